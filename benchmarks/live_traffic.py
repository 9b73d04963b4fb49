"""What the live routing benchmark asks of real engines: conversations whose every token is known.

An answer consists of one token (``logit_bias``), so that each request of a case has the same bytes
whoever routes it and whichever engine answers, later turns included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


# Ids below are the tokenizer's own marks.
FIRST_ID = 8
# Above any logit of random weights, and the most that vLLM takes.
FORCING_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the cases are."""

    vocab_size: int
    max_model_len: int
    groups: int  # of 8 samples
    sessions: int
    turns: int  # of a session
    concurrent: int  # sessions that are open at a time
    strangers: int  # requests that share nothing but a system prompt, half of the longest prompt
    prompt: tuple[int, int]  # fewest and most tokens, where there is one turn
    opening: int  # tokens of a session's first prompt, of which half is the group's
    reply: int  # tokens from a tool, between two turns
    answer: tuple[int, int]  # median tokens, and the most


@dataclass(frozen=True, slots=True)
class Conversation:
    """Some turns, one after the other."""

    session: int
    group: int
    opening: tuple[int, ...]
    replies: tuple[tuple[int, ...], ...]  # after each turn but the last
    answers: tuple[int, ...]  # tokens of each
    token: int  # the id that answers consist of

    def prompt(self, turn: int) -> list[int]:
        """Everything said before a turn's answer."""
        said = list(self.opening)
        for answer, reply in zip(self.answers[:turn], self.replies[:turn], strict=True):
            said += [self.token] * answer
            said += reply
        return said


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of traffic."""

    name: str
    conversations: list[Conversation] = field(repr=False)
    concurrent: int | None = None  # at a time; None starts all at once
    rounds: int = 1  # weights are pushed in between


def once_tokens(conversations: Sequence[Conversation]) -> int:
    """Prompt tokens that must be computed if nothing is computed twice.

    A group's prompt counts once. Of a later turn what came back counts, and the last token of the
    answer before it, which was sampled and never computed.
    """
    seen: set[int] = (
        set()
    )  # of the tree of first prompts, in which common beginnings are there once
    for one in conversations:
        chain = 0
        for token in one.opening:
            chain = hash((chain, token))
            seen.add(chain)
    return len(seen) + sum(len(reply) + 1 for one in conversations for reply in one.replies)


def least_tokens(conversations: Sequence[Conversation], block_size: int) -> int:
    """Prompt tokens that one engine computes if its cache forgets nothing.

    vLLM caches whole blocks only, and computes at least the last token of a prompt.
    """
    seen: set[int] = set()
    total = 0
    for one in conversations:
        chain = known = 0
        for at in range(0, len(one.opening) - 1, block_size):
            block = one.opening[at : at + block_size]
            chain = hash((chain, block))
            if chain in seen and known == at and at + block_size < len(one.opening):
                known = at + block_size
            seen.add(chain)
        length = len(one.opening)
        total += length - known
        for answer, reply in zip(one.answers, one.replies, strict=False):
            cached = (length + answer - 1) // block_size * block_size
            length += answer + len(reply)
            total += length - cached
    return total


class _Words:
    """Random ids and lengths of one case, the same in every process."""

    def __init__(self, scale: Scale, name: str) -> None:
        self.scale = scale
        self._random = np.random.default_rng([ord(letter) for letter in name])

    def text(self, length: int) -> tuple[int, ...]:
        return tuple(self._random.integers(FIRST_ID, self.scale.vocab_size, length).tolist())

    def between(self, least: int, most: int) -> int:
        return int(self._random.integers(least, most + 1))

    def answer(self) -> int:
        median, most = self.scale.answer
        return int(np.clip(median * self._random.lognormal(sigma=0.6), 1, most))

    def token(self) -> int:
        return self.between(FIRST_ID, self.scale.vocab_size - 1)


def _grpo(scale: Scale, name: str, *, rounds: int = 1) -> Case:
    """Eight samples of each prompt; all prompts begin with the same 16 tokens."""
    words = _Words(scale, name)
    common = words.text(16)
    conversations = []
    for group in range(scale.groups):
        prompt = common + words.text(words.between(*scale.prompt) - len(common))
        conversations += [
            Conversation(8 * group + sample, group, prompt, (), (words.answer(),), words.token())
            for sample in range(8)
        ]
    return Case(name, conversations, rounds=rounds)


def _sessions(scale: Scale, name: str, *, rounds: int = 1) -> Case:
    """Groups of 4 conversations with tools; all prompts begin with the same 16 tokens."""
    words = _Words(scale, name)
    common = words.text(16)
    conversations = []
    for group in range(-(-scale.sessions // 4)):
        system = common + words.text(scale.opening // 2 - len(common))
        for session in range(4 * group, min(4 * group + 4, scale.sessions)):
            replies = tuple(
                words.text(words.between(scale.reply // 2, scale.reply * 3 // 2))
                for _ in range(scale.turns - 1)
            )
            opening = system + words.text(scale.opening - len(system))
            answers = tuple(words.answer() for _ in range(scale.turns))
            conversations.append(
                Conversation(session, group, opening, replies, answers, words.token())
            )
    return Case(name, conversations, concurrent=scale.concurrent, rounds=rounds)


def _strangers(scale: Scale, name: str) -> Case:
    """One long system prompt and short questions."""
    words = _Words(scale, name)
    system = words.text(scale.prompt[1] // 2)
    conversations = [
        Conversation(
            at, at, system + words.text(words.between(20, 60)), (), (words.answer(),), words.token()
        )
        for at in range(scale.strangers)
    ]
    return Case(name, conversations, concurrent=scale.concurrent)


CASES: dict[str, Callable[[Scale], Case]] = {
    "grpo": lambda scale: _grpo(scale, "grpo"),
    "multi-turn": lambda scale: _sessions(scale, "multi-turn"),
    "shared-system-prompt": lambda scale: _strangers(scale, "shared-system-prompt"),
    "grpo-update": lambda scale: _grpo(scale, "grpo-update", rounds=2),
}
