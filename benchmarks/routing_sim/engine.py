"""One simulated engine: vLLM's scheduler over a cost of steps, many steps at a time.

The rules are those of vLLM 0.32 (``v1/core/sched/scheduler.py``) with chunked prefill and FCFS:

* In a step every decoding request computes one token; what is left of the token budget goes to
  prompts, in order of arrival. The chunk that exhausts the budget is the last one of the step.
* A waiting request starts if its whole prompt fits into the free blocks and the batch has room.
  While the head of the queue cannot start, nobody behind it does.
* If a running request finds no block, the one that started last is preempted: it frees its blocks,
  goes to the head of the queue, and computes its prompt and what it had generated again, apart from
  what the cache still has. In such a step nothing starts.
* The last token of a prompt is always computed.

Steps between two events in which requests only decode are all alike, and taken at once
(:class:`Decoding`).

What is simplified: a step's effects appear when it ends (vLLM can schedule a step ahead), outputs
have the length the trace says, and there is neither speculation nor sliding-window attention.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import TYPE_CHECKING

from benchmarks.routing_sim.cache import PrefixCache
from benchmarks.routing_sim.policies import EngineFigures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.routing_sim.cache import Holding
    from benchmarks.routing_sim.costs import EngineCosts

IDLE = math.inf
"""When the step of an engine without requests ends."""


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


class Decoding:
    """The requests that decode, and what the next steps take of them.

    Between two events a batch that only decodes does the same thing in every step, so the engine
    goes through all those steps at once: their time has a closed form, and so has the number of
    blocks that they fill.

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


class Replica:
    """An engine, driven from event to event.

    The caller alternates :meth:`begin`, which starts a step or a run of equal steps, and
    :meth:`settle` at :attr:`end`, which returns the requests that have ended. Between the two
    :meth:`add`, :meth:`pause` and :meth:`figures` may be called; the first two may bring
    :attr:`end` forward, to the end of the step under way.

    Args:
        costs: What steps cost and what fits.

    Attributes:
        end: When the present step, or run of steps, ends; :data:`IDLE` if there is none.
        stepping: Between :meth:`begin` and :meth:`settle`.
        paused_until: No step starts before; seconds.
        version: Of the weights, as :meth:`figures` tells it.
        num_preemptions: Since the start.
        hit_tokens: Prompt tokens found in the cache by requests that started.
        busy_s: Time in steps.
    """

    def __init__(self, costs: EngineCosts) -> None:
        self.costs = costs
        self.cache = PrefixCache(costs.num_kv_blocks)
        self.end = IDLE
        self.stepping = False
        self.paused_until = -math.inf
        self.version = 0
        self.num_preemptions = 0
        self.hit_tokens = 0
        self.busy_s = 0.0
        self._waiting: deque[Job] = deque()
        self._running: dict[Job, None] = {}  # in order of admission
        self._partial: Job | None = None  # the one whose prompt is not done yet; runs last
        self._decoding = Decoding(costs)
        self._admitted = 0
        self._begun = 0.0
        self._planned = 0  # steps until end
        self._chunks: list[tuple[Job, int]] = []
        self._first_need = 0  # blocks of the first planned step, taken already
        self._blocked = False  # whoever joins the queue now cannot start before end anyway
        self._reset = False

    @property
    def num_steps(self) -> int:
        """Steps since the start."""
        return self._decoding.num_steps

    @property
    def num_in_flight(self) -> int:
        """Requests that run or wait."""
        return len(self._running) + len(self._waiting)

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by requests when the present run of steps began."""
        return self.cache.num_used

    def jobs(self) -> list[Job]:
        """Every request that runs or waits."""
        return [*self._running, *self._waiting]

    def add(self, job: Job, now: float) -> None:
        """Queues a request.

        Raises:
            ValueError: It would not fit into the engine if it were alone.
        """
        total = job.prompt_len + job.output_len
        if -(-total // self.costs.block_size) > self.costs.num_kv_blocks:
            raise ValueError(
                f"a request of {total} tokens does not fit into {self.costs.num_kv_blocks} "
                f"blocks of {self.costs.block_size}"
            )
        self._waiting.append(job)
        if self.stepping and not self._blocked:
            self._cut(now)

    def pause(self, now: float, until: float, *, clear: bool = False) -> None:
        """Lets the step under way end and starts no other before ``until``.

        Args:
            now: The time.
            until: When the engine goes on, as if nothing had been.
            clear: The cache is emptied, and what runs is computed again.
        """
        self.paused_until = max(self.paused_until, until)
        self._reset |= clear
        if self.stepping:
            self._cut(now)

    def figures(self, now: float) -> EngineFigures:
        """What the engine would report now."""
        used = self.cache.num_used
        if self.stepping and self._planned > 1:
            done = min(self._decoding.steps_within(now - self._begun), self._planned)
            if done > 1:
                used += self._decoding.blocks(done) - self._first_need
        return EngineFigures(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            kv_cache_usage=used / self.costs.num_kv_blocks,
            weight_version=self.version,
        )

    def begin(self, now: float) -> None:
        """Starts the next step, or as many as are alike; sets :attr:`end`."""
        self._begun = now
        self._chunks = []
        self._planned = 0
        if self._reset:
            self._reset = False
            while self._running:
                self._preempt(next(reversed(self._running)))
            self.cache.forget()
        if now < self.paused_until:
            self.end = self.paused_until
            self.stepping, self._blocked = True, True
            return
        if not self._running and not self._waiting:
            self.end = IDLE
            self.stepping = False
            return
        need = self._decoding.blocks_now
        before = self.num_preemptions
        if need > self.cache.num_free:
            self._first_need = self._take_or_preempt()
        else:
            self.cache.take(need)
            self._first_need = need
        seconds = self._start_chunks(before)
        preempted = self.num_preemptions > before
        if self._chunks:
            self._planned = 1
            seconds += self._decoding.seconds(1)
        elif self._decoding.count:
            free = self.cache.num_free + self._first_need
            self._planned = 1 if preempted else self._decoding.steps_alike(free)
            seconds = self._decoding.seconds(self._planned)
        else:
            raise RuntimeError("an engine has requests, yet none of them can run")
        self.end = now + seconds
        self.stepping = True

    def settle(self) -> list[Job]:
        """Ends what :meth:`begin` started, at :attr:`end`; returns the requests that have ended."""
        self.stepping = False
        steps = self._planned
        if not steps:
            return []
        if steps > 1:
            self.cache.take(self._decoding.blocks(steps) - self._first_need)
        self.busy_s += self.end - self._begun
        ended = self._decoding.advance(steps)
        for job in ended:
            self._leave(job)
        for job, count in self._chunks:
            job.computed += count
            if job.computed < job.prompt_len + job.done:
                self._partial = job
                continue
            if job is self._partial:
                self._partial = None
            job.done += 1
            job.blocks = -(-job.computed // self.costs.block_size)
            if job.done == job.output_len:
                self._leave(job)
                ended.append(job)
            else:
                self._decoding.join(job)
        return ended

    def _start_chunks(self, preemptions_before: int) -> float:
        """Gives the rest of the step to prompts; returns the seconds they add to it."""
        costs = self.costs
        size = costs.block_size
        cache = self.cache
        budget = costs.token_budget - self._decoding.count
        self._blocked = False
        tokens = pairs = 0.0
        job = self._partial
        if job is not None:
            count = min(job.prompt_len + job.done - job.computed, budget)
            end = job.computed + count
            need = -(-end // size) - job.blocks
            if need > cache.num_free:
                self._preempt(job)
            elif count:
                pairs += count * (job.computed + (count - 1) / 2)
                tokens += count
                budget -= count
                self._take_chunk(job, need, end, count)
        if self.num_preemptions > preemptions_before:
            return 0.0
        waiting = self._waiting
        while waiting:
            if budget <= 0 or len(self._running) >= costs.max_num_seqs:
                self._blocked = True
                break
            job = waiting[0]
            target = job.prompt_len + job.done
            leaf, depth, idle = cache.match(job.salt, job.keys, (target - 1) // size)
            if -(-target // size) - depth + idle > cache.num_free:
                self._blocked = True
                break
            waiting.popleft()
            self._running[job] = None
            self._admitted += 1
            job.order = self._admitted
            job.holding = cache.hold(job.keys, leaf, depth)
            job.computed = depth * size
            job.blocks = depth
            if job.hit_tokens is None:
                job.hit_tokens = job.computed
                self.hit_tokens += job.computed
            count = min(target - job.computed, budget)
            end = job.computed + count
            pairs += count * (job.computed + (count - 1) / 2)
            tokens += count
            budget -= count
            self._take_chunk(job, -(-end // size) - depth, end, count)
        return tokens / costs.prefill_tokens_per_s + pairs * costs.per_prefill_context_s2

    def _take_chunk(self, job: Job, need: int, end: int, count: int) -> None:
        self.cache.take(need)
        assert job.holding is not None
        job.holding.private += need
        job.blocks += need
        self.cache.register(job.holding, end // self.costs.block_size)
        self._chunks.append((job, count))

    def _take_or_preempt(self) -> int:
        """Takes a block for each request that needs one, in order, and preempts from the end."""
        taken = 0
        for job in list(self._running):
            if job not in self._running:
                break
            if not self._decoding.needs_block(job):
                continue
            while not self.cache.num_free:
                victim = next(reversed(self._running))
                self._preempt(victim)
                if victim is job:
                    return taken
            self.cache.take(1)
            taken += 1
        return taken

    def _leave(self, job: Job) -> None:
        """Takes a request out of the batch and frees its blocks."""
        size = self.costs.block_size
        holding = job.holding
        assert holding is not None
        if job.finish_step:
            self._decoding.leave(job)
            holding.private += -(-job.computed // size) - job.blocks
        elif job is self._partial:
            self._partial = None
        del self._running[job]
        self.cache.register(holding, job.computed // size)
        self.cache.release(holding)
        job.holding = None

    def _preempt(self, job: Job) -> None:
        self._leave(job)
        job.computed = job.blocks = 0
        job.preemptions += 1
        self.num_preemptions += 1
        self._waiting.appendleft(job)

    def _cut(self, now: float) -> None:
        """Ends the present run with the step under way at ``now``."""
        if self._planned <= 1:
            return
        seconds = now - self._begun
        steps = max(self._decoding.steps_within(seconds), 1)
        if self._decoding.seconds(steps) < seconds:
            steps += 1
        if steps < self._planned:
            self._planned = steps
            self.end = self._begun + self._decoding.seconds(steps)
