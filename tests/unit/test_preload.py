"""A replica's processes import vLLM first, without looking through all of it for garbage."""

import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from torchrl_vllm_sync.checks import collecting_no_garbage
from torchrl_vllm_sync.engine.preload import first_in_children

LOOK = """(lambda gc, sys: (
    getattr(sys.modules["__main__"].__spec__, "name", None),
    "vllm.v1.engine.core" in sys.modules,
    gc.isenabled(),
    gc.get_freeze_count() > 100_000,
))(__import__("gc"), __import__("sys"))"""


def in_a_spawned_process():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(eval, LOOK).result(50)


@pytest.mark.slow
def test_what_is_spawned_begins_with_vllm_and_nothing_else_does():
    with first_in_children():
        found = in_a_spawned_process()
    assert found == ("torchrl_vllm_sync.engine.preload", True, True, True)
    name, has_vllm, _, is_frozen = in_a_spawned_process()
    assert name != "torchrl_vllm_sync.engine.preload"
    assert not has_vllm
    assert not is_frozen


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_collector_is_afterwards_as_it_was(is_enabled):
    try:
        (gc.enable if is_enabled else gc.disable)()
        with collecting_no_garbage():
            assert not gc.isenabled()
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
