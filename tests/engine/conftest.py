"""A local Ray cluster, tiny checkpoints and one service of two replicas, started once."""

import logging
import os

import pytest
import ray

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
    for item in items:
        if "tests/engine" in item.path.as_posix():
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="package")
def cluster():
    """A local Ray cluster; it can run any number of replicas that claim no CPU."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


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


@pytest.fixture(scope="package")
def service(cluster, checkpoint):
    """Two replicas that serve; tests leave them serving, with nothing in flight."""
    from torchrl_vllm_sync import AsyncVLLM

    with AsyncVLLM.from_pretrained(str(checkpoint), num_replicas=2, **ENGINE) as service:
        yield service
