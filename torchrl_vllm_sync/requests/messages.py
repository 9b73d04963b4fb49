"""What travels between a service and an engine actor for one prompt; answers travel as columns.

A ``RequestOutput`` is some thirty objects beside a dict and a ``Logprob`` for every token. Making,
pickling and collecting all these costs about as much as sampling the tokens. So the outputs of a
batch cross Ray as columns, and each is made again when somebody looks at it.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property
from inspect import getattr_static
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from torchrl_vllm_sync.errors import VersionSpanError

if TYPE_CHECKING:
    from vllm import RequestOutput

SIZE_BYTES = 8


def framed(data: bytes) -> bytes:
    """A pickle as it is sent where :func:`received` reads it."""
    return len(data).to_bytes(SIZE_BYTES, "big") + data


async def received(reader: asyncio.StreamReader, within_s: float | None = None) -> Any:
    """The next value, which must begin to come in time; none of it is lost if it does not."""
    async with asyncio.timeout(within_s):
        size = int.from_bytes(await reader.readexactly(SIZE_BYTES), "big")
    return pickle.loads(await reader.readexactly(size))


class VersionSpan(NamedTuple):
    """Tokens ``[start, end)`` of a response were sampled by ``version``.

    The spans of a response are in order, leave no gaps, and neighbours differ in version; an empty
    response has none. Version 0 is what the engine was launched with.
    """

    version: int
    start: int
    end: int


def spans_from_starts(
    starts: Iterable[tuple[int, int]], num_tokens: int
) -> tuple[VersionSpan, ...]:
    """Builds spans from where each version began, without empty ones, equal neighbours merged."""
    spans, known = list[VersionSpan](), list(starts)
    if num_tokens and not known:
        raise VersionSpanError(f"{num_tokens} tokens must have a version, got none")
    if any(later < earlier for (_, earlier), (_, later) in pairwise(known)):
        raise VersionSpanError(f"versions must begin one after the other, got {known}")
    if len(known) == 1 and num_tokens:
        return (VersionSpan(known[0][0], 0, num_tokens),)
    begin = 0
    for (version, _), (_, limit) in pairwise([*known, (0, num_tokens)]):
        end = min(limit, num_tokens)
        if end == begin:
            continue
        if spans and spans[-1].version == version:
            spans[-1] = spans[-1]._replace(end=end)
        else:
            spans.append(VersionSpan(version, begin, end))
        begin = end
    return tuple(spans)


def slice_spans(spans: Sequence[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """Returns the spans of tokens ``[start, end)``, counted from ``start``."""
    return tuple(
        VersionSpan(one.version, max(one.start, start) - start, min(one.end, end) - start)
        for one in spans
        if max(one.start, start) < min(one.end, end)
    )


def expand_spans(spans: Iterable[VersionSpan]) -> list[int]:
    """Returns the version of each token, in order.

    Args:
        spans: Spans of one response.
    """
    return [one.version for one in spans for _ in range(one.end - one.start)]


def min_version(spans: Iterable[VersionSpan], *, default: int) -> int:
    """Returns the oldest version, or ``default`` where no token was sampled.

    Args:
        spans, default: Spans of one response, and the version of one without tokens.
    """
    return min((one.version for one in spans), default=default)


def max_version(spans: Iterable[VersionSpan], *, default: int) -> int:
    """Returns the newest version, or ``default`` where no token was sampled.

    Args:
        spans, default: Spans of one response, and the version of one without tokens.
    """
    return max((one.version for one in spans), default=default)


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunAnswer:
    """What a lost replica had sent of the one sample of a request, for another to go on."""

    token_ids: tuple[int, ...]  # all that were received, at least one
    spans: tuple[VersionSpan, ...]
    logprobs: Any = None  # vLLM's SampleLogprobs of all of them
    cumulative_logprob: float | None = None
    # What outputs are to say of the prompt: vLLM's PromptLogprobs, nothing where each output holds
    # only what is new, or None.
    prompt_logprobs: Any = None
    num_cached_tokens: int | None = None  # these three were measured by the first replica
    queue_s: float | None = None
    prefill_s: float | None = None


# No slots: a frozen class with slots is pickled by Python code, object by object.
@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One checked prompt with its sampling parameters, on its way to an engine."""

    request_id: str  # unique within the service
    prompt: dict[str, Any]  # vLLM's TokensPrompt: prompt_token_ids, and what else vLLM accepts
    sampling_params: Any  # vLLM's SamplingParams
    timeout_s: float  # seconds after which the engine ends it
    lora_request: Any = None  # vLLM's LoRARequest
    adapter: str | None = None  # of those that were pushed; empty for the base weights alone
    min_version: int = 0  # oldest policy version to begin it under; 0 takes any
    session_id: str | int | None = None  # the conversation that it belongs to
    group_id: str | int | None = None  # the group of requests with the same prompt
    begun: BegunAnswer | None = None  # the answer so far, to go on with
    attempt: int = 0  # how often it was sent before

    @property
    def abort_id(self) -> str:
        """Id by which it is aborted: another one for each attempt."""
        # An engine turns away what was aborted before it came, and must not take for that what an
        # actor that was out of reach gets again.
        return f"{self.request_id}~{self.attempt}" if self.attempt else self.request_id


# A report and a result travel as columns, which takes their attributes to be in a dict.
@dataclass(frozen=True, kw_only=True)
class SampleReport:
    """What the replica knows of one sample beside vLLM's output; None is what vLLM has not said."""

    spans: tuple[VersionSpan, ...] = ()  # of the tokens that came with it
    num_cached_tokens: int | None = None  # tokens of its prompt from the prefix cache
    queue_s: float | None = None  # in vLLM's queue
    prefill_s: float | None = None  # from the first batch that it was part of to its first token
    decode_s: float | None = None  # from the first token to the last


@dataclass(frozen=True, kw_only=True)
class EngineResult:
    """The end of one request, or one step of it when streaming."""

    request_id: str
    replica_id: str
    # vLLM's RequestOutput inside the engine's process, an OutputRow outside; None with an error.
    output: Any = None
    finished: bool = True
    error: Exception | None = None
    samples: tuple[SampleReport, ...] = ()  # one for each of the output's samples, in its order
    version: int | None = None  # what the replica held when it answered

    @property
    def marks(self) -> dict[str, Any]:
        assert self.version is not None, "a replica that answers tells its version"
        return marks(self.samples, replica_id=self.replica_id, version=self.version)


def marks(samples: Sequence[SampleReport], *, replica_id: str, version: int) -> dict[str, Any]:
    """This library's attributes of a vLLM output, from one report for each sample."""
    spans = [span for one in samples for span in one.spans]
    return {
        "replica_id": replica_id,
        "version_spans": tuple(one.spans for one in samples),
        "sample_reports": tuple(samples),
        "min_version": min_version(spans, default=version),
        "max_version": max_version(spans, default=version),
    }


_INTEGERS = [(name, np.iinfo(name)) for name in ("<u1", "<i1", "<u2", "<i4", "<i8")]


class Column:
    """One value for each of many rows; ``column[at]`` makes one again, equal in value and type."""

    def __getitem__(self, at: int) -> Any:
        raise NotImplementedError

    def between(self, begin: int, end: int) -> list[Any]:
        return [self[at] for at in range(begin, end)]

    def array(self, at: int) -> np.ndarray:
        """The list of numbers in a row, without a Python object for each."""
        numbers = self[at]
        return np.asarray(numbers) if numbers else np.empty(0, np.int64)


@dataclass(eq=False)
class _Plain(Column):
    """Values that have no other form."""

    values: list[Any]

    def __getitem__(self, at: int) -> Any:
        value = self.values[at]
        # Ray's arrays are read-only views that hold their object in the store while they live.
        is_view = isinstance(value, np.ndarray) and not value.flags.writeable
        return value.copy() if is_view else value


@dataclass(eq=False)
class _Same(Column):
    value: Any

    def __getitem__(self, at: int) -> Any:
        return self.value


class _Numbers(Column):
    """Plain integers or floats. Bytes, as Ray would keep an array's store entry alive."""

    def __init__(self, numbers: np.ndarray) -> None:
        self.dtype, self.data = numbers.dtype.str, numbers.tobytes()

    @cached_property
    def all(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype)

    @cached_property
    def _values(self) -> list[Any]:
        return self.all.tolist()

    def __getitem__(self, at: int) -> Any:
        return self._values[at]

    def between(self, begin: int, end: int) -> list[Any]:
        return self.all[begin:end].tolist()


class _Lists(Column):
    """Lists, or tuples, named ones too, as one column of all their items."""

    def __init__(self, kind: type, values: Sequence[Any]) -> None:
        self.kind, self.items = kind, pack(list(chain.from_iterable(values)))
        self.lengths = _pack_numbers([len(one) for one in values], int)

    @cached_property
    def _ends(self) -> list[int]:
        assert isinstance(self.lengths, _Numbers), "lengths are no larger than int64"
        return [0, *self.lengths.all.cumsum().tolist()]

    def bounds(self, at: int) -> tuple[int, int]:
        """Where the items of a row begin and end."""
        return self._ends[at], self._ends[at + 1]

    def __getitem__(self, at: int) -> Any:
        items = self.items.between(*self.bounds(at))
        return items if self.kind is list else tuple.__new__(self.kind, items)

    def array(self, at: int) -> np.ndarray:
        begin, end = self.bounds(at)
        items = self.items
        return items.all[begin:end] if isinstance(items, _Numbers) else super().array(at)


class _Records(Column):
    """Objects of one class, each nothing but its attributes."""

    def __init__(self, kind: type, rows: list[dict[str, Any]]) -> None:
        self.kind = kind
        self.fields = {name: pack([row[name] for row in rows]) for name in rows[0]}

    def __getitem__(self, at: int) -> Any:
        return self.make(at)

    def make(self, at: int, **instead: Any) -> Any:
        """The object of a row, with the attributes that are given in place of its own."""
        # Attributes are set as unpickling sets them: past __init__, which differs by release.
        made = object.__new__(self.kind)
        vars(made).update(self.attributes(at, **instead))
        return made

    def attributes(self, at: int, **instead: Any) -> dict[str, Any]:
        """The attributes of a row; those that are given are not made."""
        made = {**self._shared, **instead}
        for name, column in self._own:
            if name not in instead:
                made[name] = column[at]
        return made

    @cached_property
    def _shared(self) -> dict[str, Any]:
        """All names in their order, with the values that are the same in every row."""
        return {
            name: column.value if isinstance(column, _Same) else None
            for name, column in self.fields.items()
        }

    @cached_property
    def _own(self) -> list[tuple[str, Column]]:
        return [one for one in self.fields.items() if not isinstance(one[1], _Same)]


def pack(values: list[Any]) -> Column:
    """Packs a list that nobody changes any more; what has no known form travels as it is."""
    kinds = set(map(type, values))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind in (type(None), bool, str) and len(set(map(id, values))) == 1:
        return _Same(values[0])
    if kind is int or kind is float:
        return _pack_numbers(values, kind)
    if kind is list or kind is tuple or kind is VersionSpan:
        return _Lists(kind, values)
    if kind is not None and _is_its_attributes(kind):
        rows = [vars(one) for one in values]
        if all(list(row) == list(rows[0]) for row in rows):
            return _Records(kind, rows)
    return _Plain(values)


@cache
def _is_its_attributes(kind: type) -> bool:
    """Whether pickle, too, would take its objects apart into their attributes and nothing else."""
    inherited = ("__new__", "__reduce__", "__reduce_ex__", "__getstate__")
    made_plainly = all(getattr(kind, name) is getattr(object, name) for name in inherited)
    return made_plainly and bool(kind.__dictoffset__)


def _pack_numbers(values: list[Any], kind: type) -> Column:
    """Packs in the narrowest type that loses nothing."""
    try:
        numbers = np.array(values, np.float64 if kind is float else np.int64)
    except OverflowError:
        return _Plain(values)
    if kind is float:
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = numbers.astype("<f4")  # bits are compared, for -0.0 and NaN
            is_exact = narrow.astype("<f8").tobytes() == numbers.tobytes()
        return _Numbers(narrow if is_exact else numbers)
    low, high = numbers.min(), numbers.max()
    dtype = next(name for name, info in _INTEGERS if info.min <= low and high <= info.max)
    return _Numbers(numbers.astype(dtype))


class PackedResults:
    """Results on their way out of an engine, without prompts, which callers hold; iterable."""

    def __init__(self, results: Sequence[EngineResult]) -> None:
        hidden = {"prompt": None, "prompt_token_ids": None}
        self._num, outputs = len(results), [one.output for one in results if one.output is not None]
        rows = [vars(one) | hidden for one in outputs]  # one engine's have the same attributes
        self._outputs = _Records(type(outputs[0]), rows) if rows else None
        self._results = _Records(EngineResult, [vars(one) | {"output": None} for one in results])

    def __iter__(self) -> Iterator[EngineResult]:
        made, errors = 0, self._results.fields["error"]
        for at in range(self._num):
            if self._outputs is not None and errors[at] is None:
                yield self._results.make(at, output=OutputRow(self._outputs, made))
                made += 1
            else:
                yield self._results[at]


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One ``RequestOutput`` in its columns."""

    outputs: _Records
    at: int

    @property
    def answers(self) -> list[np.ndarray]:
        """Token ids of each sample, of shape ``(num_tokens,)``."""
        return [samples.fields["token_ids"].array(at) for samples, at in self.samples()]

    def make(self) -> RequestOutput:
        """vLLM's output without its prompt; log-probabilities are ``FlatLogprobs``."""
        return self.outputs[self.at]

    def unread(self, result: EngineResult, request: EngineRequest) -> RequestOutput:
        """vLLM's output with the caller's prompt, and what only this library knows; made late."""
        known = {"finished": result.finished}
        return _unread(self.outputs.kind, known, _Output(self, result, request))

    def samples(self) -> Iterator[tuple[_Records, int]]:
        """The column of each sample, and its row there."""
        samples: Any = self.outputs.fields["outputs"]
        return ((samples.items, at) for at in range(*samples.bounds(self.at)))


@dataclass(frozen=True)  # no slots, as above
class PlainOutput:
    """One ``RequestOutput`` as it is, a stream's: of so few tokens columns cost more."""

    output: RequestOutput

    @property
    def answers(self) -> list[np.ndarray]:
        """Token ids of each sample, of shape ``(num_tokens,)``."""
        return [np.asarray(one.token_ids, np.int64) for one in self.output.outputs]

    def make(self) -> RequestOutput:
        """vLLM's output without its prompt; log-probabilities are ``FlatLogprobs``."""
        return self.output

    def unread(self, result: EngineResult, request: EngineRequest) -> RequestOutput:
        """A copy with the caller's prompt, and what only this library knows."""
        made, prompt = copy(self.output), request.prompt
        made.prompt, made.prompt_token_ids = prompt.get("prompt"), list(prompt["prompt_token_ids"])
        made.outputs = [copy(one) for one in made.outputs]
        for one in made.outputs:
            one.token_ids = [*one.token_ids]
        if not request.sampling_params.flat_logprobs:
            made.prompt_logprobs = as_dicts(made.prompt_logprobs)
            for one in made.outputs:
                one.logprobs = as_dicts(one.logprobs)
        vars(made).update(result.marks)
        return made


# Not a function within a function: each of its variables would be one more object a row, for
# Python's garbage collector to look at.
@dataclass(slots=True)
class _Output:
    """The attributes of one output."""

    row: OutputRow
    result: EngineResult
    request: EngineRequest

    def __call__(self) -> dict[str, Any]:
        row, prompt = self.row, self.request.prompt
        has_dicts = not self.request.sampling_params.flat_logprobs
        prompt_logprobs = row.outputs.fields["prompt_logprobs"][row.at]
        made = row.outputs.attributes(
            row.at,
            prompt=prompt.get("prompt"),
            prompt_token_ids=list(prompt["prompt_token_ids"]),
            prompt_logprobs=as_dicts(prompt_logprobs) if has_dicts else prompt_logprobs,
            outputs=[_sample(*one, has_dicts=has_dicts) for one in row.samples()],
        )
        return made | self.result.marks


def _sample(samples: _Records, at: int, *, has_dicts: bool) -> Any:
    """A ``CompletionOutput`` whose log-probabilities are made when they are looked at."""
    known = samples.attributes(at, logprobs=None)
    del known["logprobs"]
    return _unread(samples.kind, known, SampleRow(samples, at, has_dicts))


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A ``CompletionOutput`` in its columns: attributes are made when they are asked for."""

    samples: _Records
    at: int
    has_dicts: bool = True

    @property
    def token_ids(self) -> np.ndarray:
        return self.samples.fields["token_ids"].array(self.at)

    @property
    def logprobs(self) -> Any:
        flat = self.samples.fields["logprobs"][self.at]
        return as_dicts(flat) if self.has_dicts else flat

    def __getattr__(self, name: str) -> Any:
        if name not in self.samples.fields:
            raise AttributeError(name)
        return self.samples.fields[name][self.at]

    def __call__(self) -> dict[str, Any]:
        return {"logprobs": self.logprobs}

    def sampled(self) -> np.ndarray | None:
        """The log-probabilities of the tokens, unless some of the requests asked for none."""
        flat = self.samples.fields["logprobs"]
        if not isinstance(flat, _Records):
            return None
        # The sampled token comes first at each position.
        starts = flat.fields["start_indices"].array(self.at)
        return flat.fields["logprobs"].array(self.at)[starts]

    def listed(self, num: int) -> tuple[np.ndarray, np.ndarray] | None:
        """The ``num`` likeliest tokens of each position behind the sampled one, if so many are."""
        flat = self.samples.fields["logprobs"]
        if not isinstance(flat, _Records):
            return None
        ids, logprobs = (flat.fields[name].array(self.at) for name in ("token_ids", "logprobs"))
        shape = len(flat.fields["start_indices"].array(self.at)), num + 1
        if ids.size != shape[0] * shape[1]:
            return None
        return ids.reshape(shape)[:, 1:], logprobs.reshape(shape)[:, 1:]


def samples_of(output: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """A vLLM output's samples, and the attributes that are this library's; it stays unread."""
    rest = getattr(output, "_rest", None)
    if isinstance(rest, _Output):
        return [SampleRow(*one) for one in rest.row.samples()], rest.result.marks
    return output.outputs, vars(output)


def _row_of(sample: Any) -> SampleRow | None:
    """The columns of a ``CompletionOutput`` that nobody has read."""
    if isinstance(sample, SampleRow):
        return sample
    return getattr(sample, "_rest", None) if isinstance(sample, _Unread) else None


def sampled_log_probs(sample: Any) -> Sequence[float] | np.ndarray:
    """Log-probabilities of a ``CompletionOutput``'s tokens, if any, which stays unread."""
    if (row := _row_of(sample)) and (found := row.sampled()) is not None:
        return found
    positions = zip(sample.logprobs or (), sample.token_ids, strict=False)
    return [entries[token].logprob for entries, token in positions]


def listed_tokens(sample: Any, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probabilities ``[num_tokens, num]`` of the likeliest tokens at each position.

    ``sample`` is a ``CompletionOutput``, asked for ``logprobs=num``, and stays unread.
    """
    if (row := _row_of(sample)) and (found := row.listed(num)) is not None:
        return found
    ids = np.zeros((len(sample.token_ids), num), np.int64)
    logprobs = np.full(ids.shape, -np.inf)
    for at, entries in enumerate(sample.logprobs or ()):
        first = sorted(entries.items(), key=lambda one: -one[1].logprob)[:num]
        ids[at, : len(first)] = [token for token, _ in first]
        logprobs[at, : len(first)] = [one.logprob for _, one in first]
    return ids, logprobs


def as_dicts(flat: Any) -> Any:
    """Makes of ``FlatLogprobs`` what vLLM gives those who have not asked for them."""
    if flat is None:
        return None
    from vllm.logprobs import FlatLogprobs, Logprob

    if not isinstance(flat, FlatLogprobs):
        return flat
    # One iterator over all entries, from which each position takes its share.
    made = map(Logprob, flat.logprobs, flat.ranks, flat.decoded_tokens)
    entries = zip(flat.token_ids, made, strict=True)
    lengths = map(int.__sub__, flat.end_indices, flat.start_indices)
    # Only the first token of a prompt has none.
    return [dict(islice(entries, length)) if length else None for length in lengths]


class _Unread:
    """Mixed into a class of vLLM: gets the missing attributes, and that very class, when read."""

    _kind: type
    _attributes: Any  # what gets and sets all of them, past the property below
    _rest: Any  # gives the missing attributes

    def __getattr__(self, name: str) -> Any:
        return getattr(_read(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_read(self), name, value)

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return vars(_read(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _read(self).__reduce_ex__(protocol)

    def __eq__(self, other: object) -> bool:
        return _read(self) == other

    def __hash__(self) -> int:
        return hash(_read(self))


@cache
def _unread_kind(kind: type) -> type:
    fields = {"_kind": kind, "_attributes": getattr_static(kind, "__dict__")}
    return type(kind.__name__, (_Unread, kind), fields)


def _unread(kind: type, known: dict[str, Any], rest: Callable[[], dict[str, Any]]) -> Any:
    made = object.__new__(kind)
    vars(made).update(known, _rest=rest)
    made.__class__ = _unread_kind(kind)
    return made


def _read(unread: Any) -> Any:
    now = type(unread)
    rest, kind = getattr(unread, "_rest", None), getattr(now, "_kind", None)
    if rest is not None and kind is not None:  # or another thread has read it meanwhile
        made, attributes = rest(), now._attributes
        known = {name: one for name, one in attributes.__get__(unread).items() if name not in made}
        # First the attributes, all at once and in vLLM's order, then the class: others may look.
        attributes.__set__(unread, known | made | {"_rest": rest})
        object.__setattr__(unread, "__class__", kind)
        vars(unread).pop("_rest", None)
    return unread
