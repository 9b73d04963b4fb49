"""What nobody should do to routing: it is refused by name, or does no harm."""

import asyncio
import gc
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from torchrl_vllm_sync import ReplicaState, known_strategies, register_strategy
from torchrl_vllm_sync.errors import InvalidPromptError, SyncError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import EngineReport, Replica
from torchrl_vllm_sync.requests.background import iterate_blocking
from torchrl_vllm_sync.requests.dispatch import Dispatcher
from torchrl_vllm_sync.requests.messages import EngineRequest
from torchrl_vllm_sync.routing import strategies
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync.routing.monitor import BareActorMonitor
from torchrl_vllm_sync.routing.strategies import PrefixIndex
from torchrl_vllm_sync.service import requests

SERVING = ReplicaState.SERVING
STRATEGIES = ["prefix-aware", "requests", "kv-cache", "round-robin"]


class Service:
    def __init__(self, num=4):
        self.actors = [object() for _ in range(num)]
        self.load = LoadTracker([f"r{at}" for at in range(num)], state=SERVING)


@pytest.fixture
def service():
    return Service()


def in_flight(service):
    return [one.in_flight for one in service.load.snapshots()]


def use(monkeypatch, choose):
    """Registers ``choose(snapshots)`` as the strategy ``"mine"``."""

    class Mine:
        def __init__(self, settings): ...
        def choose(self, request, snapshots):
            return choose(snapshots)

    monkeypatch.setitem(strategies._FACTORIES, "mine", Mine)
    return "mine"


# Strategies


def test_a_strategy_cannot_reorder_the_ledger(service, monkeypatch):
    def by_load(snapshots):
        snapshots.sort(key=lambda one: -one.in_flight)
        return 0

    balancer = LoadBalancer(service, use(monkeypatch, by_load))
    with pytest.raises(AttributeError, match="sort"):
        balancer.reserve([1])
    places = [LoadBalancer(service, "round-robin").reserve() for _ in range(4)]
    assert all(one.replica_id == f"r{one.index}" for one in places)


def test_a_strategy_may_answer_with_a_numpy_integer(service, monkeypatch):
    balancer = LoadBalancer(
        service, use(monkeypatch, lambda some: np.argmin([one.in_flight for one in some]))
    )
    places = [balancer.reserve() for _ in range(4)]
    assert [place.index for place in places] == [0, 1, 2, 3]
    assert all(type(place.index) is int for place in places)


@pytest.mark.parametrize("position", [True, 1.0, "1", np.bool_(True), np.int64(4), object()])
def test_a_strategy_that_answers_with_no_position_is_named(service, monkeypatch, position):
    balancer = LoadBalancer(service, use(monkeypatch, lambda _: position))
    with pytest.raises(IndexError, match="strategy 'mine' must choose one of 4 positions"):
        balancer.reserve([1])
    assert in_flight(service) == [0, 0, 0, 0]


# Reports


@pytest.mark.parametrize("name", ["kv_cache_usage", "num_unfinished", "num_running", "num_waiting"])
@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -1, 10**400])
def test_a_figure_that_cannot_be_counts_as_unknown(service, name, figure):
    for replica_id in service.load.replica_ids:
        service.load.describe(replica_id, block_size=16, num_kv_blocks=100)
        others = {"num_running": 3, "num_waiting": 4}
        report = EngineReport(replica_id=replica_id, state=SERVING, **{**others, name: figure})
        service.load.observe(report)
    for one in service.load.snapshots():
        assert getattr(one, name) is None
        assert one.num_elsewhere == (None if name in others else 7)
    for strategy in STRATEGIES:
        balancer = LoadBalancer(service, strategy)
        for place in [balancer.reserve([at] * 300, session_id=at) for at in range(20)]:
            place.release()
    assert in_flight(service) == [0, 0, 0, 0]


# Prompts


@pytest.mark.parametrize(
    "ids",
    [np.array([2**32 + 1]), np.array([2**31], np.uint32), np.array([2**64 - 1], np.uint64)],
)
def test_ids_of_an_array_that_do_not_fit_are_not_taken_for_others(service, ids):
    balancer = LoadBalancer(service)
    with pytest.raises(InvalidPromptError, match="32 bits"):
        balancer.reserve(ids)
    place = balancer.reserve([1, 2])
    with pytest.raises(InvalidPromptError, match="32 bits"):
        place.release([ids])
    assert in_flight(service) == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", ["<i8", ">i8", ">i4", "u1", "i2", "u4", "u8"])
def test_ids_of_every_integer_dtype_are_the_same_prompt(dtype):
    index = PrefixIndex(128)
    ids = list(range(200))
    assert index.chain(np.array(ids, dtype)).digests == index.chain(ids).digests
    assert index.chain(np.array(ids * 2, dtype)[::2]).digests == index.chain((ids * 2)[::2]).digests


@pytest.mark.parametrize("prompt", [{"prompt": "x", "cache_salt": 5}, [True, False]])
@pytest.mark.parametrize("strategy", ["prefix-aware", "requests"])
def test_salts_are_text_and_ids_no_truth_values(service, prompt, strategy):
    with pytest.raises(InvalidPromptError):
        LoadBalancer(service, strategy).reserve(prompt)
    assert in_flight(service) == [0, 0, 0, 0]


def test_prompts_that_look_alike_in_bytes_have_nothing_in_common():
    index, text = PrefixIndex(128), "abcd" * 200
    as_ids = list(np.frombuffer(text.encode(), "<i4"))
    chains = [index.chain(text), index.chain(as_ids)]
    chains += [index.chain(text, salt) for salt in ("", "a", "b")]
    chains += [index.chain("b" + text, "a"), index.chain(text, "ab")]
    chains += [index.chain(as_ids, salt) for salt in ("", "a")]
    digests = [digest for chain in chains for digest in chain.digests]
    assert len(set(digests)) == len(digests)
    # An answer behind a prompt is the same as both in one, wherever the border is.
    longer = index.chain(as_ids + as_ids).digests
    for at in (1, 127, 128, 129, 200):
        both = as_ids + as_ids
        assert index.chain(both[:at]).followed_by(both[at:]).digests == longer


# Replicas


def test_a_replica_that_takes_the_id_of_another_has_nothing_cached(service):
    balancer, prompt = LoadBalancer(service), list(range(1000))
    with balancer.reserve(prompt) as place:
        pass
    index = balancer._index
    chain = index.chain(prompt)
    assert index.cached_tokens(chain, place.replica_id, 0) == 1000
    service.load.remove(place.replica_id)
    service.load.add(place.replica_id, SERVING)
    balancer.reserve([9])
    assert index.cached_tokens(chain, place.replica_id, 0) == 0


# Loops and threads


def test_a_loop_that_is_closed_under_a_waiting_request_stops_no_reports(service):
    balancer = LoadBalancer(service)
    request = EngineRequest(
        request_id="1", prompt={"prompt_token_ids": [1]}, sampling_params=None, timeout_s=60.0,
        min_version=3,
    )  # fmt: skip
    dispatcher = Dispatcher(lambda: [Replica("r0", None)], service.load)

    def reserve(requests, avoid):
        return balancer.reserve_batch([[1]], exclude=avoid, min_version=3)

    loop = asyncio.new_event_loop()
    task = loop.create_task(dispatcher.run([request], reserve))
    loop.run_until_complete(asyncio.sleep(0))
    assert service.load.is_watched
    loop.close()
    service.load.observe(EngineReport(replica_id="r0", state=SERVING, weight_version=3))
    assert service.load.snapshots()[0].weight_version == 3
    task._log_destroy_pending = False  # it never ends


def test_a_stream_collected_while_its_ledger_is_locked_does_not_lock_up(monkeypatch, service):
    monkeypatch.setattr("torchrl_vllm_sync.requests.background.CLEAN_UP_TIMEOUT_S", 0.1)
    balancer, closed = LoadBalancer(service), threading.Event()

    async def items():
        with balancer.reserve([1]):
            try:
                while True:
                    yield 1
            finally:
                service.load.snapshots()  # needs the lock
                closed.set()

    cycle = [iterate_blocking(items())]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    assert sum(in_flight(service)) == 1
    with service.load.lock:
        gc.collect()
        assert not closed.is_set()
    assert closed.wait(10)
    for _ in range(1000):
        if not sum(in_flight(service)):
            return
        time.sleep(0.01)
    pytest.fail("the place was not given back")


# Settings and arguments


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("prefix_length", [float("nan"), float("inf"), 8.5, True, "8", None]),
        ("overload_threshold", ["x", True, None, [1.5]]),
        ("monitor_interval_s", [float("nan"), "1", True, None, -1.0]),
        ("max_sessions", [float("nan"), float("inf"), 1.5, "5", None, True, -1]),
        ("seed", [float("nan"), "x", None, [], -1]),
        ("strategy", [5, [["requests"]], [None], b"requests", "", [], {}]),
        ("tracker", [LoadTracker(["r0"], state=SERVING)]),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(service, name, values):
    for value in values:
        with pytest.raises(SyncError, match=name):
            LoadBalancer(service, **{name: value})


@pytest.mark.parametrize("number", [np.int64(8), np.int32(8)])
def test_settings_may_be_numbers_of_numpy(service, number):
    settings = {"prefix_length": number, "max_sessions": number, "seed": number}
    balancer = LoadBalancer(service, overload_threshold=np.float32(1.5), **settings)
    balancer.reserve([1] * 300, session_id=number).release([np.array([1, 2])])
    assert in_flight(service) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "arguments",
    [{"exclude": "r10"}, {"min_version": "5"}, {"min_version": -1}, {"min_version": 1.5}],
)
def test_an_argument_that_cannot_be_is_refused_by_name(service, arguments):
    (name,) = arguments
    balancer = LoadBalancer(service)
    for reserve in (lambda: balancer.reserve([1], **arguments),
                    lambda: balancer.reserve_batch([[1]], **arguments)):  # fmt: skip
        with pytest.raises(UnsupportedArgumentError, match=f"{name} must be"):
            reserve()
    assert in_flight(service) == [0, 0, 0, 0]


@pytest.mark.parametrize("prompts", [None, 5, iter([[1]]), b"ab", {1: 2}])
def test_what_is_no_batch_is_refused(service, prompts):
    with pytest.raises(InvalidPromptError):
        LoadBalancer(service).reserve_batch(prompts)


@pytest.mark.parametrize("n", [-5, 0, 2.5, float("nan"), "1", None])
def test_samples_that_cannot_be_counted_are_refused(service, n):
    balancer = LoadBalancer(service)
    with pytest.raises(UnsupportedArgumentError, match="n of at least 1"):
        balancer.reserve_batch([[1]], sampling_params=[SimpleNamespace(n=n, max_tokens=None)])
    with pytest.raises(UnsupportedArgumentError, match="max_tokens of at least 0"):
        balancer.reserve_batch([[1]], sampling_params=[SimpleNamespace(n=1, max_tokens=-5)])
    for odd in (None, {"n": 1}):
        with pytest.raises(UnsupportedArgumentError, match="sampling_params must have n of"):
            balancer.reserve_batch([[1]], sampling_params=[odd])
    with pytest.raises(UnsupportedArgumentError, match="one for each of 1 prompts"):
        balancer.reserve_batch([[1]], sampling_params=SimpleNamespace(n=1, max_tokens=1))
    assert in_flight(service) == [0, 0, 0, 0]


def test_what_is_no_strategy_is_not_registered():
    for name, factory in [("", int), (5, int), ([], int), ("some", None)]:
        with pytest.raises(UnsupportedArgumentError):
            register_strategy(name, factory)
    assert known_strategies() == STRATEGIES


def test_released_sessions_are_not_the_bytes_of_a_name(service):
    balancer = LoadBalancer(service)
    balancer.reserve([1], session_id=97)
    with pytest.raises(UnsupportedArgumentError, match="session_ids"):
        balancer.release_sessions(b"a")
    assert balancer.release_sessions(97) == 1


def test_a_prompt_of_another_lora_adapter_is_another_prompt(service):
    from vllm.lora.request import LoRARequest

    balancer, prompt = LoadBalancer(service), {"prompt_token_ids": list(range(1000))}
    reserve = requests._reserver(balancer)

    def held(prompt, lora):
        """Tokens that the request newly holds where it goes."""
        request = EngineRequest(
            request_id="1", prompt=prompt, sampling_params=SimpleNamespace(n=1, max_tokens=1),
            timeout_s=1.0, lora_request=lora,
        )  # fmt: skip
        (place,) = reserve([request], ())
        tokens = sum(one.held_tokens for one in service.load.snapshots())
        place.release()
        return tokens

    one, other = LoRARequest("one", 1, "/one"), LoRARequest("other", 2, "/other")
    moved = LoRARequest("one", 3, "/elsewhere")
    for lora in (None, one, other, moved):
        assert held(prompt, lora) == 1000
        assert held(prompt, lora) == 0
    salted = {**prompt, "cache_salt": "x"}
    assert held(salted, one) == 1000
    assert salted == {**prompt, "cache_salt": "x"}


@pytest.mark.parametrize("said", [10**400, float("nan"), -1, True, None, "0.5", ValueError()])
def test_whatever_a_bare_actor_says_its_report_is_taken(service, said):
    report = BareActorMonitor(service.load, list).read("r0", [said, said])
    service.load.observe(report)
    one = service.load.snapshots()[0]
    assert one.num_unfinished == one.kv_cache_usage == (1 if said is True else None)
    assert LoadBalancer(service, "kv-cache").reserve([1]).index in range(4)
