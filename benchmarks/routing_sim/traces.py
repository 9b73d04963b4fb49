"""The traces: kinds of rollout traffic on 8 replicas, each made of a seed alone.

* ``grpo``: groups of 8 samples of one prompt, routers see the group.
* ``agents``: conversations with tools, in groups that share a task, all with one system prompt;
  routers see session and group. ``agents-updates``: the same while weights change by the clock.
* ``shared-prompt``: strangers behind one long system prompt, without keys.
* ``hot-group``: half of all sessions share one prompt, and a few are very long.

A session's whole text is one array. The prompt of each turn is a prefix of it, the turn's output
follows, and then what a tool or a user says next; so every policy gets the same bytes, whatever it
does, and no prompt is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

Keys = Literal["session", "group", "none"]
_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session; the next one follows ``tool_s`` seconds after the answer."""

    prompt_len: int
    output_len: int
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """A conversation, or a single request, of a group that begins with the same prompt."""

    session_id: int
    group_id: int
    tokens: np.ndarray
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One trace."""

    sessions: tuple[Session, ...]
    num_replicas: int
    concurrency: int  # sessions at a time; the next starts when one ends
    keys: Keys = "session"  # what routers see
    update_every_s: float | None = None  # from one update of the weights to the next


class BlockKeys:
    """Chained keys of full blocks: equal exactly if the blocks and all before them are.

    Keys are numbers in order of appearance, kept in one table, so nothing collides and nothing
    depends on Python's hash seed.
    """

    def __init__(self, block_size: int) -> None:
        self._width = 4 * block_size
        self._table: dict[tuple[bytes, bytes], bytes] = {}

    def of(self, tokens: np.ndarray) -> list[bytes]:
        """Keys of the full blocks of ``tokens``."""
        data = np.ascontiguousarray(tokens, dtype=np.int32).tobytes()
        key = b""
        keys = []
        for start in range(0, len(data) - self._width + 1, self._width):
            block = data[start : start + self._width]
            key = self._table.setdefault((key, block), len(self._table).to_bytes(8, "big"))
            keys.append(key)
        return keys


def grpo(seed: int, smoke: bool) -> Scenario:
    """All prompts begin with a short common header."""
    generator = np.random.default_rng([seed, 10])
    num_groups, group_size, output_median = (12, 4, 60.0) if smoke else (128, 8, 900.0)
    header = _tokens(generator, 64)
    sessions = []
    for group in range(num_groups):
        prompt = np.concatenate([header, _tokens(generator, _length(generator, 500.0, 0.6))])
        for number in range(group_size):
            output_len = _length(generator, output_median, 0.8, 8192)
            text = np.concatenate([prompt, _tokens(generator, output_len)])
            turns = (Turn(len(prompt), output_len),)
            sessions.append(Session(group * group_size + number, group, text, turns))
    return _scenario(sessions, smoke, concurrency=(32, 768), keys="group")


def agents(seed: int, smoke: bool) -> Scenario:
    generator = np.random.default_rng([seed, 11])
    num_groups, group_size = (6, 4) if smoke else (48, 8)
    system_len, mean_turns = (1000, 4.0) if smoke else (3000, 10.0)
    medians = (60.0, 500.0, 0.3) if smoke else (500.0, 500.0, 2.0)
    system = _tokens(generator, system_len)
    sessions = []
    for group in range(num_groups):
        task = _tokens(generator, _length(generator, 400.0, 0.6))
        prompt = np.concatenate([system, task])
        for number in range(group_size):
            num_turns = max(int(generator.poisson(mean_turns)), 1)
            session_id = group * group_size + number
            sessions.append(
                _conversation(generator, session_id, group, prompt, num_turns, medians, 15_000)
            )
    return _scenario(sessions, smoke, concurrency=(12, 160))


def agents_updates(seed: int, smoke: bool) -> Scenario:
    return replace(agents(seed, smoke), update_every_s=3.0 if smoke else 30.0)


def shared_prompt(seed: int, smoke: bool) -> Scenario:
    """Single turns; without keys a router sees only that all prompts begin alike."""
    generator = np.random.default_rng([seed, 12])
    num_sessions, output_median = (60, 60.0) if smoke else (2000, 300.0)
    system = _tokens(generator, 6000)
    sessions = []
    for number in range(num_sessions):
        question = _tokens(generator, _length(generator, 150.0, 0.8))
        output_len = _length(generator, output_median, 0.8, 4096)
        text = np.concatenate([system, question, _tokens(generator, output_len)])
        turns = (Turn(len(system) + len(question), output_len),)
        sessions.append(Session(number, number, text, turns))
    return _scenario(sessions, smoke, concurrency=(24, 512), keys="none")


def hot_group(seed: int, smoke: bool) -> Scenario:
    """Turns are Pareto with exponent 1.2, from 2 on: made to hurt what pins or follows prefixes."""
    generator = np.random.default_rng([seed, 13])
    num_sessions, max_turns = (24, 12) if smoke else (600, 40)
    hot = other = _tokens(generator, 4000)
    sessions = []
    members = generator.permutation(num_sessions) < num_sessions / 2
    cold = 0
    for number in range(num_sessions):
        if members[number]:
            group, prompt = 0, hot
        else:
            if cold % 4 == 0:
                other = _tokens(generator, 1000)
            group, prompt = 1 + cold // 4, other
            cold += 1
        num_turns = min(int(2 * (1 + generator.pareto(1.2))), max_turns)
        medians = (250.0, 150.0, 1.0)
        sessions.append(_conversation(generator, number, group, prompt, num_turns, medians, 30_000))
    return _scenario(sessions, smoke, concurrency=(12, 240))


# Called with the seed and whether it is to be small.
TRACES: dict[str, Callable[[int, bool], Scenario]] = {
    "grpo": grpo,
    "agents": agents,
    "agents-updates": agents_updates,
    "shared-prompt": shared_prompt,
    "hot-group": hot_group,
}


def _scenario(
    sessions: list[Session], smoke: bool, concurrency: tuple[int, int], keys: Keys = "session"
) -> Scenario:
    return Scenario(
        sessions=tuple(sessions),
        num_replicas=3 if smoke else 8,
        concurrency=concurrency[not smoke],
        keys=keys,
    )


def _conversation(
    generator: np.random.Generator,
    session_id: int,
    group_id: int,
    prompt: np.ndarray,
    num_turns: int,
    medians: tuple[float, float, float],
    max_context: int,
) -> Session:
    """Lognormal answers, tools' answers and tools' seconds about these medians."""
    turns = []
    length = len(prompt)
    output_median, tool_median, tool_s_median = medians
    for _ in range(num_turns):
        output_len = _length(generator, output_median, 0.7, 4096)
        tool_len = _length(generator, tool_median, 0.9, 4096)
        tool_s = tool_s_median * float(generator.lognormal(0.0, 1.0))
        if turns and length + output_len > max_context:
            break
        turns.append(Turn(length, output_len, tool_s))
        length += output_len + tool_len
    end = turns[-1].prompt_len + turns[-1].output_len
    text = np.concatenate([prompt, _tokens(generator, end - len(prompt))])
    return Session(session_id, group_id, text, tuple(turns))


def _tokens(generator: np.random.Generator, count: int) -> np.ndarray:
    return generator.integers(0, _VOCABULARY, count, np.int32)


def _length(generator: np.random.Generator, median: float, sigma: float, most: int = 16_384) -> int:
    """A lognormal length, at least 1."""
    return int(min(max(median * generator.lognormal(0.0, sigma), 1.0), most))
