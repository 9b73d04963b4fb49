"""Pushes and rollouts in TorchRL's loggers: CSV, TensorBoard, W&B and whatever else it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from tensordict import TensorDictBase

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.keys import POLICY_VERSION, RESPONSE_VERSIONS
from torchrl_vllm_sync.transforms.generation_statistics import STATISTICS, GenerationStatistics
from torchrl_vllm_sync.transforms.stamps import oldest_versions, staleness_of
from torchrl_vllm_sync.transforms.version_source import as_version_source

if TYPE_CHECKING:
    from collections.abc import Callable

    from tensordict import NestedKey

    from torchrl_vllm_sync.transforms.version_source import VersionLike
    from torchrl_vllm_sync.weights.transport import PushReport

__all__ = ["AnnouncesPushes", "LogsMetrics", "log_pushes", "log_rollouts", "push_scalars"]

REWARD = ("next", "reward")
# Counts of the replicas that are added up.
_SUMMED = ("num_kept", "num_restarted")


class LogsMetrics(Protocol):
    """What is needed of a logger; every ``torchrl.record.loggers.Logger`` has it."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> Any:
        """Logs numbers by name."""
        ...


class AnnouncesPushes(Protocol):
    """What is needed of a service: an ``AsyncVLLM`` or a ``LocalLLM``."""

    def register_version_hook(self, hook: Callable[[PushReport], object]) -> Callable[[], None]:
        """Has ``hook`` called with the report of each push; returns what ends that."""
        ...


def log_pushes(
    service: AnnouncesPushes, logger: LogsMetrics, *, prefix: str = "push"
) -> Callable[[], None]:
    """Logs each push that commits a new version, at the step of that version's number.

    Only pushes of this process are heard of, see ``AsyncVLLM.register_version_hook``. What the
    logger raises leaves ``push_weights``; the version is committed by then.

    Example:
        >>> stop = log_pushes(service, CSVLogger("run"))

    Args:
        service: Whose pushes.
        logger: One of TorchRL's loggers.
        prefix: What the names begin with, before a ``/``; what follows is in :func:`push_scalars`.

    Returns:
        A function that ends the logging; calling it twice does nothing.
    """

    def log(report: PushReport) -> None:
        found = push_scalars(report)
        logger.log_metrics(
            {f"{prefix}/{name}": value for name, value in found.items()}, step=report.version
        )

    return service.register_version_hook(log)


def push_scalars(report: PushReport) -> dict[str, float]:
    """Returns the numbers of one push by name.

    ========================= ==================================================================
    name                      holds
    ========================= ==================================================================
    ``seconds``               seconds of the whole push
    ``bytes``                 bytes of all tensors, once
    ``left_behind``           replicas that did not reach the version
    ``<phase>_s``             seconds of each phase on the trainer's side, as in ``phases``
    ``replica/<phase>_s``     seconds of each phase in the slowest replica
    ``replica/num_kept``      samples that went on with their tokens, of all replicas
    ``replica/num_restarted`` samples that began again, of all replicas
    ========================= ==================================================================

    Other counts of the trainer's phases, such as ``attempts``, are there by their names. What no
    replica has said is missing.

    Args:
        report: The push.
    """
    found = {
        "seconds": report.seconds,
        "bytes": float(report.num_bytes),
        "left_behind": float(len(report.left_behind)),
        **report.phases,
    }
    loaded = [one.phases for one in report.replicas if one.phases.get("loaded", 1.0)]
    for name in dict.fromkeys(name for phases in loaded for name in phases):
        values = [phases[name] for phases in loaded if name in phases]
        if name.endswith("_s"):
            found[f"replica/{name}"] = max(values)
        elif name in _SUMMED:
            found[f"replica/{name}"] = sum(values)
    return found


def log_rollouts(
    logger: LogsMetrics,
    batch: TensorDictBase,
    step: int | None = None,
    *,
    version: VersionLike | None = None,
    reward: NestedKey = REWARD,
    prefix: str = "rollout",
) -> dict[str, float]:
    """Logs how the rows of a batch were generated, how old they are and what they earned.

    ======================== ===================================================================
    name                     holds
    ======================== ===================================================================
    ``rows``                 rows of the batch
    ``tokens``               tokens that were sampled, of all rows
    ``reward``               mean reward
    ``staleness``            mean of the rows' ages in versions, each by its oldest token
    ``staleness_max``        the greatest of them
    ``prompt_length``, ...   means of what ``GenerationStatistics`` finds, by its names
    ======================== ===================================================================

    What cannot be known is not logged: without stamps of ``vLLMWrapper`` no lengths, times and
    ages, without ``version`` no ages, without rewards no reward.

    Example:
        >>> for step, batch in enumerate(collector):  # of a collector without a replay buffer
        ...     log_rollouts(logger, batch, step, version=service)
        >>> log_rollouts(logger, replay_buffer[:], step, version=service)

    Args:
        logger: One of TorchRL's loggers.
        batch: Rows of any shape, ragged or padded.
        step: Step to log at; ``None`` leaves that to the logger.
        version: What tells the newest version, see ``as_version_source``.
        reward: Entry of the rewards, below the batch's shape.
        prefix: What the names begin with, before a ``/``.

    Returns:
        What was logged, without the prefix.

    Raises:
        UnsupportedArgumentError: ``batch`` is no TensorDict, or ``version`` is nothing that a
            version can be read from.
        UnstampedRowsError: Rows carry some of the wrapper's stamps and lack others.
    """
    if not isinstance(batch, TensorDictBase):
        raise UnsupportedArgumentError(
            f"batch must be a TensorDict, got {batch!r}; a collector that fills a replay buffer "
            "yields None: log rows of the buffer, such as buffer[:]"
        )
    found = {"rows": float(batch.batch_size.numel())}
    if found["rows"]:
        found |= _generated(batch) | _ages(batch, version) | _earned(batch, reward)
    logger.log_metrics({f"{prefix}/{name}": value for name, value in found.items()}, step=step)
    return found


def _generated(batch: TensorDictBase) -> dict[str, float]:
    """Means of the figures of generation that are known; nothing if the rows are not stamped."""
    if batch.get(RESPONSE_VERSIONS, None, as_list=True) is None:  # pyright: ignore[reportCallIssue]
        return {}
    statistics = GenerationStatistics()
    statistics(batch.exclude(STATISTICS))
    known = {name: value for name, value in statistics.summary().items() if value is not None}
    return known | {"tokens": round(known["response_length"] * known["rows"])}


def _ages(batch: TensorDictBase, version: VersionLike | None) -> dict[str, float]:
    if version is None:
        return {}
    source = as_version_source(version)
    versions = oldest_versions(batch, POLICY_VERSION)
    stamped = versions[versions >= 0]
    if not stamped.numel():
        return {}
    ages = staleness_of(stamped, source if isinstance(source, int) else source())
    return {"staleness": float(ages.double().mean()), "staleness_max": float(ages.max())}


def _earned(batch: TensorDictBase, key: NestedKey) -> dict[str, float]:
    """The mean reward over all rows, whose rewards may be ragged."""
    rewards = batch.get(key, None, as_list=True)  # pyright: ignore[reportCallIssue]
    if rewards is None:
        return {}
    values = list(_leaves(rewards))
    count = sum(one.numel() for one in values)
    return {"reward": sum(float(one.double().sum()) for one in values) / count} if count else {}


def _leaves(entry: Any) -> Any:
    if isinstance(entry, list):
        for one in entry:
            yield from _leaves(one)
    else:
        yield entry
