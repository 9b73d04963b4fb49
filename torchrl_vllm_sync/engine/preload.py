"""What every process of a replica imports first: vLLM, while Python's garbage collector rests.

None of the million objects that this makes is garbage, and to look through them again and again
takes a third of the time (Python 3.11, vLLM 0.32).
"""

import contextlib
import gc
import sys
from collections.abc import Iterator

from torchrl_vllm_sync.checks import collecting_no_garbage

with collecting_no_garbage():
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core  # noqa: F401

    gc.freeze()  # nor is any of them looked at afterwards


@contextlib.contextmanager
def first_in_children() -> Iterator[None]:
    """Has spawned processes, and theirs, import this file in the place of the main module."""
    main = sys.modules["__main__"]
    before, main.__spec__ = main.__spec__, __spec__
    try:
        yield
    finally:
        main.__spec__ = before
