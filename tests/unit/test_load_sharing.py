"""Several processes send to the same replicas; each knows of the others what engines report."""

import random  # noqa: TID251 - seeded

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import NoReplicaAvailableError
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadTracker

SERVING = ReplicaState.SERVING
MAX_AGE_S = 5.0  # a balancer's, for intervals of up to 5 / 3 s


class Cluster:
    """Engines that count what they hold, and processes with balancers of their own."""

    def __init__(self, num_replicas, num_processes, strategy="requests"):
        self.now, self.ids = 1000.0, [str(at) for at in range(num_replicas)]
        self.engines = dict.fromkeys(self.ids, 0)
        self.loads = [
            LoadTracker(self.ids, state=SERVING, clock=lambda: self.now)
            for _ in range(num_processes)
        ]
        self.balancers = [
            LoadBalancer([object()] * num_replicas, strategy, tracker=load, seed=at)
            for at, load in enumerate(self.loads)
        ]
        self.running = [[] for _ in range(num_processes)]

    def send(self, process, prompt=None):
        place = self.balancers[process].reserve(prompt)
        self.engines[place.replica_id] += 1
        self.running[process].append(place)
        return place.replica_id

    def finish(self, process, at=0):
        place = self.running[process].pop(at)
        self.engines[place.replica_id] -= 1
        place.release()
        return place.replica_id

    def report(self, process, replica_id):
        """The engine answers at once."""
        self.answer(process, replica_id, self.engines[replica_id], None)

    def answer(self, process, replica_id, num_unfinished, in_flight_then):
        self.loads[process].observe(
            EngineReport(replica_id=replica_id, state=SERVING, num_unfinished=num_unfinished),
            in_flight_then=in_flight_then,
        )

    def report_all(self):
        for process in range(len(self.loads)):
            for replica_id in self.ids:
                self.report(process, replica_id)

    def estimate(self, process, replica_id):
        (one,) = [one for one in self.loads[process].snapshots() if one.replica_id == replica_id]
        return one.load(self.now, MAX_AGE_S)


steps = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "finish", "ask", "make", "take", "wait"]),
        st.integers(0, 2),
        st.integers(0, 1),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_an_estimate_is_off_by_no_more_than_what_happened_since(steps):
    """What others did since the engine spoke, and what this process did around its question.

    An engine is asked, makes its report and is heard at three different times.
    """
    cluster = Cluster(2, 3)
    asked, made, since = {}, {}, {}

    def happened(process, replica_id):
        for pair, record in since.items():
            if pair[1] == replica_id:
                record["own" if pair[0] == process else "others"] += 1
        for pair, record in (*asked.items(), *made.items()):
            if pair[1] == replica_id:
                record["own" if pair[0] == process else "others"] += 1

    for what, process, at in steps:
        pair = process, str(at)
        if what == "send":
            happened(process, cluster.send(process))
        elif what == "finish" and cluster.running[process]:
            happened(process, cluster.finish(process))
        elif what == "ask" and pair not in asked and pair not in made:
            in_flight = cluster.loads[process].in_flight(pair[1])
            asked[pair] = {"in_flight": in_flight, "own": 0, "others": 0}
        elif what == "make" and pair in asked:
            record = asked.pop(pair)
            made[pair] = record | {"num": cluster.engines[pair[1]], "others": 0}
        elif what == "take" and pair in made:
            record = made.pop(pair)
            cluster.answer(*pair, record["num"], record["in_flight"])
            since[pair] = {"own": 0, "others": record["others"], "around": record["own"]}
        elif what == "wait":
            cluster.now += 0.1
        for (owner, replica_id), record in since.items():
            off = abs(cluster.estimate(owner, replica_id) - cluster.engines[replica_id])
            assert off <= record["others"] + record["around"]


def test_with_fresh_reports_every_process_knows_the_whole_load():
    cluster = Cluster(3, 4)
    chance = random.Random(0)
    for step in range(400):
        process = chance.randrange(4)
        if cluster.running[process] and chance.random() < 0.4:
            cluster.finish(process, chance.randrange(len(cluster.running[process])))
        cluster.send(process)
        cluster.now += 0.01
        cluster.report_all()
        for one in range(4):
            assert [cluster.estimate(one, at) for at in cluster.ids] == [*cluster.engines.values()]
        assert max(cluster.engines.values()) - min(cluster.engines.values()) <= 1 + step // 2


def test_without_any_report_each_process_counts_its_own():
    cluster = Cluster(2, 2)
    for _ in range(6):
        cluster.send(0)
    assert [cluster.estimate(0, at) for at in "01"] == [3, 3]
    assert [cluster.estimate(1, at) for at in "01"] == [0, 0]


def test_what_was_reported_counts_for_five_seconds_and_not_longer():
    cluster = Cluster(2, 2)
    cluster.engines["0"] = 100
    cluster.report_all()
    cluster.now += 5.0
    assert cluster.estimate(0, "0") == 100
    assert {cluster.send(0) for _ in range(20)} == {"1"}
    cluster.now += 0.1
    assert cluster.estimate(0, "0") == 0
    assert cluster.send(0) == "0"  # as idle as it is known to be


@pytest.mark.parametrize(("interval_s", "max_age_s"), [(0.5, 5.0), (1.0, 5.0), (4.0, 12.0)])
def test_the_bound_of_staleness_is_that_of_the_docs(interval_s, max_age_s):
    load = LoadTracker("01", state=SERVING, clock=lambda: now)
    balancer = LoadBalancer([object()] * 2, "requests", tracker=load, monitor_interval_s=interval_s)
    now = 1000.0
    load.observe(EngineReport(replica_id="0", state=SERVING, num_unfinished=50))
    now += max_age_s
    assert {balancer.select_actor() for _ in range(20)} == {1}
    now += 0.01
    assert {balancer.select_actor() for _ in range(20)} == {0, 1}


@pytest.mark.parametrize("strategy", ["requests", "prefix-aware"])
@pytest.mark.parametrize("with_news", [False, True])
def test_processes_do_not_herd_to_the_replica_that_looked_idle(strategy, with_news):
    """Without news each fills the gap of 12 once, by itself; with news all together do so."""
    cluster, chance, each = Cluster(4, 4, strategy), random.Random(1), 24
    for replica_id in "012":
        cluster.engines[replica_id] = 12
    cluster.report_all()
    for _ in range(each):
        for process in range(4):
            cluster.send(process, [chance.randrange(1000) for _ in range(40)])
            if with_news:
                cluster.report_all()
    sent_there = [sum(place.replica_id == "3" for place in running) for running in cluster.running]
    gap_and_share = 12 + (each - 12) / 4
    if with_news:
        assert sum(sent_there) <= 12 + (4 * each - 12) / 4 + 4
    else:
        assert all(gap_and_share - 3 <= sent <= gap_and_share + 3 for sent in sent_there)
    for process in range(4):
        seen = [cluster.estimate(process, at) for at in cluster.ids]
        assert max(seen) <= 1.5 * sum(seen) / 4 + 1


@pytest.mark.parametrize("strategy", ["requests", "prefix-aware", "kv-cache"])
def test_in_the_long_run_reports_once_a_second_keep_the_load_even(strategy):
    """Four processes, 20 requests a second, 2 s each, and news of the others once a second."""
    cluster, chance = Cluster(4, 4, strategy), random.Random(3)
    worst, ends = 0.0, []
    for step in range(1200):
        cluster.now += 0.05
        for end in [one for one in ends if one[0] <= cluster.now]:
            ends.remove(end)
            cluster.finish(end[1], cluster.running[end[1]].index(end[2]))
        process = chance.randrange(4)
        cluster.send(process, [chance.randrange(1000) for _ in range(60)])
        ends.append((cluster.now + 2, process, cluster.running[process][-1]))
        if step % 20 == 0:
            cluster.report_all()
        if step > 200:
            mean = sum(cluster.engines.values()) / 4
            worst = max(worst, max(cluster.engines.values()) / mean)
    assert worst < 2
    assert sum(cluster.engines.values()) == pytest.approx(40, abs=2)


# Nothing to choose from


@pytest.mark.parametrize(
    "states",
    [[ReplicaState.FAILED] * 2, [ReplicaState.STALE] * 2, [ReplicaState.STARTING] * 2,
     [ReplicaState.FAILED, ReplicaState.CLOSED], [ReplicaState.DRAINING, ReplicaState.STALE]],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("strategy", ["prefix-aware", "requests", "kv-cache", "round-robin"])
def test_without_a_live_replica_every_call_says_so_at_once(strategy, states):
    cluster = Cluster(2, 1, strategy)
    (balancer,), (load,) = cluster.balancers, cluster.loads
    home = cluster.send(0)
    for replica_id, state in zip(cluster.ids, states, strict=True):
        load.mark(replica_id, state, "for a test")
    told = f"replica 0 is {states[0]} .for a test., replica 1 is {states[1]} .for a test."
    for call in (
        lambda: balancer.reserve([1, 2]),
        lambda: balancer.reserve([1, 2], session_id="chat", group_id="prompt"),
        lambda: balancer.reserve_batch([[1], [2]], session_id=[1, 2]),
        lambda: balancer.select_actor("text"),
    ):
        with pytest.raises(NoReplicaAvailableError, match=told):
            call()
    assert load.total_in_flight == 1
    assert balancer.release_sessions(["chat", 1, 2]) == 0  # nothing was noted either
    load.mark(home, SERVING)
    assert balancer.reserve([1, 2]).replica_id == home


def test_without_any_replica_left_that_is_said():
    cluster = Cluster(1, 1)
    cluster.loads[0].remove("0")
    with pytest.raises(NoReplicaAvailableError, match="there is none"):
        cluster.balancers[0].reserve([1])
