"""No replica takes more than its bounded share while others can take work, whatever the prompts."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.replica import EngineReport
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadTracker

SERVING = ReplicaState.SERVING

# Few beginnings and many of them cached: whatever draws prompts together. Some are long.
prompts = st.builds(
    lambda begin, length, end: [begin] * length + [end],
    st.integers(0, 2), st.sampled_from([1, 130, 500, 3000]), st.integers(0, 3),
)  # fmt: skip


class BoundedShares(RuleBasedStateMachine):
    """Requests come and go, other processes report theirs, replicas leave and come back."""

    strategy: str

    def __init__(self):
        super().__init__()
        self.now, self.places = 1000.0, []

    @initialize(num=st.integers(1, 5), threshold=st.sampled_from([1.0, 1.1, 1.5, 3.0]))
    def start(self, num, threshold):
        self.threshold = threshold
        self.load = LoadTracker(map(str, range(num)), state=SERVING, clock=lambda: self.now)
        for replica_id in self.load.replica_ids:
            self.load.describe(replica_id, block_size=16, num_kv_blocks=1000)
        self.balancer = LoadBalancer(
            [object()] * num, self.strategy, overload_threshold=threshold, tracker=self.load
        )

    def loads(self):
        return {
            one.replica_id: one.load(self.now, 5.0)
            for one in self.load.snapshots()
            if one.state.admits_requests
        }

    @rule(batch=st.lists(st.tuples(prompts, st.integers(1, 4)), min_size=1, max_size=12))
    def send(self, batch):
        before = self.loads()
        if not before:
            return
        params = [SimpleNamespace(n=n, max_tokens=None) for _, n in batch]
        places = self.balancer.reserve_batch(
            [prompt for prompt, _ in batch], sampling_params=params
        )
        after = self.loads()
        share = self.threshold * sum(after.values()) / len(after)
        num_samples = {place.replica_id: n for place, (_, n) in zip(places, batch, strict=True)}
        for replica_id, last in num_samples.items():
            assert after[replica_id] <= share + last, (before, after)
        self.places += places

    @rule(prompt=prompts, times=st.integers(1, 30))
    def send_one_by_one(self, prompt, times):
        if not self.loads():
            return
        for _ in range(times):
            place = self.balancer.reserve(prompt)
            after = self.loads()
            mean = sum(after.values()) / len(after)
            assert after[place.replica_id] <= self.threshold * mean + 1
            self.places.append(place)

    @rule(data=st.data())
    def finish_some(self, data):
        for at in sorted(data.draw(st.sets(st.integers(0, 40))), reverse=True):
            if at < len(self.places):
                self.places.pop(at).release([[7] * 200])

    @rule(at=st.integers(0, 4), num=st.integers(0, 60), usage=st.none() | st.floats(0, 1))
    def report(self, at, num, usage):
        if at < len(self.load.replica_ids):
            self.load.observe(
                EngineReport(
                    replica_id=str(at), state=SERVING, num_unfinished=num, kv_cache_usage=usage
                )
            )  # fmt: skip

    @rule(at=st.integers(0, 4), state=st.sampled_from([SERVING, ReplicaState.STALE]))
    def mark(self, at, state):
        if at < len(self.load.replica_ids):
            self.load.mark(str(at), state)

    @rule(seconds=st.sampled_from([1.0, 10.0]))
    def wait(self, seconds):
        self.now += seconds


def machine(name):
    case = type(f"BoundedShares[{name}]", (BoundedShares,), {"strategy": name}).TestCase
    case.settings = settings(
        max_examples=60, stateful_step_count=25, deadline=None, print_blob=True
    )
    return case


TestPrefixAware = machine("prefix-aware")
TestRequests = machine("requests")
TestKVCache = machine("kv-cache")


@pytest.mark.parametrize("num", [2, 3, 8])
@pytest.mark.parametrize("length", [20, 2000])
def test_one_prompt_for_all_reaches_every_replica(num, length):
    load = LoadTracker(map(str, range(num)), state=SERVING)
    balancer = LoadBalancer([object()] * num, "prefix-aware", tracker=load)
    running = []
    for at in range(50 * num):
        running.append(balancer.reserve([1] * length))
        if at % 3 == 2:
            running.pop(0).release()
    counts = [one.in_flight for one in load.snapshots()]
    assert max(counts) <= 1.5 * sum(counts) / num + 1
    assert min(counts) > 0


def test_the_bound_is_what_spreads_a_hot_prompt():
    """With a threshold that binds nobody, the prompt's replica holds more than that share."""
    shares = []
    for threshold in (1.5, 1e9):
        load = LoadTracker("0123", state=SERVING)
        balancer = LoadBalancer([object()] * 4, tracker=load, overload_threshold=threshold)
        for _ in range(40):
            balancer.reserve([1] * 20_000)
        counts = [one.in_flight for one in load.snapshots()]
        shares.append(max(counts) / 10)
    assert shares[0] <= 1.6
    assert shares[1] > 1.6


@given(st.integers(2, 6), st.integers(1, 40), st.sampled_from([1.0, 1.5]))
def test_a_batch_of_one_prompt_keeps_the_bound(num, size, threshold):
    load = LoadTracker(map(str, range(num)), state=SERVING)
    balancer = LoadBalancer([object()] * num, tracker=load, overload_threshold=threshold)
    for times in (1, 2, 3):
        balancer.reserve_batch([[1] * 2000] * size)
        counts = [one.in_flight for one in load.snapshots()]
        assert max(counts) <= threshold * size * times / num + 1
