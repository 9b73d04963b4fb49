"""One call to several replicas at once, and what each of them ends with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError

from torchrl_vllm_sync.ray_errors import loss

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrl_vllm_sync.errors import ReplicaUnavailableError

__all__ = ["ReplicaCalls"]


class ReplicaCalls:
    """Calls under way.

    Args:
        refs: Replica id to the Ray object of its answer.
        on_death: Told of each replica that turns out to be dead, or out of reach.
    """

    def __init__(
        self, refs: Mapping[str, Any], on_death: Callable[[ReplicaUnavailableError], None]
    ) -> None:
        self._refs, self._on_death = dict(refs), on_death

    def failures(self) -> dict[str, BaseException]:
        """Returns those that have ended with an exception by now, without waiting."""
        if not self._refs:
            return {}
        ready, _ = ray.wait(list(self._refs.values()), num_returns=len(self._refs), timeout=0)
        answers = {name: self._answer(name) for name, ref in self._refs.items() if ref in ready}
        return {name: one for name, one in answers.items() if isinstance(one, BaseException)}

    def answers(self, deadline_s: float) -> dict[str, Any]:
        """Waits for all of them.

        Args:
            deadline_s: Seconds to wait.

        Returns:
            Replica id to the answer, or to the exception with which that call ended.
        """
        if not self._refs:
            return {}
        ready, _ = ray.wait(
            list(self._refs.values()), num_returns=len(self._refs), timeout=deadline_s
        )
        return {
            name: self._answer(name)
            if ref in ready
            else TimeoutError(f"no answer within {deadline_s:g} s")
            for name, ref in self._refs.items()
        }

    def first_answer(self, deadline_s: float) -> Any:
        """Waits for one of them to succeed.

        Args:
            deadline_s: Seconds to wait.

        Returns:
            Its answer; ``None`` if all failed, or none came in time.
        """
        deadline = time.monotonic() + deadline_s
        names = {ref: name for name, ref in self._refs.items()}
        left = list(names)
        while left:
            ready, left = ray.wait(left, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            answer = self._answer(names[ready[0]])
            if not isinstance(answer, BaseException):
                return answer
        return None

    def _answer(self, replica_id: str) -> Any:
        try:
            return ray.get(self._refs[replica_id])
        except RayTaskError as error:
            return error.cause
        except RayError as error:
            lost = loss(replica_id, error)
            if lost is None:
                return error
            self._on_death(lost)
            return lost
