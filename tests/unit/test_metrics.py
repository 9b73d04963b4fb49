"""Which metrics there are, what each reads, and how requests are counted."""

import asyncio
import re
from pathlib import Path

import pytest

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import ReplicaUnavailableError, RequestLostError
from torchrl_vllm_sync.observe.metrics import (
    METRICS,
    PREFIX,
    push_readings,
    request_readings,
    status_readings,
)
from torchrl_vllm_sync.observe.status import ReplicaStatus, ServiceStatus
from torchrl_vllm_sync.replica import EngineCounters, Latency, LoadReport, PushReport
from torchrl_vllm_sync.service.requests import REQUEST_ENDS, RequestCounts

GUIDE = Path(__file__).resolve().parents[2] / "tutorials" / "guides" / "metrics.md"
KNOWN = ReplicaStatus(
    replica_id="0",
    state=ReplicaState.SERVING,
    in_flight=3,
    weight_version=7,
    num_running=2,
    num_waiting=1,
    kv_cache_usage=0.25,
    prefix_cache_hit_rate=0.5,
    time_to_first_token=Latency(p50_s=0.05, p99_s=0.4),
    counters=EngineCounters(num_prompt_tokens=100, num_generated_tokens=40, num_preempted=3),
    num_restarts=1,
)
SILENT = ReplicaStatus(replica_id="1", state=ReplicaState.FAILED, in_flight=0)


# What each tag's values look like: they stand in the order of their metric's names.
VALUES = {
    "service": "s",
    "replica": r"\d+",
    "state": "|".join(ReplicaState),
    "quantile": r"0\.5|0\.99",
    "phase": r"[a-z]\w*",
    "end": "answered|lost|failed|cancelled|committed",
}


def told(readings):
    """Name and tags in order to the value, each but once."""
    readings = list(readings)
    for one in readings:
        for name, value in zip(METRICS[one.name].tags, ("s", *one.tags), strict=True):
            assert re.fullmatch(VALUES[name], value), one
    found = {(one.name, *one.tags): one.value for one in readings}
    assert len(found) == len(readings)
    return found


def status(*replicas):
    return ServiceStatus(name="s", time=0.0, weight_version=7, in_flight=3, replicas=replicas)


def test_the_readme_lists_every_metric_as_it_is():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in GUIDE.read_text().splitlines()
        if line.startswith(f"| `ray_{PREFIX}")
    ]
    assert rows == [
        [
            f"`ray_{PREFIX}{one.name}`",
            one.kind,
            one.unit,
            ", ".join(f"`{tag}`" for tag in one.tags),
            one.about,
        ]
        for one in METRICS.values()
    ]


def test_names_are_those_that_prometheus_takes_and_counters_say_so():
    for name, one in METRICS.items():
        assert re.fullmatch("[a-z_]+", name)
        assert name.endswith("_total") == (one.kind == "counter")
        assert name.endswith("_seconds") == (one.kind == "histogram")


def test_what_a_replica_has_said_is_read():
    found = told(status_readings(status(KNOWN)))
    states = {key[2]: found.pop(key) for key in list(found) if key[0] == "replica_state"}
    assert states == {state.value: float(state == "serving") for state in ReplicaState}
    assert found == {
        ("weight_version",): 7,
        ("replica_weight_version", "0"): 7,
        ("replica_in_flight", "0"): 3,
        ("replica_running", "0"): 2,
        ("replica_waiting", "0"): 1,
        ("replica_kv_cache_usage", "0"): 0.25,
        ("replica_prefix_cache_hit_rate", "0"): 0.5,
        ("replica_time_to_first_token", "0", "0.5"): 0.05,
        ("replica_time_to_first_token", "0", "0.99"): 0.4,
        ("replica_prompt_tokens_total", "0"): 100,
        ("replica_generated_tokens_total", "0"): 40,
        ("replica_preemptions_total", "0"): 3,
        ("replica_restarts_total", "0"): 1,
    }


def test_what_is_unknown_is_not_read():
    found = told(status_readings(status(SILENT)))
    assert {name for name, *_ in found} == {"weight_version", "replica_state", "replica_in_flight"}


def test_a_push_is_counted_and_its_phases_are_observed():
    push = PushReport(
        began_at=0.5,
        seconds=0.5,
        version=3,
        num_bytes=64,
        phases={"send_s": 0.25, "attempts": 2},
        replicas=[LoadReport(replica_id="0", version=3, load_s=0.125, num_kept=5)],
        left_behind={"1": "it died"},
    )
    readings = list(push_readings(push))
    assert told(one for one in readings if one.name != "push_seconds") == {
        ("pushes_total", "committed"): 1,
        ("left_behind_total", "1"): 1,
        ("pushed_bytes_total",): 64,
        ("push_seconds_total", "whole"): 0.5,
        ("push_seconds_total", "send"): 0.25,
        ("replica_push_seconds", "0", "load"): 0.125,
    }
    assert told(one for one in readings if one.name == "push_seconds") == {
        ("push_seconds", "whole"): 0.5,
        ("push_seconds", "send"): 0.25,
    }


def test_a_push_that_failed_is_only_counted():
    push = PushReport(began_at=1.0, seconds=30.0, left_behind={"0": "silent"}, error="nobody")
    assert told(push_readings(push)) == {
        ("pushes_total", "failed"): 1,
        ("left_behind_total", "0"): 1,
    }


# ---------------------------------------------------------------- requests


def test_requests_that_ended_in_between_are_read():
    before, now = {"answered": 2, "lost": 1, "retried": 0}, {"answered": 5, "lost": 1, "retried": 4}
    assert told(request_readings(before, now)) == {
        ("requests_total", "answered"): 3,
        ("requests_total", "lost"): 0,
        ("requests_retried_total",): 4,
    }


def totals(**counts):
    return dict.fromkeys((*REQUEST_ENDS, "retried"), 0) | counts


def test_each_request_is_counted_by_its_end():
    counts = RequestCounts()
    loss = ReplicaUnavailableError("0", ReplicaState.FAILED, "it died")
    with counts.following(3) as end:
        end(None)
        end(RequestLostError("1", (loss,), "and nobody is left"))
        end(TimeoutError("late"))
    assert counts.totals() == totals(answered=1, lost=1, failed=1)


@pytest.mark.parametrize(
    ("error", "how"),
    [(ValueError, "failed"), (asyncio.CancelledError, "cancelled"), (GeneratorExit, "cancelled")],
)
def test_requests_that_nobody_hears_of_end_with_their_call(error, how):
    counts = RequestCounts()

    def call():
        with counts.following(3) as end:
            end(None)
            raise error

    with pytest.raises(error):
        call()
    assert counts.totals() == totals(answered=1, **{how: 2})
