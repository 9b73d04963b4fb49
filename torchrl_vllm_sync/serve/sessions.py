"""What sessions asked and got through a server: exact tokens, turn by turn, and their rewards."""

from __future__ import annotations

import copy
import json
import logging
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from torchrl_vllm_sync.errors import RewardError
from torchrl_vllm_sync.requests.messages import VersionSpan, sampled_log_probs
from torchrl_vllm_sync.requests.turns import Turn, behind, is_of

logger = logging.getLogger(__name__)
_OF_OUTPUT = ("replica_id", "min_version", "max_version")
DEFAULT_LIMIT = 16384  # answers that are kept, of all sessions together
_LARGEST = float(np.finfo(np.float32).max)  # that rows hold


@dataclass(eq=False, slots=True)
class Asked:
    """One HTTP request: whose it is, and what has answered it so far."""

    group_id: str | None
    versions: set[int] = field(default_factory=set)
    session_id: str | None = None  # None: nothing is kept
    is_bound: bool = False  # the session's own key was sent
    is_search: bool = False  # for beams: each of their tokens is a request of vLLM's
    is_cut: bool = False  # the chat's prompt is to be shortened
    chat: list[dict[str, str]] | None = None  # answers in it as they were sampled
    answers: list[Answer] = field(default_factory=list)


ASKED: ContextVar[Asked] = ContextVar("ASKED")


@dataclass(eq=False, slots=True)
class Answer:
    """What was sampled for one prompt."""

    report: Any  # its SampleReport, of which the spans are those of the last step
    of: SimpleNamespace  # ``replica_id``, ``min_version`` and ``max_version`` of the output
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str | None = None
    params: Any = None
    turn: Turn = field(default_factory=lambda: Turn(0, "", "", []))
    end: str = ""  # the special token that ended it
    said: Any = None  # what its client was given, see ``_said``
    chat: Any = None  # messages that it answers


@dataclass(eq=False, slots=True)
class SessionRow:
    """Turns that each begin with all of the turn before, token by token."""

    parts: list[tuple[list[int], Answer]]  # what was read in addition, and what was then sampled
    num_messages: int
    text: str  # of its prompt
    kept: int = 0  # of its prompt, tokens of an earlier turn, which is in another row
    forked: bool = False  # as earlier turns were shown in another way


class Session:
    """What one session asked and got.

    Attributes:
        rows: What :func:`session_rows` makes rows of, mostly one.
        score: The reward, once there is one.

    Args:
        id: Its name; of one that :meth:`Sessions.open` made also its key.
    """

    def __init__(self, id: str) -> None:  # noqa: A002  as it is called elsewhere
        self.id = id
        self.rows: list[SessionRow] = []
        self.score: float | None = None
        self._is_bound = False
        self._answers: list[Answer] = []

    def reward(self, value: float) -> None:
        """Sets the reward; a later one takes its place.

        Args:
            value: A number that is finite as float32, which rows have it as.

        Raises:
            RewardError: It is none.
        """
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and abs(value) <= _LARGEST):
            told = f"a reward, of float32, must be a finite number, got {value!r}"
            raise RewardError(f"session {self.id!r}: {told}")
        self.score = float(value)

    def _as_sampled(self, messages: Sequence[Any]) -> list[Any]:
        """Messages of a request, in which answers are the text that was sampled."""
        alike = defaultdict[Any, list[Answer]](list)
        for one in reversed(self._answers):
            alike[one.turn.num_messages, one.said].append(one)
        shown = list[Any]()
        for at, one in enumerate(messages):
            found = alike[at, said] if (said := _said(one)) else ()
            # Of those that read alike, the last one that was asked for by what is before it here.
            answer = max(found, key=lambda each: each.chat == chat_of(shown), default=None)
            text = answer and answer.turn.answer.removesuffix(answer.end)
            shown.append({"role": "assistant", "content": text} if answer else one)
        return shown

    def _before(
        self, ids: list[int], text: str, chat: list[dict[str, str]] | None
    ) -> tuple[Answer | None, str | None, bool]:
        """The answer that a prompt goes on from, what its text has behind that, if it forks."""
        for one in sorted(self._answers, key=lambda one: -len(one.turn.ids)):
            if ids[: len(one.turn.ids)] == one.turn.ids:
                return one, None, False
            if chat and (rest := behind(one.turn, chat, text, one.end)) is not None:
                return one, rest, False
        return None, None, any(is_of(one.turn, chat or [], one.end) for one in self._answers)

    def _add(self, answer: Answer, read: list[int], before: Answer | None, *, forked: bool) -> None:
        """Keeps an answer to the tokens that were read, in the row that ends where they begin."""
        self._answers.append(answer)
        kept = 0 if before is None else len(before.turn.ids)
        for row in self.rows:
            if before is not None and row.parts[-1][1] is before:
                row.parts.append((read[kept:], answer))
                return
        turn = answer.turn
        self.rows.append(SessionRow([(read, answer)], turn.num_messages, turn.prompt, kept, forked))


class Recording:
    """Gathers the answers of one request."""

    def __init__(
        self, sessions: Sessions, asked: Asked, prompt: dict[str, Any], params: Any
    ) -> None:
        self._sessions, self._asked, self._text = sessions, asked, prompt.get("prompt") or ""
        self.prompt_ids: list[int] = list(prompt["prompt_token_ids"])
        known = sessions.get(asked.session_id or "") or Session("")
        self._before, rest, self._forked = known._before(self.prompt_ids, self._text, asked.chat)
        if self._before is not None and rest is not None:
            self.prompt_ids = self._before.turn.ids + sessions._encode(rest, self._before.end)
        self.params = copy.copy(params)
        if params.logprobs is None:
            self.params.logprobs = 0
        self._samples: dict[int, Answer] = {}

    def add(self, output: Any) -> None:
        """Takes an output, which may hold all that was sampled or what is new."""
        is_delta = self.params.output_kind.name == "DELTA"
        for sample, report in zip(output.outputs, output.sample_reports, strict=True):
            one = self._samples.get(sample.index)
            if one is None or not is_delta:
                one = self._samples[sample.index] = Answer(report, SimpleNamespace())
            at = len(one.token_ids)
            one.token_ids += sample.token_ids
            one.log_probs += [float(value) for value in sampled_log_probs(sample)]
            one.spans += [VersionSpan(v, begin + at, end + at) for v, begin, end in report.spans]
            one.report, one.finish_reason = report, sample.finish_reason
            vars(one.of).update({name: getattr(output, name) for name in _OF_OUTPUT})

    def end(self) -> None:
        """Keeps what was answered to the end; what its client did not wait for is not."""
        asked, sessions = self._asked, self._sessions
        for _, one in sorted(self._samples.items()):
            answer, one.params = sessions._decode(one.token_ids), self.params
            if one.finish_reason == "stop" and one.token_ids:
                one.end = sessions._decode([one.token_ids[-1]])
                one.end = one.end if one.token_ids[-1] in sessions._special_ids else ""
            one.chat = asked.chat
            num_messages, ids = len(asked.chat or ()), self.prompt_ids + one.token_ids
            one.turn = Turn(num_messages, self._text, answer, ids)
            asked.answers.append(one)
            sessions._keep(asked, one, self.prompt_ids, self._before, forked=self._forked)


class Sessions(Mapping[str, Session]):
    """The sessions of a server, by name; those that were rewarded are there to be taken.

    A session is what a request names in the header ``X-Session-ID`` or the field ``user``, or whose
    key it sends as bearer token, if :meth:`open` made it. Of all sessions together as many answers
    are kept as the server was told to; then the oldest session without a reward is dropped.

    Attributes:
        num_dropped: Sessions that were dropped.

    Args:
        tokenizer: The engines'.
        limit: How many answers are kept.
    """

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self._tokenizer, self._limit, self.num_dropped = tokenizer, limit, 0
        self._known: dict[str, Session] = {}
        self._lock, self._size = threading.Lock(), 0
        self._special_ids = {*tokenizer.all_special_ids}

    def __getitem__(self, session_id: str) -> Session:
        with self._lock:  # as an answer puts its session last
            return self._known[session_id]

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter([*self._known])

    def __len__(self) -> int:
        return len(self._known)

    def open(self) -> Session:
        """Returns a session for whoever sends its ``id`` as API key, until it is taken."""
        session = Session(secrets.token_urlsafe(24))
        session._is_bound = True
        with self._lock:
            self._known[session.id] = session
        return session

    def take(self, *session_ids: str) -> list[Session]:
        """Removes sessions and returns them.

        Args:
            *session_ids: Which; if none are named, all that have a reward.

        Returns:
            The sessions, in that order.

        Raises:
            KeyError: One is not there; then all stay.
        """
        with self._lock:
            names = session_ids or [k for k, one in self._known.items() if one.score is not None]
            taken = [self._known[one] for one in names]
            for one in {*taken}:
                self._remove(one)
        return taken

    def _remove(self, session: Session) -> None:
        self._size -= len(session._answers)
        del self._known[session.id]

    def _bound(self, key: str) -> Session | None:
        """The session whose key this is."""
        with self._lock:
            session = self._known.get(key)
        return session if session is not None and session._is_bound else None

    def _keep(self, asked: Asked, answer: Answer, *turn: Any, forked: bool) -> None:
        """Adds an answer to its session, and drops the oldest sessions if these are too many."""
        name = asked.session_id or ""
        with self._lock:
            if asked.is_bound and name not in self._known:
                return  # taken: nobody waits for it
            session = self._known.pop(name, None) or Session(name)
            self._known[name] = session
            session._add(answer, *turn, forked=forked)
            self._size += 1
            while self._size > self._limit:
                others = [one for one in self._known.values() if not one._is_bound]
                if not others:
                    break
                self._remove(next((one for one in others if one.score is None), others[0]))
                self.num_dropped += 1
                if self.num_dropped.bit_count() == 1:  # at 1, 2, 4, 8 and so on
                    told = "%s sessions were dropped: more than %s answers were to be kept"
                    logger.warning(told, self.num_dropped, self._limit)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _encode(self, rest: str, end: str) -> list[int]:
        """The tokens of what follows an answer: as in the midst of a prompt."""
        anchor = end or self._tokenizer.eos_token or ""
        whole, first = self._tokenizer([anchor + rest, anchor], add_special_tokens=False)[
            "input_ids"
        ]
        return whole[len(first) :]


def chat_of(messages: Sequence[Any]) -> list[dict[str, str]]:
    """Who said what, in messages of any form."""
    dicts = [one if isinstance(one, dict) else {} for one in messages]
    return [{"role": str(one.get("role")), "content": _text(one.get("content"))} for one in dicts]


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(one.get("text", "")) for one in content if isinstance(one, dict))
    return content if isinstance(content, str) else ""


def _said(message: Any) -> Any:
    """What is compared of an assistant's message; ``None`` of any other."""
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return None
    calls = [one.get("function", {}) for one in message.get("tool_calls") or ()]
    told = [(one.get("name"), one.get("arguments")) for one in calls]
    return _text(message.get("content")), repr(told)


def note_given(body: bytes, answers: Sequence[Answer]) -> None:
    """Notes which message each answer was given as, by the body of the response to a chat."""
    lines = [one[6:] for one in body.split(b"\n") if one.startswith(b"data: {")] or [body]
    messages: dict[int, Any] = {}
    choices: list[Any] = [one for line in lines for one in json.loads(line).get("choices", [])]
    for choice in choices:
        one = messages.setdefault(choice["index"], {"content": "", "tool_calls": {}})
        part = choice.get("message") or choice.get("delta") or {}
        one["content"] += part.get("content") or ""
        tools: list[Any] = part.get("tool_calls") or []
        for at, call in enumerate(tools):
            known = one["tool_calls"].setdefault(call.get("index", at), {})
            for name, text in (call.get("function") or {}).items():
                known[name] = known.get(name, "") + (text or "")
    for index, answer in enumerate(answers):
        if (one := messages.get(index)) is not None:
            calls = [{"function": each} for _, each in sorted(one["tool_calls"].items())]
            answer.said = _said({"role": "assistant", **one, "tool_calls": calls})
