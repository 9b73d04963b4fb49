"""Keys of requests: how they are checked, remembered, and what a balancer does with them."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.routing.balancer import (
    CachedAt,
    KeyLedger,
    LoadBalancer,
    as_keys,
    key_per_prompt,
)
from torchrl_vllm_sync.routing.ledger import LoadTracker


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


# The ledger


def test_a_key_is_known_by_its_type_too():
    ledger = KeyLedger(8)
    numbered, named = CachedAt("0"), CachedAt("1")
    ledger.note(1, numbered)
    ledger.note("1", named)
    assert ledger.get(1) is numbered
    assert ledger.get("1") is named
    assert ledger.get(2) is None
    assert len(ledger) == 2


@given(
    st.lists(st.tuples(st.sampled_from(["put", "look", "release"]), st.integers(0, 6))),
    st.integers(1, 4),
)
def test_the_least_recently_used_are_forgotten(steps, capacity):
    ledger, model = KeyLedger(capacity), {}
    for what, key in steps:
        if what == "put":
            where = CachedAt(str(key))
            ledger.note(key, where)
            model.pop(key, None)
            model[key] = where  # the youngest now
            if len(model) > capacity:
                del model[next(iter(model))]
        elif what == "look":
            assert ledger.get(key) is model.get(key)
        else:
            assert ledger.release([key, "unknown"]) == (model.pop(key, None) is not None)
        assert len(ledger) == len(model)


def test_a_ledger_remembers_at_least_one_session():
    with pytest.raises(UnsupportedArgumentError, match="max_sessions must be at least 1, got 0"):
        KeyLedger(0)


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


def test_sessions_are_no_groups():
    balancer = LoadBalancer(Service(), "round-robin")
    session = send(balancer, session_id=1)
    assert send(balancer, group_id=1) != session
    assert send(balancer, session_id=1) == session


def test_keyed_requests_that_stay_cost_others_no_turn():
    plain, mixed = LoadBalancer(Service(), "round-robin"), LoadBalancer(Service(), "round-robin")
    alone = [send(plain) for _ in range(9)]
    begins = send(mixed, session_id="chat", group_id="prompt")  # by the strategy, so a turn
    between = []
    for _ in range(9):
        between.append(send(mixed))
        assert send(mixed, session_id="chat", group_id="prompt") == begins
        assert send(mixed, group_id="prompt") == begins
    assert alone == ["r0", "r1", "r2"] * 3
    assert between == ["r1", "r2", "r0"] * 3


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
