"""How the rows of a batch were generated, and whole runs in TorchRL's loggers."""

from __future__ import annotations

import contextlib
import csv
import functools
import html
import logging
import math
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from torchrl.data.tensor_specs import Composite, Unbounded
from torchrl.envs.transforms import Transform
from torchrl.record.loggers import CSVLogger, MLFlowLogger, TensorboardLogger, WandbLogger
from torchrl.record.loggers.common import Logger

from torchrl_vllm_sync.checks import check_integer
from torchrl_vllm_sync.errors import RowLayoutError, UnstampedRowsError, UnsupportedArgumentError
from torchrl_vllm_sync.observe.page import Dashboard, numbers
from torchrl_vllm_sync.replica import PushReport
from torchrl_vllm_sync.rl import rows as keys
from torchrl_vllm_sync.rl.corrections import (
    COUNTING,
    ENGINE_LOG_PROBS,
    VersionLike,
    as_version_source,
    deviations,
    oldest_versions,
    staleness_of,
)

if TYPE_CHECKING:
    from torchrl_vllm_sync.rl.local_llm import LocalLLM
    from torchrl_vllm_sync.service.service import AsyncVLLM


_POLL_S = 0.02  # between two looks at what GPUs do
_STATISTICS = "statistics"
_DTYPES = {
    "prompt_length": torch.int64,
    "response_length": torch.int64,
    "truncated": torch.bool,
    "cached_fraction": torch.float32,
    "queue_time": torch.float32,
    "decode_time": torch.float32,
    "tokens_per_second": torch.float32,
    "staleness_span": torch.int64,
}
_UNKNOWN = {torch.int64: -1, torch.bool: False, torch.float32: math.nan}
_TRAINER = ("trainer_log_probs", "full")
_REQUIRED = (
    keys.RESPONSE_VERSIONS,
    keys.FINISH_REASON,
    keys.POLICY_VERSION,
    keys.MAX_POLICY_VERSION,
    keys.NUM_CACHED_TOKENS,
    keys.QUEUE_TIME,
    keys.DECODE_TIME,
)


class GenerationStatistics(Transform):
    """Turns what ``vLLMWrapper`` stamped into figures of each row, and their means for logs.

    All entries are below ``"statistics"`` and of the batch's shape:

    ===================== ======== ==============================================================
    entry                 type     holds
    ===================== ======== ==============================================================
    ``prompt_length``     int64    tokens of the prompt; -1 with ``input_mode="text"``
    ``response_length``   int64    tokens that were sampled
    ``truncated``         bool     the response ended by its length (``finish_reason``)
    ``cached_fraction``   float32  share of the prompt that came from the prefix cache, 0 to 1
    ``queue_time``        float32  seconds in vLLM's queue
    ``decode_time``       float32  seconds from the first token to the last
    ``tokens_per_second`` float32  tokens after the first, by ``decode_time``
    ``staleness_span``    int64    newest minus oldest version that sampled one of the tokens
    ===================== ======== ==============================================================

    A float is NaN where it is unknown; so are all at an environment's reset, with integers -1. An
    environment has them below ``"next"``, a buffer from ``extend`` on. They are counted once.

    Example:
        >>> statistics = GenerationStatistics()
        >>> env = env.append_transform(statistics)
        >>> logger.info(statistics.summary())

    Raises:
        UnstampedRowsError: When rows pass: an entry of the wrapper's is missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reset_summary()

    def summary(self) -> dict[str, float | None]:
        """Returns how many ``"rows"`` have passed, and means over those where each is known."""
        with COUNTING:
            means = {n: total / num if num else None for n, (total, num) in self._known.items()}
            return {"rows": self._rows, **means}

    def reset_summary(self) -> None:
        """Forgets the rows that have passed."""
        with COUNTING:
            self._rows = 0
            self._known: dict[str, tuple[float, int]] = dict.fromkeys(_DTYPES, (0.0, 0))

    def measure(self, tensordict: TensorDictBase) -> TensorDict:
        """Returns the figures of a batch, uncounted.

        Args:
            tensordict: Rows that ``vLLMWrapper`` stamped.

        Raises:
            UnstampedRowsError: One of its entries is missing.
        """
        shape = tensordict.batch_size
        for key in _REQUIRED:
            if _entry(tensordict, key) is None:
                raise UnstampedRowsError(type(self).__name__, key, shape.numel(), shape.numel())
        rows = tensordict.reshape(-1)
        versions = keys.padded(rows, keys.RESPONSE_VERSIONS, keys.NO_VERSION)
        sampled = (versions != keys.NO_VERSION).flatten(1).sum(-1)
        prompt = torch.full_like(sampled, -1)
        if _entry(rows, keys.ATTENTION) is not None:
            prompt = keys.padded(rows, keys.ATTENTION, False).bool().flatten(1).sum(-1) - sampled
        cached, decode_time = rows.get(keys.NUM_CACHED_TOKENS), rows.get(keys.DECODE_TIME)
        is_cached = (cached != keys.UNKNOWN_COUNT) & (prompt > 0)
        is_timed = (sampled > 1) & (decode_time > 0)
        truncated = [reason == "length" for reason in _texts(rows.get(keys.FINISH_REASON))]
        figures = {
            "prompt_length": prompt,
            "response_length": sampled,
            "truncated": torch.tensor(truncated, dtype=torch.bool, device=sampled.device),
            "cached_fraction": torch.where(is_cached, cached / prompt, math.nan),
            "queue_time": rows.get(keys.QUEUE_TIME),
            "decode_time": decode_time,
            "tokens_per_second": torch.where(is_timed, (sampled - 1) / decode_time, math.nan),
            "staleness_span": rows.get(keys.MAX_POLICY_VERSION) - rows.get(keys.POLICY_VERSION),
        }
        figures = {name: figures[name].to(dtype).view(shape) for name, dtype in _DTYPES.items()}
        return TensorDict(figures, batch_size=shape)

    def _measure_and_count(self, tensordict: TensorDictBase) -> TensorDict:
        figures = self.measure(tensordict)
        with COUNTING:
            self._rows += figures.batch_size.numel()
            for name, (total, num) in self._known.items():
                values = _known(figures[name])
                self._known[name] = total + float(values.sum()), num + len(values)
        return figures

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns a shallow copy of a batch with the entries above.

        Arguments and errors are those of :meth:`measure`.
        """
        if not tensordict.batch_size.numel() or tensordict.get(_STATISTICS, None) is not None:
            return tensordict
        return tensordict.copy().set(_STATISTICS, self._measure_and_count(tensordict))

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Writes the entries on the way into a buffer."""
        if tensordict is None or self.parent is not None:
            return tensordict
        return self.forward(tensordict)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set(_STATISTICS, self._measure_and_count(tensordict))

    def _reset(
        self,
        tensordict: TensorDictBase,  # noqa: ARG002
        tensordict_reset: TensorDictBase,
    ) -> TensorDictBase:
        shape, device = tensordict_reset.batch_size, tensordict_reset.device
        figures = {
            name: torch.full(shape, _UNKNOWN[dtype], dtype=dtype, device=device)
            for name, dtype in _DTYPES.items()
        }
        return tensordict_reset.set(_STATISTICS, TensorDict(figures, batch_size=shape))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the same specification, with the entries in it.

        Args:
            observation_spec: The environment's, which is changed.
        """
        shape, device = observation_spec.shape, cast("torch.device", observation_spec.device)
        entries = {name: Unbounded(shape, device, dtype) for name, dtype in _DTYPES.items()}
        observation_spec[_STATISTICS] = Composite(entries, shape=shape, device=device)
        return observation_spec


def _known(values: torch.Tensor) -> torch.Tensor:
    """Those of a figure's values that are known, float64."""
    return values[values >= 0 if values.dtype == torch.int64 else ~values.isnan()].double()


def _entry(tensordict: TensorDictBase, key: NestedKey) -> Any:
    """Returns an entry, a ragged one as a list, or ``None`` if some row lacks it."""
    return tensordict.get(key, None, as_list=True)  # pyright: ignore[reportCallIssue]


def _texts(entry: Any, key: NestedKey = keys.FINISH_REASON) -> list[str]:
    if entry is None or isinstance(entry, torch.Tensor):
        raise UnsupportedArgumentError(f"{key!r} must hold text, got {entry!r}")
    return entry if isinstance(entry, list) else entry.tolist()


# ---- Runs in TorchRL's loggers


class DashboardLogger(Logger):
    """A TorchRL logger for a service's dashboard: numbers become plots, several a histogram.

    Example:
        >>> logger = DashboardLogger(service.dashboard(), WandbLogger("grpo"))
        >>> logger.log_metrics({"loss": loss, "ESS": loss_td["ESS"]}, step)
        >>> log_rollouts(logger, batch, step, version=service)

    Args:
        board: The dashboard, which closing the logger leaves open.
        also: Another logger, which gets everything as well.

    Raises:
        UnsupportedArgumentError: By its methods: what is logged is no number.
    """

    def __init__(self, board: Dashboard, also: Logger | None = None) -> None:
        self.board, self.also = board, also
        super().__init__(also.exp_name if also else "dashboard", also.log_dir if also else "")

    def _create_experiment(self) -> Any:
        return self.also.experiment if self.also else None

    def log_scalar(self, name: str, value: Any, step: int | None = None) -> None:
        """Adds a number to its plot; several, as ``log_metrics`` passes on, make a histogram.

        Args:
            name, value, step: Its name, the number or a tensor of them, the other logger's step.
        """
        self._show(name, value)
        if self.also:
            self.also.log_scalar(name, value, step=step)

    def log_histogram(self, name: str, data: Any, **kwargs: Any) -> None:
        """Shows the histogram of values.

        Args:
            name, data, kwargs: Their name, the values, and what the other logger takes.
        """
        self._show(name, data)
        if self.also:
            self.also.log_histogram(name, data, **kwargs)

    def _show(self, name: str, value: Any) -> None:
        values = numbers(name, value)
        self.board.log(name, values.item() if values.size == 1 else values.flatten().tolist())

    def log_video(self, name: str, video: Any, step: int | None = None, **kwargs: Any) -> None:
        """Passes a video on to the other logger.

        Args:
            name, video, step, kwargs: That logger's.
        """
        if self.also:
            self.also.log_video(name, video, step=step, **kwargs)

    def log_hparams(self, cfg: Any) -> None:
        """Passes settings on to the other logger.

        Args:
            cfg: The settings.
        """
        if self.also:
            self.also.log_hparams(cfg)

    def __repr__(self) -> str:
        return f"DashboardLogger({self.board!r}, {self.also!r})"


def log_pushes(
    service: AsyncVLLM | LocalLLM, logger: Logger, *, prefix: str = "push"
) -> Callable[[], None]:
    """Logs each push that commits a new version, at the step of that version's number.

    These are ``seconds`` of the whole push, ``bytes`` of all tensors, how many replicas were
    ``left_behind``, and the trainer's ``phases``. Of replicas there are ``replica/<phase>_s`` of
    the slowest one, and sums of ``replica/num_kept`` and ``replica/num_restarted``, see
    ``LoadReport``. What the logger raises leaves ``push_weights``, after the commit.

    Example:
        >>> stop = log_pushes(service, CSVLogger("run"))

    Args:
        service: Whose pushes; those of this process.
        logger: One of TorchRL's loggers.
        prefix: What the names begin with, before a ``/``.

    Returns:
        A function that ends the logging.
    """

    def log(report: PushReport) -> None:
        found = {
            "seconds": report.seconds,
            "bytes": float(report.num_bytes or 0),
            "left_behind": float(len(report.left_behind)),
            **report.phases,
        }
        loaded = [phases for one in report.replicas if (phases := one.phases).get("loaded")]
        for name in loaded[0] if loaded else ():
            if name.endswith("_s"):
                found[f"replica/{name}"] = max(phases[name] for phases in loaded)
            elif name in ("num_kept", "num_restarted"):
                found[f"replica/{name}"] = sum(phases[name] for phases in loaded)
        logger.log_metrics(_flat(prefix, found), step=report.version)

    return service.register_version_hook(log)


def log_rollouts(
    logger: Logger,
    batch: TensorDictBase,
    step: int | None = None,
    *,
    version: VersionLike | None = None,
    reward: NestedKey = ("next", "reward"),
    prefix: str = "rollout",
) -> dict[str, float]:
    """Logs how the rows of a batch were generated, how old they are and what they earned.

    That is how many ``rows`` and sampled ``tokens`` there are, the mean ``reward``, mean and
    greatest age in versions of the rows' oldest tokens (``staleness``, ``staleness_max``), and
    means of what ``GenerationStatistics`` finds, by its names; nothing that is not known. Of rows
    with ``("trainer_log_probs", "full")`` beside ``("log_probs", "full")`` also how far trainer and
    engine are apart: ``abs_log_ratio``, ``abs_log_ratio_max`` and ``kl`` as of
    ``RolloutCorrection.summary``, and the effective sample size ``ess`` of the ratios, 0 to 1.
    A ``DashboardLogger`` also shows how lengths, ages and rewards are distributed over the rows.

    Example:
        >>> log_rollouts(logger, replay_buffer[:], step, version=service)

    Args:
        logger: One of TorchRL's loggers.
        batch: Rows of any shape, ragged or padded.
        step: Step to log at; ``None`` leaves that to the logger.
        version: What tells the newest version, as for ``StalenessFilter``; without it, no ages.
        reward: Entry of the rewards.
        prefix: What the names begin with, before a ``/``.

    Returns:
        What was logged, without the prefix.

    Raises:
        UnsupportedArgumentError: ``batch`` is no TensorDict, or ``version`` tells no version.
        UnstampedRowsError: Rows carry some of the wrapper's stamps and lack others.
        RowLayoutError: Log-probabilities are missing for a sampled token, or of another shape than
            ``("masks", "all_assistant_mask")``.
    """
    by_row, found = _figures(batch, version, reward)
    logger.log_metrics(_flat(prefix, found), step=step)
    _show_by_row(logger, prefix, by_row)
    return found


def _show_by_row(logger: Logger, prefix: str, by_row: dict[str, torch.Tensor]) -> None:
    if isinstance(logger, DashboardLogger):
        for name in {"staleness", "reward", "response_length"} & by_row.keys():
            if len(values := by_row[name]) > 1:
                logger.board.log(f"{prefix}/{name} by row", values.tolist())


def _figures(
    batch: TensorDictBase, version: VersionLike | None, reward: NestedKey
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """What is known of rows, by figure a value for each of which it is, and the figures."""
    if not isinstance(batch, TensorDictBase):
        why = "a collector with a replay buffer yields None: log rows of the buffer[:]"
        raise UnsupportedArgumentError(f"batch must be a TensorDict, got {batch!r}; {why}")
    found = {"rows": float(batch.batch_size.numel())}
    if not found["rows"]:
        return {}, found
    parts: dict[str, Any] = {}
    if _entry(batch, keys.RESPONSE_VERSIONS) is not None:
        parts |= GenerationStatistics().measure(batch).items()
    if version is not None:
        source, versions = as_version_source(version), oldest_versions(batch, keys.POLICY_VERSION)
        parts["staleness"] = staleness_of(versions[versions >= 0], source)
    by_row = {name: values for name, one in parts.items() if len(values := _known(one))}
    if (rewards := _entry(batch.reshape(-1), reward)) is not None:  # a tensor, or a ragged one's
        by_row["reward"] = torch.cat([one.flatten() for one in rewards]).double()
    found |= {name: float(values.mean()) for name, values in by_row.items()}
    if "response_length" in by_row:
        found["tokens"] = float(by_row["response_length"].sum())
    if "staleness" in by_row:
        found["staleness_max"] = float(by_row["staleness"].max())
    return by_row, found | _mismatch(batch.reshape(-1))


def _mismatch(rows: TensorDictBase) -> dict[str, float]:
    """How far trainer and engine are apart on sampled tokens, where rows have what both say."""
    is_corrected = _entry(rows, ENGINE_LOG_PROBS) is not None
    engine_key = ENGINE_LOG_PROBS if is_corrected else keys.LOG_PROBS
    entries = {key: _entry(rows, key) for key in (keys.ASSISTANT, engine_key, _TRAINER)}
    if any(entry is None for entry in entries.values()):
        return {}
    for key, entry in entries.items():
        for at, (one, mask) in enumerate(zip(entry, entries[keys.ASSISTANT], strict=True)):
            if one.shape != mask.shape:
                raise RowLayoutError(key, f"row {at} has {[*one.shape]}, its mask {[*mask.shape]}")
    mask, engine, trainer = (torch.cat([*entry]) for entry in entries.values())
    far = (trainer.double() - engine.double())[mask.bool() & ~engine.isnan()]
    if not far.isfinite().all():
        raise RowLayoutError(_TRAINER, "a sampled token has no finite log-probability")
    num, total, most, kl = deviations(far)
    if not num:
        return {}
    ess = (2 * far.logsumexp(0) - (2 * far).logsumexp(0)).exp() / num
    found = {"abs_log_ratio": total / num, "abs_log_ratio_max": most, "kl": kl / num}
    return found | {"ess": float(ess)}


class GPUUse:
    """Polls the share of time, of the last second or less, in which each GPU runs anything."""

    def __init__(self) -> None:
        self._polls = deque[tuple[float, list[float]]](maxlen=50_000)  # a quarter of an hour's
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        from vllm.third_party import pynvml

        self._ended.clear()
        poll = functools.partial(self._poll, pynvml)
        self._thread = threading.Thread(target=poll, name="gpu-use", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(10.0)

    def _poll(self, nvml: Any) -> None:
        level = logging.DEBUG  # of what is said where there is no GPU of NVIDIA's
        with contextlib.ExitStack() as stack:
            try:
                nvml.nvmlInit()
                stack.callback(nvml.nvmlShutdown)
                level, gpus = logging.WARNING, _visible_gpus(nvml)
                while gpus and not self._ended.wait(_POLL_S):
                    rates = [nvml.nvmlDeviceGetUtilizationRates(one) for one in gpus]
                    self._polls.append((time.perf_counter(), [one.gpu / 100 for one in rates]))
            except nvml.NVMLError as error:  # also a part of a GPU (MIG), or one off the bus
                logging.getLogger(__name__).log(level, "GPU use is not known: %s", error)

    def between(self, begin: float, end: float) -> list[float] | None:
        """Shares of each GPU between two times of ``time.perf_counter()``; ``None`` if unknown."""
        polls = [shares for when, shares in self._polls.copy() if begin <= when <= end]
        return [statistics.fmean(of_one) for of_one in zip(*polls, strict=True)] or None


def _visible_gpus(nvml: Any) -> list[Any]:
    """NVML's handles of the GPUs that this process may use, by their numbers or UUIDs."""
    by_index, by_uuid = nvml.nvmlDeviceGetHandleByIndex, nvml.nvmlDeviceGetHandleByUUID
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return [by_index(at) for at in range(nvml.nvmlDeviceGetCount())]
    names = filter(None, map(str.strip, named.split(",")))
    return [by_index(int(one)) if one.isdigit() else by_uuid(one) for one in names]


class RunLog:
    """Logs all of a training step by one call, and between the calls each push.

    ======================= ======================================================================
    names                   what
    ======================= ======================================================================
    ``rollout/...``         reward, lengths, staleness and so on: see :func:`log_rollouts`
    ``push/...``            each push as it commits: see :func:`log_pushes`
    ``step/seconds``        from the call before to this one; the first time from ``with`` on
    ``step/tokens_per_s``   sampled tokens of the rows, by those seconds
    ``step/gpu_<n>_busy``   share of the seconds in which a GPU that this process may use ran
                            anything, 0 to 1, and ``step/gpu_busy``, their mean; by NVML
    ``rollout/samples``     a table of some rows: step, version (the oldest), reward, prompt, answer
    ======================= ======================================================================

    The table is a file of CSV in a ``CSVLogger``'s folder, ``texts/rollout/samples.csv``, a table
    of W&B's, and else text in Markdown: an artifact of MLflow's for each step, for
    ``TensorboardLogger``, and for those with ``log_str``. What is not known is left out.

    Example:
        >>> with RunLog(WandbLogger("grpo"), service) as log:
        ...     for step, rows in enumerate(collector):
        ...         loss = loss_fn(rows)
        ...         log(rows, step, loss=loss)  # loss/ESS, loss/kl_approx, ...
        ...         service.push_weights(model)

    Args:
        logger: One of TorchRL's loggers; a ``DashboardLogger`` shows it beside the engines.
        service: Whose pushes, and versions, which tell how old rows are. ``None``: of none.
        reward: Entry of the rewards.
        samples: How many rows the table has of a step, at equal distances; 0 for no table.

    Raises:
        UnsupportedArgumentError: ``samples`` is no number of rows.
    """

    def __init__(
        self,
        logger: Logger,
        service: AsyncVLLM | LocalLLM | None = None,
        *,
        reward: NestedKey = ("next", "reward"),
        samples: int = 4,
    ) -> None:
        check_integer("samples", samples, 0)
        self.logger, self.service, self.reward, self.samples = logger, service, reward, samples
        self._gpus, self._open = GPUUse(), contextlib.ExitStack()
        self._since: float | None = None  # not before ``with``

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as entered:
            if self.service is not None:
                entered.callback(log_pushes(self.service, self.logger))
            entered.enter_context(self._gpus)
            self._open = entered.pop_all()
        self._since = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._since = None
        self._open.close()

    def __call__(
        self, rows: TensorDictBase, step: int, *, version: VersionLike | None = None, **figures: Any
    ) -> dict[str, float]:
        """Logs a step.

        Args:
            rows: Those that were trained, of any shape, ragged or padded.
            step: The number of the step.
            version: What tells how old rows are; the service by default, to be asked before the
                step's push, as rows get older by it.
            **figures: More of them, by name: a number, a tensor, whose mean counts, or several in
                a dictionary or a TensorDict, such as a loss or ``RolloutCorrection.summary()``,
                which are named ``<name>/<key>``. ``None`` is not known.

        Returns:
            What was logged, by its full name.

        Raises:
            UnsupportedArgumentError: A figure is no number, or an argument no such thing.
            UnstampedRowsError, RowLayoutError: As for ``log_rollouts``.
        """
        check_integer("step", step, 0)
        by_row, of_rows = _figures(rows, self.service if version is None else version, self.reward)
        table = _table(rows, step, self.reward, self.samples)
        found = _flat("rollout", of_rows)
        for name, value in figures.items():
            found |= _flat(name, value)
        now = time.perf_counter()
        if self._since is not None:
            found["step/seconds"] = seconds = now - self._since
            if "tokens" in of_rows:
                found["step/tokens_per_s"] = of_rows["tokens"] / seconds
            if busy := self._gpus.between(self._since, now):
                found |= {f"step/gpu_{at}_busy": share for at, share in enumerate(busy)}
                found["step/gpu_busy"] = statistics.fmean(busy)
            self._since = now
        self.logger.log_metrics(found, step=step)
        _show_by_row(self.logger, "rollout", by_row)
        if table:
            _log_table(self.logger, "rollout/samples", table, step)
        return found


def _flat(name: str, value: Any) -> dict[str, float]:
    """One figure, or those of a dictionary or TensorDict, by full name; without unknown ones."""
    if is_tensor_collection(value):
        value = value.to_tensordict().to_dict()
    if isinstance(value, Mapping):
        parts = [_flat(f"{name}/{key}", one) for key, one in value.items()]
        return {key: one for part in parts for key, one in part.items()}
    values = numbers(name, [] if value is None else value)
    return {name: float(values.mean())} if values.size else {}


_COLUMNS = ("step", "version", "reward", "prompt", "answer")


def _table(rows: TensorDictBase, step: int, reward: NestedKey, number: int) -> list[list[Any]]:
    """Some of the rows, in the columns; none without answers, and ``None`` where one is unknown."""
    if not number or not rows.batch_size.numel():
        return []
    rows = rows.reshape(-1)
    if (answers := _entry(rows, ("text", "response"))) is None:
        return []
    chosen = torch.linspace(0, len(rows) - 1, min(number, len(rows))).round().long().tolist()
    prompts, rewards = _entry(rows, ("text", "prompt")), _entry(rows, reward)
    prompts = [None] * len(rows) if prompts is None else _texts(prompts, ("text", "prompt"))
    versions = oldest_versions(rows, keys.POLICY_VERSION)
    answers = _texts(answers, ("text", "response"))
    return [
        [
            step,
            None if versions[at] == keys.NO_VERSION else int(versions[at]),
            None if rewards is None else float(rewards[at].sum()),
            prompts[at],
            answers[at],
        ]
        for at in chosen
    ]


def _log_table(logger: Any, name: str, table: list[list[Any]], step: int) -> None:
    # By class: what stands for a logger in another process is an instance of its class, for
    # TorchRL, and takes any method.
    kind = type(logger)
    if issubclass(kind, DashboardLogger):
        if logger.also:
            _log_table(logger.also, name, table, step)
    elif issubclass(kind, CSVLogger):
        path = Path(logger.experiment.log_dir) / "texts" / f"{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="") as file:
            csv.writer(file).writerows(table if file.tell() else [_COLUMNS, *table])
    elif issubclass(kind, WandbLogger):
        import wandb  # pyright: ignore[reportMissingImports]

        logger.log_scalar(name, wandb.Table(columns=[*_COLUMNS], data=table), step=step)
    elif issubclass(kind, MLFlowLogger):
        import mlflow  # pyright: ignore[reportMissingImports]

        mlflow.log_text(_markdown(table), f"{name}/step-{step}.md")
    elif issubclass(kind, TensorboardLogger):
        logger.experiment.add_text(name, _markdown(table), step)
    elif hasattr(kind, "log_str"):
        logger.log_str(name, _markdown(table), step=step)


def _markdown(table: list[list[Any]]) -> str:
    """A table in GitHub's Markdown, in which all texts are shown as they are."""
    lines = [_COLUMNS, ["---"] * len(_COLUMNS), *table]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    text = "" if value is None else html.escape(str(value), quote=False)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
