"""The version in an environment's output: the one that sampled the row, not the one of the day."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import torch
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.envs.llm.transforms.policy_version import VersionChange

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.keys import MAX_POLICY_VERSION, NO_VERSION, POLICY_VERSION
from torchrl_vllm_sync.transforms.stamps import oldest_versions
from torchrl_vllm_sync.transforms.version_source import as_version_source

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import TensorDictBase

    from torchrl_vllm_sync.transforms.version_source import VersionLike

__all__ = ["VersionStamp"]


class VersionStamp(PolicyVersion):
    """TorchRL's ``PolicyVersion`` that says which version sampled the tokens.

    TorchRL's writes its counter when the environment steps. A push between the sampling and the
    step makes that one too new, and GRPO's staleness figures read it. This one writes
    ``("next", "policy_version")`` from the row's own stamp, which ``vLLMWrapper`` made where the
    row was sampled; on rows that no such policy stamped it writes the version at the step, as
    TorchRL does.

    ===============================  =========================  ==================================
    entry                            type, shape                holds
    ===============================  =========================  ==================================
    ``("next", "policy_version")``   int64, the batch's         oldest version that sampled a token
                                                                of the step's response
    ``"policy_version"`` at a reset  int64, the batch's         version at the reset; the policy's
                                                                stamp takes its place
    ===============================  =========================  ==================================

    It stands wherever ``PolicyVersion`` does: ``LLMCollector(track_policy_version=VersionStamp())``
    appends it and moves it at each push. An ``AsyncEnvPool`` steps its environments elsewhere: give
    each of them a stamp, and one to the collector. It pickles.

    Example:
        >>> collector = LLMCollector(env, policy=policy, track_policy_version=VersionStamp(service))

    Args:
        version: ``None`` counts from 0, one for each :meth:`increment_version`. Otherwise
            :attr:`version` follows a service, an updater or a function, however often it is
            incremented; setting it tells it of a version that its source may hear of later only,
            as a copy of a service in another process does.

    Raises:
        UnsupportedArgumentError: ``version`` is a number, or nothing that a version can be read
            from.
    """

    def __init__(self, version: VersionLike | None = None) -> None:
        source = None if version is None else as_version_source(version)
        if isinstance(source, int):
            raise UnsupportedArgumentError(
                f"version must be something to follow, or None to count, got {source}"
            )
        self._source: Callable[[], int] | None = source
        self._heard = 0
        super().__init__(version_type=int)

    @property
    def version(self) -> int:
        """The newest version."""
        if self._source is None:
            return int(super().version)
        return max(int(self._source()), self._heard)

    @version.setter
    def version(self, value: str | int) -> None:
        """Sets the counter, or tells of a version; what follows never goes back.

        Raises:
            UnsupportedArgumentError: ``value`` is no integer from 0 on.
        """
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UnsupportedArgumentError(f"version must be an int of at least 0, got {value!r}")
        if self._source is None:
            self._current_version = value
        else:
            self._heard = max(value, self._heard)

    def _increment_version(self, init: bool = False) -> int:
        """Counts on, or notes in ``version_history`` what the source says now."""
        if self._source is None:
            return int(super()._increment_version(init))
        before = None if init else self._current_version
        self._current_version = self.version
        self.version_history.append(VersionChange(datetime.now(), before, self._current_version))
        return self._current_version

    def _step(
        self, tensordict: TensorDictBase | None, next_tensordict: TensorDictBase
    ) -> TensorDictBase:
        """Stamps the step's rows; TorchRL calls it without ``tensordict`` at a reset."""
        next_tensordict = super()._step(tensordict, next_tensordict)
        # A reset leaves a stamp in the root too: only the wrapper leaves a newest version as well.
        if tensordict is None or tensordict.get(MAX_POLICY_VERSION, None) is None:
            return next_tensordict
        sampled = oldest_versions(tensordict, POLICY_VERSION)
        today: Any = next_tensordict.get(POLICY_VERSION)
        next_tensordict.set(POLICY_VERSION, torch.where(sampled == NO_VERSION, today, sampled))
        return next_tensordict
