"""Skips tests whose devices are missing, and gives tests that start engines their time."""

import os

# Decided before anything imports torch: OpenMP threads that spin starve the engines' processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

ENGINE_TIMEOUT_S = 300
REQUIRE_GPU = "REQUIRE_GPU"
"""A GPU runner sets this variable to 1: there, a test without its devices fails."""


def pytest_collection_modifyitems(items):
    for item in items:
        starts_engines = any(item.get_closest_marker(mark) for mark in ("ray", "gpu", "multigpu"))
        if starts_engines and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))


def pytest_runtest_setup(item):
    needed = (
        2 if item.get_closest_marker("multigpu") else 1 if item.get_closest_marker("gpu") else 0
    )
    if not needed:
        return
    import torch

    found = torch.cuda.device_count()
    if found >= needed:
        return
    message = f"needs {needed} CUDA device(s), found {found}"
    if os.environ.get(REQUIRE_GPU) == "1":
        pytest.fail(message)
    pytest.skip(message)
