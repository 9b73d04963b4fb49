"""Tests of benchmarks are selected, timed and skipped by the rules of ``tests/``."""

from tests.conftest import pytest_collection_modifyitems, pytest_runtest_setup
from tests.gpu.conftest import checkpoints, cluster

__all__ = ["checkpoints", "cluster", "pytest_collection_modifyitems", "pytest_runtest_setup"]
