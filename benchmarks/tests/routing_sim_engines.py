"""Engines step by step, beside the simulated one that jumps, and sessions to run on both."""

import heapq
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from benchmarks.routing_sim.costs import EngineCosts
from benchmarks.routing_sim.engine import IDLE, Job, Replica
from benchmarks.routing_sim.scenario import BlockKeys, Session, Turn

# Powers of two: sums of them are exact, so equal times are equal numbers.
EXACT = EngineCosts(
    base_step_s=2**-7,
    per_sequence_s=2**-12,
    per_context_token_s=2**-20,
    prefill_tokens_per_s=2.0**14,
    per_prefill_context_s2=2**-30,
    token_budget=16,
    max_num_seqs=4,
    num_kv_blocks=48,
    block_size=4,
)


def single(number, group, prompt, output_len, arrival_s=0.0):
    """A session of one turn, whose output is nobody else's."""
    own = range(10_000 * (number + 1), 10_000 * (number + 1) + output_len)
    text = np.array([*prompt, *own], np.int32)
    return Session(number, group, text, (Turn(len(prompt), output_len),), arrival_s)


# An engine as vLLM has it, one block and one step at a time.


class Block:
    """A block that requests hold, or that can be found again."""

    def __init__(self):
        self.key = self.copy_of = None
        self.refs = 1


class NaiveCache:
    """Every block by itself."""

    def __init__(self, num_blocks):
        self.plain = num_blocks
        self.found = {}  # by key
        self.queue = []  # keyed, but held by nobody
        self.copies = []

    def free(self):
        return self.plain + len(self.queue)

    def match(self, keys, limit):
        blocks = []
        for key in keys[:limit]:
            if key not in self.found:
                break
            blocks.append(self.found[key])
        return blocks

    def hold(self, block):
        if not block.refs:
            self.queue.remove(block)
        block.refs += 1

    def take(self):
        if self.plain:
            self.plain -= 1
        else:
            del self.found[self.queue.pop(0).key]
        return Block()

    def register(self, block, key):
        other = self.found.get(key)
        if other is not None and other.refs:
            block.copy_of = key
            self.copies.append(block)
            return
        if other is not None:
            self.queue.remove(other)
            self.plain += 1
        block.key = key
        self.found[key] = block

    def drop(self, block):
        block.refs -= 1
        if block.refs:
            return
        if block in self.copies:
            self.copies.remove(block)
        copy = next((one for one in self.copies if one.copy_of == block.key), None)
        if block.key is None or copy is not None:
            self.plain += 1
        else:
            self.queue.append(block)
        if block.key is not None and copy is not None:
            self.copies.remove(copy)
            copy.key, copy.copy_of = block.key, None
            self.found[block.key] = copy


class SteppedRequest:
    """A request of an engine that goes step by step."""

    def __init__(self, name, session, keys, prompt_len, output_len, salt=0):
        self.name = name
        self.session = session
        self.salt = salt
        self.keys = [(salt, key) for key in keys]
        self.prompt_len, self.output_len = prompt_len, output_len
        self.done = self.computed = self.preemptions = self.registered = 0
        self.blocks = []
        self.hits = None
        self.decodes = False

    def target(self):
        return self.prompt_len + self.done


class NaiveEngine:
    """vLLM's rules, written down once more."""

    def __init__(self, costs):
        self.costs = costs
        self.cache = NaiveCache(costs.num_kv_blocks)
        self.running, self.waiting = [], []
        self.steps = 0

    def add(self, request):
        self.waiting.append(request)

    def num_requests(self):
        return len(self.running) + len(self.waiting)

    def num_free(self):
        return self.cache.free()

    def take(self, request, count):
        """Blocks for ``count`` more tokens; False if there are not enough."""
        size = self.costs.block_size
        need = -(-(request.computed + count) // size) - len(request.blocks)
        if need > self.cache.free():
            return False
        request.blocks += [self.cache.take() for _ in range(need)]
        return True

    def register(self, request, tokens):
        for index in range(request.registered, tokens // self.costs.block_size):
            self.cache.register(request.blocks[index], request.keys[index])
            request.registered = index + 1

    def release(self, request):
        for block in reversed(request.blocks):
            self.cache.drop(block)
        request.blocks, request.registered = [], 0

    def preempt(self):
        victim = self.running.pop()
        self.release(victim)
        victim.computed = 0
        victim.decodes = False
        victim.preemptions += 1
        self.waiting.insert(0, victim)
        return victim

    def step(self):
        """Runs one step; returns its seconds and the requests that ended with it."""
        costs = self.costs
        budget = costs.token_budget
        scheduled = []
        preempted = False
        index = 0
        while index < len(self.running) and budget:
            request = self.running[index]
            count = min(request.target() - request.computed, budget)
            while not self.take(request, count):
                preempted = True
                if self.preempt() is request:
                    break
            else:
                scheduled.append((request, count))
                self.register(request, request.computed + count)
                budget -= count
                index += 1
                continue
            break
        while not preempted and self.waiting and budget:
            if len(self.running) >= costs.max_num_seqs:
                break
            request = self.waiting[0]
            size = costs.block_size
            found = self.cache.match(request.keys, (request.target() - 1) // size)
            idle = sum(not block.refs for block in found)
            if -(-request.target() // size) - len(found) + idle > self.cache.free():
                break
            self.running.append(self.waiting.pop(0))
            for block in found:
                self.cache.hold(block)
            request.blocks = list(found)
            request.registered = len(found)
            request.computed = len(found) * size
            if request.hits is None:
                request.hits = request.computed
            count = min(request.target() - request.computed, budget)
            assert self.take(request, count)
            self.register(request, request.computed + count)
            scheduled.append((request, count))
            budget -= count
        seconds = costs.base_step_s
        ended = []
        assert scheduled
        for request, count in scheduled:
            seconds += seconds_of(costs, request.decodes, request.computed, count)
            request.computed += count
            if request.computed == request.target():
                request.done += 1
                request.decodes = True
                if request.done == request.output_len:
                    ended.append(request)
        for request in ended:
            self.running.remove(request)
            self.release(request)
        self.steps += 1
        return seconds, ended


def seconds_of(costs, decodes, computed, count):
    """What one request adds to a step."""
    if decodes:
        return costs.per_sequence_s + costs.per_context_token_s * computed
    pairs = sum(range(computed, computed + count))
    return count / costs.prefill_tokens_per_s + costs.per_prefill_context_s2 * pairs


@dataclass
class Outcome:
    """What one engine made of some sessions."""

    finished_s: dict
    hits: dict
    preemptions: int
    steps: int


def run_naively(costs, sessions, pauses=()):
    """Sessions on one naive engine."""
    return run_by_steps(NaiveEngine(costs), costs, sessions, pauses)


def run_by_steps(engine, costs, sessions, pauses=()):
    """Sessions on one engine; ``pauses`` are (at, until), after which salts change."""
    keys = BlockKeys(costs.block_size)
    chains = [keys.of(session.tokens) for session in sessions]
    arrivals = [(session.arrival_s, index, 0) for index, session in enumerate(sessions)]
    heapq.heapify(arrivals)
    outcome = Outcome({}, {}, 0, 0)
    now = 0.0
    while arrivals or engine.num_requests():
        if not engine.num_requests():
            now = max(now, arrivals[0][0])
        while held_back := [until for at, until in pauses if at <= now < until]:
            now = max(held_back)
        while arrivals and arrivals[0][0] <= now:
            at, index, number = heapq.heappop(arrivals)
            turn = sessions[index].turns[number]
            salt = sum(begin <= at for begin, _ in pauses)
            name = (index, number)
            lengths = (turn.prompt_len, turn.output_len)
            engine.add(SteppedRequest(name, sessions[index], chains[index], *lengths, salt))
        seconds, ended = engine.step()
        now += seconds
        for request in ended:
            index, number = request.name
            outcome.finished_s[request.name] = now
            outcome.hits[request.name] = request.hits
            outcome.preemptions += request.preemptions
            if number + 1 < len(sessions[index].turns):
                gap = sessions[index].turns[number].tool_s
                heapq.heappush(arrivals, (now + gap, index, number + 1))
    assert engine.num_free() == costs.num_kv_blocks
    outcome.steps = engine.steps
    return outcome


def run_jumping(costs, sessions, pauses=()):
    """The same on the engine that jumps."""
    keys = BlockKeys(costs.block_size)
    chains = [keys.of(session.tokens) for session in sessions]
    replica = Replica(costs)
    events = [(session.arrival_s, index, 0) for index, session in enumerate(sessions)]
    events += [(at, -1, until) for at, until in pauses]
    heapq.heapify(events)
    outcome = Outcome({}, {}, 0, 0)
    salt = 0
    while events or replica.end != IDLE:
        now = min(replica.end, events[0][0] if events else IDLE)
        while events and events[0][0] <= now:
            _, index, number = heapq.heappop(events)
            if index < 0:
                salt += 1
                replica.pause(now, number)
                continue
            turn = sessions[index].turns[number]
            job = Job((index, number), chains[index], turn.prompt_len, turn.output_len, salt)
            replica.add(job, now)
        figures = replica.figures(now)
        assert figures.num_running + figures.num_waiting == replica.num_in_flight
        assert 0 <= figures.kv_cache_usage <= 1
        if replica.stepping and now < replica.end:
            continue
        for job in replica.settle() if replica.stepping else ():
            index, number = job.owner
            outcome.finished_s[job.owner] = now
            outcome.hits[job.owner] = job.hit_tokens
            outcome.preemptions += job.preemptions
            if number + 1 < len(sessions[index].turns):
                gap = sessions[index].turns[number].tool_s
                heapq.heappush(events, (now + gap, index, number + 1))
        if not (events and events[0][0] <= now):
            replica.begin(now)
        else:
            replica.end = now
    assert replica.cache.num_free == costs.num_kv_blocks
    outcome.steps = replica.num_steps
    return outcome


@st.composite
def some_sessions(draw, full_prompts=True):
    """A few sessions with common beginnings; prompts fill whole blocks of four if they may."""
    sessions = []
    fresh = iter(range(1000, 1_000_000))
    for number in range(draw(st.integers(1, 8))):
        group = draw(st.integers(0, 2))
        common = draw(st.integers(0, 40))
        tokens = [group * 100 + position for position in range(common)]
        turns = []
        for _ in range(draw(st.integers(1, 3))):
            own = draw(st.integers(0 if tokens else 1, 12))
            if not full_prompts and (len(tokens) + own) % 4 == 0:
                own += 1
            output = draw(st.integers(1, 30))
            if len(tokens) + own + output > 180:
                break
            tokens += [next(fresh) for _ in range(own)]
            turns.append(Turn(len(tokens), output, draw(st.integers(0, 8)) / 64))
            tokens += [next(fresh) for _ in range(output)]
        arrival_s = draw(st.integers(0, 64)) / 64
        text = np.array(tokens, np.int32)
        sessions.append(Session(number, group, text, tuple(turns), arrival_s))
    return sessions


def some_pauses():
    begins = st.lists(st.integers(1, 200), max_size=3, unique=True).map(sorted)
    return begins.map(lambda all_: [(at / 64, at / 64 + 0.125) for at in all_[::2]])
