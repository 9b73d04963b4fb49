"""Who a group of a trainer and its engines does without, while it stands."""

from types import SimpleNamespace

import pytest
import torch

from tests.unit.describing_client import DescribingClient
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import TransferError
from torchrl_vllm_sync.weights.broadcast.members import BroadcastMembers
from torchrl_vllm_sync.weights.source import MappingSource
from torchrl_vllm_sync.weights.transport import Standing


def standing_group(device):
    return SimpleNamespace(
        is_connected=True, was_left=False, device=torch.device(device), close=lambda: None
    )


def test_a_group_that_stands_does_without_those_who_are_absent_now_and_no_others():
    client = DescribingClient(None, None)
    client.known["1"] = Standing(state=ReplicaState.FAILED)
    members = BroadcastMembers(torch.device("cpu"), None, 1.0)
    members._group = standing_group("cpu")
    members.crew, members.missing = {"0": ""}, {"7": "it is failed"}  # and was removed since
    assert not members.form(client)
    assert members.missing == {"1": "it is failed"}
    assert not client.described


@pytest.mark.parametrize(("device", "again"), [("meta", False), ("meta:1", True)])
def test_weights_that_are_elsewhere_have_a_new_group_formed(device, again):
    source = MappingSource({"a": torch.ones(2)})
    source.views = lambda: [("a", torch.ones(2, device="meta"))]
    client = DescribingClient(TransferError("too busy"))
    members = BroadcastMembers(None, None, 1.0)
    members._group, members.crew = standing_group(device), {"0": ""}
    if again:
        with pytest.raises(TransferError, match="too busy"):
            members.form(client, source=source)
    else:
        assert not members.form(client, source=source)
    assert client.described == again
    members._group = standing_group(device)
    assert not members.form(client), "without knowing what will be sent, the group stands"
