"""A replica that Ray's memory monitor kills is lost like any other, to requests and to pushes."""

import logging
import os
import threading
import time

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
ray = pytest.importorskip("ray")

from tests.soak.memory import eat, quick_to_kill  # noqa: E402
from torchrl_vllm_sync import AsyncVLLM, ReplicaState  # noqa: E402
from torchrl_vllm_sync.errors import WeightSyncError  # noqa: E402
from torchrl_vllm_sync.service.fleet import Fleet  # noqa: E402
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 32,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 * 2**20,
    "num_cpus_per_replica": 0,
    "verbose": False,
}
WAIT_S = 240.0
# Seconds between batches: the engine's processes must get to start, too.
PAUSE_S = 0.3


@pytest.fixture
def cluster(monkeypatch):
    for name, value in quick_to_kill().items():
        monkeypatch.setenv(name, value)
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


def eventually(condition):
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)
    return value


@pytest.mark.timeout(500)
def test_a_replica_that_is_killed_for_memory_is_lost_like_any_other(cluster, tmp_path, monkeypatch):
    from vllm import SamplingParams

    checkpoint = make_tiny_checkpoint(tmp_path / "model", seed=0)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    may_restart, restart = threading.Event(), Fleet.restart
    outputs, ended = [], threading.Event()

    def restart_when_told(fleet, replica_id):
        assert may_restart.wait(WAIT_S)
        restart(fleet, replica_id)

    def call(service):
        while not ended.is_set():
            outputs.extend(
                service.generate(
                    [[number, 5, 6] for number in range(3, 27)],
                    params,
                    timeout_seconds=WAIT_S,
                    return_exceptions=True,
                )
            )
            ended.wait(PAUSE_S)

    monkeypatch.setattr(Fleet, "restart", restart_when_told)
    with AsyncVLLM.from_pretrained(str(checkpoint), num_replicas=1, **ENGINE) as service:
        (first,) = service.replicas
        (added,) = service.add_replicas()
        model = load_tiny_model(checkpoint)
        service.push_weights(model, strict=True)
        caller = threading.Thread(target=call, args=(service,))
        caller.start()
        try:
            eventually(lambda: service.load.in_flight(added))
            victim = next(one for one in service.replicas if one.replica_id == added)
            victim.actor.__ray_call__.remote(eat)
            failed = eventually(
                lambda: next(
                    (one for one in service.load.snapshots() if one.state is ReplicaState.FAILED),
                    None,
                )
            )
            assert failed.replica_id == added
            assert "memory" in failed.reason
            assert failed.away_since is None
            with pytest.raises(WeightSyncError, match="running low on memory") as caught:
                service.push_weights(model, strict=True)
            assert list(caught.value.failures) == [added]
            may_restart.set()
            eventually(lambda: service.replicas.membership.find(added).num_restarts == 1)
            service.wait_until_serving(timeout_s=WAIT_S)
            before = len(outputs)
            eventually(lambda: added in {one.replica_id for one in outputs[before:]})
        finally:
            may_restart.set()
            ended.set()
            caller.join(WAIT_S)
        assert not [one for one in outputs if isinstance(one, Exception)]
        report = service.push_weights(model, strict=True)
        assert service.weight_versions == dict.fromkeys([first.replica_id, added], report.version)
