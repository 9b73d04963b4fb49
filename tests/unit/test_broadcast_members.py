"""Who a group of a trainer and its engines does without, while it stands."""

from types import SimpleNamespace

import pytest
import torch

from tests.fakes.weights import DescribingClient, members_of
from torchrl_vllm_sync import BroadcastTransport, ReplicaState
from torchrl_vllm_sync.errors import TransferError
from torchrl_vllm_sync.weights.source import MappingSource
from torchrl_vllm_sync.weights.transport import Standing


def standing_group(device):
    return SimpleNamespace(
        is_connected=True, was_left=False, device=torch.device(device), close=lambda: None
    )


def test_a_group_that_stands_does_without_those_who_are_absent_now_and_no_others():
    client = DescribingClient(None, None)
    client.known["1"] = Standing(state=ReplicaState.FAILED)
    transport = BroadcastTransport(device="cpu")
    group = transport._group = standing_group("cpu")
    transport._crew = {"0": ""}
    members = members_of(client)
    transport.open(members)
    assert transport.group is group
    assert members.missing == {"1": "it is failed"}
    assert not client.described


@pytest.mark.parametrize(("device", "again"), [("meta", False), ("meta:1", True)])
def test_weights_that_are_elsewhere_have_a_new_group_formed(device, again):
    source = MappingSource({"a": torch.ones(2)})
    source.views = lambda: [("a", torch.ones(2, device="meta"))]
    client = DescribingClient(TransferError("too busy"))
    transport = BroadcastTransport()
    transport._group, transport._crew = standing_group(device), {"0": ""}
    if again:
        with pytest.raises(TransferError, match="too busy"):
            transport.open(members_of(client), source)
    else:
        transport.open(members_of(client), source)
    assert client.described == again
    group = transport._group = standing_group(device)
    transport.open(members_of(client))
    assert transport.group is group, "without knowing what will be sent, the group stands"
