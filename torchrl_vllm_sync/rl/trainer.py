"""The trainer's policy: log-probabilities of the answers, and of them alone, chunk by chunk."""

from __future__ import annotations

import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial, partialmethod
from typing import Any, Literal, TypeAlias, cast

import torch
from tensordict import LazyStackedTensorDict, MetaData, NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint
from torchrl.modules.llm.policies.common import LLMWrapperBase, LogProbs
from transformers import PreTrainedModel

from torchrl_vllm_sync.checks import check_integer, check_number
from torchrl_vllm_sync.errors import (
    DivergedError,
    InvalidPromptError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.rl import rows as keys
from torchrl_vllm_sync.weights.module import base_model, unwrap
from torchrl_vllm_sync.weights.sharded import is_sharded
from torchrl_vllm_sync.weights.source import coarsest, served_dtype

logger = logging.getLogger(__name__)

# Tokens of the two rows by which a model shows whether it keeps packed ones apart.
_PROBE = 16

# A logit beside which any other is certain, at any temperature.
_NOTHING = -1e30

_STEPS = Counter[str]()
register_optimizer_step_post_hook(lambda *_: _STEPS.update(["of any optimizer"]))

# Log-probabilities of tokens and entropies of their positions, float32 [N], and what finds them.
_Found: TypeAlias = "tuple[Tensor, Tensor]"
_Scorer: TypeAlias = "Callable[[Tensor], _Found]"

# Enters what replays the experts of the pass that runs, for layers that backward computes again.
_REPLAY: ContextVar[Callable[[], Any]] = ContextVar("replay", default=nullcontext)


class TrainerPolicy(LLMWrapperBase):
    """The actor network of TorchRL's LLM losses at the speed and in the memory of the bare model.

    It takes the place of ``TransformersWrapper(model, input_mode="tokens", generate=False)`` in
    ``GRPOLoss`` and its kin, and as the reference model of ``RetrieveLogProb``, with the same
    results. Only positions that the loss asks for get logits, ``chunk_tokens`` at a time, in
    float32; backward computes logits of earlier chunks again. No padding on the left is computed,
    wherever it stands, and a causal model needs no attention mask.

    Rows are a ``TensorDict`` of batch size ``[B]`` with int64 ``("tokens", "full")`` ``[B, T]`` and
    boolean ``("masks", "all_attention_mask")`` and ``("masks", "all_assistant_mask")`` of the same
    shape, or TorchRL's lazy stacks of ragged rows, which are padded on the left as its losses do.
    A row's first token follows nothing: its log-probability is 0.

    Rows may say which tokens could be sampled, in ``("sampling_mask", "response")`` of
    :class:`vLLMWrapper`, whose columns end where those of the tokens do. Log-probabilities and
    entropies are of these alone: with top-k, top-p or min-p, equal weights have the ratio 1.

    A called policy writes ``(log_probs_key, "full")`` into the rows, float32 and 0 on padding.

    Engines that it is pushed to may round its weights. Where it then computes more finely than they
    do, it has updates that they lack, more with each step, and says so once, in the log: losses
    belong under ``torch.autocast`` to the engines' dtype. A model sharded by FSDP2 is not judged.

    Args:
        model: A causal language model of transformers, also inside PEFT or sharded by FSDP2, where
            every rank must make as many passes: as many rows, ``chunk_tokens`` of ``micro_batch``
            times their longest. Its mode, ``eval`` as ``GRPOLoss`` advises, is left alone.
        chunk_tokens: Positions whose logits exist at a time, 1,024 of 150,000 words in 2 GiB.
        micro_batch: Rows a forward pass, all by default, of a like length unless they are packed.
            Activations of one pass exist at a time: backward computes those before the last again.
        gradient_checkpointing: Turns on the model's own; transformers does it in train mode only.
        temperature: Of sampling, above 0: logits are divided by it, as vLLM does for
            ``logprobs_mode="processed_logprobs"``.
        packed: Puts the rows of a pass one after the other, without padding; positions that begin
            again tell the model where a row begins. Flash attention then computes each row by
            itself; others the square of all tokens of a pass, which ``micro_batch`` bounds.
        log_probs_key: Where a call writes; not where losses read.
        replay_experts: Has the model compute by the experts that rows may name, in
            ``("routed_experts", "full")``, integers ``[B, T, layers, top_k]``, -1 for none known:
            ``replay_routed_experts``, or what else makes a context manager of a model and of those
            of the tokens of one call, around which it is entered, also for layers in backward.

    Raises:
        UnsupportedArgumentError: An argument is out of range; or, when rows are scored, gradients
            are wanted with ``gradient_checkpointing`` of a model in evaluation mode, or of experts
            with the model's own, or its attention does not keep ``packed`` rows apart.
        InvalidPromptError: Of a call or a loss: an entry is missing or of a wrong shape, a token is
            outside the vocabulary or its sampling mask, a row is longer than the model's positions,
            or has no token that the loss asks for.
        DivergedError: Of a loss with entropies: the model computes NaN or infinity.

    Example:
        >>> policy = TrainerPolicy(model, micro_batch=16)
        >>> loss = GRPOLoss(policy, clip_epsilon=0.2, kl_to_ref_coeff=None)
        >>> loss(rows).loss_objective.backward()
    """

    # What TorchRL's transforms ask of a wrapper.
    generate = False
    pad_output = False
    input_mode = "tokens"
    return_log_probs = True
    layout = torch.strided
    replays_sampling_masks = True  # which vLLMWrapper asks of its trainer

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        chunk_tokens: int = 1024,
        micro_batch: int | None = None,
        gradient_checkpointing: bool = False,
        temperature: float = 1.0,
        packed: bool = False,
        log_probs_key: NestedKey = "log_probs",
        replay_experts: Callable[..., AbstractContextManager[Any]] | None = None,
    ) -> None:
        super().__init__(model)
        check_integer("chunk_tokens", chunk_tokens, 1)
        if micro_batch is not None:
            check_integer("micro_batch", micro_batch, 1)
        check_number("temperature", temperature, 0)
        if not 0 < temperature < math.inf:
            raise UnsupportedArgumentError(f"temperature must be above 0, got {temperature}")
        self.model = model
        self.chunk_tokens, self.micro_batch = chunk_tokens, micro_batch
        self.gradient_checkpointing, self.temperature = gradient_checkpointing, temperature
        self.packed, self.log_probs_key = packed, log_probs_key
        self.replay_experts = replay_experts
        # A pass that the loss of the same rows may take: tokens, what it found, and conditions.
        self._ahead: tuple[TokenDistribution, list[Any]] | None = None
        self._has_told = False
        self.in_keys = [keys.TOKENS, keys.ATTENTION]
        self.out_keys = [log_probs_key]
        if gradient_checkpointing:
            inner: Any = unwrap(model)
            contexts = {"use_reentrant": False, "context_fn": _contexts_of_layers}
            inner.gradient_checkpointing_enable(contexts)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_ahead": None}  # graphs are neither pickled nor copied

    @cached_property
    def path(self) -> Literal["head", "logits"]:
        """By the model without its ``"head"``, which then takes chunks of positions, or not.

        Where the model does more to ``"logits"`` than its head (a soft cap, a scale) or must be
        called as a whole (FSDP2), it computes as many rows at a time as have ``chunk_tokens``
        columns. Found by a call on two tokens, whose states are replaced by large ones.
        """
        core: Any = base_model(self.model)
        if not isinstance(core, PreTrainedModel) or is_sharded(core):
            return "logits"
        head, inner = core.get_output_embeddings(), core.base_model
        if head is None or inner is core:
            return "logits"
        ids = torch.zeros(1, 2, dtype=torch.long, device=core.device)
        probes: list[Tensor] = []

        def replace(_module: object, _args: object, output: Any) -> None:
            if "last_hidden_state" in output:
                states = output["last_hidden_state"]
                probe = torch.arange(states.numel(), device=states.device).sin().mul(100)
                probes.append(probe.reshape(states.shape).to(states.dtype))
                output["last_hidden_state"] = probes[-1]

        hook = inner.register_forward_hook(replace)
        try:
            with torch.no_grad():
                logits = core(**_input(ids)).logits
                alone = bool(probes) and torch.allclose(
                    head(probes[-1]).float(), logits.float(), rtol=1e-3, equal_nan=True
                )
        finally:
            hook.remove()
        return "head" if alone else "logits"

    def _takes(self, argument: str) -> bool:
        """Whether the model's call takes it; a PEFT model hands on what its base takes."""
        return argument in inspect.signature(base_model(unwrap(self.model)).forward).parameters

    @cached_property
    def _keeps_rows_apart(self) -> bool:
        """Whether a packed row's logits are those that it has alone, found by a call on two."""
        core: Any = base_model(unwrap(self.model))
        if not self._takes("position_ids"):
            return False
        if getattr(core.config.get_text_config(), "attention_chunk_size", None):
            return False  # chunks are counted from the first row's start
        ids = torch.arange(_PROBE, device=next(self.model.parameters()).device)
        half = _PROBE // 2

        def last(ids: Tensor, places: Tensor) -> Tensor:
            return self.model(**_input(ids[None], places[None])).logits[0, -half:].float()

        modes = [(one, one.training) for one in self.model.modules()]
        self.model.eval()  # without dropout
        try:
            with torch.no_grad():
                alone, packed = last(ids[half:], ids[:half]), last(ids, ids % half)
                run_on = last(ids, ids)
        finally:
            for one, mode in modes:
                one.training = mode
        # Rounding to bfloat16 made up to 0.05 of it in models of 28 layers, other rows 0.3 or more.
        return bool((packed - alone).norm() <= 0.1 * (run_on - alone).norm())

    def forward(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
        """Returns the rows with the log-probability of every token, ragged ones as long.

        Args:
            tensordict: The rows; also one row, or several batch dimensions.
            **kwargs: Refused: what the wrapper's call takes beyond rows has no use here.

        Raises:
            UnsupportedArgumentError: There are ``kwargs``.
        """
        if kwargs:
            raise UnsupportedArgumentError(f"TrainerPolicy takes rows only, got {sorted(kwargs)}")
        if not tensordict.ndim:
            return self(LazyStackedTensorDict(tensordict, stack_dim=0))[0]
        if tensordict.ndim > 1:
            return self(tensordict.reshape(-1)).view(tensordict.shape)
        dist = self._get_generic_dist(tensordict)
        log_probs = dist.log_prob(_padded(tensordict, keys.TOKENS))
        if isinstance(tensordict, LazyStackedTensorDict):
            rows = zip(tensordict.unbind(0), log_probs, _lengths(tensordict), strict=True)
            for row, values, length in rows:
                row.set(self.log_probs_key, _entry(values[len(values) - length :]))
        else:
            tensordict.set(self.log_probs_key, _entry(log_probs))
        return tensordict

    def score_ahead(self, rows: TensorDictBase) -> Tensor:
        """Scores the answers' tokens, in a pass that the next loss of these rows takes.

        That loss takes it if rows and weights are the same (tokens, sampling masks, and experts
        where these are replayed), its mask is the assistant's (TorchRL's
        ``"sft"`` and ``"rlhf"``), and it wants gradients; otherwise it scores anew.

        Args:
            rows: Dense rows of batch size ``[B]``.

        Returns:
            Log-probabilities without gradients, float32 ``[B, T]``, 0 where no answer is.

        Raises:
            InvalidPromptError: See the class.
        """
        self._ahead = None
        with torch.enable_grad():
            dist = self.get_dist(rows, mask_key=keys.ASSISTANT)
            dist.kept = dist.log_prob(_padded(rows, keys.TOKENS))
        self._ahead = dist, self._conditions()
        return dist.kept.detach()

    def _conditions(self) -> list[Any]:
        """What must be the same for the same numbers: weights, precision and mode."""
        parameters = [*self.model.parameters()]
        kind = parameters[0].device.type
        precision = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        written = [one._version for one in parameters]  # which fused optimizers do not count
        return [_STEPS["of any optimizer"], precision, self.model.training, *written]

    def _tell_of_rounding(self) -> None:
        served = None if self._has_told else served_dtype(self.model)
        if served is None:
            return
        parameters = [*self.model.parameters()]
        kind = parameters[0].device.type
        own = coarsest(one.dtype for one in parameters)
        own = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else own
        is_finer = own is not None and torch.finfo(own).eps < torch.finfo(served).eps
        if is_finer and not is_sharded(self.model):
            self._has_told = True
            logger.warning(
                "log-probabilities are computed in %s, by engines in %s: updates that rounding "
                "takes from the engines move the trainer away from them with each step; compute "
                "the loss under torch.autocast(%r, %s)",
                *(own, served, kind, served),
            )

    def get_dist(
        self,
        tensordict: TensorDictBase,
        *args: Any,  # noqa: ARG002
        mask_key: NestedKey | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> TokenDistribution:
        """Returns the distribution, of shape ``[B, T]``, of the tokens that a mask picks.

        Args:
            tensordict: The rows.
            mask_key: A boolean entry of the tokens' shape; the attention mask by default.
            *args, **kwargs: TorchRL's others, without effect.
        """
        mask = _padded(tensordict, mask_key or keys.ATTENTION)
        return self._distribution(tensordict, mask)

    def _get_sft_dist(self, tensordict: TensorDictBase, **_: Any) -> TokenDistribution:
        """Of the answers: of ragged rows what follows the prompt, as TorchRL has it."""
        prompts = None
        if isinstance(tensordict, LazyStackedTensorDict) or keys.ASSISTANT not in tensordict:
            prompts = cast("Any", tensordict).get(keys.PROMPT, None, as_list=True)
        if prompts is None:
            return self.get_dist(tensordict, mask_key=keys.ASSISTANT)
        mask = _padded(tensordict, keys.ATTENTION)
        lengths = zip(prompts, _lengths(tensordict), strict=True)
        starts = [mask.shape[1] - length + prompt.shape[-1] for prompt, length in lengths]
        columns = torch.arange(mask.shape[1], device=mask.device)
        answers = columns >= torch.tensor(starts, device=mask.device)[:, None]
        return self._distribution(tensordict, mask.bool() & answers)

    _get_generic_dist = get_dist
    _get_rlhf_dist = partialmethod(get_dist, mask_key=keys.ASSISTANT)  # pyright: ignore[reportAssignmentType]

    def _distribution(self, tensordict: TensorDictBase, mask: Tensor) -> TokenDistribution:
        if self.gradient_checkpointing and torch.is_grad_enabled() and not self.model.training:
            needs = "needs a model in train mode, where transformers does it: call policy.train()"
            raise UnsupportedArgumentError(f"gradient_checkpointing {needs}")
        if self.packed and not self._keeps_rows_apart:
            core: Any = base_model(unwrap(self.model))
            how = f"attn_implementation={core.config._attn_implementation!r}"
            why = f"{type(core).__name__} does not keep rows apart by positions with {how}"
            raise UnsupportedArgumentError(f"packed=True, but {why}")
        self._tell_of_rounding()
        tokens = _padded(tensordict, keys.TOKENS)
        attention = _padded(tensordict, keys.ATTENTION)
        for name, one in {keys.ATTENTION: attention, "the mask": mask}.items():
            if one.shape != tokens.shape:
                shapes = f"{[*one.shape]}, {keys.TOKENS} {[*tokens.shape]}"
                raise InvalidPromptError(f"{name} has shape {shapes}")
        mask, ahead = mask.bool() & attention.bool(), self._ahead
        experts = self._experts(tensordict, tokens)
        left_over = keys.padded(tensordict, keys.SAMPLING_MASK, keys.NO_TOKEN, "left")
        given = [tokens, mask, experts, *([] if left_over is None else [left_over])]
        if ahead is not None and torch.is_grad_enabled():
            (dist, conditions), self._ahead = ahead, None
            is_same = len(given) == len(dist.given) and all(map(_is_same, given, dist.given))
            if is_same and conditions == self._conditions():
                return dist
            del ahead, dist  # and its graph
        has_passes = self.micro_batch is not None or self.path == "logits"
        rows = _Rows.of(
            tokens,
            attention.bool(),
            mask,
            unwrap(self.model),
            experts,
            by_length=has_passes and not self.packed,
        )
        masks = [_at(rows.positions, one, tokens.shape[1]) for one in given[3:]]
        if self.path == "head":
            scorer = partial(self._scores_by_head, self._states(rows), masks)
        else:
            scorer = partial(self._scores_by_model, rows, masks)
        return TokenDistribution(given, rows.positions, scorer)

    def _experts(self, tensordict: Any, tokens: Tensor) -> Tensor:
        """The experts [B, T, layers, k] to be replayed; of no layer where there are none."""
        key, none = keys.ROUTED_EXPERTS, keys.NO_EXPERT
        experts = keys.padded(tensordict, key, none, "left") if self.replay_experts else None
        if experts is None:
            return tokens.new_empty(*tokens.shape, 0, 0)
        if experts.shape[:-2] != tokens.shape:
            shapes = f"{[*experts.shape]}, {keys.TOKENS} {[*tokens.shape]}"
            raise InvalidPromptError(f"{keys.ROUTED_EXPERTS} has shape {shapes}")
        model: Any = base_model(unwrap(self.model))
        if model.training and model.is_gradient_checkpointing and not self.gradient_checkpointing:
            told = "needs gradient_checkpointing=True of the policy instead of the model's own"
            raise UnsupportedArgumentError(f"replay_experts {told}")
        return experts

    @contextmanager
    def _replaying(self, experts: Tensor) -> Iterator[None]:
        known, replay = bool(experts.numel()), cast("Any", self.replay_experts)
        former = _REPLAY.set(partial(replay, self.model, experts) if known else nullcontext)
        try:
            with _REPLAY.get()():
                yield
        finally:
            _REPLAY.reset(former)

    def _states(self, rows: _Rows) -> Tensor:
        """The hidden states [N, H] that predict the scored tokens."""
        inner: Any = base_model(self.model)

        def one(ids: Tensor, predicts: Tensor, experts: Tensor, *places: Tensor) -> tuple[Tensor]:
            with self._replaying(experts):
                return (inner.base_model(**_input(ids, *places)).last_hidden_state[predicts],)

        step = self.micro_batch or len(rows.ids)
        return _each(one, [given for given, _ in rows.parts(step, packed=self.packed)])[0]

    def _scores_by_head(self, states: Tensor, masks: list[Tensor], targets: Tensor) -> _Found:
        inner: Any = base_model(self.model)
        head = inner.get_output_embeddings()

        def one(states: Tensor, *of_tokens: Tensor) -> _Found:
            return _scored(head(states), self.temperature, *of_tokens)

        given = [states, targets, *masks]
        return _each(one, [*zip(*(one.split(self.chunk_tokens) for one in given), strict=True)])

    def _scores_by_model(self, rows: _Rows, masks: list[Tensor], targets: Tensor) -> _Found:
        step = min(self.micro_batch or len(rows.ids), self.chunk_tokens // max(*rows.ends, 1) or 1)
        keeps = self._takes("logits_to_keep")

        def one(of_tokens: list[Tensor], ids: Tensor, predicts: Tensor, *others: Tensor) -> _Found:
            experts, *places = others
            columns = predicts.any(0).nonzero()[:, 0]
            chosen: Any = {"logits_to_keep": columns} if keeps else {}
            with self._replaying(experts):
                logits = self.model(**_input(ids, *places), **chosen).logits
            logits = logits if keeps else logits[:, columns]
            return _scored(logits[predicts[:, columns]], self.temperature, *of_tokens)

        parts = [*rows.parts(step, packed=self.packed)]
        counts = [num for _, num in parts]
        splits = zip(*(one.split(counts) for one in (targets, *masks)), strict=True)
        runs = [(own, *given) for (given, _), own in zip(parts, splits, strict=True)]
        return _each(one, runs)


class TokenDistribution(torch.distributions.Distribution):
    """TorchRL's ``LLMMaskedCategorical`` of a mask [B, T], without the logits of all positions."""

    def __init__(self, given: list[Tensor], positions: tuple[Tensor, ...], scorer: _Scorer) -> None:
        self.given = given  # tokens, mask, and whatever else of the rows it depends on
        self._tokens, self.mask, *_ = given
        super().__init__(self.mask.shape, validate_args=False)
        self._positions, self._scorer = positions, scorer
        self._entropies: dict[bool, Tensor] = {}  # by whether gradients were wanted
        self.kept: Tensor | None = None  # of the rows' own tokens, which log_prob gives once more

    def log_prob(self, value: Tensor) -> Tensor:
        """Float32 [B, T] of ids in place of the rows' own, 0 outside the mask and at first."""
        if value.shape != self.mask.shape:
            told = f"of shape {[*value.shape]}, rows are {[*self.mask.shape]}"
            raise InvalidPromptError(f"log_prob of tokens {told}")
        kept, self.kept = self.kept, None
        if kept is not None and torch.equal(value, self._tokens):
            return kept
        log_probs, self._entropies[torch.is_grad_enabled()] = self._scorer(value[self._positions])
        return self._laid_out(log_probs)

    def entropy(self) -> Tensor:
        """Float32 [B, T] in nats, 0 where :meth:`log_prob` is by definition."""
        if torch.is_grad_enabled() not in self._entropies:
            scores = self._scorer(self._tokens[self._positions])
            self._entropies[torch.is_grad_enabled()] = scores[1]
        return self._laid_out(self._entropies[torch.is_grad_enabled()])

    def sample(self, sample_shape: Any = ()) -> Tensor:  # noqa: ARG002
        """Refuses: TorchRL's losses ask for it where an entropy is not finite."""
        raise DivergedError

    def _laid_out(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.mask.shape).index_put(self._positions, values)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows whose tokens start at column 0, and which of them are scored."""

    ids: Tensor  # int64 [B, T], 0 behind the last token of a row
    predicts: Tensor  # bool [B, T]: what is known up to here scores the next token
    positions: tuple[Tensor, ...]  # rows and columns of the N scored tokens, as they were given
    ends: list[int]  # of each row, the columns that its scored tokens need
    counts: list[int]  # of each row, scored tokens
    experts: Tensor  # integers [B, T, layers, k]: of each token, to be replayed

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        attention: Tensor,
        mask: Tensor,
        model: Any,
        experts: Tensor,
        *,
        by_length: bool,
    ) -> _Rows:
        if not tokens.numel():
            told = f"{keys.TOKENS!r} has shape {[*tokens.shape]}"
            raise InvalidPromptError(f"there are no tokens: {told}")
        attended, order = attention.byte().sort(stable=True, dim=1, descending=True)
        ids = tokens.long().gather(1, order) * attended
        predicts = (mask.gather(1, order) & attended.bool()).roll(-1, 1)
        predicts[:, -1] = False  # which is column 0's: a first token follows nothing
        ends = (predicts * torch.arange(1, ids.shape[1] + 1, device=ids.device)).amax(1)
        asked, lengths, counts = mask.sum(1), attention.sum(1), predicts.sum(1)
        in_order = torch.arange(len(ids), device=ids.device)
        rows = ends.argsort(descending=True) if by_length else in_order
        extremes = torch.stack([ids.amin(), ids.amax(), lengths.amax(), asked.amin()])
        # One wait for the device, whatever is asked.
        low, high, length, fewest, *each = torch.cat([extremes, ends[rows], counts[rows]]).tolist()
        num_tokens = model.get_input_embeddings().weight.shape[0]
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if low < 0 or high >= num_tokens:
            row, column = ((ids < 0) | (ids >= num_tokens)).nonzero()[0].tolist()
            told = f"outside the model's vocabulary of {num_tokens}"
            raise InvalidPromptError(f"row {row}: token {int(ids[row, column])} is {told}")
        if longest is not None and length > longest:
            told = f"has {length} tokens, the model {longest} positions"
            raise InvalidPromptError(f"row {int(lengths.argmax())} {told}")
        if not fewest:
            none = (asked == 0).nonzero()[:, 0].tolist()
            raise InvalidPromptError(f"rows without a token to score: {none}")
        places, columns = (mask & (attention.cumsum(1) > 1))[rows].nonzero(as_tuple=True)
        ids, predicts, experts = ids[rows], predicts[rows], experts[rows[:, None], order[rows]]
        ends, counts = each[: len(ids)], each[len(ids) :]
        return cls(ids, predicts, (rows[places], columns), ends, counts, experts)

    def parts(self, step: int, *, packed: bool) -> Iterator[tuple[tuple[Tensor, ...], int]]:
        """Ids, what they predict and experts, of needed columns; packed, one row and positions."""
        for at in range(0, len(self.ids), step):
            some = slice(at, at + step)
            ends = [max(one, 1) for one in self.ends[some]]
            whole = self.ids, self.predicts, self.experts
            given = tuple(one[some, : max(ends)] for one in whole)
            if packed:
                columns = torch.arange(max(ends), device=self.ids.device).expand_as(given[0])
                needed = columns < torch.tensor(ends, device=columns.device)[:, None]
                given = tuple(one[needed][None] for one in (*given, columns))
            yield given, sum(self.counts[some])


def _input(ids: Tensor, *places: Tensor) -> dict[str, Any]:
    """What a model is called with: positions of packed rows, and of others its own."""
    positions = {"position_ids": places[0]} if places else {}
    return {"input_ids": ids, "use_cache": False, **positions}


def _scored(
    logits: Tensor, temperature: float, targets: Tensor, masks: Tensor | None = None
) -> _Found:
    """Log-probabilities of tokens [N] and entropies from logits [N, V], masked by ids [N, K]."""
    if masks is None:
        return _Scores.apply(logits, targets, temperature)
    is_there = masks >= 0
    masked, is_target = is_there.any(1), masks == targets[:, None]
    num, outside = torch.stack([masked.sum(), (masked & ~is_target.any(1)).sum()]).tolist()
    if outside:
        at = int((masked & ~is_target.any(1)).nonzero()[0])
        raise InvalidPromptError(f"token {int(targets[at])} is outside its sampling mask")
    if not num:
        return _Scores.apply(logits, targets, temperature)
    if num < len(masks):  # tokens of prompts have no mask
        at = masked.nonzero(as_tuple=True)
        whole = _Scores.apply(logits, targets, temperature)
        some = _scored(logits[at], temperature, targets[at], masks[at])
        return whole[0].index_put(at, some[0]), whole[1].index_put(at, some[1])
    # Columns of the mask in place of the vocabulary; those behind its last token weigh nothing.
    few = logits.gather(1, masks.clamp(min=0).long()).float().masked_fill(~is_there, _NOTHING)
    return _Scores.apply(few, is_target.byte().argmax(1), temperature)


class _Scores(torch.autograd.Function):
    """Log-probabilities of tokens and entropies from logits [N, V], in float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> _Found:
        scaled = logits if temperature == 1 else logits.float() / temperature
        log_p = scaled.log_softmax(-1, dtype=torch.float32)
        entropies = -torch.linalg.vecdot(log_p.exp(), log_p)
        ctx.save_for_backward(log_p, targets, entropies)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return log_p.gather(1, targets[:, None])[:, 0], entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  once_differentiable hides it
        ctx: Any, *grad_outputs: Tensor | None
    ) -> Any:
        log_p, targets, entropies = ctx.saved_tensors
        of_log_probs, of_entropies = grad_outputs
        # d log p[y] = onehot(y) - p and d H = -p (log p + H), by the logits.
        grad = log_p.exp()
        if of_entropies is None:
            assert of_log_probs is not None
            grad *= -of_log_probs[:, None]
        else:
            weights = (log_p + entropies[:, None]).mul_(-of_entropies[:, None])
            grad *= weights if of_log_probs is None else weights.sub_(of_log_probs[:, None])
        if of_log_probs is not None:
            grad.scatter_add_(1, targets[:, None], of_log_probs[:, None])
        return grad.div_(ctx.temperature).to(ctx.dtype), None, None


def _contexts_of_layers() -> tuple[Any, Any]:
    """Of a layer that is checkpointed: of its call, which is within a pass, and of all others."""
    return nullcontext(), _EachTime(_REPLAY.get())


class _EachTime(ExitStack):
    """A context that is made anew whenever it is entered, as for each backward of one graph."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self._make = make

    def __enter__(self) -> Any:
        return self.enter_context(self._make())


def _each(run: Callable[..., Any], parts: Sequence[tuple[Any, ...]]) -> Any:
    """Joins what the parts give; only the last, with which backward begins, is kept for it."""
    again = partial(checkpoint, run, use_reentrant=False) if torch.is_grad_enabled() else run
    found = [*(again(*part) for part in parts[:-1]), run(*parts[-1])]
    return tuple(map(torch.cat, zip(*found, strict=True)))


def _padded(tensordict: Any, key: NestedKey) -> Tensor:
    """An entry of the rows as [B, T], ragged rows padded on the left."""
    value = keys.padded(tensordict, key, 0, "left")
    if value is None:
        there = ", ".join(sorted(map(str, tensordict.keys(True, True))))
        raise InvalidPromptError(f"rows have no {key!r}; they have {there}")
    if value.ndim != 2:
        raise InvalidPromptError(f"{key!r} must be of shape [B, T], got {[*value.shape]}")
    return value


def _at(positions: tuple[Tensor, ...], masks: Tensor, width: int) -> Tensor:
    """The tokens [N, K] that could be sampled at some positions, of masks [B, T, K]."""
    rows, columns = positions
    columns = columns - (width - masks.shape[1])
    return masks[rows, columns.clamp(min=0)].masked_fill(columns[:, None] < 0, keys.NO_TOKEN)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and torch.equal(one, other)


def _lengths(tensordict: Any) -> list[int]:
    return [row.shape[-1] for row in tensordict.get(keys.TOKENS, as_list=True)]


def _entry(log_probs: Tensor) -> LogProbs:
    """What TorchRL's wrapper writes, of one row or of all."""
    values = TensorDict({"full": log_probs, "padded": MetaData(log_probs.ndim > 1)})
    return LogProbs._from_tensordict(values.auto_batch_size_(log_probs.ndim - 1))
