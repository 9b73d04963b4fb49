"""``Pacer`` keeps its inequality in whatever order rollouts begin, end, fail and are trained."""

import asyncio
import itertools
import pickle
import random  # noqa: TID251  each is seeded
import threading
import time
from functools import partial

import pytest

from torchrl_vllm_sync.errors import PacingError, PacingTimeoutError, UnsupportedArgumentError
from torchrl_vllm_sync.rl.pacing import Ledger, Pacer


class Run:
    """Collectors, a buffer, and a trainer that pushes after each batch, in any order of events."""

    def __init__(self, seed, *, staleness, batch, rows, owners=3, ledger=Ledger):
        self.random, self.ledger = random.Random(seed), ledger(staleness, batch)
        self.batch, self.owners = batch, [f"collector {one}" for one in range(owners)]
        for owner in self.owners:
            self.ledger.join(owner, rows)
        self.version, self.buffer, self.trained, self.ages = 0, [], [], []
        self.held = {owner: [] for owner in self.owners}  # tickets with the version at admission
        self.dropped, self.behind, self.fullest = set(), [], 0
        self.num_written, self.num_silent_deaths = 0, 0

    dies_silently = False  # between writing its rows and saying so
    empties = False  # the trainer its buffer, which then counts anew

    def admit(self, owner):
        self.take(owner, self.ledger.admit(owner))

    def take(self, owner, ticket):
        if ticket:
            assert min(ticket.rows) >= ticket.oldest
            self.held[owner].append([ticket.number, list(ticket.rows), self.version])
            num_admitted = self.ledger.num_admitted * self.ledger.num_rows
            self.behind.append(num_admitted - self.ledger.num_trained)

    def drop(self, owner):
        """A filter drops some rows, whose places go to others, which are sampled now."""
        if self.held[owner]:
            held = self.random.choice(self.held[owner])
            gone = self.random.sample(held[1], self.random.randint(1, len(held[1])))
            fresh = self.ledger.replace(owner, held[0], gone)
            held[1] = [dict(zip(gone, fresh, strict=True)).get(one, one) for one in held[1]]
            self.dropped |= {*gone}

    def fail(self, owner):
        self.ledger.leave(owner)
        self.held[owner].clear()

    def deliver(self, owner):
        for held in self.held[owner]:
            turn = self.ledger.turn(owner, held[0])
            if turn is not True:
                self.take(owner, turn)
            else:
                if self.ledger.write(owner, held[0], self.num_written):
                    self.buffer += [(row, held[2]) for row in held[1]]
                    self.num_written += len(held[1])
                    if self.dies_silently and self.random.random() < 0.3:
                        self.num_silent_deaths += 1
                        self.fail(owner)
                        return
                self.held[owner].remove(held)
                self.ledger.deliver(owner, held[0])
                return

    def train(self, _):
        if len(self.buffer) >= self.batch:
            self.fullest = max(self.fullest, len(self.buffer))
            self.random.shuffle(self.buffer)
            rows, self.buffer = self.buffer[: self.batch], self.buffer[self.batch :]
            self.ages += [self.version - version for _, version in rows]
            self.trained += [row for row, _ in rows]
            self.version += self.random.random() < 0.8  # not each batch is followed by a push
            self.num_written *= not self.empties
            self.ledger.train(self.batch)

    def go(self, steps, *, failing=True):
        events = [self.admit, self.deliver, self.train]
        events += [self.drop, self.fail] if failing else []
        for _ in range(steps):
            self.random.choice(events)(self.random.choice(self.owners))
        for _ in range(100 * self.ledger.num_admitted):  # and to the end of what has begun
            if not (self.ledger._returned or any(self.held.values())):
                break
            owner = self.random.choice(self.owners)
            for event in (
                (self.admit, self.deliver, self.train)
                if self.ledger._returned
                else (
                    self.deliver,
                    self.train,
                )
            ):
                event(owner)
        while len(self.buffer) >= self.batch:
            self.train(None)


@pytest.mark.parametrize("seed", range(60))
def test_no_order_of_events_breaks_the_bound_or_loses_a_row(seed):
    staleness, rows = seed % 5, random.Random(seed).choice([1, 2, 4, 8])
    run = Run(seed, staleness=staleness, batch=8, rows=rows)
    run.go(2000)
    assert len(run.trained) >= 40
    assert max(run.ages) <= staleness
    assert max(run.behind) <= (staleness + 1) * 8
    assert run.fullest == 8
    left = [row for row, _ in run.buffer]
    assert sorted([*run.trained, *left, *run.dropped]) == [*range(run.ledger.num_asked)]


class Forgetful(Ledger):
    """Has returned rows written again."""

    def write(self, owner, number, count):
        return True


def dying_silently(seed, ledger=Ledger):
    run = Run(seed, staleness=seed % 3, batch=8, rows=[2, 4, 8][seed % 3], ledger=ledger)
    run.dies_silently, run.empties = True, seed % 2 == 0
    run.go(1000, failing=False)
    return run


def test_rows_of_one_that_died_before_it_said_that_they_are_written_come_once():
    runs = [dying_silently(seed) for seed in range(20)]
    for run in runs:
        rows = [*run.trained, *(row for row, _ in run.buffer)]
        assert sorted(rows) == [*range(run.ledger.num_asked)]
        assert len(run.trained) >= 40
        assert max(run.ages) <= run.ledger.max_staleness
    assert sum(run.num_silent_deaths for run in runs) > 100


def test_they_come_twice_if_nobody_counts():
    """The negative control."""
    with pytest.raises(PacingError, match="rows were trained, where only"):
        [dying_silently(seed, Forgetful) for seed in range(20)]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_without_failures_rows_are_trained_in_the_order_of_the_data_set(staleness):
    run = Run(staleness, staleness=staleness, batch=8, rows=4)
    run.go(3000, failing=False)
    batches = [sorted(run.trained[at : at + 8]) for at in range(0, len(run.trained), 8)]
    assert batches == [[*range(at, at + 8)] for at in range(0, len(run.trained), 8)]
    assert max(run.ages) == staleness  # it is reached, too
    assert max(run.behind) == (staleness + 1) * 8


class Unpaced(Ledger):
    """Admits whenever it is asked."""

    def admit(self, owner):
        self.num_trained, trained = self.num_asked + 100 * self.batch_size, self.num_trained
        try:
            return super().admit(owner)
        finally:
            self.num_trained = trained


class Disordered(Ledger):
    """Hands on what ends first, first."""

    def turn(self, owner, number):
        return True

    def deliver(self, owner, number):
        self.num_delivered, delivered = number, self.num_delivered
        super().deliver(owner, number)
        self.num_delivered = delivered + 1


@pytest.mark.parametrize("ledger", [Unpaced, Disordered])
def test_the_bound_is_broken_without_pace_or_order(ledger):
    """The negative control: both parts of the rule are needed."""
    oldest = []
    for seed in range(10):
        run = Run(seed, staleness=1, batch=8, rows=2, owners=6, ledger=ledger)
        run.go(2000, failing=False)
        oldest.append(max(run.ages))
    assert max(oldest) > 1


def test_any_bound_and_any_part_of_a_batch_get_on():
    for staleness, rows, parts in itertools.product(range(4), range(1, 6), range(1, 6)):
        ledger, held = Ledger(staleness, parts * rows), []
        ledger.join("a", rows)
        for _ in range(10):
            while ticket := ledger.admit("a"):
                held.append(ticket.number)
            assert len(held) == (staleness + 1) * parts
            for _ in range(parts):
                assert ledger.turn("a", held[0])
                ledger.deliver("a", held.pop(0))
            assert not held or ledger.turn("a", held[0]) is None
            ledger.train(parts * rows)


def test_what_a_collector_held_goes_to_the_next_oldest_first():
    ledger = Ledger(2, 4)
    for owner in "ab":
        ledger.join(owner, 4)
    first, second, third = ledger.admit("a"), ledger.admit("b"), ledger.admit("a")
    assert ledger.admit("b") is None
    assert ledger.replace("a", 0, [1, 3]) == (12, 13)
    ledger.join("a", 4)  # it began anew
    again = ledger.admit("b")
    assert (again.number, again.rows) == (0, (0, 12, 2, 13))
    assert first.oldest == second.oldest == again.oldest == 0
    assert ledger.admit("a").rows == third.rows
    for call in (ledger.turn, ledger.deliver):
        with pytest.raises(PacingError, match="batch 0 is not a's, but held by b"):
            call("a", 0)
    with pytest.raises(PacingError, match="batch 1 was handed on before 0"):
        ledger.deliver("b", 1)
    with pytest.raises(PacingError, match="13 rows were trained, where only 12 were there"):
        ledger.train(13)
    assert (ledger.num_delivered, ledger.num_trained) == (0, 0)


def test_batches_of_other_sizes_are_refused():
    ledger = Ledger(2, 8)
    ledger.join("a", 4)
    with pytest.raises(UnsupportedArgumentError, match="of 8 rows, where others' have 4"):
        ledger.join("b", 8)
    with pytest.raises(UnsupportedArgumentError, match="3 rows are no part of batch_size=8"):
        Ledger(2, 8).join("a", 3)


def test_who_waits_is_woken_and_not_for_ever():
    pacer, admitted = Pacer(0, 4), []
    pacer._call("join", "a", 4)
    ticket = pacer._call("admit", "a", waits=True)
    waiting = threading.Thread(
        target=lambda: admitted.append(pacer._call("admit", "a", waits=True))
    )
    waiting.start()
    pacer._call("deliver", "a", ticket.number)
    time.sleep(0.05)
    assert not admitted
    pacer.trained(4)
    waiting.join(20)
    assert admitted[0].rows == (4, 5, 6, 7)
    short = Pacer(0, 4, timeout_s=0.05)
    short._call("join", "a", 4)
    short._call("admit", "a")
    told = r"no rows were admitted within 0.05 s: 4 rows admitted, 0 trained .*batch 0.*held by a"
    with pytest.raises(PacingTimeoutError, match=told) as caught:
        short._call("admit", "a", waits=True)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_trainer_is_woken_when_its_batch_is_there():
    async def run():
        ledger = Ledger(1, 8)
        ledger.join("a", 4)
        for _ in range(2):
            waiting = asyncio.create_task(ledger.call("ready", (), 60.0))
            for _ in range(2):
                await asyncio.sleep(0)
                assert not waiting.done()
                number = ledger.admit("a").number
                assert ledger.turn("a", number)
                ledger.deliver("a", number)
            assert await waiting
            ledger.train(4)  # the others of the batch are there, too
            assert ledger.ready()
            ledger.train(4)
            assert ledger.ready() is None

    asyncio.run(run())
    pacer = Pacer(0, 4, timeout_s=0.05)
    pacer._call("join", "a", 4)
    pacer._call("admit", "a")
    told = "no batch was complete within 0.05 s: 4 rows admitted, 0 trained .*batch 0.*held by a"
    with pytest.raises(PacingTimeoutError, match=told):
        pacer.wait_for_batch()
    pacer.leave("a")
    with pytest.raises(PacingTimeoutError, match="held by nobody; no collector is there, or all"):
        pacer.wait_for_batch()


def test_what_a_dead_collector_waited_for_goes_to_others():
    """Its call outlives it, in the actor that keeps the books."""

    async def run(name):
        ledger = Ledger(0, 4)
        for owner in ("dead", "other"):
            ledger.join(owner, 4)
        ticket = ledger.admit("other")
        late = asyncio.create_task(ledger.call("admit", ("dead",), 60.0))
        await asyncio.sleep(0)
        (ledger.leave if name == "leave" else partial(ledger.join, num_rows=4))("dead")
        assert ledger.turn("other", ticket.number)
        ledger.deliver("other", ticket.number)
        ledger.train(4)
        with pytest.raises(PacingError, match="dead has left"):
            await late
        if name == "leave":
            with pytest.raises(PacingError, match="dead has left"):
                await ledger.call("admit", ("dead",), None)
        return await ledger.call("admit", ("other",), 1.0)

    for name in ("leave", "join anew"):
        assert asyncio.run(run(name)).number == 1


def test_a_save_that_is_given_up_leaves_nothing_frozen():
    async def run():
        ledger = Ledger(0, 4)
        ledger.join("a", 4)
        number = ledger.admit("a").number
        assert ledger.turn("a", number)
        ledger.freeze()
        waiting = asyncio.create_task(ledger.call("settled", (), 60.0))
        await asyncio.sleep(0)
        ledger.thaw()
        assert await waiting
        ledger.deliver("a", number)
        ledger.train(4)
        assert ledger.turn("a", ledger.admit("a").number)

    asyncio.run(run())


def test_what_was_written_is_part_of_the_state():
    ledger, other = Ledger(1, 4), Ledger(1, 4)
    for one in (ledger, other):
        one.join("a", 4)
    number = ledger.admit("a").number
    assert ledger.turn("a", number)
    assert ledger.write("a", number, 8)
    ledger.leave("a")  # it died, and its rows are in the buffer that is saved
    other.load_state_dict(ledger.state_dict())
    assert other.admit("a").number == number
    assert not other.write("a", number, 12)


def test_arguments_out_of_range_are_refused():
    for wrong in (-1, 0.5, None, True):
        with pytest.raises(UnsupportedArgumentError, match="max_staleness"):
            Pacer(wrong, 8)
    with pytest.raises(UnsupportedArgumentError, match="batch_size must be at least 1"):
        Pacer(0, 0)
    with pytest.raises(UnsupportedArgumentError, match="timeout_s"):
        Pacer(0, 1, timeout_s=float("inf"))
    with pytest.raises(UnsupportedArgumentError, match="shared=True"):
        pickle.dumps(Pacer(0, 1))


def test_a_wait_that_is_cancelled_takes_nothing():
    async def scenario():
        ledger = Ledger(0, 4)
        ledger.join("a", 4)
        ledger.admit("a")
        waiting = asyncio.create_task(ledger.call("admit", ("a",), 20.0))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        ledger.deliver("a", 0)
        ledger.train(4)
        return ledger.admit("a")

    assert asyncio.run(scenario()).number == 1
