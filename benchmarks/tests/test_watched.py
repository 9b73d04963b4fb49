"""A call that may block for ever is watched: it is left in time, and its errors arrive typed."""

import threading
import time

import pytest

from benchmarks.peers.vllm_nccl import watched
from torchrl_vllm_sync.errors import TransferError, WeightMismatchError


class Pending:
    def __init__(self, failures=()):
        self.found = dict(failures)

    def failures(self):
        return self.found


def test_a_call_that_blocks_is_left_behind():
    blocked = threading.Event()
    begin = time.monotonic()
    with pytest.raises(TransferError, match="the transfer did not end in time"):
        watched("the transfer", lambda: blocked.wait(20), Pending(), begin + 0.2)
    with pytest.raises(TransferError, match="replica 1: gone"):
        watched(
            "the transfer", lambda: blocked.wait(20), Pending({"1": OSError("gone")}), begin + 20
        )
    assert time.monotonic() - begin < 5
    blocked.set()


def test_what_a_call_raises_arrives_typed():
    def fail(error):
        raise error

    deadline = time.monotonic() + 20
    assert watched("it", lambda: 3, Pending(), deadline) == 3
    with pytest.raises(WeightMismatchError, match="mine"):
        watched("it", lambda: fail(WeightMismatchError("mine")), Pending(), deadline)
    with pytest.raises(TransferError, match="it broke off: OSError: theirs"):
        watched("it", lambda: fail(OSError("theirs")), Pending(), deadline)
