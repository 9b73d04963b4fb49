"""A local Ray cluster with the machine's GPUs, and tiny checkpoints."""

import logging
import os

import pytest
import ray

from torchrl_vllm_sync.testing import make_tiny_checkpoint

os.environ.setdefault("RAY_AUTH_MODE", "disabled")


@pytest.fixture(scope="session")
def cluster():
    ray.init(address="local", include_dashboard=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Two checkpoints of one architecture with different weights."""
    return [
        make_tiny_checkpoint(tmp_path_factory.mktemp(f"seed{seed}"), seed=seed) for seed in (0, 1)
    ]
