"""Which version a replica that joins must hold before it serves."""

from types import SimpleNamespace

import pytest

from torchrl_vllm_sync.fleet import Fleet
from torchrl_vllm_sync.load import LoadTracker
from torchrl_vllm_sync.replica import EngineReport, ReplicaState

SERVING, STALE, STARTING = ReplicaState.SERVING, ReplicaState.STALE, ReplicaState.STARTING


@pytest.fixture
def load():
    return LoadTracker(["0", "1"])


def newest_for_0(load, committed=0):
    pusher = SimpleNamespace(committed=committed)
    fleet = Fleet("service", lambda: None, None, load, pusher, dict)
    return fleet._newest_version(["0"])


def told(load, replica_id, state, version):
    load.observe(EngineReport(replica_id=replica_id, state=state, weight_version=version))


def test_what_the_others_serve_with(load):
    told(load, "0", SERVING, 9)  # alone; its trainer was killed before the other had it
    told(load, "1", SERVING, 8)
    load.renew("0", STARTING)
    assert newest_for_0(load) == 8
    assert newest_for_0(load, committed=9) == 9


def test_launched_weights_do_not_come_back_while_nobody_serves(load):
    told(load, "0", SERVING, 20)  # another process pushed
    told(load, "1", SERVING, 20)
    told(load, "1", STALE, 20)  # and the next push broke off
    load.renew("0", STARTING)
    assert newest_for_0(load) == 20
    load.renew("1", STARTING)
    assert newest_for_0(load) == 20


def test_nothing_was_pushed_yet(load):
    told(load, "1", SERVING, 0)
    assert newest_for_0(load) == 0
