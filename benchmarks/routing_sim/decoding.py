"""The decoding half of a simulated engine: one token for each such request in every step.

Between two events a batch that only decodes does the same thing in every step, so the engine goes
through all those steps at once: their time has a closed form, and so has the number of blocks that
they fill.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.routing_sim.costs import EngineCosts
    from benchmarks.routing_sim.job import Job

__all__ = ["Decoding"]


class Decoding:
    """The requests that decode, and what the next steps take of them.

    Args:
        costs: What steps cost.

    Attributes:
        num_steps: Steps of the engine since the start, also those in which nobody decodes.
        count: Requests that decode.
        context: Tokens before those that the next step computes, of all of them.
    """

    def __init__(self, costs: EngineCosts) -> None:
        self.costs = costs
        self.num_steps = 0
        self.count = 0
        self.context = 0
        self._finishes: list[tuple[int, int, Job]] = []
        self._residues = [0] * costs.block_size  # who needs a block when the step has this residue

    def join(self, job: Job) -> None:
        """A request whose prompt is done decodes from the next step on."""
        job.finish_step = self.num_steps + job.output_len - job.done
        heapq.heappush(self._finishes, (job.finish_step, job.order, job))
        self.count += 1
        self.context += job.computed
        self._residues[(self.num_steps - job.computed) % self.costs.block_size] += 1

    def leave(self, job: Job) -> None:
        """A request stops decoding; its tokens are counted up to the last step."""
        tokens = self.tokens(job)
        self.count -= 1
        self.context -= tokens
        self._residues[(self.num_steps - tokens) % self.costs.block_size] -= 1
        job.done = job.output_len - (job.finish_step - self.num_steps)
        job.computed = tokens
        job.finish_step = 0

    def advance(self, steps: int) -> list[Job]:
        """So many steps are over; returns the requests whose last token is out."""
        self.num_steps += steps
        self.context += steps * self.count
        ended = []
        finishes = self._finishes
        while finishes and finishes[0][0] <= self.num_steps:
            _, order, job = heapq.heappop(finishes)
            if job.order == order and job.finish_step:
                ended.append(job)
        return ended

    def tokens(self, job: Job) -> int:
        """Tokens of a decoding request whose keys and values exist."""
        return job.prompt_len + job.output_len - 1 - (job.finish_step - self.num_steps)

    def needs_block(self, job: Job) -> bool:
        """Whether the next step puts a request's token into a new block."""
        return bool(job.finish_step) and not self.tokens(job) % self.costs.block_size

    @property
    def blocks_now(self) -> int:
        """New blocks of the next step."""
        return self._residues[self.num_steps % self.costs.block_size]

    def blocks(self, steps: int) -> int:
        """New blocks of that many steps."""
        size = self.costs.block_size
        rounds, rest = divmod(steps, size)
        first = self.num_steps % size
        residues = self._residues
        if first + rest <= size:
            more = sum(residues[first : first + rest])
        else:
            more = sum(residues[first:]) + sum(residues[: first + rest - size])
        return rounds * self.count + more

    def steps_alike(self, free_blocks: int) -> int:
        """Steps until a request ends or these blocks run out."""
        finishes = self._finishes
        while True:
            step, order, job = finishes[0]
            if job.order == order and job.finish_step == step:
                break
            heapq.heappop(finishes)
        steps = step - self.num_steps
        size = self.costs.block_size
        if (steps // size + 1) * self.count <= free_blocks:
            return steps
        rounds = free_blocks // self.count
        rest = free_blocks - rounds * self.count
        possible = rounds * size
        residue = self.num_steps % size
        while possible < steps and self._residues[residue] <= rest:
            rest -= self._residues[residue]
            residue = (residue + 1) % size
            possible += 1
        return min(steps, possible)

    def seconds(self, steps: int) -> float:
        """Seconds of the next steps, apart from prompts."""
        costs = self.costs
        count = self.count
        return steps * (
            costs.base_step_s
            + costs.per_sequence_s * count
            + costs.per_context_token_s * (self.context + count * (steps - 1) / 2)
        )

    def steps_within(self, seconds: float) -> int:
        """Whole steps within that time, by the inverse of the closed form."""
        if seconds <= 0:
            return 0
        costs = self.costs
        growth = costs.per_context_token_s * self.count
        first = (
            costs.base_step_s
            + costs.per_sequence_s * self.count
            + costs.per_context_token_s * self.context
        )
        if growth == 0:
            steps = int(seconds / first)
        else:
            linear = first - growth / 2
            steps = int((math.sqrt(linear * linear + 2 * growth * seconds) - linear) / growth)
        while self.seconds(steps + 1) <= seconds:
            steps += 1
        while steps and self.seconds(steps) > seconds:
            steps -= 1
        return steps
