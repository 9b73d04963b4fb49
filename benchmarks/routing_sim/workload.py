"""What is asked of a cluster: sessions of turns, their tokens fixed in advance.

A session's whole text is one array. The prompt of each turn is a prefix of it, the turn's output
follows, and then what a tool or a user says next; so every policy gets the same bytes, whatever it
does, and no prompt is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockKeys", "Session", "Turn"]


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
