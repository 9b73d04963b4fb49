"""The policy for TorchRL's collectors: TorchRL's wrapper, plus what it drops of each output."""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import xxhash
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    TensorDict,
    TensorDictBase,
    lazy_stack,
)
from torchrl.data.llm import History
from torchrl.modules.llm import vLLMWrapper as _TorchRLWrapper
from torchrl.modules.llm.policies import vllm_wrapper as _torchrl
from torchrl.modules.llm.policies.common import ChatHistory, LogProbs, Masks, Text, Tokens

from torchrl_vllm_sync.checks import check_integer
from torchrl_vllm_sync.errors import (
    RowLayoutError,
    UncorrectableSamplingError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.requests.messages import (
    listed_tokens,
    max_version,
    min_version,
    sampled_log_probs,
    samples_of,
)
from torchrl_vllm_sync.requests.turns import behind, end_of_turn, is_of, without_end
from torchrl_vllm_sync.rl import conversations as turns
from torchrl_vllm_sync.rl import guards
from torchrl_vllm_sync.rl import rows as keys
from torchrl_vllm_sync.rl.rows import Texts, non_tensor, objects, unbound
from torchrl_vllm_sync.service.service import AsyncVLLM

logger = logging.getLogger(__name__)

# Top-level entries of what is stamped.
_STAMPS = [keys.POLICY_VERSION, keys.MAX_POLICY_VERSION, keys.POLICY_VERSIONS]
_STAMPS += [keys.FINISH_REASON, keys.GENERATION]
# Where a report of a sample has what is stamped, and what stands for a figure that it lacks.
_FIGURES = (
    (keys.NUM_CACHED_TOKENS, "num_cached_tokens", keys.UNKNOWN_COUNT, torch.int64),
    (keys.QUEUE_TIME, "queue_s", math.nan, torch.float32),
    (keys.PREFILL_TIME, "prefill_s", math.nan, torch.float32),
    (keys.DECODE_TIME, "decode_s", math.nan, torch.float32),
)
# Of the probability may be outside a sampling mask, by rounding.
_MISSING = 1e-3
Chat: TypeAlias = "list[dict[str, Any]]"  # messages, each with its role and content
_Dense: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"  # padded tokens, and where they are


class _Seeds:
    """A seed for each row: with one seed all samples of a group would be the same answer."""

    def __init__(self) -> None:
        self._rows = itertools.count()

    def __reduce__(self) -> tuple[type[_Seeds], tuple[()]]:
        return type(self), ()

    def of(self, params: Any, num_rows: int, numbers: Sequence[int] | None = None) -> Any:
        """Parameters for so many rows: these, or if they have a seed, those of each row."""
        if isinstance(params, list) or params is None or params.seed is None:
            return params
        own = [copy.copy(params) for _ in range(num_rows)]
        for one, number in zip(own, self._rows if numbers is None else numbers, strict=False):
            mixed = xxhash.xxh3_64_intdigest(b"%d %d" % (params.seed, number))
            one.seed = mixed >> 2  # vLLM takes 63 bits, and counts on for further samples
        return own


class vLLMWrapper(_TorchRLWrapper):  # noqa: N801  TorchRL's spelling
    """TorchRL's ``vLLMWrapper`` over a service, with what TorchRL drops of each response kept.

    Each generated row carries more entries than TorchRL's, of the batch's shape unless said
    otherwise; ``torchrl_vllm_sync.rl.rows`` has their names.

    - ``"policy_version"`` and ``"max_policy_version"``, int64: the oldest and the newest policy
      version that sampled one of the row's tokens, in place of a collector's own stamp.
    - ``("policy_versions", "response")`` and ``"full"``, int64, laid out as ``"tokens"`` are: the
      version that sampled each token; -1 on prompts and padding. As TorchRL has no
      ``("tokens", "full")`` with ``input_mode="text"``, there is no such one either.
    - ``"finish_reason"``, text: vLLM's reason (``"stop"``, ``"length"``, ``"abort"``).
    - ``("generation", "num_cached_tokens")``, int64: tokens of the prompt that came from the prefix
      cache; -1 where vLLM did not say.
    - ``("generation", "queue_time")``, ``"prefill_time"`` and ``"decode_time"``, float32 seconds:
      from vLLM's queue to its first batch, to the first token, to the last. Pauses count where they
      fall; what a request did before an update sent it back does not. NaN where vLLM did not say.
    - ``("generation", "replica_id")``, text: the replica that answered. ``"uncorrected"``, text:
      settings that ``allow`` let through; else absent.
    - ``("sampling_mask", "response")``, int32 of the shape of ``("tokens", "response")`` and
      ``top_k + 8``, with ``return_sampling_mask``: the tokens that could be sampled there, by the
      engines' own log-probabilities; -1 behind the last.
    - ``("routed_experts", "full")``, int16 of the shape of ``("tokens", "full")``, layers, and
      experts a token, from engines launched with ``enable_return_routed_experts``: which experts
      computed each token; -1 on the last one, which none has computed, and on padding.
    - ``("turns", "num_messages")``, int64, with ``input_mode="history"``: messages of the prompt.
      ``"kept"``, int64: of its tokens, those of the turn before, prompt and answer; 0 where all of
      it was encoded. ``"forked"``, bool: that was so because the template shows an earlier turn in
      another way than before (it drops thinking, for one).

    So in a conversation the prompt of a turn begins with prompt and answer of the turn before,
    token by token: its text, encoded anew, would be other tokens than those sampled. The rows carry
    the turn from call to call, as TorchRL's environments and collectors do with all that a policy
    writes. A row without those entries is encoded whole, and so are all with ``prefer_tokens``.
    What ends an answer, which TorchRL leaves in the history, is not shown twice. A row's masks are
    of its own answer, so that each sampled token is in the loss of one row.

    Prompt log-probabilities are NaN, which ``GRPOLoss`` masks, unless ``generate_kwargs`` has
    ``prompt_logprobs``: asking for them makes vLLM skip its prefix cache.

    With a ``seed`` in ``generate_kwargs`` each row that the policy asks for has a seed of its own,
    made from that one and the row's number, which it keeps on another replica. So a run whose
    engines compute batch-invariantly samples the same rows again, whatever is killed meanwhile. A
    copy in another process counts anew: give it another seed.

    Conversations, and groups of rows that began with the same prompt, are found in the data
    (``input_mode="history"``, or rows that number their trajectories) and passed to the service as
    ``session_id`` and ``group_id``: the turns of a conversation go to one replica, and the samples
    of a GRPO group go together while it is not overloaded.

    Where rows get log-probabilities to train on, settings are refused with which a loss would
    divide by those of another distribution: a temperature other than the trainer's, or not in the
    log-probabilities; top-k, top-p and what else removes tokens, unless ``TrainerPolicy`` replays
    the mask; penalties and biases. Sampling at temperature 0 is evaluation, and not refused.

    Example:
        >>> policy = vLLMWrapper(service, tokenizer=tokenizer, input_mode="history")
        >>> policy = vLLMWrapper(service, tokenizer=tokenizer, input_mode="history",
        ...     generate_kwargs={"temperature": 0.7, "top_k": 50, "top_p": 0.9},
        ...     trainer=TrainerPolicy(model, temperature=0.7), return_sampling_mask=True)

    Args:
        model: The service.
        generate: Generate; ``False`` scores given tokens.
        generate_kwargs: Sampling parameters.
        find_sessions: Name sessions and groups; ``False`` leaves each request to the strategy.
        trainer: What scores the rows for the loss: a ``TrainerPolicy``, TorchRL's wrapper, or
            anything that has its ``temperature``; only looked at. ``None`` stands for temperature
            1, and for a trainer that reads tokens.
        return_sampling_mask: Rows say which tokens could be sampled, for ``TrainerPolicy`` to leave
            out the others. Needs a ``top_k`` and engines that report processed log-probabilities;
            each token brings ``top_k + 8`` of them.
        adapter: Name of the adapter that answers, as ``AsyncVLLM.generate`` takes it.
        allow: Names of settings that are not refused. Each is warned of once and noted in the rows.
        **kwargs: Everything else of TorchRL's wrapper.

    Raises:
        UnsupportedArgumentError: ``model`` is not a service of this library.
        TokenizerMismatchError: At the first call, unless rows are token ids: the engines' tokenizer
            has tokens that the policy's has not, or encodes otherwise; or the trainer's does.
        UncorrectableSamplingError: At the first call: see above.
        ValueError: See TorchRL's wrapper.
    """

    tokenizer: Any
    padding_value: Any

    def __init__(
        self,
        model: Any,
        *,
        generate: bool = True,
        generate_kwargs: dict[str, Any] | None = None,
        find_sessions: bool = True,
        trainer: Any = None,
        return_sampling_mask: bool = False,
        adapter: str | None = None,
        allow: Collection[str] = (),
        **kwargs: Any,
    ) -> None:
        if not isinstance(model, AsyncVLLM):
            raise UnsupportedArgumentError(
                f"model must be a torchrl_vllm_sync.AsyncVLLM, got {type(model).__name__}; "
                "for other engines use torchrl.modules.llm.vLLMWrapper"
            )
        generate_kwargs = dict(generate_kwargs or {})
        if generate:
            generate_kwargs.setdefault("prompt_logprobs", None)
            if not {"stop", "stop_sequences"} & generate_kwargs.keys():
                generate_kwargs.setdefault("detokenize", False)  # all text is decoded here
        super().__init__(model, generate=generate, generate_kwargs=generate_kwargs, **kwargs)
        if (seed := generate_kwargs.get("seed")) is not None:  # which TorchRL 0.14 drops
            check_integer("seed", seed, 0)
            self.sampling_params.seed = int(seed)
        self._ends: dict[str, str] = {}  # of turns, by template
        if generate:
            self.out_keys = [*self.out_keys, *_STAMPS]
            if self.input_mode == "history" and not self.prefer_tokens:
                self.out_keys.append(keys.TURNS)
            if getattr(model.engine_args, "enable_return_routed_experts", False):
                self.out_keys.append(keys.ROUTED_EXPERTS[0])
        self.find_sessions, self.adapter = find_sessions, adapter
        self._finder, self._seeds = turns.ConversationFinder(), _Seeds()
        self._set_guards(trainer, return_sampling_mask, allow)
        self._knows_tokenizer = self.tokenizer is None or self.input_mode == "tokens"

    def get_new_version(self, **kwargs: Any) -> vLLMWrapper:
        """Returns a copy with other settings; conversations are not shared with it.

        Args:
            **kwargs: Arguments of the constructor that differ.
        """
        find_sessions = kwargs.pop("find_sessions", self.find_sessions)
        adapter = kwargs.pop("adapter", self.adapter)
        names = "trainer", "return_sampling_mask", "allow"
        guarded = [kwargs.pop(name, getattr(self, name)) for name in names]
        other: vLLMWrapper = super().get_new_version(**kwargs)
        other.find_sessions, other.adapter = find_sessions, adapter
        other._set_guards(*guarded)
        return other

    def _set_guards(self, trainer: Any, return_sampling_mask: bool, allow: Collection[str]) -> None:
        guards.check_allowed(allow)
        self.return_sampling_mask, self.allow = return_sampling_mask, allow
        # No module of this one: it would travel to collectors with its weights.
        self.trainer = trainer if trainer is None else guards.Trainer.of(self, trainer)
        if self.generate and return_sampling_mask:
            self.out_keys = [*self.out_keys, keys.SAMPLING_MASK[0]]
        self._judged: tuple[Any, Any, str] = None, None, ""

    def _judge(self, params: Any) -> tuple[Any, str]:
        """The parameters to sample with, and those of them that the loss cannot correct for."""
        known, mine, note = self._judged
        if not self.return_log_probs:
            return params, ""
        if known is params:
            return mine, note
        engine, mine = self.model.engine_args, params
        is_masked = self.return_sampling_mask and not guards.is_greedy(params)
        if is_masked:
            mine = copy.copy(params)
            mine.logprobs = guards.mask_width(params.top_k)
            guards.check_mask(mine, engine)
        found = guards.judge_sampling(mine, engine, self.trainer, has_mask=is_masked)
        if refused := {name: one for name, one in found.items() if name not in self.allow}:
            raise UncorrectableSamplingError(refused)
        note = ", ".join(f"{name}={value!r}" for name, (value, _) in found.items())
        if note and note != self._judged[2]:
            logger.warning("rows are sampled with what the loss cannot correct for: %s", note)
        self._judged = params, mine, note
        return mine, note

    def _call_generate(self, *args: Any, **kwargs: Any) -> Any:
        self._check_tokenizer()
        kwargs["adapter"] = self.adapter
        kwargs.setdefault("use_tqdm", False)  # the loop that collects has its own bar
        prompts = args[0] if args else kwargs["prompt_token_ids"]
        if isinstance(prompts, list):
            kwargs["sampling_params"] = self._seeds.of(kwargs["sampling_params"], len(prompts))
        return super()._call_generate(*args, **kwargs)

    def _check_tokenizer(self) -> None:
        args = self.model.engine_args
        if not (self._knows_tokenizer or args.skip_tokenizer_init):  # else the engines have none
            mine, its = guards.named(self.tokenizer), args.tokenizer or args.model
            names = f"the policy's {mine}", f"the engines' {its!r}"
            guards.check_tokenizers(self.tokenizer, self.model.requests.tokenizer(), names)
        self._knows_tokenizer = True

    def _from_vllm_generate_history(
        self, tensordict_input: TensorDictBase, sampling_params: Any, out: TensorDictBase
    ) -> TensorDictBase:
        rows, history = tensordict_input, tensordict_input.get(self.input_key, None)
        if not isinstance(history, History):  # TorchRL says what is wrong
            return super()._from_vllm_generate_history(rows, sampling_params, out)
        prompts = list(history.unbind(0))
        chats = [one.tolist(tolist_first=True) for one in prompts]
        said = [turns.said_in(chat) for chat in chats]
        conversations = self._find_conversations(rows, said)
        ids, texts, stamps = self._prompt_tokens(rows, prompts[0], chats)
        answers = self._answers(ids, sampling_params, conversations)
        text = self._texts(answers, texts, ids)
        replies = text["response"].tolist()
        if conversations:
            wholes = zip(answers.for_each_row(said), replies, strict=True)
            self._finder.answered(conversations, [[*a, f"assistant:{b}"] for a, b in wholes])
        chats = _chats(answers.for_each_row(prompts), replies)
        return self._rows(answers, self._prompts(answers, ids), text, stamps, chats)

    def answer_chats(
        self,
        chats: Sequence[Chat],
        of_row: Sequence[int],
        outputs: Sequence[Any] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> TensorDict:
        """Answers chats with dense rows, as :class:`RolloutCollector` gives them.

        Args:
            chats: Distinct ones, of equally many messages each, with a ``"role"`` and a
                ``"content"``.
            of_row: The position in ``chats`` of each row's; the rows of a group share one.
            outputs: What the service has answered for each row, if it was asked already.
            numbers: Of each row, from which its seed is made if the policy has one; if left out,
                rows are counted.

        Returns:
            All entries of the rows in one ``TensorDict`` of batch size ``(num_rows,)``. Prompts are
            padded on the left and answers on the right; there log-probabilities are 0.0 and
            versions -1. Text and histories are made when they are looked at.

        Raises:
            InvalidPromptError: As :meth:`AsyncVLLM.generate`, whose other errors pass, too.
        """
        ids, texts, names = self._encoded_chats(chats)
        params, note = self._judge(self.sampling_params)
        if outputs is None:
            own = self._seeds.of(params, len(of_row), numbers)
            options: dict[str, Any] = {"sampling_params": own}
            options["group_id"] = [names[at] for at in of_row]
            outputs = self._call_generate(prompt_token_ids=[ids[at] for at in of_row], **options)
        answers, num = _Answers(outputs, of_row, params, note, self.padding_value), len(chats)
        stamps = turns.stamps([len(chats[0])] * num, [0] * num, [False] * num)
        text = self._texts(answers, texts, ids)
        prompts = self._prompts(answers, ids)
        rows: Any = self._dense_rows(answers, prompts, text, stamps, of_chats=True)
        history = TensorDict(_dense_chats(chats, answers.of_row, text["response"]), rows.shape)
        return rows.set(self.history_key, ChatHistory._from_tensordict(history))

    def _texts(
        self, answers: _Answers, texts: Sequence[str], ids: Sequence[Sequence[int]] | None = None
    ) -> dict[str, Texts]:
        """Text of each row, made when it is looked at; of its tokens, if there are ``ids``."""
        said, of_row = answers.ids, answers.of_row  # and nothing of outputs, as rows may be kept

        def late(make: Callable[[], Any]) -> Texts:
            return Texts.late(of_row.shape, lambda: objects(make()))

        def wholes() -> list[str]:
            if ids is not None:
                return self._decoded([ids[at] for at in of_row], said)
            return [a + b for a, b in zip(prompts.tolist(), replies.tolist(), strict=True)]

        prompts = late(lambda: objects(texts)[of_row])
        replies = late(lambda: self._decoded(said))
        return {"prompt": prompts, "response": replies, "full": late(wholes)}

    def _asked(self, chats: Sequence[Chat], num_rows: int) -> list[Coroutine[Any, Any, list[Any]]]:
        """For each chat what sends it, so many times, and returns its ``outputs``."""
        self._check_tokenizer()
        ids, _, names = self._encoded_chats(chats)
        judged, _ = self._judge(self.sampling_params)
        params = (self._seeds.of(judged, num_rows) for _ in ids)
        return [
            self.model.agenerate(
                prompt_token_ids=[one] * num_rows,
                sampling_params=own,
                group_id=name,
                adapter=self.adapter,
            )
            for one, name, own in zip(ids, names, params, strict=True)
        ]

    def _encoded_chats(self, chats: Sequence[Chat]) -> tuple[list[list[int]], list[str], list[Any]]:
        """Tokens, text and group of each chat."""
        texts, _ = self._rendered(cast("History", History.from_chats([chats[0]])[0]), [*chats])
        encoded = self._encoded(texts)
        finds = self.find_sessions
        names = [turns.group_name(turns.said_in(one)) if finds else None for one in chats]
        return [encoded[one] for one in texts], texts, names

    def _from_vllm_generate_text(
        self, td: TensorDictBase, sampling_params: Any, out: TensorDictBase
    ) -> TensorDictBase:
        texts = td.get(self.input_key, None)
        if texts is None:
            return super()._from_vllm_generate_text(td, sampling_params, out)
        texts = texts if isinstance(texts, list) else texts.tolist()
        conversations = self._find_conversations(td, [[one] for one in texts])
        answers = self._answers(texts, sampling_params, conversations)
        return self._rows(answers, text=self._texts(answers, texts))

    def _from_vllm_generate_tokens(
        self, td: TensorDictBase, sampling_params: Any, out: TensorDictBase
    ) -> TensorDictBase:
        rows: Any = td
        if self.input_key not in rows:
            return super()._from_vllm_generate_tokens(td, sampling_params, out)
        given = rows.get(self.input_key, as_list=not self.pad_output)
        ids = [self._unpadded(one) for one in given]
        conversations = self._find_conversations(td, [[repr(one)] for one in ids])
        answers = self._answers(ids, sampling_params, conversations)
        if not self.pad_output:
            return self._rows(answers, self._prompts(answers, ids))
        prompt = answers.for_each_row(given)
        return self._rows(answers, (prompt, prompt != self.padding_value))

    def _prompt_tokens(
        self, rows: Any, first: History, chats: list[Chat]
    ) -> tuple[list[list[int]], list[str], dict[str, torch.Tensor]]:
        """Tokens and text of each prompt, and what its row will say of earlier turns."""
        tokens: Any = None
        for name in ("prompt", "full") if self.prefer_tokens else ():
            if tokens is None:
                tokens = rows.get((self.tokens_key, name), None, as_list=True)
        if tokens is not None:
            is_nested = getattr(tokens, "is_nested", False)
            tokens = [*tokens.unbind(0)] if isinstance(tokens, torch.Tensor) else tokens
            is_padded = not is_nested and len({*map(len, tokens)}) == 1  # others cannot be
            ids = [self._unpadded(one) if is_padded else one.tolist() for one in tokens]
            return ids, self._decoded(ids), {}
        texts, end = self._rendered(first, chats)
        names = self.text_key, self.tokens_key, self.masks_key
        before = [None] * len(chats) if self.prefer_tokens else turns.carried(rows, *names)
        # Behind a special token text is encoded as it is in the midst of a prompt.
        anchor = end or self.tokenizer.eos_token or ""
        new, kept, forked = [*texts], [[] for _ in chats], [False] * len(chats)
        for at, (turn, chat, shown) in enumerate(zip(before, chats, texts, strict=True)):
            if turn is None:
                continue
            rest = behind(turn, chat, shown, end)
            if rest is None:
                forked[at] = is_of(turn, chat, end)
            else:
                new[at], kept[at] = anchor + rest, turn.ids
        encoded = self._encoded([*new, anchor])
        skipped = len(encoded[anchor])
        ids = [
            [*ids, *encoded[one][skipped:]] if ids else encoded[one]
            for ids, one in zip(kept, new, strict=True)
        ]
        stamps = turns.stamps([*map(len, chats)], [*map(len, kept)], forked)
        return ids, texts, {} if self.prefer_tokens else stamps

    def _encoded(self, texts: list[str]) -> dict[str, list[int]]:
        distinct = list(dict.fromkeys(texts))  # the samples of a group have one prompt
        encoded = self.tokenizer(distinct, add_special_tokens=False)["input_ids"]
        return dict(zip(distinct, encoded, strict=True))

    def _rendered(self, first: History, chats: list[Chat]) -> tuple[list[str], str]:
        """Applies the template, which TorchRL alone knows, to all; and says what ends its turns."""
        chosen: dict[str, Any] = {}
        listener: Any = SimpleNamespace(
            name_or_path=getattr(self.tokenizer, "name_or_path", ""),
            chat_template=getattr(self.tokenizer, "chat_template", None),
            apply_chat_template=lambda **settings: chosen.update(settings) or "",
        )
        template = {name: getattr(self, name) for name in ("chat_template", "chat_template_name")}
        first.apply_chat_template(tokenizer=listener, **template)
        name = chosen["chat_template"]
        if name not in self._ends:
            probe = {**chosen, "add_generation_prompt": False}
            self._ends[name] = end_of_turn(
                lambda chat: self.tokenizer.apply_chat_template(**{**probe, "conversation": chat}),
                [str(one) for one in self.tokenizer.added_tokens_decoder.values() if one.special],
            )
        end = self._ends[name]
        said = ([one for one in chat if one["role"] != "<none>"] for chat in chats)
        shown = [[without_end(one, end) for one in chat] for chat in said]
        return self.tokenizer.apply_chat_template(**{**chosen, "conversation": shown}), end

    def _answers(
        self, prompts: Any, sampling_params: Any, conversations: list[turns.Conversation] | None
    ) -> _Answers:
        """Generates for texts or tokens."""
        sampling_params, note = self._judge(sampling_params)
        options: dict[str, Any] = {"sampling_params": sampling_params}
        if conversations is not None:
            options["session_id"] = [one.session_id for one in conversations]
            options["group_id"] = [one.group_id for one in conversations]
        if isinstance(prompts[0], str):
            outputs = self._call_generate(prompts, **options)
        else:
            outputs = self._call_generate(prompt_token_ids=prompts, **options)
        of_row = np.arange(len(prompts)).repeat(self.num_samples or 1)
        return _Answers(outputs, of_row, sampling_params, note, self.padding_value)

    def _rows(
        self,
        answers: _Answers,
        prompts: _Dense | None = None,
        text: dict[str, Texts] | None = None,
        stamps: dict[str, torch.Tensor] | None = None,
        chats: list[ChatHistory] | None = None,
    ) -> TensorDictBase:
        """The rows of TorchRL's wrapper, and this library's entries."""
        entries = dict[Any, Any](self._dense_rows(answers, prompts, text, stamps).items())
        if chats is not None:
            entries[self.history_key] = chats
        masks: dict[Any, Any] = {}
        if not self.pad_output:
            is_answer = answers.dense[1]
            is_prompt = is_answer[:, :0] if prompts is None else prompts[1]
            masks = {(True, False): is_prompt, (False, True): is_answer}
            masks[True, True] = torch.hstack([is_prompt, is_answer])
        rows = unbound(entries, masks)
        if self.num_samples:
            each = self.num_samples
            rows = [lazy_stack(rows[at : at + each]) for at in range(0, len(rows), each)]
        return lazy_stack(rows)

    def _dense_rows(
        self,
        answers: _Answers,
        prompts: _Dense | None,
        text: dict[str, Texts] | None,
        stamps: dict[str, torch.Tensor] | None,
        *,
        of_chats: bool = False,  # whose rows say nothing of prompts' log-probabilities
    ) -> TensorDict:
        """All rows as tensors, padded, but histories; of prompts there may be no tokens."""
        response, is_answer = answers.dense
        versions, masks = answers.versions(), {}
        tokens, of_tokens = {"response": response}, {"response": versions}
        if prompts is not None:
            prompt, is_prompt = prompts
            tokens |= {"prompt": prompt, "full": torch.hstack([prompt, response])}
            masks["all_attention_mask"] = torch.hstack([is_prompt, is_answer])
            is_sampled = versions != keys.NO_VERSION
            masks["all_assistant_mask"] = torch.hstack([torch.zeros_like(is_prompt), is_sampled])
            of_tokens["full"] = torch.hstack([torch.full_like(prompt, keys.NO_VERSION), versions])
        made: dict[Any, Any] = {keys.POLICY_VERSIONS: of_tokens, **answers.stamps()}
        if stamps:
            made[keys.TURNS] = {name: answers.for_each_row(one) for name, one in stamps.items()}
        name, full = keys.ROUTED_EXPERTS
        if masks and name in self.out_keys:
            made[name] = {full: answers.experts(masks["all_attention_mask"])}
        kinds: dict[Any, Any] = {self.tokens_key: (Tokens, tokens), self.masks_key: (Masks, masks)}
        if self.return_log_probs:
            log_probs = self._log_probs(answers, prompts, of_chats=of_chats)
            kinds[self.log_probs_key] = LogProbs, log_probs
            if self.return_sampling_mask:
                name, of_response = keys.SAMPLING_MASK
                made[name] = {of_response: answers.masks()}
        for _, fields in kinds.values():
            fields["padded"] = MetaData(True)
        if text is not None:
            kinds[self.text_key] = Text, text
        for name, (kind, fields) in kinds.items():
            made[name] = kind._from_tensordict(TensorDict(fields, [len(response)]))
        return TensorDict(made, [len(response)])

    def _log_probs(
        self, answers: _Answers, prompts: _Dense | None, *, of_chats: bool
    ) -> dict[str, Any]:
        padding = 0.0 if of_chats else self.padding_value
        response, _ = _padded(answers.log_probs(), torch.float32, padding)
        entries = {"response": response}
        if prompts is None:
            return entries | {"full": response}
        if self.num_samples is not None and not of_chats:
            return entries
        prompt: Any = None
        if answers.params.prompt_logprobs is not None and not of_chats:
            prompt = [_torchrl._build_prompt_logprobs(one) for one in answers.outputs]
            # To the left, as the tokens; TorchRL 0.14 pads these to the right.
            prompt, _ = _padded(prompt, torch.float32, padding, on_left=True)
            if prompt.any() if self.pad_output else prompt.numel():
                missing = prompts[0].shape[-1] - prompt.shape[-1]
                entries["prompt"] = prompt = torch.nn.functional.pad(prompt, (missing, 0))
            else:
                prompt = None
                _torchrl._warn_missing_vllm_prompt_logprobs()
        full = _torchrl._assemble_generate_full_logprobs(prompt, response, prompts[0])
        return entries | {"full": full}

    def _prompts(self, answers: _Answers, ids: list[list[int]]) -> _Dense:
        """The prompt of each row, padded on the left, and where its tokens are."""
        tokens, is_there = _padded(ids, torch.int64, self.padding_value, on_left=True)
        return tokens[answers.of_row], is_there[answers.of_row]

    def _unpadded(self, tokens: torch.Tensor) -> list[int]:
        return tokens[tokens != self.padding_value].tolist()

    def _decoded(self, *parts: Sequence[Any]) -> list[str]:
        """Texts of rows of tokens, each of one or several parts."""
        ids = ([*map(_as_list, part)] for part in parts)
        rows = [[*itertools.chain(*row)] for row in zip(*ids, strict=True)]
        return self.tokenizer.batch_decode(rows, skip_special_tokens=False)

    def _find_conversations(
        self, rows: TensorDictBase, said: Sequence[Sequence[str]]
    ) -> list[turns.Conversation] | None:
        if not self.find_sessions:
            return None
        # Batching merges the rows of several callers, so that their positions say nothing.
        by = {"by_content": self.input_mode == "history", "by_position": not self.batching}
        found = self._finder.find(rows, said, **by)
        if over := self._finder.ended():
            self.model.release_sessions(over)
        return found


class _Answers:
    """What an engine has answered: a row for each sample, and of which prompt it is."""

    def __init__(
        self, outputs: Any, of_row: Sequence[int] | np.ndarray, params: Any, note: str, padding: int
    ) -> None:
        self.outputs = outputs if isinstance(outputs, list) else [outputs]
        self.of_row, self.params = np.asarray(of_row), params
        self._note, self._padding = note, padding
        self.samples, self._reports = list[Any](), list[tuple[Any, dict[str, Any]]]()
        for samples, marks in map(samples_of, self.outputs):
            self.samples += samples
            self._reports += [(one, marks) for one in marks["sample_reports"]]
        self.ids = [one.token_ids for one in self.samples]

    def for_each_row(self, of_prompts: Any) -> Any:
        if isinstance(of_prompts, torch.Tensor):
            return of_prompts[self.of_row]
        return [of_prompts[at] for at in self.of_row]

    @cached_property
    def dense(self) -> _Dense:
        """Tokens, padded on the right, and where they are."""
        return _padded(self.ids, torch.int64, self._padding)

    def log_probs(self) -> list[Any]:
        """Of each answer's tokens."""
        return [sampled_log_probs(one) for one in self.samples]

    def versions(self) -> torch.Tensor:
        """The version that sampled each token."""
        spans = [span for one, _ in self._reports for span in one.spans]
        versions, starts, ends = torch.tensor(spans, dtype=torch.int64).view(-1, 3).unbind(1)
        tokens, is_answer = self.dense
        made = torch.full_like(tokens, keys.NO_VERSION)
        made[is_answer] = versions.repeat_interleave(ends - starts)
        return made

    def masks(self) -> torch.Tensor:
        """The tokens that could be sampled in place of each, of shape ``(*tokens, width)``."""
        width = guards.mask_width(self.params.top_k)
        if guards.is_greedy(self.params):
            return torch.full((*self.dense[0].shape, width), keys.NO_TOKEN, dtype=torch.int32)
        made = []
        for row, sample in enumerate(self.samples):
            ids, log_probs = listed_tokens(sample, width)
            total = np.exp(log_probs).sum(-1)
            if (short := np.flatnonzero(total < 1 - _MISSING)).size:
                at = int(short[0])
                raise RowLayoutError(
                    keys.SAMPLING_MASK,
                    f"row {row}, token {at}: the {width} likeliest tokens hold {total[at]:.4f} of "
                    "the probability: too many are as likely as the last of top_k",
                )
            made.append(np.where(np.isfinite(log_probs), ids.astype(np.int32), keys.NO_TOKEN))
        return _padded(made, torch.int32, keys.NO_TOKEN)[0]

    def experts(self, attention: torch.Tensor) -> torch.Tensor:
        """Those of each row, where its mask is."""
        made = []
        for row, (mask, sample) in enumerate(zip(attention, self.samples, strict=True)):
            one, at = sample.routed_experts, mask.nonzero()[:-1, 0]
            if one is None or len(one) != len(at):
                told = f"row {row}: {None if one is None else len(one)} for {len(at)} tokens"
                raise RowLayoutError(keys.ROUTED_EXPERTS, told)
            experts = torch.full((len(mask), *one.shape[1:]), keys.NO_EXPERT, dtype=torch.int16)
            experts[at] = torch.from_numpy(one.astype(np.int16))
            made.append(experts)
        return torch.stack(made)

    def stamps(self) -> dict[str, Any]:
        """Columns of one value a row."""
        oldest = [min_version(one.spans, default=of["min_version"]) for one, of in self._reports]
        newest = [max_version(one.spans, default=of["max_version"]) for one, of in self._reports]
        generation: dict[str, Any] = {}
        for key, name, unknown, dtype in _FIGURES:
            known = (getattr(one, name) for one, _ in self._reports)
            values = [unknown if one is None else one for one in known]
            generation[key[-1]] = torch.tensor(values, dtype=dtype)
        generation[keys.REPLICA_ID[-1]] = Texts.of([of["replica_id"] for _, of in self._reports])
        if self._note:
            generation[keys.UNCORRECTED[-1]] = Texts.of([self._note] * len(self._reports))
        return {
            keys.POLICY_VERSION: torch.tensor(oldest),
            keys.MAX_POLICY_VERSION: torch.tensor(newest),
            keys.FINISH_REASON: Texts.of([one.finish_reason for one in self.samples]),
            keys.GENERATION: generation,
        }


def _as_list(ids: Sequence[int] | np.ndarray) -> Sequence[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else ids


def _padded(
    rows: Sequence[Any], dtype: torch.dtype, padding: float | None, *, on_left: bool = False
) -> _Dense:
    """Rows of unequal length as one tensor, and where they are, in a few operations for all."""
    lengths = torch.tensor([len(one) for one in rows])
    is_there = torch.arange(int(lengths.max())) < lengths[:, None]
    is_there = is_there.flip(1) if on_left else is_there
    values = torch.from_numpy(np.concatenate(rows)).to(dtype)
    padded = torch.full((*is_there.shape, *values.shape[1:]), padding or 0, dtype=dtype)
    padded[is_there] = values
    return padded, is_there


def _chats(prompts: list[Any], replies: list[str]) -> list[ChatHistory]:
    """What was said: before, in answer, and together. ``History`` itself is 20 times slower."""
    fixed = {"role": non_tensor("assistant"), "is_complete": non_tensor(True)}
    messages = [TensorDict({**fixed, "content": non_tensor(one)}) for one in replies]
    made = []
    for prompt, message in zip(prompts, messages, strict=True):
        response = LazyStackedTensorDict(message)
        full = LazyStackedTensorDict(*prompt._tensordict.unbind(0), message)
        said = {"response": response, "full": full}
        chat = {name: History._from_tensordict(one) for name, one in said.items()}
        made.append(ChatHistory._from_tensordict(TensorDict({"prompt": prompt, **chat})))
    return made


def _dense_chats(chats: Sequence[Chat], of_row: np.ndarray, replies: Texts) -> dict[str, Any]:
    """The same, as columns that are made when they are looked at."""
    length, answer = len(chats[0]), {"role": "assistant", "is_complete": True}

    def made(name: str) -> np.ndarray:
        before = objects([one.get(name, True) for chat in chats for one in chat])
        said = replies.tolist() if name == "content" else [answer[name]] * len(of_row)
        return np.column_stack([before.reshape(len(chats), length)[of_row], objects(said)])

    shape = (len(of_row), length + 1)
    columns = {name: Texts.late(shape, partial(made, name)) for name in (*answer, "content")}
    full: Any = History._from_tensordict(TensorDict(columns, shape))
    return {"prompt": full[:, :length], "response": full[:, length:], "full": full}
