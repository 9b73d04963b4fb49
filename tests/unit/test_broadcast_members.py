"""Who a group of a trainer and its engines does without, while it stands."""

from types import SimpleNamespace

import torch

from tests.unit.describing_client import DescribingClient
from torchrl_vllm_sync.replica import ReplicaState
from torchrl_vllm_sync.weights.broadcast_members import BroadcastMembers
from torchrl_vllm_sync.weights.transport import Standing


def test_a_group_that_stands_does_without_those_who_are_absent_now_and_no_others():
    client = DescribingClient(None, None)
    client.known["1"] = Standing(state=ReplicaState.FAILED)
    members = BroadcastMembers(torch.device("cpu"), None, 1.0)
    members._group = SimpleNamespace(is_connected=True, was_left=False)
    members.crew, members.missing = {"0": ""}, {"7": "it is failed"}  # and was removed since
    assert not members.form(client)
    assert members.missing == {"1": "it is failed"}
    assert not client.described
