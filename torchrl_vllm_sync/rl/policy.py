"""The policy for TorchRL's collectors: TorchRL's wrapper, plus what it drops of each output."""

from __future__ import annotations

import itertools
import math
import secrets
import threading
from collections import OrderedDict, deque
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm import vLLMWrapper as _TorchRLWrapper

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.rl import keys
from torchrl_vllm_sync.service.service import AsyncVLLM
from torchrl_vllm_sync.versions import expand_spans, max_version, min_version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tensordict import TensorDictBase
    from tensordict.utils import NestedKey

    from torchrl_vllm_sync.requests.messages import SampleReport


# Where TorchRL's collectors and its TrajCounter write the number of a row's trajectory.
TRAJECTORY_KEYS: tuple[NestedKey, ...] = (("collector", "traj_ids"), "traj_ids", "traj_count")
# Where AsyncEnvPool writes which of its environments a row is of.
ENVIRONMENT_KEYS: tuple[NestedKey, ...] = ("env_index",)
_CAPACITY = 16384


@dataclass(frozen=True, slots=True)
class Conversation:
    """The conversation that one row of a policy call belongs to."""

    session_id: str  # the same at every turn
    group_id: str  # of all that began with the same prompt; the same in every process


class ConversationFinder:
    """Finds the conversations of a policy's rows, turn by turn; thread-safe.

    A trajectory's number names its conversation, together with its environment's in a pool, whose
    environments count for themselves. Where rows have no number, a row belongs to the conversation
    that it continues: its prompt begins with an earlier call's prompt and answer, message by
    message, where equal siblings are told apart by counting. Other rows begin a conversation.

    Rows are also places: an environment's index in a pool, or else the position in the batch. What
    begins in a place ends the conversation there. A pickled copy begins anew, with its own names.
    """

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._name = secrets.token_hex(6)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        # Least recently continued first, each with the ends at which it may go on.
        self._known: OrderedDict[str, tuple[Conversation, list[int]]] = OrderedDict()
        self._waiting: dict[int, deque[str]] = {}  # sessions by what was said up to their ends
        self._places: OrderedDict[object, str] = OrderedDict()
        self._ended: list[str] = []

    def __reduce__(self) -> tuple[type[ConversationFinder], tuple[int]]:
        return type(self), (self._capacity,)

    def find(
        self,
        rows: TensorDictBase,
        prompts: Sequence[Sequence[str | bytes]],
        *,
        by_content: bool = True,
        by_position: bool = True,
    ) -> list[Conversation] | None:
        """Returns the conversation of each row; ``None`` if nothing identifies them."""
        numbers, environments = _numbers(rows, TRAJECTORY_KEYS), _numbers(rows, ENVIRONMENT_KEYS)
        if numbers is None and not by_content:
            return None
        found: list[Conversation] = []
        over: list[str] = []
        with self._lock:
            for at, prompt in enumerate(prompts):
                digests = list(_digests(prompt))
                environment = None if environments is None else environments[at]
                if numbers is None:
                    one = self._continued(digests)
                    name = f"{self._name}-{next(self._numbers)}" if one is None else ""
                else:
                    name = f"{self._name}:{environment}.{numbers[at]}"
                    one = self._named(name)
                place = ("row", len(prompts), at) if environment is None else ("pool", environment)
                begins = one is None
                if one is None:
                    one = self._begin(name, digests)
                if by_position or environment is not None:
                    before = self._settle(place, one.session_id)
                    if begins and before is not None:
                        over.append(before)
                found.append(one)
            for session_id in {*over}.difference(one.session_id for one in found):
                self._forget(session_id)
        return found

    def answered(
        self, conversations: Sequence[Conversation], said: Sequence[Sequence[str | bytes]]
    ) -> None:
        """Notes what was said up to and with the answers, so that the next turns are recognised."""
        each = len(said) // len(conversations)
        with self._lock:
            for at, messages in enumerate(said):
                session_id = conversations[at // each].session_id
                if session_id in self._known:  # not if another call has pushed it out
                    *_, end = _digests(messages)
                    self._known[session_id][1].append(end)
                    self._waiting.setdefault(end, deque()).append(session_id)

    def ended(self) -> list[str]:
        """Returns the sessions that ended since the last call of this method."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def _continued(self, digests: list[int]) -> Conversation | None:
        end = next((one for one in reversed(digests) if one in self._waiting), None)
        if end is None:
            return None
        session_id = self._waiting[end][0]
        self._known.move_to_end(session_id)
        one, ends = self._known[session_id]
        ends.remove(end)
        self._unwait(session_id, end)
        return one

    def _named(self, session_id: str) -> Conversation | None:
        if session_id not in self._known:
            return None
        self._known.move_to_end(session_id)
        one, ends = self._known[session_id]
        while ends:
            self._unwait(session_id, ends.pop())
        return one

    def _begin(self, session_id: str, digests: list[int]) -> Conversation:
        start = digests[-1] if digests else 0  # nothing was said yet
        one = Conversation(session_id, f"prompt-{start:016x}")
        self._known[session_id] = one, []
        if len(self._known) > self._capacity:
            self._forget(next(iter(self._known)))
        return one

    def _settle(self, place: object, session_id: str) -> str | None:
        """Puts a conversation in its place; returns the one that was there before."""
        before = self._places.pop(place, None)
        self._places[place] = session_id
        if len(self._places) > self._capacity:
            self._places.popitem(last=False)
        return before

    def _forget(self, session_id: str) -> None:
        known = self._known.pop(session_id, None)
        if known is not None:
            for end in known[1]:
                self._unwait(session_id, end)
            self._ended.append(session_id)

    def _unwait(self, session_id: str, end: int) -> None:
        waiting = self._waiting[end]
        waiting.remove(session_id)
        if not waiting:
            del self._waiting[end]


def _digests(messages: Sequence[str | bytes]) -> Iterator[int]:
    """Digest of what was said up to each message, the same in every process."""
    digest = xxhash.xxh3_64()
    for message in messages:
        data = message.encode("utf-8", "surrogatepass") if isinstance(message, str) else message
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
        yield digest.intdigest()


def _numbers(rows: TensorDictBase, names: Sequence[NestedKey]) -> list[int] | None:
    """The first of ``names`` that holds one number a row, however they are nested."""
    for name in names:
        entry: Any = rows.get(name, None)
        if entry is not None:
            flat = np.ravel(entry.tolist() if hasattr(entry, "tolist") else entry).tolist()
            if len(flat) == rows.numel():
                return flat
    return None


# Top-level entries of what is stamped.
_STAMPS = [
    keys.POLICY_VERSION,
    keys.MAX_POLICY_VERSION,
    keys.POLICY_VERSIONS,
    keys.FINISH_REASON,
    keys.GENERATION,
]

# The outputs of the engine call that is being turned into a TensorDict, in this thread.
_outputs: ContextVar[list[Any]] = ContextVar("torchrl_vllm_sync_outputs")
# The conversations of the rows that are being generated for, in this thread.
_conversations: ContextVar[list[Conversation] | None] = ContextVar(
    "torchrl_vllm_sync_conversations", default=None
)


class vLLMWrapper(_TorchRLWrapper):  # noqa: N801  TorchRL's spelling
    """TorchRL's ``vLLMWrapper`` over a service, with what TorchRL drops of each response kept.

    Each generated row carries more entries than TorchRL's, whose names are in
    ``torchrl_vllm_sync.rl.keys``. Where no shape is given it is the batch's.

    - ``"policy_version"``, int64: the oldest policy version that sampled one of the row's tokens.
      ``PolicyAgeFilter`` works on it as it is. A collector's own stamp, made when the environment
      steps, is overwritten.
    - ``"max_policy_version"``, int64: the newest one.
    - ``("policy_versions", "response")``, int64, laid out as ``("tokens", "response")``: the
      version that sampled each token; -1 on padding.
    - ``("policy_versions", "full")``, int64, laid out as ``("tokens", "full")``: the same, with -1
      on the prompt. Absent with ``input_mode="text"``, where TorchRL has no ``("tokens", "full")``.
    - ``"finish_reason"``, text: vLLM's reason (``"stop"``, ``"length"``, ``"abort"``).
    - ``("generation", "num_cached_tokens")``, int64: tokens of the prompt that came from the prefix
      cache; -1 where vLLM did not say.
    - ``("generation", "queue_time")``, ``"prefill_time"`` and ``"decode_time"``, float32 seconds:
      from vLLM's queue to its first batch, from there to the first token, from there to the last.
      Pauses are part of the phase they fall into; what a request did before an update sent it back
      is not counted. NaN where vLLM did not say.
    - ``("generation", "replica_id")``, text: the replica that answered.

    Prompt log-probabilities are not asked for while generating unless ``generate_kwargs`` has
    ``prompt_logprobs``: asking makes vLLM skip its prefix cache (``vllm/sampling_params.py``,
    ``skip_reading_prefix_cache``). TorchRL then fills the prompt's slice with NaN, which
    ``GRPOLoss`` masks, and logs once that it got none.

    Each row's conversation and the group of rows that began with the same prompt are found in the
    data (``torchrl_vllm_sync.rl.policy``) and passed to the service as ``session_id`` and
    ``group_id``: all turns of a conversation go to one replica, and the samples of a GRPO group go
    together while it is not overloaded. That takes ``input_mode="history"``, or data that number
    their trajectories; sessions are released where another conversation takes their place.

    Example:
        >>> policy = vLLMWrapper(service, tokenizer=tokenizer, input_mode="history")

    Args:
        model: The service.
        generate: Generate; ``False`` scores given tokens.
        generate_kwargs: Sampling parameters.
        find_sessions: Name sessions and groups; ``False`` leaves each request to the strategy.
        **kwargs: Everything else of TorchRL's wrapper.

    Raises:
        UnsupportedArgumentError: ``model`` is not a service of this library.
        ValueError: See TorchRL's wrapper.
    """

    def __init__(
        self,
        model: Any,
        *,
        generate: bool = True,
        generate_kwargs: dict[str, Any] | None = None,
        find_sessions: bool = True,
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
        super().__init__(model, generate=generate, generate_kwargs=generate_kwargs, **kwargs)
        if generate:
            self.out_keys = [*self.out_keys, *_STAMPS]
        self.find_sessions = find_sessions
        self._finder = ConversationFinder()

    def get_new_version(self, **kwargs: Any) -> vLLMWrapper:
        """Returns a copy with other settings; conversations are not shared with it.

        Args:
            **kwargs: Arguments of the constructor that differ.
        """
        find_sessions = kwargs.pop("find_sessions", self.find_sessions)
        other: vLLMWrapper = super().get_new_version(**kwargs)
        other.find_sessions = find_sessions
        return other

    def _call_generate(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("use_tqdm", False)  # the loop that collects has its own bar
        conversations = _conversations.get()
        if conversations is not None:
            kwargs["session_id"] = [one.session_id for one in conversations]
            kwargs["group_id"] = [one.group_id for one in conversations]
        outputs = super()._call_generate(*args, **kwargs)
        _outputs.set(outputs if isinstance(outputs, list) else [outputs])
        return outputs

    def _from_vllm_generate_history(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        return self._generated(super()._from_vllm_generate_history, *args, **kwargs)

    def _from_vllm_generate_text(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        return self._generated(super()._from_vllm_generate_text, *args, **kwargs)

    def _from_vllm_generate_tokens(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        return self._generated(super()._from_vllm_generate_tokens, *args, **kwargs)

    def _generated(
        self,
        generate: Callable[..., TensorDictBase],
        rows: TensorDictBase,
        *args: Any,
        **kwargs: Any,
    ) -> TensorDictBase:
        """Runs one of TorchRL's generations with the rows' sessions, and stamps its result."""
        conversations = self._find_conversations(rows) if self.find_sessions else None
        previous = _conversations.set(conversations)
        try:
            out = generate(rows, *args, **kwargs)
        finally:
            _conversations.reset(previous)
        if conversations and self.input_mode == "history":
            said = _messages(out.get((self.history_key, "full")), out.ndim)
            self._finder.answered(conversations, said)
        return self._stamped(out)

    def _find_conversations(self, rows: TensorDictBase) -> list[Conversation] | None:
        if self.input_key not in rows:
            return None  # TorchRL raises for it next
        said = self.input_mode == "history"
        if said:
            prompts = _messages(rows.get(self.input_key), 1)
        else:
            prompts = [[_as_text(row.get(self.input_key))] for row in rows.unbind(0)]
        # Batching merges the rows of several callers, so that their positions say nothing.
        found = self._finder.find(rows, prompts, by_content=said, by_position=not self.batching)
        if over := self._finder.ended():
            self.model.release_sessions(over)
        return found

    def _stamped(self, out: TensorDictBase) -> TensorDictBase:
        """Adds the entries of this library to what TorchRL made of an engine call's outputs."""
        width = prompt_width = None
        if self.pad_output:
            width = out.get((self.tokens_key, "response")).shape[-1]
            if self.input_mode != "text":
                prompt_width = out.get((self.tokens_key, "full")).shape[-1] - width
        rows: list[TensorDictBase] = []
        for output in _outputs.get():
            if not self.pad_output and self.input_mode != "text":
                prompt_width = len(output.prompt_token_ids)
            for completion, sample in zip(output.outputs, output.sample_reports, strict=True):
                row = _row(output, completion, sample)
                response = _padded(expand_spans(sample.spans), width)
                row.set(keys.RESPONSE_VERSIONS, response)
                if prompt_width is not None:  # TorchRL has no ids of prompts that came as text
                    prompt = torch.full((prompt_width,), keys.NO_VERSION)
                    row.set(keys.FULL_VERSIONS, torch.cat([prompt, response]))
                rows.append(row)
        for size in reversed(out.shape[1:]):
            rows = [lazy_stack(rows[at : at + size]) for at in range(0, len(rows), size)]
        return out.update(lazy_stack(rows))


def _messages(history: Any, ndim: int) -> list[list[str]]:
    """Returns the messages of each conversation in a history of ``ndim`` batch dimensions."""
    roles, contents = history.role, history.content
    for _ in range(ndim - 1):
        roles, contents = itertools.chain(*roles), itertools.chain(*contents)
    return [
        [f"{role}:{content}"]
        if isinstance(role, str)  # a history of one message, without a dimension for it
        else [f"{one}:{said}" for one, said in zip(role, content, strict=True)]
        for role, content in zip(roles, contents, strict=True)
    ]


def _as_text(prompt: Any) -> str:
    return repr(prompt.tolist()) if isinstance(prompt, torch.Tensor) else str(prompt)


def _row(output: Any, completion: Any, sample: SampleReport) -> TensorDictBase:
    """Returns the entries of one response that do not depend on its layout."""
    cached = sample.num_cached_tokens
    counts = {
        keys.POLICY_VERSION: min_version(sample.spans, default=output.min_version),
        keys.MAX_POLICY_VERSION: max_version(sample.spans, default=output.max_version),
        keys.NUM_CACHED_TOKENS: keys.UNKNOWN_COUNT if cached is None else cached,
    }
    seconds = {
        keys.QUEUE_TIME: sample.queue_s,
        keys.PREFILL_TIME: sample.prefill_s,
        keys.DECODE_TIME: sample.decode_s,
    }
    row = TensorDict({key: torch.tensor(one, dtype=torch.int64) for key, one in counts.items()})
    for key, one in seconds.items():
        row.set(key, torch.tensor(math.nan if one is None else one, dtype=torch.float32))
    row.set_non_tensor(keys.FINISH_REASON, completion.finish_reason)
    row.set_non_tensor(keys.REPLICA_ID, output.replica_id)
    return row


def _padded(versions: list[int], width: int | None) -> torch.Tensor:
    """Returns versions as a tensor, padded to ``width`` on the right where there is one."""
    padding = [] if width is None else [keys.NO_VERSION] * (width - len(versions))
    return torch.tensor([*versions, *padding], dtype=torch.int64)
