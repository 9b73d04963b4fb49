"""Calls to the store of a trainer that is stopped: they end, and the connection is given up."""

import os
import signal
import threading
import time
from contextlib import closing
from datetime import timedelta

import pytest
from torch.distributed import DistError, TCPStore

from tests.processes import Child, stop
from torchrl_vllm_sync.weights.broadcast.group import BoundedStore

HOST = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def host():
    """A process that hosts a store, and its port; it may be stopped."""
    with closing(Child(HOST)) as child:
        yield child, int(child.stdout.readline())


def connected(port):
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=5))


CALLS = {
    "check": lambda store: store.check(["key"]),
    "add": lambda store: store.add("number", 1),
    "await_value": lambda store: store.await_value("missing", 0.2),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_end_although_the_host_is_stopped(host, name):
    process, port = host
    store = BoundedStore(connected(port), answer_timeout_s=2.0)  # also for a busy host
    store.set("key", "word")
    assert store.check(["key"])
    stop(process.pid)
    begin = time.monotonic()
    with pytest.raises(DistError, match="did not answer in time"):
        CALLS[name](store)
    for call in (*CALLS.values(), lambda store: store.set("key", "other")):
        with pytest.raises(DistError, match="was given up"):
            call(store)
    assert time.monotonic() - begin < 10
    os.kill(process.pid, signal.SIGCONT)
    assert connected(port).get("key") == b"word"


def test_without_it_a_call_waits_for_as_long_as_the_host_is_stopped(host):
    process, port = host
    raw = connected(port)
    raw.set("key", "word")
    stop(process.pid)
    begin = time.monotonic()
    threading.Timer(1.5, os.kill, args=(process.pid, signal.SIGCONT)).start()
    with pytest.raises(DistError):
        raw.wait(["missing"], timedelta(seconds=0.2))
    assert time.monotonic() - begin > 1.4


def test_calls_on_a_host_that_answers(host):
    _, port = host
    store, other = (BoundedStore(connected(port)) for _ in range(2))
    assert [store.add("number", 1), other.add("number", 2)] == [1, 3]
    assert not store.check(["key"])
    with pytest.raises(DistError, match=r"timeout"):
        store.await_value("key", 0.2)
    threading.Timer(0.2, lambda: other.set("key", "word")).start()
    assert store.await_value("key", 20) == "word"


def test_the_hosts_own_calls():
    raw = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = BoundedStore(raw, answer_timeout_s=None)
    store.set("key", "word")
    assert store.check(["key"])
    assert store.await_value("key", 1.0) == "word"
