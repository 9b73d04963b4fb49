"""The pusher and its ledger, over replicas and a transport that only answer."""

import contextlib
import copy
import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.fakes.weights import SERVING, Answered, Replicas, Transport
from torchrl_vllm_sync import AutoTransport, ParamMeta, ReplicaState
from torchrl_vllm_sync.checks import Deadline
from torchrl_vllm_sync.errors import (
    NonFiniteWeightsError,
    PushUnderWayError,
    StaleVersionError,
    SyncError,
    UnsupportedArgumentError,
    WeightMismatchError,
    WeightSyncError,
)
from torchrl_vllm_sync.observe.status import StatusLog
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync.weights import audit, module
from torchrl_vllm_sync.weights.push import WeightPusher, catch_up_from_others
from torchrl_vllm_sync.weights.snapshots import data_file
from torchrl_vllm_sync.weights.transport import Standing, awaited_replicas

WEIGHTS = {"w": torch.ones(2)}


class Weights(nn.Module):
    """A model of one tensor."""

    def __init__(self, value=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.full((2,), float(value)))


@pytest.fixture
def replicas():
    return Replicas(a=0, b=0)


@pytest.fixture
def transport(replicas):
    return Transport(replicas)


@pytest.fixture
def pusher(replicas, transport):
    pusher = WeightPusher(replicas, lambda: [ParamMeta.of("w", WEIGHTS["w"])])
    pusher.use(transport)
    return pusher


def push(pusher, version=None, weights=WEIGHTS, **options):
    options = {"timeout_s": 1, "clear_cache": False, **options}
    return pusher.push(weights, version=version, **options)


def test_versions_count_up_from_what_the_replicas_hold(pusher, replicas, transport):
    replicas.held = {"a": 7, "b": 9}
    assert pusher.committed == 0
    assert push(pusher).version == 10
    assert push(pusher).version == pusher.committed == 11
    assert push(pusher, 20).version == 20
    assert transport.sent == [10, 11, 20]
    assert replicas.calls == ["report"]  # asked once


def test_the_transport_is_opened_for_what_is_pushed(pusher, transport):
    push(pusher)
    (source,) = transport.opened_for
    assert [name for name, _ in source] == list(WEIGHTS)


@pytest.mark.parametrize("shares", [False, True])
def test_tensors_are_looked_for_once_a_push_unless_they_may_move(
    pusher, transport, monkeypatch, shares
):
    """Such as out of memory that engines share, as a transport is opened."""
    model, looks, sent = Weights(), [], []
    layout_of, send = module.layout_of, transport.send

    def move(members, source=None):
        del members, source
        model.w.data = model.w.data.clone()

    def note(members, push):
        sent.extend(one.data_ptr() for _, one in push.source.views())
        return send(members, push)

    monkeypatch.setattr(module, "layout_of", lambda one: looks.append(one) or layout_of(one))
    monkeypatch.setattr(transport, "open", move)
    monkeypatch.setattr(transport, "send", note)
    pusher._shares, pusher.slept_s = shares, 0.0
    push(pusher, weights=model)
    assert (sent == [model.w.data_ptr()]) == shares
    assert (len(looks) == 1) == (not shares)


def test_versions_count_up_from_what_stale_replicas_were_at(pusher, replicas):
    replicas.held = {"a": 57, "b": 56}
    replicas.states = dict.fromkeys("ab", ReplicaState.STALE)
    assert pusher.committed == 0
    assert push(pusher).version == 58


def test_versions_count_up_from_what_the_transport_holds(pusher, transport):
    transport.last_version = 100
    assert push(pusher).version == 101


def test_older_versions_are_refused_and_equal_ones_sent_again(pusher, transport):
    push(pusher, 5)
    push(pusher, 5)
    with pytest.raises(StaleVersionError, match="version must be at least 5, got 4"):
        push(pusher, 4)
    with pytest.raises(StaleVersionError, match="version must be at least 5, got 0"):
        push(pusher, 0)
    assert transport.sent == [5, 5]


FORMS = {
    "module": lambda module: module,
    "state dict": lambda module: module.state_dict(),
    "pairs": lambda module: iter(module.state_dict().items()),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_failed_push_is_repeated_with_the_same_weights_only(pusher, replicas, transport, form):
    module = Weights()
    transport.failing = {"b"}
    with pytest.raises(WeightSyncError):
        push(pusher, weights=FORMS[form](module))
    module.w.data[1] += 1  # of which torch keeps no count
    calls = list(replicas.calls)
    with pytest.raises(StaleVersionError, match=r"version 1 was pushed already, .*: w;"):
        push(pusher, weights=FORMS[form](module), version=1)
    assert (transport.sent, replicas.calls) == ([1], calls)
    module.w.data[1] -= 1
    with pytest.raises(WeightSyncError):
        push(pusher, weights=FORMS[form](module), version=1)
    transport.failing = set()
    assert push(pusher, weights=copy.deepcopy(module), version=1).version == 1
    assert transport.sent == [1, 1, 1]
    push(pusher, weights=FORMS[form](Weights(value=3)), version=2)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: nn.init.zeros_(module.w),
        lambda module: setattr(module, "w", nn.Parameter(torch.ones(2))),
        lambda module: setattr(module.w, "data", torch.ones(2)),
    ],
    ids=["written to", "another parameter", "other memory"],
)
def test_a_committed_version_is_repeated_only_from_tensors_as_they_were(pusher, transport, change):
    module = Weights()
    push(pusher, weights=module)
    assert push(pusher, weights=module, version=1).version == 1
    change(module)
    with pytest.raises(StaleVersionError, match=r"version 1 was pushed already, .*: w;"):
        push(pusher, weights=module, version=1)
    assert transport.sent == [1, 1]
    assert push(pusher, weights=module).version == 2
    with pytest.raises(StaleVersionError, match="must be at least 2"):
        push(pusher, weights=module, version=1)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_that_torch_does_not_count_as_a_write_is_noticed(pusher, transport, optimizer):
    module = Weights()
    step = optimizer(module.parameters(), lr=0.1, fused=True)
    push(pusher, weights=module)
    module.w.sum().backward()
    writes = module.w._version
    step.step()
    assert module.w._version == writes
    with pytest.raises(StaleVersionError, match=r"version 1 was pushed already, .*: w;"):
        push(pusher, weights=module, version=1)


def test_a_committed_version_is_repeated_from_another_state_dict_of_the_same_module(pusher):
    module = Weights()
    push(pusher, weights=module.state_dict())
    assert push(pusher, weights=module.state_dict(), version=1).version == 1


@pytest.mark.parametrize("weights", ["inference", "expanded", "conjugate"])
def test_a_push_of_unusual_tensors_that_fails_is_told_of_as_any_other(
    pusher, replicas, transport, weights
):
    with torch.inference_mode(weights == "inference"):
        made = {
            "inference": lambda: torch.ones(2),
            "expanded": lambda: torch.ones(1).expand(2),
            "conjugate": lambda: torch.ones(2, dtype=torch.cfloat).conj().imag,
        }[weights]()
    transport.failing = {"b"}
    with pytest.raises(WeightSyncError):
        push(pusher, weights={"w": made})
    assert replicas.left_behind == {"b": 1}
    transport.failing = set()
    assert push(pusher, weights={"w": made}, version=1).version == 1


def test_a_retry_by_another_transport_is_refused_before_anything_is_sent(
    pusher, replicas, transport
):
    """Who has the version already would take it for another run's, and serve no more."""
    transport.failing = {"b"}
    with pytest.raises(WeightSyncError):
        push(pusher)
    held_back, other = [*replicas.held_back], Transport(replicas)
    other.run_id = "another"
    pusher.use(other)
    with pytest.raises(StaleVersionError, match="version 1 was pushed already, by another trans"):
        push(pusher, version=1)
    assert (other.sent, replicas.held_back) == ([], held_back)
    assert push(pusher).version == 2
    pusher.use(transport)
    with pytest.raises(StaleVersionError, match="by another transport"):
        push(pusher, version=2)


def test_a_version_that_everybody_refused_stays_the_run_s_that_committed_it(pusher, transport):
    push(pusher)
    transport.failing, transport.run_id = {"a", "b"}, "another"
    pusher._pushed.clear()  # as in a process that has not pushed it
    with pytest.raises(WeightSyncError):
        push(pusher, version=1)
    assert (pusher.committed, pusher._ledger.run_id) == (1, "run")


def test_a_number_that_a_silent_replica_may_have_taken_is_not_free(pusher, transport):
    transport.failing = transport.silent = {"a", "b"}
    with pytest.raises(WeightSyncError):
        push(pusher, weights=Weights(), version=4)
    transport.failing = transport.silent = set()
    with pytest.raises(StaleVersionError, match="version 4 was pushed already"):
        push(pusher, weights=Weights(value=3), version=4)


def test_weights_are_read_once_for_a_replica_that_stays_behind(pusher, transport, monkeypatch):
    read = []
    checksum = data_file.checksum
    monkeypatch.setattr(data_file, "checksum", lambda one: read.append(1) or checksum(one))
    transport.failing = {"b"}
    for _ in range(4):
        push(pusher, weights=Weights(), strict=False)
    assert read == [1]


def test_a_failed_push_from_a_gpu_is_recognised_without_a_copy_on_the_host(
    pusher, transport, monkeypatch
):
    monkeypatch.setattr(audit, "is_on_host", lambda _: False)
    monkeypatch.setattr(torch.Tensor, "numpy", None)  # by which the host would read
    module = Weights()
    transport.failing = {"b"}
    with pytest.raises(WeightSyncError):
        push(pusher, weights=module)
    module.w.data[1] += 1
    with pytest.raises(StaleVersionError, match=r"version 1 was pushed already, .*: w;"):
        push(pusher, weights=module, version=1)
    module.w.data[1] -= 1
    transport.failing = set()
    assert push(pusher, weights=module, version=1).version == 1


def test_a_retry_of_a_source_that_cannot_be_compared_is_safe(pusher, transport):
    class Own:
        def metadata(self):
            return [ParamMeta.of("w", WEIGHTS["w"])]

        def __iter__(self):
            yield from WEIGHTS.items()

    transport.failing = {"b"}
    with pytest.raises(WeightSyncError):
        push(pusher, weights=Own())
    transport.failing = set()
    assert push(pusher, weights=Own(), version=1).version == 1


def test_a_committed_version_that_nothing_can_be_compared_with_is_not_repeated(pusher, transport):
    class Own:
        def metadata(self):
            return [ParamMeta.of("w", WEIGHTS["w"])]

        def __iter__(self):
            yield from WEIGHTS.items()

    push(pusher, weights=Own())
    with pytest.raises(StaleVersionError, match="nothing is known to compare"):
        push(pusher, weights=Own(), version=1)
    assert transport.sent == [1]


def test_pushes_that_everybody_took_read_no_weights(pusher, transport, monkeypatch):
    monkeypatch.setattr(data_file, "checksum", None)
    monkeypatch.setattr(audit, "checksum", None)
    for _ in range(3):
        push(pusher, weights=Weights())
    assert transport.sent == [1, 2, 3]


def test_a_number_that_nobody_took_is_free_for_other_weights(pusher, transport):
    transport.failing = {"a", "b"}
    with pytest.raises(WeightSyncError):
        push(pusher, weights=Weights(), version=4)
    transport.failing = set()
    assert push(pusher, weights=Weights(value=3), version=4).version == 4


def test_what_was_pushed_is_not_kept_alive(pusher, transport):
    module = Weights()
    seen = weakref.ref(module.w)
    push(pusher, weights=module)
    transport.opened_for.clear()
    del module
    gc.collect()
    assert seen() is None


def test_who_was_left_behind_is_held_back_and_can_be_repaired(pusher, replicas, transport):
    push(pusher)
    transport.failing = {"b"}
    with pytest.raises(
        WeightSyncError, match=r"version 2 did not .* replica b: injected"
    ) as caught:
        push(pusher)
    assert caught.value.failures == {"b": "injected"}
    assert set(replicas.held_back) == {("a", 2, "run"), ("b", 2, "run")}
    assert replicas.left_behind == {"b": 2}
    assert pusher.committed == 1
    transport.failing = set()
    with pytest.raises(StaleVersionError, match="at least 2, got 1"):
        push(pusher, 1)
    assert push(pusher, 2).version == pusher.committed == 2
    assert push(pusher).version == 3


def test_nobody_is_held_back_when_all_failed_and_the_number_is_used_up(pusher, replicas, transport):
    push(pusher)
    transport.failing = {"a", "b"}
    with pytest.raises(WeightSyncError):
        push(pusher)
    assert replicas.held_back == []
    transport.failing = set()
    # Version 2 may be stored with the weights of then.
    assert push(pusher).version == 3


def test_a_push_that_another_process_overtook_takes_the_next_number(pusher, replicas, transport):
    push(pusher)
    replicas.held = {"a": 3, "b": 3}  # pushed by somebody else
    send = transport.send

    def refuse_old(members, push):
        if push.version <= 3:
            transport.sent.append(push.version)
            return dict.fromkeys(replicas.held, OSError("holds 3"))
        return send(members, push)

    transport.send = refuse_old
    assert push(pusher).version == 4
    assert transport.sent == [1, 2, 4]
    replicas.held = {"a": 9, "b": 9}
    assert push(pusher).version == 5  # this transport takes any


def test_weights_that_do_not_fit_are_not_sent_and_use_no_number(pusher, transport):
    for weights in ({}, {"w": torch.ones(3)}, {"v": torch.ones(2)}):
        with pytest.raises(WeightMismatchError):
            push(pusher, weights=weights)
    assert transport.sent == []
    assert push(pusher).version == 1


def test_nan_is_not_sent_by_a_transport_that_does_not_look_and_uses_no_number(pusher, transport):
    with pytest.raises(NonFiniteWeightsError):
        push(pusher, weights={"w": torch.tensor([1.0, torch.nan])})
    assert transport.sent == []
    assert push(pusher).version == 1


def test_a_transport_is_closed_when_another_takes_over(pusher, replicas, transport):
    pusher.use(transport)
    assert transport.closed == 0
    second = Transport(replicas)
    pusher.use(second)
    assert (transport.closed, second.closed) == (1, 0)
    pusher.close()
    assert second.closed == 1


@pytest.mark.parametrize("other", ["memmap", 3, None, Transport], ids=str)
def test_what_is_no_transport_takes_nobodys_place(pusher, transport, other):
    pusher.use(transport)
    with pytest.raises(UnsupportedArgumentError, match="transport must be a WeightTransport, got"):
        pusher.use(other)
    assert pusher.transport is transport
    assert transport.closed == 0
    assert push(pusher).version == 1


@pytest.mark.parametrize(
    ("version", "timeout_s", "culprit"),
    [
        ("3", 1, "version"),
        (True, 1, "version"),
        (float("nan"), 1, "version"),
        ([1], 1, "version"),
        (2**63, 1, "version"),
        (None, 0, "timeout_s"),
        (None, -1, "timeout_s"),
        (None, float("inf"), "timeout_s"),
        (None, "5", "timeout_s"),
    ],
)
def test_arguments_that_are_no_such_numbers_send_nothing(
    pusher, transport, version, timeout_s, culprit
):
    log, options = StatusLog(LoadTracker([])), {"timeout_s": timeout_s, "clear_cache": False}
    with pytest.raises(UnsupportedArgumentError, match=culprit):
        pusher.push(WEIGHTS, version=version, on_end=log.end_push, **options)
    assert transport.sent == []
    assert isinstance(log.pushes[0].version, int | None)  # pages are made of it


# ---------------------------------------------------------------- replicas that are left behind


def test_without_strict_one_replica_is_enough_and_the_report_names_the_others(
    pusher, replicas, transport
):
    announced = []
    pusher._on_commit = announced.append
    transport.failing = {"b"}
    report = push(pusher, strict=False)
    assert (report.version, report.left_behind) == (1, {"b": "injected"})
    assert pusher.committed == 1
    assert announced == [report]
    assert replicas.left_behind == {"b": 1}
    assert pusher.committed_run_id == "run"
    assert push(pusher, strict=False).version == 2
    transport.failing = set()
    repaired = push(pusher, 2, strict=False)
    assert (repaired.left_behind, len(announced)) == ({}, 2)  # it was committed before


def test_without_strict_a_push_that_nobody_takes_still_raises(pusher, replicas, transport):
    push(pusher)
    transport.failing = {"a", "b"}
    with pytest.raises(WeightSyncError):
        push(pusher, strict=False)
    assert (pusher.committed, replicas.left_behind) == (1, {})


def test_the_pusher_s_own_strictness_holds_where_a_push_does_not_say(replicas, transport):
    pusher = WeightPusher(replicas, lambda: [ParamMeta.of("w", WEIGHTS["w"])], strict=False)
    pusher.use(transport)
    transport.failing = {"b"}
    assert push(pusher).left_behind == {"b": "injected"}
    with pytest.raises(WeightSyncError):
        push(pusher, strict=True)
    with pytest.raises(UnsupportedArgumentError, match="strict must be a bool or None, got 'no'"):
        push(pusher, strict="no")


def test_a_replica_that_starts_is_left_behind_even_by_a_strict_push(pusher, replicas, transport):
    replicas.known = {"b": Standing(state=ReplicaState.STARTING)}
    transport.failing = {"b"}
    report = push(pusher, strict=True)
    assert report.left_behind == {"b": "injected"}
    assert pusher.committed == 1
    replicas.known = {"b": Standing(state=ReplicaState.FAILED)}
    with pytest.raises(WeightSyncError):
        push(pusher, strict=True)


def test_pushes_wait_for_who_joins_and_not_for_who_is_gone():
    known = {one: Standing(state=one, incarnation=one.value) for one in ReplicaState}
    missing = {ReplicaState.FAILED, ReplicaState.CLOSED}
    assert awaited_replicas(known).keys() == known.keys() - missing


def test_who_was_silent_is_told_to_hold_back_and_not_waited_for(pusher, replicas, transport):
    transport.failing = transport.silent = {"b"}
    waited = []
    answers = replicas.answers
    replicas.answers = lambda deadline_s: waited.append(set(replicas.answer)) or answers(deadline_s)
    push(pusher, strict=False)
    assert set(replicas.held_back) == {("a", 1, "run"), ("b", 1, "run")}
    assert waited == [{"a", "b"}, {"a"}]  # stock, and who was held back
    push(pusher, strict=False)
    assert not any("b" in one for one in waited[1:])  # nor asked what it holds


def test_the_time_limit_follows_what_pushes_took(pusher, replicas, transport):
    push(pusher, timeout_s=None)
    push(pusher, timeout_s=None)
    push(pusher, timeout_s=7)
    assert transport.limits[0] == 300
    assert 30 < transport.limits[1] < 40
    assert transport.limits[2] == 7
    replicas.known = {"b": Standing(state=ReplicaState.SERVING, incarnation="another")}
    push(pusher, timeout_s=None)
    assert transport.limits[3] == 300


def test_pushes_that_load_nothing_do_not_tell_how_long_pushes_take(pusher, transport):
    transport.facts = {"loaded": False}
    push(pusher, timeout_s=None)
    transport.facts = {"loaded": True}
    push(pusher, timeout_s=None)
    push(pusher, timeout_s=None)
    assert transport.limits[:2] == [300, 300]
    assert transport.limits[2] < 40


def test_the_time_before_a_transport_sends_is_told(pusher, replicas, transport, monkeypatch):
    monkeypatch.setattr(transport, "open", lambda client, source: time.sleep(0.05))
    report = push(pusher)
    assert 0.05 <= report.phases["open_s"] <= report.seconds
    assert 0 <= report.phase_starts["open_s"] <= report.seconds - report.phases["open_s"]


def test_who_was_silent_and_has_caught_up_can_give_to_others(
    pusher, replicas, transport, monkeypatch
):
    asked = []

    def catch_up(client, replica_ids, givers, version, deadline):
        asked.append((list(replica_ids), list(givers), version))
        replicas.states |= dict.fromkeys(replica_ids, ReplicaState.SERVING)
        replicas.held |= dict.fromkeys(replica_ids, version)
        return {name: {} for name in replica_ids}

    monkeypatch.setattr("torchrl_vllm_sync.weights.push.catch_up_from_others", catch_up)
    transport.failing = transport.silent = {"b"}
    push(pusher, strict=False)
    replicas.stopped = set()
    assert pusher.catch_up(["b"], 1.0) == {}
    assert pusher.catch_up(["a"], 1.0) == {}
    assert asked == [(["b"], ["a"], 1), (["a"], ["b"], 1)]


@pytest.mark.parametrize("others", [ReplicaState.SERVING, ReplicaState.UPDATING])
def test_who_sleeps_wakes_as_it_catches_up_if_others_are_awake(
    replicas, transport, monkeypatch, others
):
    def catch_up(client, replica_ids, *_):
        replicas.calls.append("load")
        return {name: {} for name in replica_ids}

    monkeypatch.setattr("torchrl_vllm_sync.weights.push.catch_up_from_others", catch_up)
    pusher = WeightPusher(replicas, lambda: [ParamMeta.of("w", WEIGHTS["w"])], wakes=True)
    pusher.use(transport)
    push(pusher)
    replicas.calls.clear()
    replicas.states = {"a": others, "b": ReplicaState.STALE}
    assert pusher.catch_up(["b"], 1.0) == {}
    is_awake = others is ReplicaState.SERVING
    wanted = ["rouse", "load", "rouse"] if is_awake else ["load"]
    assert [one for one in replicas.calls if one != "report"] == wanted


def test_who_is_stopped_is_not_waited_for_while_pushes_wait(
    pusher, replicas, transport, monkeypatch
):
    loads = []

    def from_store(client, replica_ids, stored, version, limit_s):
        loads.append(sorted(replica_ids))
        return {name: {} for name in replica_ids}

    transport.directory = "store"
    monkeypatch.setattr("torchrl_vllm_sync.weights.push.MemmapTransport", type(transport))
    monkeypatch.setattr("torchrl_vllm_sync.weights.push.load_snapshot", from_store)
    push(pusher)
    transport.last_version = 1
    replicas.stopped = {"b"}
    assert pusher.catch_up(["a", "b"], 1.0) == {"b": "no answer"}
    assert loads == [["a"]]


def test_who_cannot_read_the_store_gets_the_weights_from_another(
    pusher, replicas, transport, monkeypatch
):
    """Such as one that was restarted on another node."""
    asked = []

    def from_store(client, replica_ids, stored, version, limit_s):
        assert stored == {"directory": "store", "run_id": "run"}
        return {name: OSError("no such directory") for name in replica_ids}

    def from_others(client, replica_ids, givers, version, deadline):
        asked.append((list(replica_ids), list(givers), version))
        return {name: {} for name in replica_ids}

    transport.directory = "store"
    monkeypatch.setattr("torchrl_vllm_sync.weights.push.MemmapTransport", type(transport))
    monkeypatch.setattr("torchrl_vllm_sync.weights.push.load_snapshot", from_store)
    monkeypatch.setattr("torchrl_vllm_sync.weights.push.catch_up_from_others", from_others)
    push(pusher)
    transport.last_version = 1
    assert pusher.catch_up(["b"], 1.0) == {}
    assert asked == [(["b"], ["a"], 1)]


@pytest.mark.parametrize(("timeout_s", "givers"), [(0.0, ["a"]), (60.0, ["a", "b"])])
def test_a_catch_up_that_is_late_waits_for_no_further_giver(timeout_s, givers):
    asked = []

    class Hung:
        def start_calls(self, method, calls, **_):
            asked.extend(calls if method == "offer_weights" else ())
            return Answered(dict.fromkeys(calls, TimeoutError("hung")))

    failed = catch_up_from_others(Hung(), ["c"], ["a", "b"], 1, Deadline(timeout_s))
    assert asked == givers
    assert isinstance(failed["c"], TimeoutError)


def test_every_push_looks_where_the_weights_are(pusher, transport, monkeypatch):
    auto, looks = AutoTransport(), []
    auto._chosen = transport
    monkeypatch.setattr(auto, "open", lambda members, source: looks.append(source))
    pusher.use(auto)
    assert [push(pusher).transport for _ in range(2)] == ["fake", "fake"]
    assert len(looks) == 2


# ---------------------------------------------------------------- what others are told


def test_what_became_of_a_push_is_told_once_and_before_the_turn_is_known_to_be_over(
    pusher, replicas, transport
):
    told = []

    def on_end(status):
        told.append(status)
        assert replicas.turns[-1] == ("end_push", "a", "b")

    transport.failing = {"b"}
    report = push(pusher, strict=False, on_end=on_end)
    with pytest.raises(WeightSyncError) as caught:
        push(pusher, strict=True, on_end=on_end)
    with pytest.raises(UnsupportedArgumentError):
        pusher.push(WEIGHTS, version=7, mode="never", on_end=told.append)
    done, failed, refused = told
    assert (done.version, done.error, done.left_behind) == (1, "", {"b": "injected"})
    assert (done.seconds, done.num_bytes) == (report.seconds, 8)
    assert (failed.version, failed.error) == (2, str(caught.value))
    assert failed.left_behind == {"b": "injected"}
    assert (refused.version, "mode must be one of" in refused.error) == (7, True)


def test_a_push_whose_hook_failed_is_committed_all_the_same(pusher, monkeypatch):
    def hook(report):
        raise ZeroDivisionError("a user's hook")

    told = []
    monkeypatch.setattr(pusher, "_on_commit", hook)
    with pytest.raises(ZeroDivisionError):
        push(pusher, on_end=told.append)
    assert [(one.version, one.error) for one in told] == [(1, "")]


def test_an_interrupted_push_is_no_push(pusher, transport, monkeypatch):
    def interrupt(members, source):
        raise KeyboardInterrupt

    told = []
    monkeypatch.setattr(transport, "open", interrupt)
    with pytest.raises(KeyboardInterrupt):
        push(pusher, on_end=told.append)
    assert told == [None]


def test_only_one_thread_at_a_time_has_the_turn(pusher):
    with ThreadPoolExecutor(1) as pool:
        with pusher.exclusive(1), pusher.exclusive(1):
            refused = pool.submit(lambda: pusher.exclusive(0.05).__enter__())
            with pytest.raises(SyncError, match=r"a push was under way for 0\.05 s"):
                refused.result()
            push(pusher)
        assert pool.submit(lambda: push(pusher).version).result() == 2


def test_who_joined_during_a_push_is_kept_out_until_it_has_that_version(
    pusher, replicas, transport, monkeypatch
):
    send = transport.send

    def send_while_one_joins(*args, **kwargs):
        outcome = send(*args, **kwargs)
        replicas.held.setdefault("c", 0)
        return outcome

    monkeypatch.setattr(transport, "send", send_while_one_joins)
    options = {"version": None, "timeout_s": 5.0, "clear_cache": False}
    pusher.push(WEIGHTS, **options)
    assert replicas.held_back == [("c", 1, "run")]
    assert replicas.left_behind == {"c": 1}
    pusher.push(WEIGHTS, **options)  # this one reaches it
    assert replicas.held_back == [("c", 1, "run")]


# ---------------------------------------------------------------- two trainers


def test_one_replica_is_asked_first_and_all_are_told_of_the_end(pusher, replicas, transport):
    replicas.turns = []
    push(pusher)
    assert replicas.turns == [("begin_push", "a"), ("begin_push", "b"), ("end_push", "a", "b")]
    pusher.open()
    assert replicas.turns[3:] == replicas.turns[:3]


@pytest.mark.parametrize("replica", ["a", "b"])
def test_a_push_that_another_trainer_keeps_out_touches_nothing(
    pusher, replicas, transport, replica
):
    replicas.refusals = {replica: PushUnderWayError("far-away", 7)}
    for call in (push, WeightPusher.open):
        replicas.turns = []
        with pytest.raises(PushUnderWayError, match="pid 7 on far-away"):
            call(pusher)
        assert replicas.turns[-1] == ("end_push", "a", "b")
    assert (transport.sent, transport.opened_for, replicas.calls) == ([], [], [])
    replicas.refusals = {}
    assert push(pusher).version == 1


@pytest.mark.parametrize("came", ["c", "a"])
def test_replicas_that_came_while_the_first_was_asked_are_asked_too(
    pusher, replicas, transport, came
):
    """Such as one in the place of the only one there was, to which another trainer pushes."""
    replicas.held = {"a": 0}
    push(pusher)

    def follow():
        replicas.held, replicas.turns = {came: 1}, []
        replicas.known = {came: replace(SERVING, incarnation="another")}
        replicas.refusals = {came: PushUnderWayError("far-away", 7)}

    replicas.look_for_members = lambda: follow
    with pytest.raises(PushUnderWayError, match="pid 7 on far-away"):
        push(pusher)
    asked, *_, told = replicas.turns
    assert (asked, came in told) == (("begin_push", came), True)
    assert transport.sent == [1]


@pytest.mark.parametrize("answer", [TimeoutError("no answer"), SyncError("it is dead")])
def test_who_cannot_say_who_pushes_is_passed_over(pusher, replicas, answer):
    replicas.refusals = {"a": answer}
    assert push(pusher).version == 1
    replicas.refusals = {"a": answer, "b": PushUnderWayError("far-away", 7)}
    with pytest.raises(PushUnderWayError):
        push(pusher)


def test_silent_replicas_are_not_waited_for_one_after_the_other(pusher, replicas):
    replicas.held = dict.fromkeys("abcdef", 0)
    replicas.states = dict.fromkeys("abcdef", ReplicaState.SERVING)
    replicas.refusals = dict.fromkeys("abcdef", TimeoutError("no answer"))
    replicas.turns = []
    pusher.open()
    assert [calls for calls in replicas.turns if calls[0] == "begin_push"] == [
        ("begin_push", "a"),
        ("begin_push", *"bcdef"),
    ]


def test_what_another_trainer_pushed_since_is_counted_from(pusher, replicas, transport):
    push(pusher)
    replicas.held = {"a": 5, "b": 5}
    replicas.refusals = {"a": False, "b": False}
    assert push(pusher).version == 6
    assert transport.sent == [1, 6]


@pytest.mark.parametrize("was_ours", [True, False])
def test_a_replica_that_another_holds_since_is_not_pushed_to(
    pusher, replicas, transport, monkeypatch, was_ours
):
    push(pusher)
    replicas.refusals = dict.fromkeys("ab", was_ours)
    looks = iter([lambda: None, lambda: replicas.held.pop("b")])  # it is held after the first
    monkeypatch.setattr(replicas, "refresh_members", lambda: next(looks)())
    report = push(pusher)
    assert [one.replica_id for one in report.replicas] == (["a", "b"] if was_ours else ["a"])


@pytest.mark.parametrize("replica", ["a", "b"])
def test_quiet_waits_for_another_trainers_push_and_counts_from_it(pusher, replicas, replica):
    push(pusher)
    replicas.refusals = {replica: PushUnderWayError("far-away", 7)}
    with pytest.raises(PushUnderWayError), pusher.quiet(0.2):
        pytest.fail("it was not quiet")
    ends = threading.Timer(0.2, replicas.refusals.update, [{"a": False, "b": False}])
    ends.start()
    with pusher.quiet(10):
        assert replicas.turns[-1] != ("end_push", "a", "b")  # nobody else may push
        replicas.held = {"a": 5, "b": 5}
    assert replicas.turns[-1] == ("end_push", "a", "b")
    replicas.refusals = {}
    assert push(pusher).version == 6


def test_a_push_that_takes_long_gives_signs_of_life_until_it_ends(
    pusher, replicas, transport, monkeypatch
):
    monkeypatch.setattr("torchrl_vllm_sync.weights.push.SIGN_OF_LIFE_S", 0.01)
    send = transport.send

    def slow(*args, **kwargs):
        deadline = time.monotonic() + 10
        while replicas.turns.count(("keep_push", "a", "b")) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return send(*args, **kwargs)

    transport.send = slow
    push(pusher)
    assert replicas.turns[-1] == ("end_push", "a", "b")
    told = len(replicas.turns)
    time.sleep(0.05)
    assert len(replicas.turns) == told


# ---------------------------------------------------------------- what pushes learn from pushes


def test_after_a_push_that_failed_replicas_are_asked_anew_what_they_hold(
    pusher, replicas, transport
):
    push(pusher)
    transport.failing = {"b"}
    with pytest.raises(WeightSyncError):
        push(pusher)
    transport.failing = set()
    replicas.held = {"a": 40, "b": 41}  # by whatever brought them there since
    replicas.calls.clear()
    assert push(pusher).version == 42
    assert replicas.calls == ["report"]


def test_pushes_that_failed_do_not_tell_how_long_pushes_take(pusher, replicas, transport):
    for strict in (True, False):
        transport.failing = {"b"}
        with contextlib.suppress(WeightSyncError):
            push(pusher, timeout_s=None, strict=strict)
    transport.failing = set()
    push(pusher, timeout_s=None)
    assert transport.limits == [300, 300, 300]
    push(pusher, timeout_s=None)
    assert transport.limits[3] < 40


# ---------------------------------------------------------------- transfers that all take part in


class Collective(Transport):
    """A transfer that breaks off for all when one is lost, and goes well without it."""

    is_collective = True

    def __init__(self, replicas):
        super().__init__(replicas)
        self.sent_to = []

    def send(self, members, push):
        self.sent_to.append(sorted(members.incarnations))
        lost = self.silent & members.incarnations.keys()
        self.replicas.stopped |= lost
        answers = dict.fromkeys(members.incarnations, SyncError("somebody is missing"))
        if lost:
            return answers | dict.fromkeys(lost, TimeoutError("no answer"))
        return {name: self.answer(name, push.version) for name in members.incarnations}


def test_a_transfer_is_sent_again_without_the_lost_who_are_reported(pusher, replicas):
    replicas.held = {"a": 0, "b": 0, "c": 0}
    transport = Collective(replicas)
    transport.silent = {"b"}
    pusher.use(transport)
    report = push(pusher, strict=False)
    assert transport.sent_to == [["a", "b", "c"], ["a", "c"]]
    assert report.left_behind == {"b": "no answer"}
    assert {one.replica_id: one.version for one in report.replicas} == {"a": 1, "b": None, "c": 1}
    assert report.phases["attempts"] == 2
    assert report.phases["lost_s"] >= 0
    again = push(pusher, strict=False)
    assert transport.sent_to[2:] == [["a", "c"]]
    assert again.left_behind == {"b": "no answer"}
    assert [one.is_silent for one in again.replicas if one.error] == [True]
    with pytest.raises(WeightSyncError, match="replica b: no answer"):
        push(pusher, strict=True)


def test_who_is_absent_is_reported_and_not_waited_for(pusher, replicas):
    replicas.known = {"b": Standing(state=ReplicaState.FAILED, reason="it died")}
    transport = Collective(replicas)
    pusher.use(transport)
    report = push(pusher, strict=False)
    assert transport.sent_to == [["a"]]
    assert report.left_behind == {"b": "it is failed: it died"}
    with pytest.raises(WeightSyncError):
        push(pusher, strict=True)


def test_a_transfer_that_fails_for_its_own_reasons_is_not_sent_again(pusher, replicas):
    transport = Collective(replicas)
    transport.failing = {"a"}
    pusher.use(transport)
    with pytest.raises(WeightSyncError) as caught:
        push(pusher)
    assert caught.value.failures == {"a": "injected"}
    assert len(transport.sent_to) == 1
