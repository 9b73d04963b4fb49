"""Keys of requests: how they are checked, and where the ledger sends requests that have them."""

import pickle
import random  # noqa: TID251 - seeded
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from torchrl_vllm_sync.balancer import LoadBalancer
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.load import LoadSnapshot, LoadTracker
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.routing import StrategySettings
from torchrl_vllm_sync.sessions import SessionLedger, as_keys, key_per_prompt

SETTINGS = StrategySettings(overload_threshold=1.5)


def replicas(*loads, without=()):
    """Serving replicas ``"0"``, ``"1"``, ..., that hold so many requests."""
    return [
        LoadSnapshot(replica_id=str(at), state=ReplicaState.SERVING, in_flight=load)
        for at, load in enumerate(loads)
        if str(at) not in without
    ]


class Router:
    """A ledger and the requests in flight, as a balancer would put them together."""

    def __init__(self, num_replicas, capacity=1000):
        self.ledger = SessionLedger(capacity)
        self.loads = [0] * num_replicas

    def send(self, session=None, group=None, without=()):
        snapshots = replicas(*self.loads, without=without)
        at = self.ledger.choose(session, group, snapshots, SETTINGS)
        replica_id = snapshots[at].replica_id
        candidates = [one.replica_id for one in snapshots]
        self.ledger.record(session, group, replica_id, candidates=candidates)
        self.loads[int(replica_id)] += 1
        return replica_id

    def finish(self, replica_id):
        self.loads[int(replica_id)] -= 1


@pytest.mark.parametrize(
    ("given", "num", "keys"),
    [
        (None, 2, [None, None]),
        ("chat", 1, ["chat"]),
        ("chat", 3, ["chat"] * 3),
        (0, 2, [0, 0]),
        (np.int64(3), 1, [3]),
        (["a", 1, None], 3, ["a", 1, None]),
        (("a",), 1, ["a"]),
    ],
)
def test_one_key_is_for_all_prompts_and_a_list_has_one_for_each(given, num, keys):
    assert key_per_prompt("session_id", given, num) == keys


@pytest.mark.parametrize(
    ("given", "num", "message"),
    [
        (["a"], 2, "one for each of 2 prompts, got 1"),
        (["a", "b"], 1, "one for each of 1 prompts, got 2"),
        ([], 1, "got 0"),
        ("", 1, "not empty, got ''"),
        (True, 1, "got True"),
        (1.5, 1, "got 1.5"),
        (["a", 2.0], 2, "got 2.0"),
        ([["a"]], 1, r"got \['a'\]"),
        ({"a": 1}, 1, "got {'a': 1}"),
    ],
)
def test_keys_that_are_none_are_refused_by_name(given, num, message):
    with pytest.raises(UnsupportedArgumentError, match=f"^group_id must be .*{message}"):
        key_per_prompt("group_id", given, num)


def test_keys_to_release_are_one_or_several():
    assert as_keys("ids", "chat") == ["chat"]
    assert as_keys("ids", 3) == [3]
    assert as_keys("ids", iter(["chat", 3])) == ["chat", 3]
    with pytest.raises(UnsupportedArgumentError, match=r"ids must be .* got None"):
        as_keys("ids", None)
    with pytest.raises(UnsupportedArgumentError, match=r"ids must be .* got 1.0"):
        as_keys("ids", [1.0])


def test_a_session_stays_however_loaded_its_replica_is():
    router = Router(3)
    first = router.send("chat")
    router.loads[int(first)] = 100
    assert [router.send("chat") for _ in range(5)] == [first] * 5


def test_a_session_moves_when_its_replica_is_no_candidate_and_stays_where_it_moved():
    router = Router(3)
    first = router.send("chat")
    second = router.send("chat", without={first})
    assert second != first
    assert [router.send("chat") for _ in range(3)] == [second] * 3  # the first is back


def test_new_sessions_go_to_the_least_loaded_replica():
    router = Router(4)
    assert Counter(router.send(at) for at in range(40)) == {str(at): 10 for at in range(4)}


def test_a_released_session_is_placed_anew():
    router = Router(2)
    first = router.send("chat")
    router.loads[int(first)] = 5
    assert router.send("chat") == first
    assert router.ledger.release(["chat", "never seen"]) == 1
    assert len(router.ledger) == 0
    assert router.send("chat") != first


def test_numbers_and_text_are_different_keys():
    router = Router(2)
    first = router.send(1)
    router.loads[int(first)] = 3
    assert router.send("1") != first
    assert router.send(1) == first


def test_siblings_go_together_until_their_replica_is_overloaded():
    router = Router(2)
    homes = [router.send(session=at, group="prompt") for at in range(8)]
    assert set(homes) == {homes[0]}
    ninth = router.send(session=8, group="prompt")
    assert ninth != homes[0]
    router.finish(homes[0])
    assert router.send(session=9, group="prompt") == homes[0]  # the group has not moved
    assert router.send(session=8, group="prompt") == ninth  # but its ninth session stays


def test_a_group_moves_when_its_replica_is_no_candidate():
    router = Router(3)
    first = router.send(group="prompt")
    second = router.send(group="prompt", without={first})
    assert second != first
    assert router.send(group="prompt") == second


def test_groups_spread_evenly():
    router = Router(2)
    homes = [router.send(group=f"prompt {at // 8}") for at in range(64)]
    assert Counter(homes) == {"0": 32, "1": 32}
    assert all(len(set(homes[at : at + 8])) == 1 for at in range(0, 64, 8))


def test_no_replica_holds_more_than_its_share_of_new_sessions():
    chance = random.Random(0)
    router = Router(5)
    running = []
    for step in range(3000):
        if running and chance.random() < 0.4:
            router.finish(running.pop(chance.randrange(len(running))))
        group = chance.choice(["hot", "hot", "hot", f"cold {step % 50}"])
        running.append(router.send(session=step, group=group))
        mean = sum(router.loads) / 5
        assert max(router.loads) <= max(8, 1.5 * mean + 2)


def test_memory_is_bounded_and_the_least_recently_used_are_forgotten():
    router = Router(2, capacity=100)
    old = router.send("old", group="old group")
    for at in range(99):
        router.send(at, group=f"group {at}")
    assert router.send("old", group="old group") == old  # used: now the youngest
    for at in range(100, 199):
        router.send(at, group=f"group {at}")
    assert len(router.ledger) == 100
    router.loads[int(old)] += 1000
    assert router.send("old") == old
    assert router.send(0) != old  # forgotten: placed by load
    assert len(router.ledger._groups) == 100


def test_a_ledger_remembers_at_least_one_session():
    with pytest.raises(UnsupportedArgumentError, match="max_sessions must be at least 1, got 0"):
        SessionLedger(0)


PLACES = """
from torchrl_vllm_sync.load import LoadSnapshot
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.routing import StrategySettings
from torchrl_vllm_sync.sessions import SessionLedger
snapshots = [
    LoadSnapshot(replica_id=str(at), state=ReplicaState.SERVING) for at in range(4)
]
ledger = SessionLedger()
for at in range(64):
    print(ledger.choose(f"chat {at}", None, snapshots, StrategySettings()), end=" ")
    print(ledger.choose(at, f"prompt {at % 9}", snapshots, StrategySettings()), end=" ")
"""


def test_processes_with_other_hash_seeds_agree_on_where_new_sessions_go():
    told = [
        subprocess.run(
            [sys.executable, "-c", PLACES],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=50,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert set(told[0].split()) == {"0", "1", "2", "3"}  # and do not all go to one replica


# Through a balancer


class Service:
    """What a balancer needs of a service; its actors are never called."""

    def __init__(self, num=3):
        self.actors = [object() for _ in range(num)]
        self.load = LoadTracker([f"r{at}" for at in range(num)], state=ReplicaState.SERVING)


def send(balancer, **keys):
    with balancer.reserve([1, 2, 3], **keys) as place:
        return place.replica_id


STRATEGIES = ["prefix-aware", "requests", "kv-cache", "round-robin", ["round-robin", "requests"]]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_sessions_stay_under_every_strategy(strategy):
    balancer = LoadBalancer(Service(), strategy)
    homes = [{send(balancer, session_id=at % 10) for _ in range(3)} for at in range(30)]
    assert all(len(home) == 1 for home in homes)
    assert all(homes[at] == homes[at % 10] for at in range(30))


def test_requests_without_keys_are_the_strategys_as_before():
    plain, mixed = LoadBalancer(Service(), "round-robin"), LoadBalancer(Service(), "round-robin")
    alone = [send(plain) for _ in range(9)]
    between = []
    for _ in range(9):
        between.append(send(mixed))
        send(mixed, session_id="chat", group_id="prompt")
    assert between == alone == ["r0", "r1", "r2"] * 3


@pytest.mark.parametrize("state", [one for one in ReplicaState if not one.admits_requests], ids=str)
def test_a_session_leaves_a_replica_that_takes_no_requests(state):
    service = Service()
    balancer = LoadBalancer(service)
    home = send(balancer, session_id="chat")
    service.load.mark(home, state, "")
    moved = send(balancer, session_id="chat")
    assert moved != home
    service.load.mark(home, ReplicaState.SERVING, "")
    assert send(balancer, session_id="chat") == moved


def test_a_session_waits_in_a_replica_that_is_being_updated():
    service = Service()
    balancer = LoadBalancer(service)
    home = send(balancer, session_id="chat")
    service.load.mark(home, ReplicaState.UPDATING, "")
    assert send(balancer, session_id="chat") == home


def test_a_session_goes_on_elsewhere_without_the_replica_that_lost_its_request():
    balancer = LoadBalancer(Service())
    home = send(balancer, session_id="chat")
    with balancer.reserve([1], session_id="chat", exclude={home}) as place:
        assert place.replica_id != home
    assert send(balancer, session_id="chat") == place.replica_id


def test_a_batch_has_a_key_for_each_prompt():
    balancer = LoadBalancer(Service())
    first = balancer.reserve_batch([[at] for at in range(6)], session_id=list("abcdef"))
    again = balancer.reserve_batch([[9], [9], [9]], session_id=["f", None, "a"])
    assert again[0].replica_id == first[5].replica_id
    assert again[2].replica_id == first[0].replica_id
    assert {place.replica_id for place in first} == {"r0", "r1", "r2"}


@pytest.mark.parametrize("keys", [{"session_id": ["a"]}, {"group_id": [1, 2, 3]}])
def test_a_batch_with_too_few_or_many_keys_reserves_nothing(keys):
    service = Service()
    with pytest.raises(UnsupportedArgumentError, match="one for each of 2 prompts"):
        LoadBalancer(service).reserve_batch([[1], [2]], **keys)
    with pytest.raises(UnsupportedArgumentError, match=next(iter(keys))):
        LoadBalancer(service).reserve([1], **keys | {next(iter(keys)): 0.5})
    assert service.load.total_in_flight == 0


def test_a_balancer_remembers_as_many_sessions_as_it_is_told():
    balancer = LoadBalancer(Service(), max_sessions=2)
    for chat in "abc":
        send(balancer, session_id=chat)
    assert balancer.release_sessions("a") == 0
    assert balancer.release_sessions(iter("bc")) == 2
    with pytest.raises(UnsupportedArgumentError, match=r"session_ids must be .* got None"):
        balancer.release_sessions([None])
    with pytest.raises(UnsupportedArgumentError, match="max_sessions must be at least 1"):
        LoadBalancer(Service(), max_sessions=0)


def test_a_pickled_balancer_has_sessions_of_its_own():
    balancer = LoadBalancer(Service(), max_sessions=50)
    homes = {chat: send(balancer, session_id=chat) for chat in range(40)}
    copy = pickle.loads(pickle.dumps(balancer))
    assert copy.release_sessions(range(40)) == 0
    assert {chat: send(copy, session_id=chat) for chat in range(40)} == homes  # equal loads
    assert balancer.release_sessions(range(40)) == 40


def test_many_threads_keep_sessions_where_they_are():
    service = Service()
    balancer = LoadBalancer(service)
    homes = [send(balancer, session_id=chat) for chat in range(8)]

    def talk(chat):
        for _ in range(200):
            assert send(balancer, session_id=chat) == homes[chat]
            send(balancer, session_id=f"short {chat}", group_id="hot")
            balancer.release_sessions(f"short {chat}")

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(talk, chat) for chat in range(8)]:
            done.result(timeout=50)
    assert service.load.total_in_flight == 0
    assert balancer.release_sessions(range(8)) == 8
