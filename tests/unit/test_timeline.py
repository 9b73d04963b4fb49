"""Pushes as files for trace viewers, held to the published format."""

import json
import time
from itertools import combinations

import pytest
import torch

from tests.fakes.weights import Replicas
from torchrl_vllm_sync import LoadReport, MemmapTransport, ParamMeta, PushReport, save_timeline
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.observe.views import trace_of
from torchrl_vllm_sync.weights.push import WeightPusher
from torchrl_vllm_sync.weights.snapshots.data_file import TensorWriter
from torchrl_vllm_sync.weights.source import WeightSource

BEGAN = 1.75e9 + 0.123456


def replica(name="0", began_at=BEGAN + 0.02, **phases):
    measured = {
        "pause_s": 0.001,
        "load_s": 0.03,
        "resume_s": 0.002,
        "whole_pause_s": 0.033,
        "num_kept": 4,
        **phases,
    }
    return LoadReport(replica_id=name, version=7, began_at=began_at, path="plan", **measured)


def push(*replicas, began_at=BEGAN, version=7, **options):
    """A push by broadcast: prepared, then sent, of which it waited for readiness at first."""
    return PushReport(
        **{
            "version": version,
            "transport": "broadcast",
            "num_bytes": 10,
            "seconds": 0.1,
            "phases": {"prepare_s": 0.01, "send_s": 0.06, "ready_s": 0.02, "copy_s": 0.004},
            "phase_starts": {"prepare_s": 0.005, "send_s": 0.015, "ready_s": 0.015},
            "replicas": list(replicas),
            "began_at": began_at,
            **options,
        }
    )


def tracks(trace):
    """Name of each track to its complete events."""
    names = {
        one["tid"]: one["args"]["name"]
        for one in trace["traceEvents"]
        if one["name"] == "thread_name"
    }
    found = {name: [] for name in names.values()}
    for one in trace["traceEvents"]:
        if one["ph"] == "X":
            found[names[one["tid"]]].append(one)
    return found


def spans(events):
    """Name, begin and end of each, in milliseconds."""
    return [
        (one["name"], pytest.approx(one["ts"] / 1e3), pytest.approx((one["ts"] + one["dur"]) / 1e3))
        for one in events
    ]


def assert_follows_the_format(trace):
    """What the Trace Event Format asks of the two kinds of events used here."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    for one in trace["traceEvents"]:
        assert isinstance(one["name"], str)
        assert isinstance(one["pid"], int)
        if one["ph"] == "M":
            assert one["name"] in ("process_name", "thread_name", "thread_sort_index")
            continue
        assert one["ph"] == "X"
        assert isinstance(one["cat"], str)
        assert isinstance(one["tid"], int)
        assert isinstance(one["ts"], float)
        assert one["dur"] >= 0
    for events in tracks(trace).values():
        for one, other in combinations(events, 2):
            assert nest_or_do_not_meet(one, other), (one, other)


def nest_or_do_not_meet(*events):
    (_, b), (c, d) = sorted(
        ((round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in events),
        key=lambda ends: (ends[0], -ends[1]),
    )
    return b <= c or d <= b


def test_a_push_has_a_track_for_the_trainer_and_one_for_each_replica(tmp_path):
    path = tmp_path / "push.json"
    save_timeline(path, push(replica("0"), replica("b", BEGAN + 0.03)))
    trace = json.loads(path.read_text())
    assert_follows_the_format(trace)
    found = tracks(trace)
    assert list(found) == ["trainer", "replica 0", "replica b"]
    assert spans(found["trainer"]) == [
        ("push", 0, 100),
        ("prepare", 5, 15),
        ("send", 15, 75),
        ("ready", 15, 35),
    ]
    assert spans(found["replica 0"]) == [
        ("whole_pause", 20, 53),
        ("pause", 20, 21),
        ("load", 21, 51),
        ("resume", 51, 53),
    ]
    assert spans(found["replica b"])[0] == ("whole_pause", 30, 63)
    assert trace["otherData"] == {"began_at": BEGAN}


def test_what_has_no_place_in_time_is_among_the_arguments():
    dead = LoadReport(replica_id="1", version=None, error="it died")
    held = replica("2", None, loaded=0.0)
    found = tracks(trace_of(push(replica(), dead, held, left_behind={"1": "it died"})))
    assert found["trainer"][0]["args"] == {
        "version": 7,
        "transport": "broadcast",
        "num_bytes": 10,
        "left_behind": {"1": "it died"},
        "copy_s": 0.004,
    }
    args = found["replica 0"][0]["args"]
    assert (args["version"], args["num_kept"], args["path"]) == (7, 4.0, "plan")
    assert found["replica 1"] == found["replica 2"] == []


@pytest.mark.parametrize("before", ["verify", "stage"])
def test_what_a_replica_does_before_its_pause_comes_first(before):
    phases = {f"{before}_s": 0.04, "ready_s": 0.01 if before == "stage" else 0.0}
    found = tracks(trace_of(push(replica(**phases))))["replica 0"]
    ready = [("ready", 20, 30)] if before == "stage" else []
    assert spans(found)[: len(ready) + 2] == [
        (before, 20, 60),
        *ready,
        ("whole_pause", 60, 93),
    ]


def test_several_pushes_share_the_tracks_in_order_of_time():
    later = push(replica(began_at=BEGAN + 0.52), began_at=BEGAN + 0.5, version=8)
    trace = trace_of([later, push(replica())])
    assert_follows_the_format(trace)
    found = tracks(trace)
    assert [one["args"]["version"] for one in found["trainer"] if one["name"] == "push"] == [7, 8]
    assert spans(found["replica 0"])[4] == ("whole_pause", 520, 553)


def test_a_push_that_waits_for_another_gets_a_track_of_its_own():
    """Events of one track must not overlap otherwise than by nesting."""
    waiting = push(replica(began_at=BEGAN + 0.12), began_at=BEGAN + 0.05, version=8)
    third = push(began_at=BEGAN + 0.1001, version=9)
    trace = trace_of([push(replica()), waiting, third])
    assert_follows_the_format(trace)
    versions = {
        name: [one["args"]["version"] for one in events if one["name"] == "push"]
        for name, events in tracks(trace).items()
    }
    assert versions == {"trainer": [7, 9], "trainer 2": [8], "replica 0": []}


def test_overlaps_would_be_noticed():
    trace = trace_of(push(replica()))
    trace["traceEvents"][-1]["dur"] += 1e3
    with pytest.raises(AssertionError):
        assert_follows_the_format(trace)


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(UnsupportedArgumentError, match="at least 1 push"):
        save_timeline(tmp_path / "push.json", [])
    assert not list(tmp_path.iterdir())


class Loading(Replicas):
    """Replicas that answer to a load with the report of one."""

    def start_calls(self, method, calls, **kwargs):
        super().start_calls(method, calls, **kwargs)
        if method == "load_snapshot":
            begin, began_at = time.perf_counter(), time.time()
            time.sleep(0.01)
            seconds = time.perf_counter() - begin
            report = {"version": 1, "load_s": seconds, "whole_pause_s": seconds}
            self.answer = dict.fromkeys(calls, report | {"began_at": began_at})
        return self

    def call_replicas(self, method, *args, deadline_s, **kwargs):
        return self.start_calls(method, dict.fromkeys(self.held, args), **kwargs).answers(0)


def test_a_real_push_is_measured_where_it_happens(tmp_path):
    """Durations are those of the report, each phase lies in the push, and the sum is no longer."""
    pusher = WeightPusher(Loading(a=0), lambda: [ParamMeta("w", torch.float32, (2,))])
    pusher.use(MemmapTransport(tmp_path / "weights"))
    before = time.time()
    report = pusher.push({"w": torch.ones(2)}, version=None, timeout_s=10, clear_cache=False)
    after = time.time()
    pusher.close()
    assert before - 1e-3 <= report.began_at <= after - report.seconds + 1e-3
    trace = trace_of(report)
    assert_follows_the_format(trace)
    whole, *phases = tracks(trace)["trainer"]
    assert whole["dur"] == pytest.approx(report.seconds * 1e6, abs=0.002)
    names = [one["name"] for one in phases]
    assert names == [
        "open",
        "publish",
        "acquire",
        "fill",
        "flush",
        "flip",
        "collect",
        "acknowledge",
    ]
    for one in phases:
        assert one["dur"] == pytest.approx(report.phases[f"{one['name']}_s"] * 1e6, abs=0.002)
    outer = [one["dur"] for one in phases if one["name"] in ("open", "publish", "acknowledge")]
    assert sum(outer) <= whole["dur"]
    replica_load = tracks(trace)["replica a"][2]
    acknowledge = phases[-1]
    assert acknowledge["ts"] - 1e3 <= replica_load["ts"] <= acknowledge["ts"] + acknowledge["dur"]


class Computed(WeightSource):
    """Hands out one buffer, as it may with every tensor."""

    def metadata(self):
        return [ParamMeta("weight", torch.float32, (2, 2))]

    def __iter__(self):
        yield "weight", torch.ones(2, 2)


@pytest.mark.parametrize(
    ("weights", "stay"), [(torch.nn.Linear(2, 2, bias=False), True), (Computed(), False)]
)
def test_only_weights_that_stay_in_place_are_stored_while_others_are(
    tmp_path, monkeypatch, weights, stay
):
    seen, add = [], TensorWriter.add
    monkeypatch.setattr(
        TensorWriter, "add", lambda *args, stays: seen.append(stays) or add(*args, stays=stays)
    )
    pusher = WeightPusher(Loading(a=0), lambda: [ParamMeta("weight", torch.float32, (2, 2))])
    pusher.use(MemmapTransport(tmp_path / "weights"))
    pusher.push(weights, version=None, timeout_s=10, clear_cache=False)
    pusher.close()
    assert seen == [stay]


def test_phases_whose_start_a_transport_does_not_say_are_not_drawn():
    report = PushReport(
        version=1,
        transport="own",
        num_bytes=8,
        seconds=1.0,
        phases={"send_s": 0.5},
        replicas=[],
        began_at=time.time() - 1,
    )
    (only,) = tracks(trace_of(report))["trainer"]
    assert (only["name"], only["args"]["send_s"]) == ("push", 0.5)
