"""Replicas that gave no answer, which pushes do without until they show a sign of life."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import SilentEngineError, SyncError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrl_vllm_sync.weights.transport import PendingCalls, ReplicaClient

__all__ = ["SilentReplicas"]


@dataclass(slots=True)
class _Silence:
    reason: str
    incarnation: str
    probe: PendingCalls


class SilentReplicas:
    """Who was silent, and a question to each that nobody waits for.

    The question goes through the actor and the engine core to every worker, so that an answer means
    that all of them run again. Asking costs one call; looking for the answer costs nothing, so a
    wedged replica delays only the push that it was wedged in.
    """

    def __init__(self) -> None:
        self._silences: dict[str, _Silence] = {}

    @property
    def reasons(self) -> dict[str, str]:
        """Id of each silent replica, to what it was silent about."""
        return {name: one.reason for name, one in self._silences.items()}

    def note(self, client: ReplicaClient, reasons: Mapping[str, str]) -> None:
        """Begins to do without these replicas.

        Args:
            client: The replicas.
            reasons: Id of each to what it was silent about.
        """
        standings = client.standings()
        for name in reasons.keys() & standings.keys():
            self._silences[name] = _Silence(
                reasons[name], standings[name].incarnation, _probe(client, name)
            )

    def look(self, client: ReplicaClient) -> None:
        """Forgets those that have answered since, are dead, or are other actors by now."""
        standings = client.standings()
        for name, silence in list(self._silences.items()):
            standing = standings.get(name)
            if standing is None or standing.absence or standing.incarnation != silence.incarnation:
                del self._silences[name]
                continue
            answer = silence.probe.answers(0.0).get(name)
            if isinstance(answer, SilentEngineError):  # the actor lives, its engine does not answer
                silence.probe = _probe(client, name)
            elif not isinstance(answer, TimeoutError) or isinstance(answer, SyncError):
                del self._silences[name]


def _probe(client: ReplicaClient, name: str) -> PendingCalls:
    return client.start_calls("probe_workers", {name: ()})
