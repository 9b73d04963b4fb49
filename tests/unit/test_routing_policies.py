"""The routers that the simulation compares: each rule of each, where it decides."""

import numpy as np
import pytest

from benchmarks.routing_sim.interface import Cluster, EngineFigures, SimRequest
from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.policies.blocks import PrefixNames, shared_length
from benchmarks.routing_sim.policies.cache_aware import CacheAware, CacheAwareSettings
from benchmarks.routing_sim.policies.consistent_hash import BoundedConsistentHash
from benchmarks.routing_sim.policies.dynamo_cost import DynamoCost
from benchmarks.routing_sim.policies.in_flight import InFlight
from benchmarks.routing_sim.policies.lmetric import LMetric
from benchmarks.routing_sim.policies.ray_prefix import RayPrefixAffinity, RayPrefixSettings
from benchmarks.routing_sim.policies.ring_hash import mcrouter_hash, ring_position
from benchmarks.routing_sim.policies.simple import LeastRequests, RoundRobin
from benchmarks.routing_sim.policies.sticky_least_loaded import StickyLeastLoaded
from benchmarks.routing_sim.policies.tenant_tree import TenantTree
from benchmarks.routing_sim.policies.torchrl_rule import TorchRLRule
from benchmarks.routing_sim.policies.verl_sticky import VerlSticky

PEERS = sorted(name for name in POLICIES if not name.startswith("ours"))
BLOCK = 64


def cluster(replicas=4, *, num_kv_blocks=1000, rate=1e4):
    return Cluster(tuple(range(replicas)), BLOCK, num_kv_blocks, 256, rate)


def prompt(*blocks):
    """Whole blocks of equal tokens."""
    return np.repeat(np.asarray(blocks, np.int32), BLOCK)


class Driver:
    """Sends requests to a policy, one number after the other."""

    def __init__(self, policy):
        self.policy, self.requests, self.now = policy, [], 0.0

    def send(self, *blocks, session=-1, group=-1, at=None):
        self.now = self.now + 1e-3 if at is None else at
        request = SimRequest(len(self.requests), prompt(*blocks), session, group)
        replica = self.policy.choose(request, self.now)
        self.requests.append((request, replica))
        return replica

    def end(self, number, output=None):
        request, replica = self.requests[number]
        self.policy.finish(request, replica, output, self.now)


# ---------------------------------------------------------------- what every policy owes


@pytest.mark.parametrize("name", PEERS)
def test_every_policy_survives_a_life_and_repeats_it(name):
    def life():
        driver = Driver(POLICIES[name](cluster(), 3))
        generator = np.random.default_rng(5)
        choices, running = [], []
        for number in range(300):
            if number == 150:
                driver.policy.set_replicas((0, 2, 3), driver.now)
            if number == 220:
                driver.policy.set_replicas((0, 2, 3, 7), driver.now)
            session = int(generator.integers(40))
            choices.append(driver.send(session, *generator.integers(100, 110, 3), session=session))
            running.append(number)
            driver.policy.report(0, EngineFigures(1, 0, 0.1, 1), driver.now, driver.now)
            while len(running) > 20:
                ended = running.pop(int(generator.integers(len(running))))
                lost = generator.random() < 0.1
                driver.end(ended, None if lost else prompt(7)[:9])
            if generator.random() < 0.1:
                driver.policy.end_session(session, driver.now)
        return choices, driver.policy

    choices, policy = life()
    assert set(choices[:150]) <= {0, 1, 2, 3}
    assert set(choices[150:220]) <= {0, 2, 3}
    assert set(choices[220:]) <= {0, 2, 3, 7}
    assert life()[0] == choices
    assert set(policy.in_flight.counts) == {0, 2, 3, 7}
    assert min(policy.in_flight.counts.values()) >= 0


@pytest.mark.parametrize("name", PEERS)
def test_every_policy_counts_what_is_in_flight(name):
    driver = Driver(POLICIES[name](cluster(), 0))
    for number in range(20):
        driver.send(number, session=number)
    assert sum(driver.policy.in_flight.counts.values()) == 20
    for number in range(20):
        driver.end(number)
    assert set(driver.policy.in_flight.counts.values()) == {0}


@pytest.mark.parametrize("name", PEERS)
def test_no_replicas_are_refused(name):
    with pytest.raises(ValueError, match="at least one replica"):
        POLICIES[name](Cluster((), BLOCK, 10, 8, 1e4), 0)
    policy = POLICIES[name](cluster(), 0)
    with pytest.raises(ValueError, match="at least one replica"):
        policy.set_replicas((), 0.0)
    assert list(policy.in_flight.counts) == [0, 1, 2, 3]


def test_an_end_counts_once_and_only_for_the_life_in_which_it_began():
    counts = InFlight((0, 1))
    counts.begin(5, 0)
    assert counts.set_replicas((1,)) == ([], [0])
    assert counts.set_replicas((1, 0)) == ([0], [])
    assert not counts.end(5, 0)
    counts.begin(5, 1)
    assert counts.end(5, 1)
    assert not counts.end(5, 1)
    assert counts.counts == {1: 0, 0: 0}


# ---------------------------------------------------------------- names and the tree


def test_names_are_equal_exactly_while_prefixes_are():
    names = PrefixNames(4)
    first = np.arange(23, dtype=np.int32)
    second = first.copy()
    second[13] = 99
    one, other = names(first), names(second)
    assert len(one) == 5
    assert [a == b for a, b in zip(one, other, strict=True)] == [True] * 3 + [False] * 2
    assert shared_length(one, 0, other) == 3
    assert names(first, tail=True)[:5] == one
    assert len(names(first, tail=True)) == 6
    assert names(first[:20], tail=True) == one
    assert names(np.zeros(5000, np.int32))[:2] == PrefixNames(4)(np.zeros(8, np.int32))


@pytest.mark.parametrize("length", range(8))
def test_shared_length_finds_the_place(length):
    names = PrefixNames(1)
    tokens = np.arange(7, dtype=np.int32)
    other = tokens.copy()
    other[length:] += 50
    for start in range(7):
        expected = max(0, length - start)
        assert shared_length(names(tokens), start, names(other)[start:]) == min(expected, 7 - start)


def test_a_tail_of_fewer_tokens_is_another_one():
    names = PrefixNames(4)
    zeros = np.zeros(7, np.int32)
    assert names(zeros[:6], tail=True)[-1] != names(zeros, tail=True)[-1]


def test_tree_sizes_are_the_tokens_of_owned_nodes():
    """Against a set of prefixes by replica."""
    generator = np.random.default_rng(0)
    tree, names = TenantTree(BLOCK), PrefixNames(BLOCK)
    owned = {0: set(), 1: set(), 2: set()}
    prompts = [()]
    for _ in range(200):
        base = prompts[int(generator.integers(len(prompts)))]
        keep = int(generator.integers(0, len(base) + 1))
        blocks = (*base[:keep], *map(int, generator.integers(0, 5, 3)))
        prompts.append(blocks)
        tenant = int(generator.integers(3))
        tree.insert(names(prompt(*blocks), tail=True), len(blocks) * BLOCK, tenant)
        owned[tenant] |= {blocks[: end + 1] for end in range(len(blocks))}
        for one, prefixes in owned.items():
            assert tree.sizes.get(one, 0) == len(prefixes) * BLOCK
    for blocks in prompts[1:40]:
        for tenant, prefixes in owned.items():
            _, matched = tree.match(names(prompt(*blocks)), len(blocks) * BLOCK, (tenant,))
            expected = max((n for n in range(len(blocks) + 1) if blocks[:n] in prefixes), default=0)
            assert matched == expected * BLOCK
    tree.remove_tenant(1)
    assert 1 not in tree.sizes
    for tenant in (0, 2):
        tree.remove_tenant(tenant)
    assert not tree.root.children
    assert not tree.sizes


def test_shrinking_takes_the_oldest_leaves_and_leaves_no_orphans():
    tree, names = TenantTree(BLOCK), PrefixNames(BLOCK)
    for time, blocks in enumerate([(1, 2, 3), (1, 2, 4), (1, 5)], 1):
        path = tree.insert(names(prompt(*blocks), tail=True), len(blocks) * BLOCK, 0)
        path[-1].times[0] = time
    tree.shrink(0, 4 * BLOCK)  # of 1, 2, 3, 4 and 5 the leaf 3 is the oldest
    _, matched = tree.match(names(prompt(1, 2, 3)), 3 * BLOCK, (0,))
    assert matched == 2 * BLOCK
    tree.shrink(0, 2 * BLOCK)  # then 4, and 2 that nothing is below of any more
    assert tree.match(names(prompt(1, 2, 4)), 3 * BLOCK, (0,))[1] == BLOCK
    assert tree.match(names(prompt(1, 5)), 2 * BLOCK, (0,))[1] == 2 * BLOCK


# ---------------------------------------------------------------- by count


def test_round_robin_goes_on_after_a_death():
    driver = Driver(RoundRobin(cluster(3), 0))
    assert [driver.send(0) for _ in range(4)] == [0, 1, 2, 0]
    driver.policy.set_replicas((0, 2), 1.0)
    assert sorted(driver.send(0) for _ in range(2)) == [0, 2]


def test_least_requests_breaks_ties_by_lot():
    first = {Driver(LeastRequests(cluster(), seed)).send(0) for seed in range(40)}
    assert first == {0, 1, 2, 3}
    driver = Driver(LeastRequests(cluster(), 0))
    assert sorted(driver.send(0) for _ in range(4)) == [0, 1, 2, 3]
    driver.end(2)
    assert driver.send(0) == driver.requests[2][1]


def test_torchrl_sends_every_prompt_with_one_header_to_one_replica():
    driver = Driver(TorchRLRule(cluster(), 0))
    assert len({driver.send(1, number) for number in range(100)}) == 1
    assert len({driver.send(number) for number in range(100)}) == 4


# ---------------------------------------------------------------- sticky


def test_verl_keeps_a_trajectory_until_its_server_is_gone():
    driver = Driver(VerlSticky(cluster(2), 0))
    home = driver.send(0, session=1)
    for _ in range(5):
        assert driver.send(0, session=1) == home
    assert driver.send(0, session=2) != home
    driver.policy.set_replicas((1 - home,), 1.0)
    assert driver.send(0, session=1) == 1 - home


def test_verl_forgets_the_trajectory_that_was_not_used_for_longest():
    driver = Driver(VerlSticky(cluster(2), 0, max_remembered=2))
    home = driver.send(0, session=1)
    driver.send(0, session=2)
    driver.send(0, session=1)
    driver.send(0, session=3)  # 2 is forgotten, 1 was used since
    assert driver.send(0, session=1) == home


def test_verl_knows_no_groups():
    driver = Driver(VerlSticky(cluster(4), 0))
    assert sorted(driver.send(0, group=1) for _ in range(4)) == [0, 1, 2, 3]


def test_sticky_least_loaded_counts_sessions_and_not_requests():
    driver = Driver(StickyLeastLoaded(cluster(2), 0))
    home = driver.send(0, session=1)
    for _ in range(9):
        assert driver.send(0, session=1) == home
    other = driver.send(0, session=2)
    assert other != home
    driver.policy.end_session(2, 1.0)
    assert driver.policy.sessions[other] == 0
    assert driver.send(0, session=3) == other
    driver.policy.end_session(99, 1.0)
    assert sum(driver.policy.sessions.values()) == 2


def test_sticky_least_loaded_forgets_a_session_after_two_hours():
    driver = Driver(StickyLeastLoaded(cluster(2), 0))
    driver.send(0, session=1, at=100.0)
    driver.send(0, session=2, at=7250.0)
    assert sum(driver.policy.sessions.values()) == 2
    driver.send(0, session=2, at=7350.0)
    assert sum(driver.policy.sessions.values()) == 1


def test_sticky_least_loaded_finishes_a_group_with_its_last_request():
    driver = Driver(StickyLeastLoaded(cluster(2), 0))
    assert len({driver.send(0, group=1) for _ in range(3)}) == 1
    driver.end(0)
    driver.end(1)
    assert sum(driver.policy.sessions.values()) == 1
    driver.end(2)
    assert sum(driver.policy.sessions.values()) == 0


def test_sticky_least_loaded_hashes_little_of_a_long_prompt_without_a_key(monkeypatch):
    hashed = []
    monkeypatch.setattr(
        "benchmarks.routing_sim.policies.sticky_least_loaded.mcrouter_hash",
        lambda text: hashed.append(text) or len(hashed),
    )
    driver = Driver(StickyLeastLoaded(cluster(), 0))
    driver.send(*range(200))
    assert len(hashed) == 4
    assert max(map(len, hashed)) < 60
    assert not any(driver.policy.sessions.values())


def test_sticky_least_loaded_sends_equal_prompts_without_a_key_together():
    driver = Driver(StickyLeastLoaded(cluster(), 0))
    assert len({driver.send(1, 2) for _ in range(9)}) == 1
    assert {driver.send(number) for number in range(60)} == {0, 1, 2, 3}


def test_sticky_least_loaded_moves_the_sessions_of_the_dead():
    driver = Driver(StickyLeastLoaded(cluster(2), 0))
    home = driver.send(0, session=1)
    driver.policy.set_replicas((1 - home,), 1.0)
    assert driver.send(0, session=1) == 1 - home
    assert driver.policy.sessions == {1 - home: 1}
    driver.policy.set_replicas((0, 1), 2.0)
    assert driver.send(0, session=1) == 1 - home


# ---------------------------------------------------------------- consistent hashing


def test_a_key_stays_until_its_replica_is_above_its_share():
    driver = Driver(BoundedConsistentHash(cluster(), 0))
    home = driver.send(0, session=1)
    assert driver.send(0, session=1) != home  # one request of one is four times the mean
    driver = Driver(BoundedConsistentHash(cluster(), 0, max_load_skew=None))
    assert {driver.send(0, session=1) for _ in range(9)} == {home}


def test_a_death_moves_only_the_keys_of_the_dead():
    driver = Driver(BoundedConsistentHash(cluster(), 0, max_load_skew=None))
    homes = {session: driver.send(0, session=session) for session in range(200)}
    driver.policy.set_replicas((0, 1, 3), 1.0)
    moved = {s for s, home in homes.items() if driver.send(0, session=s) != home}
    assert moved == {session for session, home in homes.items() if home == 2}
    driver.policy.set_replicas((0, 1, 2, 3), 2.0)
    assert all(driver.send(0, session=session) == home for session, home in homes.items())


def test_without_a_key_any_replica_may_be_chosen():
    driver = Driver(BoundedConsistentHash(cluster(), 0))
    assert {driver.send(0) for _ in range(50)} == {0, 1, 2, 3}


def test_hashes_are_those_of_the_real_routers():
    """Fixed values; the replays of real choices in test_routing_peers depend on all bits."""
    assert ring_position("session-1") == ring_position("session-1") < 2**64
    assert mcrouter_hash("session-1:http://a") != mcrouter_hash("session-1:http://b")
    assert mcrouter_hash("") < 2**64


# ---------------------------------------------------------------- SGLang


def test_cache_aware_follows_a_prefix_of_more_than_the_threshold():
    driver = Driver(CacheAware(cluster(), 0))
    assert driver.send(1, 2, 3) == 0
    assert driver.send(9) == 1
    assert driver.send(1, 2, 7, 8, 5, 6) == 0  # a third matches
    assert driver.send(1, 11, 12, 13) == 2  # a quarter does not suffice
    assert driver.send(1, 2, 3, 11, 12, 13) == 0


def test_cache_aware_looks_at_load_above_both_thresholds():
    settings = CacheAwareSettings(balance_abs_threshold=3, balance_rel_threshold=2)
    driver = Driver(CacheAware(cluster(2), 0, settings))
    assert [driver.send(1, 2) for _ in range(4)] == [0, 0, 0, 0]
    assert driver.send(1, 2) == 1  # four over none
    assert driver.send(1, 2) == 0  # four over one is three
    assert driver.send(1, 2) == 1
    driver = Driver(CacheAware(cluster(2), 0, CacheAwareSettings()))
    assert {driver.send(1, 2) for _ in range(64)} == {0}


def test_cache_aware_forgets_the_oldest_when_it_evicts():
    settings = CacheAwareSettings(eviction_interval_s=10, max_tree_tokens=4 * BLOCK)
    driver = Driver(CacheAware(cluster(1), 0, settings))
    driver.send(1, 2, 3)
    driver.send(4, 5, 6)
    driver.send(1, 2, 3, at=5.0)
    assert driver.policy.tree.sizes[0] == 6 * BLOCK
    driver.send(7, at=11.0)
    assert driver.policy.tree.sizes[0] == 4 * BLOCK
    names = driver.policy._names
    assert driver.policy.tree.match(names(prompt(4, 5, 6)), 192, (0,))[1] == 0
    assert driver.policy.tree.match(names(prompt(1, 2, 3)), 192, (0,))[1] == 192


def test_cache_aware_does_not_send_to_a_replica_that_left():
    driver = Driver(CacheAware(cluster(2), 0))
    assert driver.send(1, 2, 3) == 0
    driver.policy.set_replicas((1,), 1.0)
    assert driver.send(1, 2, 3) == 1
    driver.policy.set_replicas((0, 1), 2.0)
    assert driver.send(1, 2, 3) == 1


# ---------------------------------------------------------------- lmetric


def test_lmetric_multiplies_what_is_unseen_by_load():
    driver = Driver(LMetric(cluster(2), 0))
    assert driver.send(1, 2, 3, 4) == 0
    assert driver.send(1, 2, 3, 5) == 0  # 1 x 2 against 4 x 1
    assert driver.send(1, 2, 3, 6) == 0  # 1 x 3 against 4 x 1
    assert driver.send(1, 2, 3, 7) == 1  # 1 x 4 against 4 x 1: fewer requests
    assert driver.send(1, 2, 3, 4) == 0  # seen whole: nothing times four


def test_lmetric_forgets_a_replica_that_left():
    driver = Driver(LMetric(cluster(2), 0))
    assert driver.send(1, 2) == 0
    driver.end(0)
    driver.policy.set_replicas((1,), 1.0)
    driver.policy.set_replicas((0, 1), 2.0)
    assert driver.policy.tree.sizes == {1: 0, 0: 0}


# ---------------------------------------------------------------- Ray


def test_ray_chooses_the_shortest_queue_among_the_owners():
    driver = Driver(RayPrefixAffinity(cluster(3), 0))
    assert driver.send(1, 2) == 0
    assert driver.send(1, 2) == 0  # its only owner, whatever its queue
    assert driver.send(7) == 1  # nothing matches: 1 and 2 own least
    assert driver.send(8, 9, 10) == 2


def test_ray_looks_away_from_prefixes_when_queues_are_uneven():
    settings = RayPrefixSettings(imbalanced_threshold=2)
    driver = Driver(RayPrefixAffinity(cluster(2), 0, settings))
    assert [driver.send(1, 2) for _ in range(4)] == [0, 0, 0, 1]
    driver = Driver(RayPrefixAffinity(cluster(2), 0))
    assert {driver.send(1, 2) for _ in range(50)} == {0}


def test_ray_evicts_what_was_not_used_for_longest():
    settings = RayPrefixSettings(
        eviction_threshold_tokens=5 * BLOCK, eviction_target_tokens=3 * BLOCK, eviction_interval_s=9
    )
    driver = Driver(RayPrefixAffinity(cluster(1), 0, settings))
    driver.send(1, 2, 3)
    driver.send(4, 5, 6)
    driver.send(1, 2, 3, at=3.0)
    assert driver.policy.tree.sizes[0] == 6 * BLOCK
    driver.send(7, at=10.0)
    assert driver.policy.tree.sizes[0] == 4 * BLOCK
    assert driver.policy.tree.match(driver.policy._names(prompt(4, 5)), 128, (0,))[1] == 0


# ---------------------------------------------------------------- Dynamo


def test_dynamo_weighs_what_is_cached_against_what_is_in_use():
    driver = Driver(DynamoCost(cluster(2, rate=1e9), 0))
    home = driver.send(1, 2, 3, 4)
    # With a cached prompt of four blocks and four in use: 4 against 4 + 4 for one like it,
    assert driver.send(1, 2, 3, 4) == home
    # 1 to compute and 5 in use against 5 and 5 for a longer one,
    assert driver.send(1, 2, 3, 4, 5) == home
    # and 4 + 9 against 4 + 4 for another one.
    assert driver.send(6, 7, 8, 9) == 1 - home


def test_dynamo_counts_prompts_until_they_are_computed():
    driver = Driver(DynamoCost(cluster(2, rate=BLOCK), 0))  # a block a second
    home = driver.send(*range(10, 20), at=0.0)
    worker = driver.policy.workers[home]
    assert worker.prefill_tokens(9.9) == 10 * BLOCK
    assert worker.prefill_tokens(10.0) == 0
    driver.end(0)
    assert worker.prefill_tokens(0.0) == 0
    assert not worker.active_blocks


def test_dynamo_knows_answers_and_forgets_the_oldest_blocks():
    driver = Driver(DynamoCost(cluster(1, num_kv_blocks=5), 0))
    driver.send(1, 2)
    driver.end(0, prompt(3))
    worker, names = driver.policy.workers[0], driver.policy._names
    assert worker.overlap(names(prompt(1, 2, 3, 4))) == 3
    driver.send(5, 6, 7)
    assert worker.overlap(names(prompt(1, 2, 3))) == 2
    assert worker.overlap(names(prompt(5, 6, 7))) == 3


def test_dynamo_draws_lots_among_equals():
    assert {Driver(DynamoCost(cluster(), seed)).send(1) for seed in range(40)} == {0, 1, 2, 3}


def test_dynamo_forgets_a_replica_that_left_and_survives_its_requests():
    driver = Driver(DynamoCost(cluster(2), 0))
    home = driver.send(1, 2, 3)
    driver.policy.set_replicas((1 - home,), 1.0)
    driver.end(0, prompt(4))
    driver.policy.set_replicas((0, 1), 2.0)
    assert not driver.policy.workers[home].cached
    assert not driver.policy.workers[home].bookings
