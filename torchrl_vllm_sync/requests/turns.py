"""Exact turns: a prompt begins with the tokens that were read and sampled in the turn before.

Text does not tell which tokens it was sampled as, so that a history that is encoded anew drifts:
the trainer sees tokens that no engine has sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

_PROBE = "Zyxw"


class Turn(NamedTuple):
    """A prompt as the template has shown it, and its answer."""

    num_messages: int  # of the prompt
    prompt: str
    answer: str
    ids: list[int]  # of both: as the engine read the one, and sampled the other


def end_of_turn(show: Callable[[list[dict[str, str]]], str], special: Sequence[str]) -> str:
    """The special token that a template puts behind an answer; empty if it puts none."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
    behind = show(chat).rpartition(_PROBE)[2].lstrip()
    return max((one for one in special if behind.startswith(one)), key=len, default="")


def without_end(message: dict[str, Any], end: str) -> dict[str, Any]:
    """A message without the token that ended it, which the template puts there itself."""
    if not end or message["role"] != "assistant" or not isinstance(message["content"], str):
        return message
    return message | {"content": message["content"].removesuffix(end)}


def is_of(turn: Turn, chat: Sequence[dict[str, Any]], end: str) -> bool:
    """Whether a chat has the turn's answer."""
    bodies = (without_end(one, end)["content"] for one in chat if one["role"] == "assistant")
    return turn.answer.removesuffix(end) in bodies


def behind(turn: Turn, chat: Sequence[dict[str, Any]], shown: str, end: str) -> str | None:
    """What a chat, as the template shows it, has behind a turn; ``None`` if it has another turn.

    Whitespace around the answer is the one thing that may differ, for many templates trim it.
    """
    said = turn.answer.removesuffix(end)
    if not is_of(turn, chat[turn.num_messages :][:1], end) or not shown.startswith(turn.prompt):
        return None
    rest = shown[len(turn.prompt) :]
    inner, core = rest.lstrip(), said.strip()
    leading, trailing = said[: len(said) - len(said.lstrip())], said[len(said.rstrip()) :]
    if not inner.startswith(core) or not leading.endswith(rest[: len(rest) - len(inner)]):
        return None
    rest = inner[len(core) :]
    rest = rest[len(commonprefix([rest, trailing])) :]  # noqa: RUF071  of characters
    if said != turn.answer:  # the engine has sampled its end
        if not rest:  # which the answer, that is to be gone on with, is shown without
            return None
        if rest.lstrip().startswith(end):
            rest = rest.lstrip()[len(end) :]
    return rest
