"""From launch to shutdown: who can use a service, from where, and that nothing of it stays."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest
import ray
from ray.util import placement_group_table
from transformers import AutoTokenizer

from tests.engine.conftest import ENGINE
from tests.engine.requests import eventually, is_idle, sampling, slowed, token_ids
from tests.warm import warm_python
from torchrl_vllm_sync import AsyncVLLM, LoadBalancer, attach
from torchrl_vllm_sync.engine import preload
from torchrl_vllm_sync.engine.actor import EngineActor
from torchrl_vllm_sync.errors import (
    LaunchError,
    ServiceClosedError,
    UnknownStrategyError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.testing import load_tiny_model

IDS = [7, 8, 9, 10, 11]


def run_python(code, *arguments):
    """Runs ``code`` in a process of its own that joins this Ray cluster; returns what it prints."""
    done = subprocess.run(
        [warm_python(), "-c", textwrap.dedent(code), *map(str, arguments)],
        env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def cluster_processes():
    """Processes of this test's cluster that belong to engines."""
    return {one for one in psutil.Process().children(recursive=True) if is_of_an_engine(one)}


def is_of_an_engine(process):
    try:
        line = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return any(word in line for word in ("EngineActor", "EngineCore", "multiprocessing"))


def groups_alive():
    return [one for one in placement_group_table().values() if one["state"] != "REMOVED"]


def named_actors(name):
    named = ray.util.list_named_actors(all_namespaces=True)
    return [one for one in named if name in one["name"]]


@pytest.fixture
def nothing_stays(cluster):
    """What a test starts is gone at its end: processes, actors, placement groups, shared memory."""
    resource_tracker.ensure_running()  # this process's own, which a bar of tqdm starts, stays
    before, actors = cluster_processes(), named_actors("")
    yield
    eventually(lambda: cluster_processes() <= before)
    eventually(lambda: not groups_alive())
    eventually(lambda: len(named_actors("")) == len(actors))


# ---------------------------------------------------------------- the shared service


def test_it_is_launched_once(service):
    with pytest.raises(UnsupportedArgumentError, match="is launched already"):
        service._launch()
    assert service.generate(IDS, sampling()).finished


def test_engines_begin_with_vllm_alone(service):
    assert ray.get(service.collective_rpc("main_module")) == [[preload.__name__]] * 2


def test_torchrls_questions(service):
    assert service.get_tp_size() == 1
    assert service.get_world_size() == 2
    assert service.num_replicas == len(service.actors) == len(service.replicas) == 2
    assert service.get_random_actor_index() in (0, 1)
    assert service.get_num_unfinished_requests() == [0, 0]
    assert service.get_num_unfinished_requests(1) == 0
    service.generate([IDS] * 4, sampling(), actor_index=0)
    assert 0 <= service.get_cache_usage(0) <= 1
    assert len(service.get_cache_usage()) == 2
    for call in (service.get_num_unfinished_requests, service.get_cache_usage):
        with pytest.raises(IndexError, match="got 2"):
            call(2)
    service.reset_prefix_cache()


def test_the_rendezvous_is_reachable_and_stays(service):
    import socket

    address, port = service.get_master_address(), service.get_master_port()
    assert (address, port) == (service.get_master_address(), service.get_master_port())
    with socket.socket() as listener:  # it is free
        listener.bind((address, port))
        listener.listen()
        socket.create_connection((address, port), timeout=5).close()


def test_collective_rpc_gives_one_ref_a_replica(service):
    refs = service.collective_rpc("check_health")
    assert len(refs) == 2
    assert all(isinstance(ref, ray.ObjectRef) for ref in refs)
    assert ray.get(refs) == [[None], [None]]


def takes_an_emptiest(balancer):
    """Whether the replica that is chosen has the least used cache of all."""
    usages = [one["cache_usage"] for one in balancer.get_stats()["actor_stats"]]
    return None not in usages and usages[balancer.select_actor(IDS)] == min(usages)


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        (None, ["prefix-aware", "requests"]),
        ("round-robin", ["round-robin"]),
        ("kv-cache", ["kv-cache"]),
        (["prefix-aware", "kv-cache", "requests"], ["prefix-aware", "kv-cache", "requests"]),
    ],
)
def test_balancers_of_a_service(service, strategy, names):
    balancer = service.create_load_balancer(strategy, prefix_length=16, overload_threshold=2.0)
    outputs = service.generate([[i, i + 1] for i in range(5, 45)], sampling(max_tokens=1))
    used = {output.replica_id for output in outputs}
    # By the caches alone all may go to one: what the engines last said of theirs decides.
    assert used == {"0", "1"} if names != ["kv-cache"] else used <= {"0", "1"}
    stats = balancer.get_stats()
    assert (stats["strategies"], stats["num_actors"]) == (names, 2)
    assert (stats["prefix_length"], stats["overload_threshold"]) == (16, 2.0)
    assert [one["pending_requests"] for one in stats["actor_stats"]] == [0, 0]
    eventually(lambda: None not in [one["age_s"] for one in balancer.get_stats()["actor_stats"]])
    assert balancer.select_actor(IDS) in (0, 1)
    if names == ["kv-cache"]:
        eventually(lambda: takes_an_emptiest(balancer))
    service.create_load_balancer()


def test_an_unknown_strategy_changes_nothing(service):
    before = service.requests.balancer
    with pytest.raises(UnknownStrategyError, match="least-busy"):
        service.create_load_balancer("least-busy")
    assert service.requests.balancer is before
    assert service.generate(IDS, sampling()).finished


def test_a_balancer_over_the_bare_actors(service):
    balancer = LoadBalancer(service.actors, "requests", monitor_interval_s=0.1)
    wanted = token_ids(service.generate(IDS, sampling()))
    for _ in range(4):
        with balancer.reserve(IDS) as place:
            output = ray.get(service.actors[place.index].generate.remote(IDS, sampling()))
        assert token_ids(output) == wanted
    outputs = ray.get(
        service.actors[0].generate.remote(
            prompt_token_ids=[IDS, [5, 6]], sampling_params=[sampling(), sampling(max_tokens=1)]
        )
    )
    assert [len(token_ids(output)) for output in outputs] == [4, 1]
    eventually(
        lambda: [one["num_unfinished"] for one in balancer.get_stats()["actor_stats"]] == [0, 0]
    )
    balancer.close()


@pytest.mark.slow
def test_a_pickled_copy_works_in_a_ray_task_with_torchrls_own_wrapper(service, checkpoint):
    wanted = token_ids(service.generate(IDS, sampling()))

    @ray.remote(num_cpus=0)
    def use(copy, checkpoint):
        from tensordict import TensorDict
        from torchrl.modules.llm import vLLMWrapper
        from torchrl.modules.llm.policies.common import Text
        from vllm import SamplingParams

        with copy:  # lets go at the end, and ends nobody's service
            output = copy.generate(IDS, SamplingParams(max_tokens=4, temperature=0.0))
            policy = vLLMWrapper(
                copy,
                tokenizer=AutoTokenizer.from_pretrained(checkpoint),
                input_mode="text",
                generate_kwargs={"max_tokens": 4, "temperature": 0.0},
            )
            prompts = TensorDict(text=Text(prompt=["Hello", "What is 3?"]), batch_size=(2,))
            texts = policy(prompts)["text"].response
            return list(output.outputs[0].token_ids), list(texts), copy.load.total_in_flight

    ids, texts, in_flight = ray.get(use.remote(service, str(checkpoint)), timeout=200)
    assert ids == wanted
    decode = AutoTokenizer.from_pretrained(checkpoint).decode
    outputs = service.generate(["Hello", "What is 3?"], sampling())
    assert texts == [decode(token_ids(output)) for output in outputs]
    assert in_flight == 0
    eventually(lambda: is_idle(service))


@pytest.mark.slow
def test_another_process_attaches_by_name(service):
    wanted = token_ids(service.generate(IDS, sampling()))
    service.create_load_balancer("round-robin")
    answer = run_python(
        """
        import sys
        from torchrl_vllm_sync import attach
        from vllm import SamplingParams

        greedy = SamplingParams(max_tokens=4, temperature=0)
        with attach(sys.argv[1]) as service:
            output = service.generate([7, 8, 9, 10, 11], greedy)
            print(service.num_replicas, service.weight_version, list(output.outputs[0].token_ids))
        """,
        service.name,
    )
    assert answer == f"2 {service.weight_version} {wanted}"
    assert service.generate(IDS, sampling()).finished  # leaving the block only let go
    with pytest.raises(ServiceClosedError, match="no service named 'nobody'"):
        attach("nobody")


STREAM = """
    import os, sys
    from tests.engine.requests import sampling
    from torchrl_vllm_sync import attach

    params = sampling(max_tokens=200, ignore_eos=True)
    with attach(sys.argv[1]) as service:
        for _ in service.generate([7, 8, 9], params, stream=True):
            print(os.getpid(), flush=True)
"""


def test_a_process_that_is_killed_takes_its_streams_along(service):
    with slowed(service, 0.2):  # the answer would take forty seconds
        process = subprocess.Popen(
            [warm_python(), "-c", textwrap.dedent(STREAM), service.name],
            env={**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            pid = int(process.stdout.readline())
            assert not is_idle(service)
            os.kill(pid, signal.SIGKILL)
            process.stdout.read()
        eventually(lambda: is_idle(service), timeout_s=15)


# ---------------------------------------------------------------- services of their own


class OwnActor(EngineActor):
    """What a user passes as ``actor_class``."""

    def marker(self):
        return f"own {self.replica_id}"


class Unlucky(EngineActor):
    async def start(self):
        if self.replica_id == "1":
            raise RuntimeError("out of luck")
        return await super().start()


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests


@pytest.mark.slow
def test_everything_a_service_made_is_gone_after_it(nothing_stays, checkpoint):
    own = {**ENGINE, "num_cpus_per_replica": 0.5}
    with AsyncVLLM.from_pretrained(
        str(checkpoint), compile=True, enable_fp32_output=True, actor_class=OwnActor, **own
    ) as service:
        assert ray.get(service.actors[0].marker.remote()) == "own 0"
        assert len(groups_alive()) == 1
        service.push_weights(load_tiny_model(checkpoint))
        assert service.generate(IDS, sampling()).finished
        shared = list(Path("/dev/shm").glob(f"torchrl_vllm_sync-{service.name}-*"))
        assert shared
        stream = service.generate(IDS, sampling(max_tokens=200, ignore_eos=True), stream=True)
        next(stream)
    assert not any(path.exists() for path in shared)
    assert service.actors == []
    service.shutdown()
    service.shutdown()
    del stream
    for call in (
        lambda: service.generate(IDS, sampling()),
        lambda: service.push_weights({}),
        lambda: service.collective_rpc("check_health"),
        service.get_cache_usage,
        service.get_random_actor_index,
        service.create_load_balancer,
    ):
        with pytest.raises(ServiceClosedError, match="is not launched, or was shut down"):
            call()
    with pytest.raises(ServiceClosedError):
        attach(service.name)


@pytest.mark.slow
def test_a_launch_that_fails_half_way_leaves_nothing(nothing_stays, checkpoint):
    own = {**ENGINE, "num_cpus_per_replica": 0.5}
    with pytest.raises(LaunchError, match="out of luck") as caught:
        AsyncVLLM.from_pretrained(str(checkpoint), num_replicas=2, actor_class=Unlucky, **own)
    assert list(caught.value.failures) == ["1"]


@pytest.mark.slow
def test_a_model_that_does_not_exist_is_named(nothing_stays, tmp_path):
    model = tmp_path / "missing"
    with pytest.raises(UnsupportedArgumentError, match=r"there is none at .*missing"):
        AsyncVLLM.from_pretrained(str(model), **ENGINE)
    model.mkdir()  # there is something, and vLLM says what it is not
    with pytest.raises(LaunchError, match=r"failed: 0: ValidationError: (.|\n)*missing") as caught:
        AsyncVLLM.from_pretrained(str(model), **ENGINE)
    assert "pickle" not in str(caught.value)


@pytest.mark.slow
def test_what_an_engine_s_own_process_raised_is_told(nothing_stays, checkpoint):
    own = {**ENGINE, "kv_cache_memory_bytes": 1024}  # not one block; ENGINE is not verbose
    with pytest.raises(LaunchError, match=r"failed: 0: .* ValueError: No available memory for the"):
        AsyncVLLM.from_pretrained(str(checkpoint), **own)


@pytest.mark.slow
def test_a_checkpoint_that_is_quantised_already_is_refused(nothing_stays, checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "quantised")
    config = tmp_path / "quantised" / "config.json"
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    quantised = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"all": {"targets": ["Linear"], "weights": weights}},
    }
    fields = json.loads(config.read_text()) | {"quantization_config": quantised}
    config.write_text(json.dumps(fields))
    with pytest.raises(LaunchError, match=r"quantised already \(compressed-tensors\)"):
        AsyncVLLM.from_pretrained(str(config.parent), **ENGINE)


@pytest.mark.slow
def test_a_launch_without_room_for_staged_weights_says_how_much_is_missing(
    nothing_stays, checkpoint
):
    with pytest.raises(LaunchError, match=r"staged weights need 12\.34 GB on cuda:0"):
        AsyncVLLM.from_pretrained(
            str(checkpoint),
            stage_weights=True,
            worker_extension_cls="tests.engine.faults.CrampedWorker",
            **ENGINE,
        )


@pytest.mark.slow
def test_a_detached_service_outlives_its_creator(nothing_stays, checkpoint):
    """With a placement group, which must outlive it too."""
    name = run_python(
        """
        import sys
        from tests.engine.conftest import ENGINE
        from torchrl_vllm_sync import AsyncVLLM

        own = {**ENGINE, "num_cpus_per_replica": 0.5}
        service = AsyncVLLM.from_pretrained(sys.argv[1], detached=True, name="kept", **own)
        print(service.name)
        """,
        checkpoint,
    )
    service = attach(name)
    # A creator's other actors and groups end within seconds of it.
    eventually(lambda: not any(job for job in alive_jobs() if job != own_job()))
    assert service.generate(IDS, sampling()).finished
    assert len(groups_alive()) == 1
    assert named_actors("kept")
    service.shutdown()
    eventually(lambda: not named_actors("kept"))


def own_job():
    return ray.get_runtime_context().get_job_id()


def alive_jobs():
    from ray._private.state import jobs

    return [one["JobID"] for one in jobs() if not one["IsDead"]]
