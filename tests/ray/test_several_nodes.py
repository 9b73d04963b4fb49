"""Real engines on a Ray cluster of several nodes, which are processes of this machine."""

import logging
import os
import threading
import time

import psutil
import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from tests.warm import warm_workers  # noqa: E402
from torchrl_vllm_sync import AsyncVLLM, ReplicaState  # noqa: E402
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 32,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 * 2**20,
    "num_cpus_per_replica": 1,
    "verbose": False,
}
REPAIR_S = 240.0
# Seconds between requests: the engine's processes must get to start, too.
PAUSE_S = 0.3


@pytest.fixture(scope="module")
def cluster():
    """A head without room for replicas, and two nodes with room for one each."""
    with warm_workers():
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        ray.init(address=cluster.address, logging_level=logging.ERROR)
        cluster.wait_for_nodes()
        yield cluster, nodes
    ray.shutdown()
    cluster.shutdown()


def places(service):
    """Ray's id of the node of each replica."""
    found = service.replicas.call_replicas("describe")
    return {name: one.processes.node_id for name, one in found.items()}


@pytest.mark.timeout(500)
def test_a_node_is_lost_and_its_replica_goes_on_on_another(cluster, tmp_path):
    from vllm import SamplingParams

    cluster, nodes = cluster
    checkpoint = make_tiny_checkpoint(tmp_path / "model", seed=0)
    other = load_tiny_model(make_tiny_checkpoint(tmp_path / "other", seed=1))
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    stop, answered, errors = threading.Event(), [], []
    with AsyncVLLM.from_pretrained(str(checkpoint), num_replicas=2, **ENGINE) as service:
        before = places(service)
        assert set(before.values()) == {one.node_id for one in nodes}  # one on each
        service.push_weights(other)
        lost = next(name for name, node in before.items() if node == nodes[0].node_id)
        description = service.replicas.call_replicas("describe")[lost]
        processes = [psutil.Process(one.pid) for one in description.processes.processes]

        def ask():
            number = 0
            while not stop.is_set():
                number += 1
                prompts = [[5 + number % 200, 9, 5 + i] for i in range(4)]
                outputs = service.generate(
                    prompts, params, timeout_seconds=REPAIR_S, return_exceptions=True
                )
                errors.extend(one for one in outputs if isinstance(one, Exception))
                answered.extend(one for one in outputs if not isinstance(one, Exception))
                stop.wait(PAUSE_S)

        caller = threading.Thread(target=ask)
        caller.start()
        try:
            cluster.remove_node(nodes[0], allow_graceful=False)
            deadline = time.monotonic() + 90
            while {one.replica_id: one.state for one in service.load.snapshots()}[lost] in (
                ReplicaState.SERVING,
                ReplicaState.UPDATING,
            ):
                assert time.monotonic() < deadline, "the loss of a node was not noticed"
                time.sleep(0.1)
            new = cluster.add_node(num_cpus=1)
            service.wait_until_serving(timeout_s=REPAIR_S)
        finally:
            stop.set()
            caller.join(REPAIR_S)
        assert not errors
        assert answered
        after = places(service)
        assert after[lost] == new.node_id
        assert {name: node for name, node in after.items() if name != lost} == {
            name: node for name, node in before.items() if name != lost
        }
        assert service.weight_versions == dict.fromkeys(before, 1)
        assert {one.min_version for one in answered} == {1}
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert not alive, "processes of the lost node live on"
