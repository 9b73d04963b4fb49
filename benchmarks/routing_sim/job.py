"""One request inside a simulated engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.routing_sim.cache import Holding

__all__ = ["Job"]


class Job:
    """One request inside an engine.

    Attributes:
        owner: Whatever the caller wants to find again.
        keys: Chained keys of all full blocks of prompt and output.
        prompt_len: Tokens of the prompt.
        output_len: Tokens to generate, at least 1.
        salt: Prefixes are shared within one salt.
        hit_tokens: Prompt tokens found in the cache when it first started; None before.
        preemptions: Times that it was preempted.
    """

    __slots__ = (
        "blocks",
        "computed",
        "done",
        "finish_step",
        "hit_tokens",
        "holding",
        "keys",
        "order",
        "output_len",
        "owner",
        "preemptions",
        "prompt_len",
        "salt",
    )

    def __init__(
        self, owner: object, keys: Sequence[int], prompt_len: int, output_len: int, salt: int = 0
    ) -> None:
        self.owner = owner
        self.keys = keys
        self.prompt_len = prompt_len
        self.output_len = output_len
        self.salt = salt
        self.hit_tokens: int | None = None
        self.preemptions = 0
        self.done = 0  # tokens generated; of a decoding job, when its decoding began
        self.computed = 0  # tokens whose keys and values exist; likewise
        self.blocks = 0  # blocks that these fill, the last one partly
        self.finish_step = 0  # the engine's count of steps when its last token is out; 0: prefills
        self.order = 0  # of admission; a new one each time
        self.holding: Holding | None = None
