"""Corrections for tokens whose probability in the engine was another than in the trainer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from tensordict import LazyStackedTensorDict
from torchrl.envs.transforms import Transform

from torchrl_vllm_sync.checks import check_number
from torchrl_vllm_sync.errors import RowLayoutError, UnsupportedArgumentError
from torchrl_vllm_sync.rl.rows import FULL_VERSIONS
from torchrl_vllm_sync.rl.staleness import COUNTING, VersionLike, as_version_source
from torchrl_vllm_sync.rl.trainer import TrainerPolicy

if TYPE_CHECKING:
    from tensordict import TensorDictBase
    from tensordict.utils import NestedKey
    from torch import Tensor

Level: TypeAlias = Literal["token", "sequence", "geometric"]

_ASSISTANT = ("masks", "all_assistant_mask")
_ENGINE = ("log_probs", "full")
_KEPT_ASIDE = "engine_log_probs"
# Tokens, the sum and the maximum of |d|, the sum of exp(d) - 1 - d, and how many were rejected.
_COUNTS = 5


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

    Call it on a batch before the loop over minibatches: ``policy`` scores the rows by the weights
    that it has then, which takes a forward pass; or, with ``shared_pass=True``, on each minibatch
    just before the loss and under its autocast, which then takes that pass for its own. Advantages
    must be there already.

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
            optimizer step, the weights are those of its beginning in all its minibatches. Wants a
            policy.
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
        _check_one_of("weigh", weigh, ("token", "sequence"))
        _check_one_of("reject", reject, ("token", "sequence", "geometric"))
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
            tensordict: Dense rows of batch size ``[B]`` with advantages ``[B, 1, 1]`` or
                ``[B, T, 1]``.

        Raises:
            RowLayoutError: See the class; nothing was counted.
        """
        if isinstance(tensordict, LazyStackedTensorDict):
            raise RowLayoutError((), "rows must be a dense TensorDict, got a lazy stack")
        if not tensordict.batch_size.numel():
            return tensordict
        rows = tensordict.copy()
        engine, mask = _entry(rows, _ENGINE), _entry(rows, _ASSISTANT)
        trainer = self._trainers(rows, engine)
        sampled = mask.bool() & ~engine.isnan()
        for name, values in {_ENGINE: engine, self.log_probs_key: trainer}.items():
            bad = (sampled & ~values.isfinite()).any(1).nonzero().flatten().tolist()
            if bad:
                raise RowLayoutError(name, f"row {bad[0]} has a token without a log-probability")
        if empty := (~sampled.any(1)).nonzero().flatten().tolist():
            raise RowLayoutError(_ENGINE, f"row {empty[0]} has no sampled token")
        advantage = rows.get("advantage", None)
        if not isinstance(advantage, torch.Tensor) or advantage.ndim != 3:
            raise RowLayoutError("advantage", "it must be a tensor of [B, 1, 1] or [B, T, 1]")
        log_ratio = torch.where(sampled, trainer - engine, 0.0)
        kept = sampled & self._is_kept(log_ratio, sampled, advantage)
        weights = torch.where(kept, self._weights(log_ratio, sampled), 0.0)
        newest = self._newest() if callable(self._newest) else self._newest
        is_stale = None if newest is None else _entry(rows, FULL_VERSIONS) < newest
        self._count(log_ratio, sampled, kept, weights, is_stale)
        rows.set(_KEPT_ASIDE, engine)
        rows.set(_ENGINE, torch.where(kept, trainer, math.nan))
        return rows.set("advantage", advantage * weights[..., None])

    def _trainers(self, rows: TensorDictBase, engine: Tensor) -> Tensor:
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
        return trainer.to(engine.dtype)

    def _weights(self, log_ratio: Tensor, sampled: Tensor) -> Tensor:
        if self.weigh is None:
            return torch.ones_like(log_ratio)
        most = math.inf if self.cap is None else math.log(self.cap)
        return _of_level(self.weigh, log_ratio, sampled).clamp(max=most).exp()

    def _is_kept(self, log_ratio: Tensor, sampled: Tensor, advantage: Tensor) -> Tensor:
        if self.reject is None:
            return sampled
        level = _of_level(self.reject, log_ratio, sampled)
        low, high = (one and math.log(one) for one in self.bounds)
        kept = torch.ones_like(sampled)
        if low is not None:
            kept &= level >= low
        if high is not None:
            kept &= level <= high
        return kept | (advantage[..., 0] >= 0) if self.only_negative else kept

    def _count(
        self,
        log_ratio: Tensor,
        sampled: Tensor,
        kept: Tensor,
        weights: Tensor,
        is_stale: Tensor | None,
    ) -> None:
        of = {"": sampled}
        if is_stale is not None:
            of |= {"noise_": sampled & ~is_stale, "stale_": sampled & is_stale}
        with COUNTING:
            for name, chosen in of.items():
                new = [*deviations(log_ratio[chosen]), float((chosen & ~kept).sum())]
                old = self._counts.setdefault(name, [0.0] * _COUNTS)
                self._counts[name] = [a + b for a, b in zip(old, new, strict=True)]
                self._counts[name][2] = max(old[2], new[2])
            used = weights[kept].double()
            self._effective[0] += float(used.sum())
            self._effective[1] += float(used.square().sum())
            self._effective[2] += float(used.numel())

    def summary(self) -> dict[str, float | None]:
        """Returns how far apart trainer and engine were on the tokens that have passed.

        With ``d`` the trainer's log-probability of a token minus the engine's: ``"tokens"``,
        ``"abs_log_ratio"`` and ``"abs_log_ratio_max"``, the mean and maximum of ``|d|``; ``"kl"``,
        the mean of ``exp(d) - 1 - d``, which estimates ``KL(engine || trainer)``; ``"rejected"``, a
        share from 0 to 1; and ``"ess"``, the effective sample size of the weights by the tokens
        kept, 0 to 1. With a ``version`` all but the last also as ``"noise_..."`` of the tokens that
        the newest version sampled, and as ``"stale_..."`` of older ones. ``None`` where there was
        no token.
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
            self._counts: dict[str, list[float]] = {}
            self._effective = [0.0] * 3  # sums of weights, of their squares, and of tokens


def deviations(log_ratio: Tensor) -> list[float]:
    """How many there are, the sum and maximum of ``|d|``, and the sum of ``exp(d) - 1 - d``."""
    far = log_ratio.double()
    most = far.abs().max() if far.numel() else far.new_zeros(())
    return [float(far.numel()), *map(float, (far.abs().sum(), most, (far.expm1() - far).sum()))]


def _check_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        raise UnsupportedArgumentError(f"{name} must be one of {known} or None, got {value!r}")


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
