"""What NCCL is told, and what it cannot be told any more."""

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from torchrl_vllm_sync.weights.broadcast.group import (
    ONE_CHANNEL,
    BroadcastGroup,
    Rendezvous,
    is_held_to_one_channel,
    nccl_environment,
)

PINNED = {"VLLM_BATCH_INVARIANT": "1", "NCCL_MAX_NCHANNELS": "1", "NCCL_PROTO": "Simple"}


@pytest.fixture
def pinned(monkeypatch):
    """As a batch-invariant vLLM worker is, one of two."""
    for name, value in PINNED.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NCCL_NO_CACHE", raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)


def test_what_vllm_pins_does_not_reach_a_communicator_with_the_trainer(pinned):
    with nccl_environment("eth7"):
        assert "NCCL_PROTO" not in os.environ
        assert "NCCL_MAX_NCHANNELS" not in os.environ
        assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth7"
    assert {name: os.environ[name] for name in PINNED} == PINNED
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_what_a_user_pins_stays(monkeypatch):
    monkeypatch.setenv("NCCL_PROTO", "LL")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    with nccl_environment(None):
        assert os.environ["NCCL_PROTO"] == "LL"


def test_a_worker_among_others_has_told_nccl_already(pinned):
    assert is_held_to_one_channel()


def test_nccl_that_reads_again_is_not_held(pinned, monkeypatch):
    monkeypatch.setenv("NCCL_NO_CACHE", "NCCL_PROTO,NCCL_MAX_NCHANNELS")
    assert not is_held_to_one_channel()


@pytest.mark.parametrize(
    ("name", "value"),
    [("is_initialized", False), ("get_world_size", 1)],
)
def test_a_worker_alone_has_not(pinned, monkeypatch, name, value):
    monkeypatch.setattr(dist, name, lambda: value)
    assert not is_held_to_one_channel()


def test_neither_has_a_trainer(pinned, monkeypatch):
    monkeypatch.delenv("NCCL_MAX_NCHANNELS")
    assert not is_held_to_one_channel()


@pytest.mark.parametrize("held", [True, False])
def test_the_communicator_is_made_without_the_pins(pinned, monkeypatch, held):
    """By the first collective, as torch does it; one that is held to one channel says so."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2 if held else 1)
    seen = []

    def broadcast(tensors, options):
        seen.append((os.environ.get("NCCL_PROTO"), os.environ.get("NCCL_MAX_NCHANNELS")))
        return SimpleNamespace(wait=lambda: None)

    at = Rendezvous("127.0.0.1", 0, world_size=1)
    group = BroadcastGroup.host(at, torch.device("cpu"), timeout_s=5)
    group._stream = object()  # as on a GPU
    monkeypatch.setattr(group, "side_stream", contextlib.nullcontext)
    monkeypatch.setattr(group, "synchronize", lambda **limits: None)
    communicator = SimpleNamespace(broadcast=broadcast, abort=lambda: None)
    monkeypatch.setattr(group, "_make_group", lambda timeout_s: communicator)
    group.connect(timeout_s=5)
    assert seen == [(None, None)]
    assert os.environ["NCCL_PROTO"] == "Simple"
    assert group.store.check([ONE_CHANNEL]) == held
    group.close()
