"""Placement on a real Ray cluster whose GPUs are pretended: it fits, or is refused at once."""

import asyncio
import logging
import os
import time

import pytest

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402
from ray.util import placement_group_table  # noqa: E402

from torchrl_vllm_sync import AsyncVLLM  # noqa: E402
from torchrl_vllm_sync.errors import LaunchError, PlacementError  # noqa: E402
from torchrl_vllm_sync.service import launch, service  # noqa: E402
from torchrl_vllm_sync.service.launch import actor_options, place, remove  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with two pretended GPUs each."""
    node = {"num_cpus": 2, "num_gpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(num_cpus=2, num_gpus=2)
    ray.init(address=cluster.address, logging_level=logging.ERROR)
    cluster.wait_for_nodes()
    yield
    ray.shutdown()
    cluster.shutdown()


def groups_alive():
    return [one for one in placement_group_table().values() if one["state"] != "REMOVED"]


def refused(resources, num_replicas):
    begin = time.monotonic()
    with pytest.raises(PlacementError) as caught:
        place(resources, num_replicas, detached=False)
    assert time.monotonic() - begin < 10
    assert not groups_alive()
    return str(caught.value)


def test_replicas_that_claim_nothing_need_no_group(cluster):
    assert place({}, 100, detached=False) == []
    assert actor_options({}, None) == {"num_gpus": 0, "num_cpus": 0}


def test_each_replica_gets_a_group_on_one_node(cluster):
    resources = {"GPU": 2, "CPU": 0.5}
    groups = place(resources, 2, detached=False)

    @ray.remote
    def node():
        return ray.get_runtime_context().get_node_id(), len(ray.get_gpu_ids())

    found = ray.get([node.options(**actor_options(resources, group)).remote() for group in groups])
    assert len({node_id for node_id, _ in found}) == 2
    assert [num_gpus for _, num_gpus in found] == [2, 2]
    remove(groups)
    remove(groups)
    assert not groups_alive()


def test_more_than_there_is_is_refused_with_what_was_asked_and_what_is_free(cluster):
    all_is_free()
    message = refused({"GPU": 2, "CPU": 1}, 3)
    assert "3 replica(s) of 2 GPU, 1 CPU each do not fit: GPU: 6 needed, 4 free" in message
    assert "free in the cluster: 4 of 4 GPU, 4 of 4 CPU; num_cpus_per_replica=0" in message
    assert "CPU: 9 needed, 4 free" in refused({"CPU": 9}, 1)


def test_a_replica_that_no_single_node_holds_is_refused(cluster):
    assert "no single node" in refused({"GPU": 3}, 1)


def test_what_is_free_but_scattered_is_refused_soon(cluster):
    """One GPU is taken on each node: two are free, on no node both."""
    all_is_free()
    taken = [place({"GPU": 1, "CPU": cpus}, 1, detached=False) for cpus in (1, 2)]
    try:
        begin = time.monotonic()
        with pytest.raises(PlacementError, match="no single node"):
            place({"GPU": 2}, 1, detached=False)
        assert time.monotonic() - begin < launch.SETTLE_S + launch.PLACE_TIMEOUT_S + 3
        assert len(groups_alive()) == 2
    finally:
        for groups in taken:
            remove(groups)


def test_what_others_hold_is_awaited_for_a_moment(cluster):
    groups = place({"GPU": 2}, 2, detached=False)
    remove(groups)
    again = place({"GPU": 2}, 2, detached=False)
    assert len(again) == 2
    remove(again)


def test_a_service_that_does_not_fit_is_refused_before_any_engine_starts(cluster, monkeypatch):
    monkeypatch.setattr(service, "on_cpu", lambda: False)
    begin = time.monotonic()
    with pytest.raises(PlacementError, match=r"2 replica\(s\) of 4 GPU, 1 CPU each do not fit"):
        AsyncVLLM.from_pretrained("no/such/model", num_devices=4, num_replicas=2)
    assert time.monotonic() - begin < 10
    assert not groups_alive()


@pytest.fixture
def fake_engine():
    class FakeEngine:
        """Stands for ``EngineActor``: replica 1 fails, the others never finish starting."""

        def __init__(self, *, replica_id, **_):
            self.replica_id = replica_id

        async def start(self):
            if self.replica_id == "1":
                raise RuntimeError("out of luck")
            await asyncio.sleep(1000)

    return FakeEngine


def test_the_first_failure_ends_a_launch_and_nothing_stays(cluster, fake_engine, monkeypatch):
    monkeypatch.setattr(launch, "FAILURE_GRACE_S", 0.2)
    begin = time.monotonic()
    with pytest.raises(LaunchError, match="out of luck") as caught:
        AsyncVLLM.from_pretrained(
            "no/such/model", num_replicas=3, num_cpus_per_replica=0.5, actor_class=fake_engine
        )
    assert list(caught.value.failures) == ["1"]
    assert time.monotonic() - begin < 120  # the others would take 1000 s
    nothing_stays()


def test_a_launch_that_takes_too_long_names_who_is_late(cluster, fake_engine, monkeypatch):
    monkeypatch.setenv(launch.LAUNCH_TIMEOUT_VARIABLE, "3")
    with pytest.raises(LaunchError, match="0: not serving after 3 s"):
        AsyncVLLM.from_pretrained("no/such/model", actor_class=ray.remote(fake_engine))
    nothing_stays()


def eventually(condition, timeout_s=20.0):
    """Waits until ``condition()`` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.1)


def all_is_free():
    """Ray's figures follow what happened about a second later."""
    eventually(lambda: ray.available_resources().get("GPU") == 4)
    eventually(lambda: ray.available_resources().get("CPU") == 4)


def nothing_stays():
    eventually(lambda: not groups_alive())
    eventually(lambda: not ray.util.list_named_actors(all_namespaces=True))
