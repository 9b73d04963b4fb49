"""A local Ray cluster, tiny checkpoints, and three services that the modules share.

``service`` has two replicas, ``hurt`` three whose actors and workers go wrong on demand, ``plain``
two that compute with parameters as they are. One of them is open at a time. Each module gets it
whole: what an earlier one killed is restarted.
"""

import gc
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from ray.exceptions import RayError

from tests.engine.requests import eventually, is_idle
from tests.warm import warm_cluster
from torchrl_vllm_sync import AsyncVLLM, MemmapTransport, ReplicaState
from torchrl_vllm_sync.errors import SyncError
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint

# Ray 2.60 turns token authentication on, which a local cluster of one user does not need.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

# The smallest engines that still batch, cache prefixes (blocks of 32 tokens) and run out of room.
# What a test kills stays dead.
ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": 32,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 * 2**20,
    "num_cpus_per_replica": 0,
    "max_restarts": 0,
    "verbose": False,
}


def pytest_collection_modifyitems(items):
    """Marks the tests of this folder, and puts those together that share a service.

    Modules whose tests kill replicas, as their ``KILLS`` says, come last of their service's.
    """
    places = [at for at, item in enumerate(items) if "tests/engine" in item.path.as_posix()]
    mine = [items[at] for at in places]
    for item in mine:
        item.add_marker(pytest.mark.ray)
    mine.sort(key=lambda item: (engines_of(item), getattr(item.module, "KILLS", False)))
    for at, item in zip(places, mine, strict=True):
        items[at] = item


def engines_of(item):
    """Which engines a test runs on: those of ``service``, ``hurt`` or ``plain``, or of its own."""
    if "hurt" in item.fixturenames:
        return 1
    if "plain" in item.fixturenames:
        return 2
    return 0 if "service" in item.fixturenames and "cluster" not in item.fixturenames else 3


class SharedServices:
    """Launches services that several modules use, of which one is open at a time."""

    def __init__(self, say):
        self._say, self._name, self._service = say, None, None

    def get(self, name, launch):
        """The service of that name, serving what it was launched with; ``launch`` makes it."""
        if self._name == name and self._made_whole():
            return self._service
        self.close()
        self._service, self._name = launch(), name
        return self._service

    def close(self):
        """Ends the open service, if there is one."""
        if self._service is not None:
            self._service.shutdown()
        self._name = self._service = None

    def _made_whole(self):
        """Restarts replicas that died and undoes what tests have set; whether that worked."""
        service = self._service
        try:
            if self._name != "service":
                service.replicas.call_replicas("collective_rpc", "sync_plan")  # no faults are left
            dead = [
                name
                for name, one in service.replicas.call_replicas("report").items()
                if is_dead(one)
            ]
            if dead:
                self._say(f" restarting what tests have killed: replicas {dead}")
                with ThreadPoolExecutor() as pool:
                    list(pool.map(service.fleet.restart, dead))
            service.use_transport(MemmapTransport())
            service.create_load_balancer()
            service.push_weights(load_tiny_model(service.engine_args.model))
            service.wait_until_serving(timeout_s=60)
            eventually(lambda: is_idle(service))
            service.reset_prefix_cache()
        except (SyncError, RayError) as error:
            self._say(f" launching the service again: {error}")
            return False
        return True


def is_dead(report):
    """Whether a replica does not answer, or its engine has ended."""
    return getattr(report, "state", ReplicaState.FAILED) is ReplicaState.FAILED


@pytest.fixture(scope="package")
def shared_services(request):
    """A local Ray cluster, and what is shared in it."""
    with warm_cluster(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR):
        services = SharedServices(request.config.get_terminal_writer().line)
        yield services
        services.close()


@pytest.fixture(scope="module")
def cluster(shared_services):
    """A local Ray cluster, with no engines; it can run any number that claim no CPU."""
    shared_services.close()


@pytest.fixture(scope="module", autouse=True)
def no_actor_outlives_its_module():
    """Ends actors that only garbage holds, such as those of TorchRL's collectors.

    Those call their actors as they are collected and wait for the answer; in a thread of a service,
    inside Ray, that would be for ever.
    """
    yield
    gc.collect()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """What the service is launched with: dense, tied, with diverse outputs."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=0)


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory):
    """The same architecture with other weights."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def model(checkpoint):
    """The trainer's copy of what the service was launched with."""
    return load_tiny_model(checkpoint)


@pytest.fixture
def other_model(other_checkpoint):
    """A trainer's model whose outputs differ from the launched ones."""
    return load_tiny_model(other_checkpoint)


@pytest.fixture(scope="session")
def untied_checkpoint(tmp_path_factory):
    """Another model, dense, with a head of its own."""
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("untied"), architecture="qwen3", tied=False, seed=3
    )


@pytest.fixture(scope="module")
def service(shared_services, checkpoint):
    """Two replicas that serve; tests leave them serving, with nothing in flight."""
    return shared_services.get(
        "service",
        lambda: AsyncVLLM.from_pretrained(
            str(checkpoint),
            num_replicas=2,
            worker_extension_cls="tests.engine.faults.PacedWorker",
            **ENGINE,
        ),
    )


@pytest.fixture(scope="module")
def hurt(shared_services, untied_checkpoint):
    """Three replicas that tests break and kill; what goes wrong does so when it is told to."""
    from tests.engine.faults import FaultyActor

    return shared_services.get(
        "hurt",
        lambda: AsyncVLLM.from_pretrained(
            str(untied_checkpoint),
            num_replicas=3,
            actor_class=FaultyActor,
            worker_extension_cls="tests.engine.layerwise_engine.LayerwiseWorker",
            logprobs_mode="raw_logprobs",  # of all tokens, also where min_tokens rules some out
            **ENGINE,
        ),
    )


@pytest.fixture(scope="module")
def plain(shared_services, checkpoint):
    """Two replicas whose weights can be copied, compared, and written to from outside."""
    return shared_services.get(
        "plain",
        lambda: AsyncVLLM.from_pretrained(
            str(checkpoint),
            num_replicas=2,
            stage_weights=True,
            worker_extension_cls="tests.engine.plain_worker.PlainWorker",
            scheduler_cls="tests.engine.plain_worker.QueueingScheduler",
            **ENGINE,
        ),
    )
