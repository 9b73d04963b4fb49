"""A local Ray cluster with the machine's GPUs, and tiny checkpoints."""

import logging
import os

import pytest
import ray
import torch

from tests.warm import warm_cluster
from torchrl_vllm_sync.testing import make_tiny_checkpoint

os.environ.setdefault("RAY_AUTH_MODE", "disabled")


@pytest.fixture(scope="session")
def cluster():
    options = {"include_dashboard": False, "logging_level": logging.ERROR}
    if not torch.cuda.is_available():
        with warm_cluster(**options):
            yield
        return
    ray.init(address="local", **options)
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Two checkpoints of one architecture with different weights."""
    return [
        make_tiny_checkpoint(tmp_path_factory.mktemp(f"seed{seed}"), seed=seed) for seed in (0, 1)
    ]
