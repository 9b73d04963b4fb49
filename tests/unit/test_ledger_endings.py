"""However requests end and whatever becomes of their replicas, the ledger's counts come to zero."""

import asyncio
import contextlib
import random  # noqa: TID251 - seeded
import threading
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import NoReplicaAvailableError, SyncError
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadTracker

SERVING, FAILED = ReplicaState.SERVING, ReplicaState.FAILED
STRATEGIES = ["prefix-aware", "requests", "kv-cache", "round-robin"]


class Service:
    """A changing set of replicas; ids are never used again."""

    def __init__(self, num=3):
        self.load = LoadTracker([], state=SERVING)
        self.actors, self.num_ever = [], 0
        for _ in range(num):
            self.join()

    def join(self):
        replica_id = f"r{self.num_ever}"
        self.num_ever += 1
        self.load.add(replica_id, SERVING)
        self.load.describe(replica_id, block_size=16, num_kv_blocks=200)
        self.actors.append(object())

    def leave(self, replica_id):
        with self.load.lock:
            if replica_id in self.load.replica_ids:
                self.actors.pop(self.load.replica_ids.index(replica_id))
                self.load.remove(replica_id)

    def mark(self, replica_id, state):
        with self.load.lock:
            if replica_id in self.load.replica_ids:
                self.load.mark(replica_id, state)

    def everything(self):
        """All that is counted, of replicas that left too."""
        return [*self.load._snapshots.values(), *self.load._removed.values()]

    def assert_nothing_is_left(self):
        assert [(one.in_flight, one.held_tokens) for one in self.load.snapshots()] == [
            (0, 0)
        ] * len(self.actors)
        assert self.load._removed == {}
        assert self.load.total_in_flight == 0


class EndingsInAnyOrder(RuleBasedStateMachine):
    """Reservations and their ends, deaths, joins and reports, against sums kept apart."""

    def __init__(self):
        super().__init__()
        self.service = Service()
        self.load = self.service.load
        self.balancer = LoadBalancer(self.service, ["prefix-aware", "kv-cache", "requests"])
        self.running = []

    replicas = st.integers(0, 6).map("r{}".format)
    keys = st.none() | st.integers(0, 3)

    @rule(
        prompts=st.lists(st.integers(1, 400), min_size=1, max_size=6),
        session=keys, group=keys, n=st.integers(1, 5), max_tokens=st.none() | st.integers(1, 50),
        excluded=st.sets(replicas, max_size=2),
    )  # fmt: skip
    def send(self, prompts, session, group, n, max_tokens, excluded):
        params = SimpleNamespace(n=n, max_tokens=max_tokens)
        able = [one for one in self.load.snapshots() if one.state.admits_requests]
        before = [(one.in_flight, one.held_tokens) for one in self.service.everything()]
        try:
            places = self.balancer.reserve_batch(
                [[7] * length for length in prompts], exclude=excluded,
                session_id=session, group_id=group, sampling_params=[params] * len(prompts),
            )  # fmt: skip
        except NoReplicaAvailableError:
            assert {one.replica_id for one in able} <= excluded
            after = [(one.in_flight, one.held_tokens) for one in self.service.everything()]
            assert after == before
        else:
            assert not {place.replica_id for place in places} & excluded
            self.running += [(place, n) for place in places]

    @rule(
        at=st.integers(0, 99),
        lengths=st.lists(st.integers(0, 300), max_size=3),
        twice=st.booleans(),
    )
    def end(self, at, lengths, twice):
        if self.running:
            place, _ = self.running.pop(at % len(self.running))
            for _ in range(1 + twice):
                place.release([[3] * length for length in lengths])

    @rule(replica_id=replicas, state=st.sampled_from(ReplicaState))
    def mark(self, replica_id, state):
        self.service.mark(replica_id, state)

    @rule(replica_id=replicas)
    def leave(self, replica_id):
        self.service.leave(replica_id)

    @rule()
    def join(self):
        if self.service.num_ever < 7:
            self.service.join()

    @rule(
        replica_id=replicas,
        num=st.integers(0, 50),
        usage=st.floats(0, 1),
        version=st.integers(0, 3),
    )
    def report(self, replica_id, num, usage, version):
        self.load.observe(
            EngineReport(
                replica_id=replica_id, state=SERVING, num_unfinished=num, kv_cache_usage=usage,
                weight_version=version,
            )
        )  # fmt: skip

    @invariant()
    def counts_are_those_of_what_runs(self):
        samples, tokens = {}, {}
        for place, n in self.running:
            samples[place.replica_id] = samples.get(place.replica_id, 0) + n
            tokens[place.replica_id] = tokens.get(place.replica_id, 0) + place._tokens
        for one in self.service.everything():
            assert one.in_flight == samples.pop(one.replica_id, 0) >= 0
            assert one.held_tokens == tokens.get(one.replica_id, 0) >= 0
            assert one.num_elsewhere is None or one.num_elsewhere >= 0
        assert samples == {}

    def teardown(self):
        for place, _ in self.running:
            place.release()
        self.service.assert_nothing_is_left()


TestEndingsInAnyOrder = EndingsInAnyOrder.TestCase
TestEndingsInAnyOrder.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, print_blob=True
)


def watched(service, stop):
    """Looks at the ledger until ``stop`` is set; returns what must never be seen."""
    wrong = []
    while not stop.is_set():
        with service.load.lock:
            everything = service.everything()
            wrong += [one for one in everything if one.in_flight < 0 or one.held_tokens < 0]
    return wrong


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(5))
def test_threads_whose_requests_end_in_every_way_leave_nothing(strategy, seed):
    service, stop = Service(4), threading.Event()
    balancer = LoadBalancer(service, strategy, seed=seed)
    failures = []

    def work(chance):
        for step in range(60):
            ending = chance.choice(["answer", "error", "nothing", "twice"])
            keys = {"session_id": chance.choice([None, step % 5]), "group_id": step % 3}
            params = SimpleNamespace(n=chance.randint(1, 4), max_tokens=None)
            prompts = [[chance.randrange(9)] * chance.randrange(1, 300)] * chance.randint(1, 3)
            with contextlib.suppress(ZeroDivisionError, NoReplicaAvailableError):
                places = balancer.reserve_batch(
                    prompts, sampling_params=[params] * len(prompts), **keys
                )
                with contextlib.ExitStack() as ends:
                    for place in places:
                        ends.enter_context(place)
                    if ending == "error":
                        raise ZeroDivisionError
                    if ending in ("answer", "twice"):
                        places[0].release([[5] * chance.randrange(100)] * params.n)
                    if ending == "twice":
                        places[0].release()

    def disturb(chance):
        for _ in range(60):
            replica_id = f"r{chance.randrange(service.num_ever)}"
            what = chance.choice(["die", "recover", "leave", "join", "report"])
            if what == "leave" and len(service.actors) > 2:
                service.leave(replica_id)
            elif what == "join" and service.num_ever < 12:
                service.join()
            elif what == "report":
                service.load.observe(
                    EngineReport(replica_id=replica_id, state=SERVING, num_unfinished=3)
                )
            else:
                service.mark(replica_id, FAILED if what == "die" else SERVING)

    def guarded(function, *arguments):
        try:
            failures.extend(function(*arguments) or ())
        except (SyncError, RuntimeError, KeyError, AssertionError) as error:
            failures.append(error)

    threads = [
        threading.Thread(target=guarded, args=(work, random.Random(100 * seed + at)))
        for at in range(4)
    ]
    threads.append(threading.Thread(target=guarded, args=(disturb, random.Random(seed))))
    watcher = threading.Thread(target=guarded, args=(watched, service, stop))
    for thread in (*threads, watcher):
        thread.start()
    for thread in threads:
        thread.join(timeout=50)
    stop.set()
    watcher.join(timeout=50)
    assert failures == []
    service.assert_nothing_is_left()


@pytest.mark.parametrize("seed", range(10))
async def test_tasks_cancelled_at_any_moment_leave_nothing(seed):
    chance, service = random.Random(seed), Service(3)
    balancer = LoadBalancer(service, chance.choice(STRATEGIES))

    async def request(ending, steps):
        async with balancer.reserve([1, 2, 3] * 50, group_id=steps % 4) as place:
            for _ in range(steps):
                await asyncio.sleep(0)
            if ending == "error":
                raise ZeroDivisionError
            if ending == "death":
                service.mark(place.replica_id, FAILED)
                service.leave(place.replica_id)
                service.join()
            if ending == "answer":
                place.release([[1] * 20])
            await asyncio.sleep(0)

    endings = ["answer", "error", "death", "nothing"] * 10
    tasks = [asyncio.create_task(request(one, chance.randrange(8))) for one in endings]
    for _ in range(5):
        await asyncio.sleep(0)
        for task in chance.sample(tasks, 3):
            task.cancel()
        assert all(one.in_flight >= 0 and one.held_tokens >= 0 for one in service.everything())
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    kinds = {type(outcome) for outcome in outcomes}
    assert kinds <= {type(None), ZeroDivisionError, asyncio.CancelledError}
    assert asyncio.CancelledError in kinds
    service.assert_nothing_is_left()


def test_more_than_was_reserved_is_not_given_back():
    load = LoadTracker(["0"])
    load.reserve("0", 2, tokens=10)
    for num_samples, tokens in ((3, 0), (1, 11)):
        with pytest.raises(RuntimeError, match=r"must follow a reserve, .* replica 0 with 2"):
            load.release("0", num_samples, tokens)
    assert load.in_flight("0") == 2
    load.release("0", 2, tokens=10)
