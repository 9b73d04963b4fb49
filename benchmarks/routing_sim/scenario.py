"""What is asked of a cluster: sessions of turns, their tokens fixed in advance; and by whom.

A session's whole text is one array. The prompt of each turn is a prefix of it, the turn's output
follows, and then what a tool or a user says next; so every policy gets the same bytes, whatever it
does, and no prompt is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session.

    Attributes:
        prompt_len: Tokens of the session's text before the answer.
        output_len: Tokens of the answer, at least 1.
        tool_s: Seconds between the answer and the next turn.
    """

    prompt_len: int
    output_len: int
    tool_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Session:
    """A conversation, or a single request.

    Attributes:
        session_id: Unique in a trace.
        group_id: Shared by sessions that begin with the same prompt.
        tokens: All prompts and outputs: int32 of shape ``(num_tokens,)``, read-only.
        turns: Its requests, one after the other.
        arrival_s: When it starts, if sessions start by the clock.
    """

    session_id: int
    group_id: int
    tokens: np.ndarray
    turns: tuple[Turn, ...]
    arrival_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuses turns that the text does not hold.

        Raises:
            ValueError: A turn is empty, begins before the last one ended, or leaves the text.
        """
        end = 0
        for number, turn in enumerate(self.turns):
            if turn.output_len < 1 or turn.prompt_len < max(end, 1):
                raise ValueError(f"turn {number} of session {self.session_id} cannot be {turn}")
            end = turn.prompt_len + turn.output_len
        if not self.turns or end > len(self.tokens):
            raise ValueError(
                f"session {self.session_id} has {len(self.tokens)} tokens, its turns {end}"
            )
        self.tokens.setflags(write=False)


class BlockKeys:
    """Chained keys of full blocks: equal exactly if the blocks and all before them are.

    Keys are small integers in order of appearance, kept in one table, so nothing collides and
    nothing depends on Python's hash seed.

    Args:
        block_size: Tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._table: dict[tuple[int, bytes], int] = {}

    def of(self, tokens: np.ndarray) -> Sequence[int]:
        """Keys of the full blocks of ``tokens``."""
        table = self._table
        data = np.ascontiguousarray(tokens, dtype=np.int32).tobytes()
        width = 4 * self.block_size
        key = -1
        keys = []
        for start in range(0, len(data) - width + 1, width):
            key = table.setdefault((key, data[start : start + width]), len(table))
            keys.append(key)
        return keys


@dataclass(frozen=True, slots=True)
class Reports:
    """How routers hear of the engines.

    Attributes:
        interval_s: Every engine is asked that often by each router.
        delay_s: Its answer is as old when it arrives.
        loss: Share of the answers that never arrive, 0 to 1.
    """

    interval_s: float = 1.0
    delay_s: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Updates:
    """New weights by the clock.

    Attributes:
        every_s: Time from one update to the next.
        pause_s: All engines stand still for as long, between two steps.
        clear: What runs is computed again; otherwise it keeps its keys and values. Either way no
            request that starts later finds what was computed before.
    """

    every_s: float
    pause_s: float = 0.5
    clear: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One trace.

    Attributes:
        name: Of the trace.
        sessions: In the order in which they start.
        num_replicas: At the start; their ids count from 0.
        concurrency: Sessions at a time, the next starts when one ends; None: each at its arrival.
        keys: What routers see: session and group, the group alone, or nothing.
        num_routers: Processes that route, each with a policy of its own; requests go to any.
        reports: What they hear of engines; None: nothing.
        updates: Weight updates by the clock, if any.
    """

    name: str
    sessions: tuple[Session, ...]
    num_replicas: int
    concurrency: int | None
    keys: Literal["session", "group", "none"] = "session"
    num_routers: int = 1
    reports: Reports | None = field(default_factory=Reports)
    updates: Updates | None = None

    def __post_init__(self) -> None:
        """Refuses what cannot be run.

        Raises:
            ValueError: Named in the message.
        """
        if not self.sessions:
            raise ValueError(f"trace {self.name!r} has no sessions")
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, got {self.num_replicas}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")
        if self.updates is not None and self.updates.every_s <= self.updates.pause_s:
            raise ValueError(f"every_s must be greater than pause_s, got {self.updates}")
