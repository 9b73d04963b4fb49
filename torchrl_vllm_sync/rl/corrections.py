"""TorchRL transforms for rows of older weights, or sampled with other probabilities.

They stamp rows with versions, leave old ones out, weigh them, and correct what engines round.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.envs.transforms import PolicyAgeFilter, Transform

from torchrl_vllm_sync.checks import check_integer, check_number, check_positive, check_version
from torchrl_vllm_sync.errors import RowLayoutError, UnstampedRowsError, UnsupportedArgumentError
from torchrl_vllm_sync.rl import rows as keys
from torchrl_vllm_sync.rl.trainer import TrainerPolicy
from torchrl_vllm_sync.rl.updater import WeightUpdater

if TYPE_CHECKING:
    from torchrl_vllm_sync.rl.local_llm import LocalLLM
    from torchrl_vllm_sync.service.service import AsyncVLLM


# Held while any transform's counts change, so that copies need no lock of their own.
COUNTING = threading.Lock()

VersionLike: TypeAlias = (
    "int | Callable[[], int] | AsyncVLLM | LocalLLM | WeightUpdater | PolicyVersion"
)


def oldest_versions(tensordict: TensorDictBase, key: NestedKey) -> Tensor:
    """Returns the oldest version stamped on each row, however the rows are stacked or padded."""
    shape = tensordict.batch_size
    if isinstance(tensordict, LazyStackedTensorDict) and tensordict.tensordicts:
        parts = [oldest_versions(one, key) for one in tensordict.tensordicts]
        return torch.stack(parts, tensordict.stack_dim)
    value = tensordict.get(key, None)
    if value is None or not shape.numel():
        return torch.full(shape, keys.NO_VERSION, dtype=torch.int64, device=tensordict.device)
    kind = getattr(value, "dtype", type(value).__name__)
    if not isinstance(value, Tensor) or value.is_floating_point() or kind is torch.bool:
        raise UnsupportedArgumentError(f"{key!r} must hold integer policy versions, got {kind}")
    if not value.numel():  # rows without a token
        return value.new_full(shape, keys.NO_VERSION, dtype=torch.int64)
    versions = value.to(torch.int64).reshape(*shape, -1)
    newest = torch.iinfo(torch.int64).max
    oldest = versions.masked_fill(versions < 0, newest).amin(-1)
    return oldest.masked_fill(oldest == newest, keys.NO_VERSION)


def staleness_of(versions: Tensor, newest: Callable[[], int]) -> Tensor:
    """Returns how many versions older than ``newest`` each is; those that are newer are 0 old."""
    now = newest()
    check_version("the newest version", now)
    return (now - versions).clamp(min=0)


def _ages(rows: TensorDictBase, key: NestedKey, newest: Callable[[], int], refuser: str) -> Tensor:
    """Returns how many versions old each row is; one without a stamp is 0 old, or refused."""
    versions = oldest_versions(rows, key)
    unstamped = versions == keys.NO_VERSION
    if refuser and unstamped.any():
        raise UnstampedRowsError(refuser, key, int(unstamped.sum()), versions.numel())
    return staleness_of(versions, newest).masked_fill(unstamped, 0)


def as_version_source(version: VersionLike) -> Callable[[], int]:
    """Returns a function that reads the newest version at each call, and pickles."""
    if isinstance(version, bool):
        raise UnsupportedArgumentError(f"version must not be a truth value, got {version}")
    if isinstance(version, int):
        check_integer("version", version, 0)
        return partial(int, version)
    owner: Any = version.service if isinstance(version, WeightUpdater) else version
    if owner is None and version is not None:
        raise UnsupportedArgumentError("version: this updater has no service to ask")
    name = "version" if isinstance(version, PolicyVersion) else "weight_version"
    if hasattr(owner, name) and not isinstance(owner, type):
        return partial(getattr, owner, name)
    if callable(version) and not isinstance(version, (type, torch.nn.Module, WeightUpdater)):
        return version
    known = "an int, a function that returns one, a service, a WeightUpdater or a PolicyVersion"
    raise UnsupportedArgumentError(f"version must be {known}, got {type(version).__name__}")


class StalenessFilter(PolicyAgeFilter):
    """Drops rows whose oldest token is more than ``max_staleness`` versions old.

    TorchRL's ``PolicyAgeFilter``, for a batch and for a buffer's ``extend`` and ``sample``, which
    may then return fewer rows than asked for. Beyond that it counts what it drops, raises on rows
    without a stamp, reads ragged rows and rows of several steps (the oldest stamp is the row's),
    and lets all of an ``extend`` be stale. In a buffer put it before ``MCAdvantage``.

    Example:
        >>> transform = Compose(StalenessFilter(2, service), MCAdvantage(grpo_size=8))
        >>> buffer = ReplayBuffer(storage=LazyStackStorage(512), transform=transform)
        >>> fresh = StalenessFilter(2, updater)(batch)  # without a buffer

    Args:
        max_staleness: Versions; 0 keeps rows of the newest version only.
        version: Tells the newest: a service, ``WeightUpdater``, ``PolicyVersion``, function or int.
        version_key: Integer entry with the stamp, of the batch's shape or more; negative is none.
        allow_unstamped: Let rows without a stamp pass.

    Raises:
        UnsupportedArgumentError: ``max_staleness`` is no integer from 0 on, or ``version`` no such.
        UnstampedRowsError: When rows pass: some carry no stamp; none was dropped.
    """

    def __init__(
        self,
        max_staleness: int,
        version: VersionLike,
        *,
        version_key: NestedKey = keys.POLICY_VERSION,
        allow_unstamped: bool = False,
    ) -> None:
        check_integer("max_staleness", max_staleness, 0)
        how = {"policy_version_key": version_key, "strict": not allow_unstamped}
        super().__init__(as_version_source(version), max_staleness, **how)
        self._dropped: Counter[int] = Counter()

    @property
    def max_staleness(self) -> int:
        """How many versions old a row may be."""
        return self.max_policy_lag

    @property
    def num_dropped(self) -> int:
        """Rows dropped so far, on writing and on reading."""
        return sum(self.dropped_by_staleness.values())

    @property
    def dropped_by_staleness(self) -> dict[int, int]:
        """Rows dropped so far, by how many versions old they were; in ascending order."""
        with COUNTING:
            return dict(sorted(self._dropped.items()))

    def reset_counts(self) -> None:
        """Counts from 0 again."""
        with COUNTING:
            self._dropped.clear()

    def _filter(self, tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict.batch_dims < 1 or not tensordict.batch_size.numel():
            return tensordict
        version: Any = self.current_version  # TorchRL's attribute, an integer if somebody sets one
        newest: Any = version if callable(version) else partial(int, version)
        refuser = "StalenessFilter" if self.strict else ""
        staleness = _ages(tensordict, self.policy_version_key, newest, refuser)
        staleness = staleness.reshape(len(tensordict), -1).amax(-1)  # of the steps of a row
        stale = staleness > self.max_staleness
        if not stale.any():
            return tensordict
        with COUNTING:
            self._dropped.update(staleness[stale].tolist())
        return tensordict[~stale]

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        """Drops stale rows before they are written; ``None`` writes nothing."""
        if tensordict is None or not tensordict.batch_size.numel():
            return tensordict  # an MCAdvantage behind it holds incomplete groups back
        kept = super()._inv_call(tensordict)
        return kept if kept.batch_size.numel() else None


class StalenessWeight(Transform):
    """Writes how many versions old each row is, and a weight that falls with it.

    For a batch, or what a replay buffer samples, in a shallow copy. ``"staleness"``, int64, is the
    newest version minus the oldest that sampled a token of the row, at least 0. The float32
    ``"staleness_weight"`` is ``0.5 ** (staleness / half_life)``, beyond ``max_staleness`` 0.

    Example:
        >>> weigh = StalenessWeight(updater, half_life=2, multiply="advantage")
        >>> loss = loss_fn(weigh(batch))

    Args:
        version: What tells the newest version, as for ``StalenessFilter``.
        half_life: Versions after which a row counts half.
        max_staleness: Rows older than that weigh nothing.
        multiply: Floating-point entry to multiply by the weight, dense or ragged, its shape
            beginning with the batch's; usually ``"advantage"``.
        version_key: Integer entry with the stamp.

    Raises:
        UnsupportedArgumentError: Neither ``half_life`` nor ``max_staleness`` is given, one is out
            of range, or ``version`` is nothing that a version can be read from.
    """

    def __init__(
        self,
        version: VersionLike,
        *,
        half_life: float | None = None,
        max_staleness: int | None = None,
        multiply: NestedKey | None = None,
        version_key: NestedKey = keys.POLICY_VERSION,
    ) -> None:
        if half_life is None and max_staleness is None:
            raise UnsupportedArgumentError("half_life or max_staleness must be given")
        if half_life is not None:
            check_positive("half_life", half_life)
        if max_staleness is not None:
            check_integer("max_staleness", max_staleness, 0)
        super().__init__()
        self._source = as_version_source(version)
        self.half_life, self.max_staleness = half_life, max_staleness
        self.multiply, self.version_key = multiply, version_key

    def weight_of(self, staleness: Tensor) -> Tensor:
        """Returns the float32 weight of rows of some ages.

        Args:
            staleness: Ages in versions, int64, of any shape.
        """
        weight = torch.pow(0.5, staleness / (self.half_life or math.inf))
        if self.max_staleness is not None:
            weight = weight.masked_fill(staleness > self.max_staleness, 0.0)
        return weight.to(torch.float32)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns a shallow copy of a batch with the entries above.

        Args:
            tensordict: Rows with a stamp.

        Raises:
            UnstampedRowsError: Some rows carry no stamp.
            UnsupportedArgumentError, KeyError: ``multiply`` names no floating-point entry.
        """
        if not tensordict.batch_size.numel():
            return tensordict
        staleness = _ages(tensordict, self.version_key, self._source, "StalenessWeight")
        weight = self.weight_of(staleness)
        out = tensordict.copy()
        if self.multiply is not None:
            _multiply(out, self.multiply, weight)
        return out.set("staleness", staleness).set("staleness_weight", weight)


def _multiply(tensordict: TensorDictBase, key: NestedKey, weight: Tensor) -> None:
    """Multiplies an entry by a weight of the batch's shape, in the TensorDict given."""
    if isinstance(tensordict, LazyStackedTensorDict):  # rows may be ragged
        parts = weight.unbind(tensordict.stack_dim)
        for one, part in zip(tensordict.tensordicts, parts, strict=True):
            _multiply(one, key, part)
        return
    value: Any = tensordict[key]  # KeyError if there is none
    if not isinstance(value, Tensor) or not value.is_floating_point():
        told = f"got {key!r}, which holds {getattr(value, 'dtype', type(value).__name__)}"
        raise UnsupportedArgumentError(f"multiply must name a floating-point entry, {told}")
    extra = value.ndim - weight.ndim
    tensordict.set(key, value * weight.to(value.dtype).reshape(*weight.shape, *(1,) * extra))


class VersionStamp(PolicyVersion):
    """TorchRL's ``PolicyVersion`` that says which version sampled the tokens.

    TorchRL's writes its counter when the environment steps, which is too new after a push between
    the sampling and the step. This one writes ``("next", "policy_version")`` from the row's own
    stamp of ``vLLMWrapper``; on rows without one, and at a reset, as TorchRL's does. An
    ``AsyncEnvPool`` steps environments elsewhere: give each of them a stamp, and the collector one.

    Example:
        >>> collector = LLMCollector(env, policy=policy, track_policy_version=VersionStamp(service))

    Args:
        version: ``None`` counts from 0, one for each :meth:`increment_version`. Otherwise
            :attr:`version` follows a service, an updater or a function; setting it announces a
            version of which its source may hear later.

    Raises:
        UnsupportedArgumentError: No version can be read from ``version``, or it is set to none.
    """

    def __init__(self, version: VersionLike | None = None) -> None:
        self._source = None if version is None else as_version_source(version)
        if isinstance(version, int):
            told = f"something to follow, or None to count, got {version}"
            raise UnsupportedArgumentError(f"version must be {told}")
        self._announced = 0
        super().__init__(version_type=int)

    @property
    def version(self) -> int:
        """The newest version."""
        newest = 0 if self._source is None else int(self._source())
        return max(newest, self._announced)

    @version.setter
    def version(self, value: str | int) -> None:
        """Sets the counter, or announces a version; what follows never goes back."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise UnsupportedArgumentError(f"version must be an int of at least 0, got {value!r}")
        self._announced = value if self._source is None else max(value, self._announced)
        self._current_version = self.version

    def _increment_version_int(self, init: bool = False) -> None:
        """Counts on, or takes what the source says now, for ``version_history``."""
        self._announced += self._source is None and not init
        self._current_version = self.version

    def _step(
        self, tensordict: TensorDictBase | None, next_tensordict: TensorDictBase
    ) -> TensorDictBase:
        """Stamps the step's rows; at a reset there is no ``tensordict``."""
        next_tensordict = super()._step(tensordict, next_tensordict)
        # A reset leaves a stamp in the root too: only the wrapper leaves a newest version as well.
        if tensordict is None or tensordict.get(keys.MAX_POLICY_VERSION, None) is None:
            return next_tensordict
        sampled = oldest_versions(tensordict, keys.POLICY_VERSION)
        today: Any = next_tensordict.get(keys.POLICY_VERSION)
        stamp = torch.where(sampled == keys.NO_VERSION, today, sampled)
        return next_tensordict.set(keys.POLICY_VERSION, stamp)


Level: TypeAlias = Literal["token", "sequence", "geometric"]

ENGINE_LOG_PROBS = "engine_log_probs"  # those of ``LOG_PROBS`` before a correction


class RolloutCorrection(Transform):
    """Weighs or rejects what the engine sampled with other probabilities than the trainer's.

    Engines round otherwise than trainers do, and what was sampled before a push is off-policy on
    top. The ratio of a token is its probability by the trainer over that by the engine; of a
    sequence it is the product of its tokens', or with ``"geometric"`` their geometric mean, which
    does not grow with its length. Two things are done with it, each or both of them:

    ======================================================== =====================================
    known as                                                 arguments
    ======================================================== =====================================
    truncated importance sampling (TIS) [1]_                 ``weigh="token", cap=2.0``
    TIS of sequences [2]_                                    ``weigh="sequence", cap=2.0``
    masked importance sampling (MIS) [2]_                    the same with ``reject="sequence",
                                                             bounds=(None, 2.0)``
    IcePop [3]_                                              ``weigh="token", cap=None,
                                                             reject="token", bounds=(0.5, 5.0)``
    geometric sequence mask [2]_                             ``reject="geometric",
                                                             bounds=(0.99, 1.01)``
    off-policy sequence mask by KL ``delta`` [4]_            ``reject="geometric", bounds=
                                                             (exp(-delta), None),
                                                             only_negative=True``
    ======================================================== =====================================

    A call returns a shallow copy of dense rows, for ``GRPOLoss`` and its kin as they are:
    ``("log_probs", "full")`` holds the trainer's log-probabilities, so that the loss clips by how
    far the trainer has moved and nothing else; NaN where a token was rejected, which leaves it out
    of the loss and of its mean. ``"advantage"`` is multiplied by the weights, float32 of shape
    ``[B, T, 1]``. The engine's log-probabilities are in ``"engine_log_probs"``, ``[B, T]``.

    Call it on a batch with advantages, before the loop over minibatches: ``policy`` scores the rows
    by the weights that it has then, in a forward pass; or, with ``shared_pass=True``, on each
    minibatch just before the loss and under its autocast, which takes that pass for its own.

    Example:
        >>> correct = RolloutCorrection(policy, weigh="token", cap=2.0, version=service)
        >>> rows = correct(buffer.sample())
        >>> logger.log_metrics(correct.summary(), step)

    Args:
        policy: The :class:`TrainerPolicy` that the loss trains. ``None``: the rows have its
            log-probabilities already, at ``log_probs_key``.
        weigh: ``"token"`` or ``"sequence"``: whose ratio weighs a token. ``None`` weighs nothing.
        cap: Greatest weight; ``None`` is no bound.
        reject: ``"token"``, ``"sequence"`` or ``"geometric"``: whose ratio rejects a token, or all
            tokens of a sequence. ``None`` rejects nothing.
        bounds: Least and greatest ratio that is kept, each above 0; ``None`` is no bound.
        only_negative: Reject only where the advantage is below 0.
        shared_pass: Score rows with gradients, for the loss that comes next: where a batch is one
            optimizer step, all its minibatches have the weights of its beginning. Wants a policy.
        version: What tells the newest version, as for :class:`StalenessFilter`; then
            :meth:`summary` tells the engine's noise from staleness.
        log_probs_key: Entry with float32 ``[B, T]`` for ``policy=None``.

    Raises:
        UnsupportedArgumentError: An argument is none of these, bounds are missing or in the wrong
            order, or neither ``weigh`` nor ``reject`` is given.
        RowLayoutError: When rows pass: they are not dense, an entry is missing or of another shape,
            or a row has no sampled token, or one without a finite log-probability.

    References:
        .. [1] Yao et al., *Your Efficient RL Framework Secretly Brings You Off-Policy RL Training*,
           2025, https://fengyao.notion.site/off-policy-rl
        .. [2] Liu et al., *When Speed Kills Stability: Demystifying RL Collapse from the
           Training-Inference Mismatch*, 2025
        .. [3] Ling Team, *Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale
           Thinking Model*, https://arxiv.org/abs/2510.18855
        .. [4] DeepSeek-AI, *DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models*,
           https://arxiv.org/abs/2512.02556
    """

    def __init__(
        self,
        policy: torch.nn.Module | None = None,
        *,
        weigh: Literal["token", "sequence"] | None = None,
        cap: float | None = 2.0,
        reject: Level | None = None,
        bounds: tuple[float | None, float | None] = (None, None),
        only_negative: bool = False,
        shared_pass: bool = False,
        version: VersionLike | None = None,
        log_probs_key: NestedKey = ("trainer_log_probs", "full"),
    ) -> None:
        for name, one, number in (("weigh", weigh, 2), ("reject", reject, 3)):
            if one not in (None, *(known := get_args(Level)[:number])):
                told = f"must be one of {known} or None, got {one!r}"
                raise UnsupportedArgumentError(f"{name} {told}")
        if weigh is None and reject is None:
            raise UnsupportedArgumentError("weigh or reject must be given")
        low, high = bounds
        for name, one in {"cap": cap, "bounds[0]": low, "bounds[1]": high}.items():
            if one is not None:
                check_number(name, one, 0)
                if not 0 < one < math.inf:
                    raise UnsupportedArgumentError(f"{name} must be above 0, got {one}")
        if (reject is None) != (low is None and high is None):
            raise UnsupportedArgumentError(f"reject={reject!r} with bounds={bounds}")
        if low is not None and high is not None and low > high:
            raise UnsupportedArgumentError(f"bounds must be in order, got {bounds}")
        if shared_pass and not isinstance(policy, TrainerPolicy):
            told = f"shared_pass wants a TrainerPolicy, got {type(policy).__name__}"
            raise UnsupportedArgumentError(told)
        super().__init__()
        self.shared_pass = shared_pass
        self._policy = (policy,)  # as no module of this one, whose parameters would be its own
        self.weigh, self.cap, self.reject, self.bounds = weigh, cap, reject, (low, high)
        self.only_negative, self.log_probs_key = only_negative, log_probs_key
        self._newest = None if version is None else as_version_source(version)
        self.reset_summary()

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Returns a shallow copy of a batch, corrected; see the class.

        Args:
            tensordict: Dense rows of size ``[B]``, advantages ``[B, 1, 1]`` or ``[B, T, 1]``.

        Raises:
            RowLayoutError: See the class; nothing was counted.
        """
        if isinstance(tensordict, LazyStackedTensorDict):
            raise RowLayoutError((), "rows must be a dense TensorDict, got a lazy stack")
        if not tensordict.batch_size.numel():
            return tensordict
        rows = tensordict.copy()
        engine, mask = _entry(rows, keys.LOG_PROBS), _entry(rows, keys.ASSISTANT)
        policy: Any = self._policy[0]
        if policy is None:
            trainer = _entry(rows, self.log_probs_key)
        elif self.shared_pass:
            trainer = policy.score_ahead(rows)
        else:
            trainer = policy(rows.copy())[policy.log_probs_key, "full"]
        if trainer.shape != engine.shape:
            told = f"shape {[*trainer.shape]}, the engine's {[*engine.shape]}"
            raise RowLayoutError(self.log_probs_key, told)
        trainer = trainer.to(engine.dtype)
        sampled = mask.bool() & ~engine.isnan()
        for name, values in {keys.LOG_PROBS: engine, self.log_probs_key: trainer}.items():
            bad = (sampled & ~values.isfinite()).any(1).nonzero().flatten().tolist()
            if bad:
                raise RowLayoutError(name, f"row {bad[0]} has a token without a log-probability")
        if empty := (~sampled.any(1)).nonzero().flatten().tolist():
            raise RowLayoutError(keys.LOG_PROBS, f"row {empty[0]} has no sampled token")
        advantage = rows.get("advantage", None)
        if not isinstance(advantage, torch.Tensor) or advantage.ndim != 3:
            raise RowLayoutError("advantage", "it must be a tensor of [B, 1, 1] or [B, T, 1]")
        log_ratio = torch.where(sampled, trainer - engine, 0.0)
        kept = sampled
        if self.reject is not None:
            level = _of_level(self.reject, log_ratio, sampled)
            low, high = (one and math.log(one) for one in self.bounds)
            inside = level.clamp(low, high) == level
            kept = sampled & (inside | (self.only_negative & (advantage[..., 0] >= 0)))
        weights = torch.zeros_like(log_ratio)
        if self.weigh is not None:
            most = math.inf if self.cap is None else math.log(self.cap)
            weights = _of_level(self.weigh, log_ratio, sampled).clamp(max=most)
        weights = torch.where(kept, weights.exp(), 0.0)
        parts = {"": sampled}
        if self._newest is not None:
            is_stale = staleness_of(_entry(rows, keys.FULL_VERSIONS), self._newest) > 0
            parts |= {"noise_": sampled & ~is_stale, "stale_": sampled & is_stale}
        with COUNTING:
            for name, chosen in parts.items():
                new = [*deviations(log_ratio[chosen]), float((chosen & ~kept).sum())]
                old = self._counts.setdefault(name, [0.0] * len(new))
                self._counts[name] = [a + b for a, b in zip(old, new, strict=True)]
                self._counts[name][2] = max(old[2], new[2])
            used = weights[kept].double()
            new = [float(used.sum()), float(used.square().sum()), float(len(used))]
            self._effective = [a + b for a, b in zip(self._effective, new, strict=True)]
        rows.set(ENGINE_LOG_PROBS, engine)
        rows.set(keys.LOG_PROBS, torch.where(kept, trainer, math.nan))
        return rows.set("advantage", advantage * weights[..., None])

    def summary(self) -> dict[str, float | None]:
        """Returns how far apart trainer and engine were on the tokens that have passed.

        With ``d`` the trainer's log-probability of a token minus the engine's: ``"tokens"``,
        ``"abs_log_ratio"`` and ``"abs_log_ratio_max"``, the mean and maximum of ``|d|``; ``"kl"``,
        the mean of ``exp(d) - 1 - d``, which estimates ``KL(engine || trainer)``; ``"rejected"``, a
        share from 0 to 1; and ``"ess"``, the effective sample size of the weights by the tokens
        kept, 0 to 1. With a ``version`` all but the last also as ``"noise_..."`` of the tokens that
        the newest version sampled, and as ``"stale_..."`` of older ones. ``None`` without tokens.
        """
        with COUNTING:
            found: dict[str, float | None] = {}
            for name, (num, far, most, kl, rejected) in self._counts.items():
                found[f"{name}tokens"] = num
                means = {"abs_log_ratio": far, "kl": kl, "rejected": rejected}
                found |= {f"{name}{of}": one / num if num else None for of, one in means.items()}
                found[f"{name}abs_log_ratio_max"] = most if num else None
            total, squares, num = self._effective
            return found | {"ess": total**2 / (num * squares) if squares else None}

    def reset_summary(self) -> None:
        """Forgets the tokens that have passed."""
        with COUNTING:
            # Tokens, sum and maximum of |d|, sum of exp(d) - 1 - d, and how many were rejected.
            self._counts: dict[str, list[float]] = {}
            self._effective = [0.0] * 3  # sums of weights, of their squares, and of tokens


def deviations(log_ratio: Tensor) -> list[float]:
    """How many there are, the sum and maximum of ``|d|``, and the sum of ``exp(d) - 1 - d``."""
    far = log_ratio.double()
    most = far.abs().max() if far.numel() else far.new_zeros(())
    return [float(far.numel()), *map(float, (far.abs().sum(), most, (far.expm1() - far).sum()))]


def _entry(rows: TensorDictBase, key: NestedKey) -> Tensor:
    value = rows.get(key, None)
    if not isinstance(value, torch.Tensor) or value.ndim != 2:
        raise RowLayoutError(key, "dense rows hold a tensor of [B, T] there")
    return value


def _of_level(level: str, log_ratio: Tensor, sampled: Tensor) -> Tensor:
    """The logarithm of the ratio that counts for each token, of shape [B, T] or [B, 1]."""
    if level == "token":
        return log_ratio
    total = log_ratio.sum(1, keepdim=True)
    return total / sampled.sum(1, keepdim=True).clamp(min=1) if level == "geometric" else total
