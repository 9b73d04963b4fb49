"""What a service says of itself, from reports that are written down here."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.fakes.observe import replica
from tests.fakes.observe import status as told
from tests.fakes.service import replicas_of, service_of
from torchrl_vllm_sync import AsyncVLLM, LoadReport, PushReport, ReplicaState
from torchrl_vllm_sync.errors import ServiceClosedError, WeightSyncError
from torchrl_vllm_sync.observe.status import (
    MAX_FAILURES,
    MAX_PUSHES,
    StatusLog,
)
from torchrl_vllm_sync.replica import EngineCounters, EngineReport, Latency, seconds_of
from torchrl_vllm_sync.routing.ledger import LoadTracker, token_rates
from torchrl_vllm_sync.service.weights import Weights
from torchrl_vllm_sync.weights.push import failed_push

SERVING, STALE, FAILED = ReplicaState.SERVING, ReplicaState.STALE, ReplicaState.FAILED
STARTING = ReplicaState.STARTING


class Clock:
    """Stands still until it is moved."""

    now = 1000.0

    def __call__(self):
        return self.now


class Scene:
    """A ledger of some replicas, its log, and what a service would say of them."""

    def __init__(self, *replica_ids):
        self.clock = Clock()
        self.load = LoadTracker(replica_ids, state=SERVING, clock=self.clock)
        self.log = StatusLog(self.load, wall_clock=lambda: 5000.0)
        description = SimpleNamespace(
            node_ip="10.0.0.7", pid=42, device_type="cuda", vllm_version="0.32.0",
            model="tiny", device_name="NVIDIA H100", num_workers=2,
        )  # fmt: skip
        self.members = [
            SimpleNamespace(replica_id=one, num_restarts=2, description=description)
            for one in replica_ids
        ]

    def report(self, replica_id="0", state=SERVING, **figures):
        self.load.observe(EngineReport(replica_id=replica_id, state=state, **figures))

    def count(self, generated, prompt=0, queries=0, hits=0, **figures):
        counters = EngineCounters(
            num_generated_tokens=generated,
            num_prompt_tokens=prompt,
            prefix_cache_queries=queries,
            prefix_cache_hits=hits,
        )
        self.report(counters=counters, **figures)

    def status(self):
        return self.log.status("rollouts", 3, self.members)

    def replica(self, at=0):
        return self.status().replicas[at]


def push(ended_at, version=1, **more):
    return PushReport(began_at=ended_at - 0.1, seconds=0.1, version=version, **more)


# ---------------------------------------------------------------- replicas


def test_what_nobody_has_said_is_unknown():
    scene = Scene("0")
    replica = scene.replica()
    unknown = (
        replica.num_running, replica.num_waiting, replica.num_unfinished, replica.elsewhere,
        replica.kv_cache_usage, replica.prefix_cache_hit_rate, replica.generated_tokens_per_s,
        replica.prompt_tokens_per_s, replica.counters, replica.report_age_s, replica.weight_version,
    )  # fmt: skip
    assert set(unknown) == {None}
    assert (replica.state, replica.in_flight) == (SERVING, 0)
    assert (replica.num_restarts, replica.node, replica.device_type) == (2, "10.0.0.7", "cuda")
    assert scene.status().pushes == scene.status().failures == ()
    assert scene.status().generated_tokens_per_s is None


def test_a_replica_that_is_no_member_yet_has_no_node():
    scene = Scene("0")
    scene.members = []
    assert (scene.replica().node, scene.replica().num_restarts) == (None, None)


def test_what_the_service_is_and_runs_on():
    scene = Scene("0", "1")
    status = view(scene).status()
    assert (status.model, status.launched_at, status.uptime_s) == ("tiny", None, None)
    assert status.hardware == "4 x NVIDIA H100, 1 node"
    assert set(status.versions) == {"vllm", "torchrl", "torchrl_vllm_sync"}
    assert status.versions["vllm"] == "0.32.0"
    status = view(scene, launched_at=status.time - 60.0).status()
    assert status.requests["answered"] == status.requests["retried"] == 0
    assert 60.0 <= status.uptime_s < 120.0
    assert status.as_dict()["hardware"] == status.hardware


def test_cores_of_a_cpu_are_not_added_up_and_nodes_are():
    cpu = {"device_type": "cpu", "device_name": "CPU with 8 cores", "num_workers": 2}
    replicas = (replica("0", **cpu), replica("1", **cpu), replica("2", **cpu, node="10.0.0.8"))
    assert told(*replicas).hardware == "CPU with 8 cores, 2 nodes"
    assert told(replica("0", device_name=None)).hardware == ""


def test_figures_are_the_last_reports_and_in_flight_is_counted_here():
    scene = Scene("0", "1")
    scene.load.reserve("0", 3)
    scene.report(num_unfinished=5, num_running=4, num_waiting=1, kv_cache_usage=0.25)
    replica = scene.replica()
    assert (replica.in_flight, replica.elsewhere, replica.num_unfinished) == (3, 2, 5)
    assert (replica.num_running, replica.num_waiting, replica.kv_cache_usage) == (4, 1, 0.25)
    assert replica.time_to_first_token is None
    assert scene.status().in_flight == 3
    assert scene.replica(1).num_running is None


def test_figures_that_are_too_old_are_unknown_but_the_version_is_what_it_last_said():
    scene = Scene("0")
    latency = Latency(p50_s=0.1, p99_s=0.5)
    scene.report(num_running=4, kv_cache_usage=0.5, weight_version=7, time_to_first_token=latency)
    scene.clock.now += 4.9
    assert (scene.replica().num_running, scene.replica().time_to_first_token) == (4, latency)
    scene.clock.now += 0.2
    replica = scene.replica()
    assert (replica.num_running, replica.kv_cache_usage) == (None, None)
    assert replica.time_to_first_token is None
    assert replica.weight_version == 7
    assert replica.report_age_s == pytest.approx(5.1)


def test_rates_are_between_reports_whoever_looks():
    scene = Scene("0")
    for generated, prompt in ((0, 0), (100, 10), (300, 30), (700, 70)):
        scene.count(generated, prompt)
        scene.status()
        scene.clock.now += 1.0
    replica = scene.replica()  # of the last 2 s
    assert replica.generated_tokens_per_s == 300.0
    assert replica.prompt_tokens_per_s == 30.0
    assert scene.status().generated_tokens_per_s == 300.0


def test_one_report_or_two_in_a_moment_make_no_rate():
    scene = Scene("0")
    scene.count(100)
    assert scene.replica().generated_tokens_per_s is None
    scene.clock.now += 0.1
    scene.count(200)
    assert scene.replica().generated_tokens_per_s is None
    scene.clock.now += 0.9
    scene.count(300)
    assert scene.replica().generated_tokens_per_s == pytest.approx(200.0)


def test_an_engine_that_began_anew_is_not_compared_with_the_one_before():
    scene = Scene("0")
    scene.count(1000)
    scene.clock.now += 1.0
    scene.count(10)
    assert scene.replica().generated_tokens_per_s is None
    scene.clock.now += 1.0
    scene.count(60)
    assert scene.replica().generated_tokens_per_s == 50.0
    scene.load.renew("0", STARTING)
    assert scene.load.snapshot("0").counters is None


def test_a_report_without_counters_forgets_them():
    scene = Scene("0")
    scene.count(1000)
    scene.report()
    assert scene.replica().counters is None


def test_few_counters_are_kept_however_many_reports_come():
    scene = Scene("0")
    for i in range(1000):
        scene.count(i)
        scene.clock.now += 0.1
    counted = scene.load.snapshot("0").counted
    assert len(counted) <= 22
    assert counted[-1].at - counted[0].at >= 2.0
    assert token_rates(counted)["generated_tokens_per_s"] == pytest.approx(10.0)


def test_hit_rate_needs_something_that_was_looked_up():
    scene = Scene("0")
    scene.count(0, queries=0)
    assert scene.replica().prefix_cache_hit_rate is None
    scene.count(0, queries=200, hits=50)
    assert scene.replica().prefix_cache_hit_rate == 0.25


def test_the_total_rate_is_unknown_while_one_that_serves_is():
    scene = Scene("0", "1")
    for generated in (0, 100):
        scene.count(generated)
        scene.clock.now += 1.0
    assert scene.status().generated_tokens_per_s is None
    scene.load.mark("1", FAILED, "gone")
    status = scene.status()
    assert (status.generated_tokens_per_s, status.num_serving) == (100.0, 1)


def test_everything_is_json_and_comes_back_as_it_was():
    scene = Scene("0")
    scene.count(5, kv_cache_usage=0.5, last_push=push(1.0, phases={"send": 0.1}))
    scene.load.mark("0", FAILED, "it died")
    told = scene.status().as_dict()
    assert json.loads(json.dumps(told, allow_nan=False)) == json.loads(json.dumps(told))
    (replica,) = told["replicas"]
    assert (replica["state"], replica["counters"]["num_generated_tokens"]) == ("failed", 5)
    assert told["pushes"][0]["phases"] == {"send": 0.1}
    assert told["failures"][0]["reason"] == "it died"
    assert told["num_serving"] == 0


# ---------------------------------------------------------------- what happened


def test_failures_are_noted_once_newest_first():
    scene = Scene("0", "1")
    scene.load.mark("0", FAILED, "it died")
    scene.load.mark("0", FAILED, "it is still dead")
    scene.load.set_floor("1", 4)
    told = [(one.replica_id, one.what, one.reason) for one in scene.status().failures]
    assert told == [("1", "stale", "it did not reach version 4"), ("0", "failed", "it died")]
    assert scene.status().failures[0].at == 5000.0


def test_a_replica_that_joins_has_not_failed():
    scene = Scene("0")
    scene.load.renew("0", STALE)
    scene.report(weight_version=1)
    assert scene.status().failures == ()


def test_one_that_fails_again_is_noted_again():
    scene = Scene("0")
    for _ in range(2):
        scene.load.mark("0", FAILED, "it died")
        scene.report()
    assert len(scene.status().failures) == 2


def test_the_log_does_not_grow():
    scene = Scene("0")
    for i in range(100):
        scene.load.mark("0", FAILED, "it died")
        scene.report(last_push=push(float(i), version=i))
        scene.status()
    assert len(scene.status().failures) == MAX_FAILURES
    assert [one.version for one in scene.status().pushes] == list(range(99, 99 - MAX_PUSHES, -1))


def test_a_push_is_listed_once_however_many_replicas_tell_of_it():
    scene = Scene("0", "1")
    scene.log.add_pushes([push(2.0, version=2)])
    for replica_id in ("0", "1"):
        scene.report(replica_id, last_push=push(2.0, version=2))
    scene.report("0", last_push=push(1.0, version=1))
    assert [one.version for one in scene.status().pushes] == [2, 1]


def test_a_failed_push_that_only_a_lost_replica_still_tells_of_is_not_noted_again_and_again():
    scene = Scene("0", "1")
    scene.report("0", last_push=push(0.0, version=1, error="it failed"))
    for i in range(MAX_PUSHES + 1):
        scene.report("1", last_push=push(float(i + 1), version=i + 2))
        scene.status()
    scene.load.mark("0", FAILED, "it died")
    for _ in range(3):
        told = [one.what for one in scene.status().failures]
    assert told.count("push") <= 1
    assert "failed" in told


def test_a_failed_push_is_a_failure_too():
    scene = Scene("0")
    error = WeightSyncError(4, {"0": "worker 0 could not load"})
    scene.log.add_pushes([failed_push(error, None, 1.5, 9.0)])
    status = scene.status()
    (pushed,) = status.pushes
    assert (pushed.version, pushed.left_behind) == (4, error.failures)
    assert (pushed.transport, pushed.num_bytes, pushed.pause_s) == (None, None, None)
    assert [(one.what, one.reason) for one in status.failures] == [("push", str(error))]


def test_a_push_that_was_refused_has_the_version_that_was_asked_for():
    assert failed_push(ValueError(), None, 0.0, 0.0).error == "ValueError"
    assert failed_push(ValueError("no"), 7, 0.0, 0.0).version == 7


def test_a_report_says_when_it_ended_and_how_long_engines_paused_and_tells_seconds_from_counts():
    report = PushReport(
        began_at=76.5,
        version=3,
        transport="broadcast",
        num_bytes=10**9,
        seconds=0.5,
        phases={"send_s": 0.3, "copy_s": 0.1, "num_chunks": 4},
        replicas=[
            LoadReport(replica_id="0", version=3, whole_pause_s=0.2, num_kept=5),
            LoadReport(replica_id="1", version=3, whole_pause_s=0.25),
            LoadReport(replica_id="2", version=None, error="it is failed"),
        ],
        left_behind={"2": "it is failed"},
    )
    assert seconds_of(report.phases) == {"send": 0.3, "copy": 0.1}
    assert (report.pause_s, report.ended_at, report.error) == (0.25, 77.0, "")


# ---------------------------------------------------------------- the method


def view(scene, *, launched=True, **settings):
    """A service of the scene's replicas."""
    replicas = replicas_of(scene.members, load=scene.load, launched=launched, **settings)
    return service_of(replicas, log=scene.log, committed=2)


def test_status_asks_nobody():
    scene = Scene("0", "1")
    for replica_id in ("0", "1"):
        scene.report(replica_id, weight_version=3)
    status = view(scene).status()  # there are no actors to ask
    assert (status.name, status.weight_version, status.num_serving) == ("rollouts", 3, 2)
    assert replace(status, time=0.0) == replace(view(scene).status(), time=0.0)


def test_a_service_that_is_not_there_has_no_status():
    with pytest.raises(ServiceClosedError, match="rollouts"):
        view(Scene("0"), launched=False).status()


# ---------------------------------------------------------------- pushes


class Pushing(AsyncVLLM):
    """A service whose pusher does what a test says, and which notes what its replicas are told."""

    def __init__(self, push):
        self.replicas = replicas_of()
        self.weights = Weights(self.replicas)
        self.weights.pusher, self.log = SimpleNamespace(push=push), self.weights.log
        self.replicas.learn, self.told = self.note, []

    def note(self, *, doubtful=(), pushed=None):
        self.told.append((dict(doubtful), pushed))


@pytest.mark.parametrize("left", [{}, {"1": "it is failed"}], ids=str)
def test_a_push_is_noted_here_and_told_to_the_replicas(left):
    ended = push(9.0, left_behind=left)

    def pushed(weights, *, on_end, **options):
        on_end(ended)
        return "the report"

    service = Pushing(pushed)
    assert service.push_weights({}) == "the report"
    assert service.log.pushes == (ended,)
    assert service.told == [(left, ended)]


def test_an_interrupted_push_is_no_push():
    service = Pushing(lambda weights, *, on_end, **options: on_end(None))
    service.push_weights({})
    assert service.log.pushes == ()
    assert service.told == [({}, None)]
