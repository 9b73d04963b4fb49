"""Where the newest policy version is read from, whatever a transform was given for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from torch import nn
from torchrl.envs.llm.transforms import PolicyVersion

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.updater import WeightUpdater

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["HoldsWeightVersion", "VersionLike", "as_version_source"]


@runtime_checkable
class HoldsWeightVersion(Protocol):
    """What a transform needs of a service."""

    @property
    def weight_version(self) -> int:
        """Newest policy version that every serving replica holds."""
        ...


VersionLike: TypeAlias = (
    "int | Callable[[], int] | HoldsWeightVersion | WeightUpdater | PolicyVersion"
)


@dataclass(frozen=True, slots=True)
class _Attribute:
    """Reads one attribute anew at each call; pickles with its owner."""

    owner: Any
    name: str

    def __call__(self) -> int:
        return int(getattr(self.owner, self.name))


def as_version_source(version: VersionLike) -> int | Callable[[], int]:
    """Returns the number itself, or a function that reads the newest version at each call.

    Args:
        version: A number from 0 on, which stays as it is; a service, or an updater, whose service
            is asked; a ``PolicyVersion``, for its ``version``; or a function without arguments. A
            service answers from what it knows and asks nobody; a pickled copy of it learns of
            pushes from the replicas' reports, a moment later.

    Raises:
        UnsupportedArgumentError: It is none of these, or an updater without a service.
    """
    if isinstance(version, bool):
        raise UnsupportedArgumentError(f"version must not be a truth value, got {version}")
    if isinstance(version, int):
        if version < 0:
            raise UnsupportedArgumentError(f"version must be at least 0, got {version}")
        return version
    if isinstance(version, WeightUpdater):
        if version.service is None:
            raise UnsupportedArgumentError("version: this updater has no service to ask")
        return _Attribute(version.service, "weight_version")
    if isinstance(version, PolicyVersion):
        return _Attribute(version, "version")
    if isinstance(version, HoldsWeightVersion):
        return _Attribute(version, "weight_version")
    if callable(version) and not isinstance(version, (type, nn.Module)):
        return version
    raise UnsupportedArgumentError(
        "version must be an int, a function that returns one, a service, a WeightUpdater or a "
        f"PolicyVersion, got {type(version).__name__}"
    )
