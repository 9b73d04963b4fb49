"""Memory that adapters are sent in: used again, but not while somebody may be reading it."""

from types import SimpleNamespace

import peft
import pytest
import torch

from torchrl_vllm_sync import AdapterSource, errors
from torchrl_vllm_sync.weights.adapters import AdapterSender
from torchrl_vllm_sync.weights.p2p.memory import this_node
from torchrl_vllm_sync.weights.transport import Push


class Client:
    """Replicas that note what they are given, and fail as told."""

    def __init__(self):
        self.given, self.dtypes, self.failing = [], {}, set()

    def start_calls(self, method, calls, **_):
        if method == "prepare_adapter":
            dtypes = {name: self.dtypes.get(name, "bfloat16") for name in calls}
            answers = {n: {"dtype": one, "node": this_node()} for n, one in dtypes.items()}
        else:
            (place,) = {place for _, place in calls.values()}
            size = next(iter(calls.values()))[0].num_bytes
            held = torch.from_file(place[0], size=size, dtype=torch.uint8).view(torch.bfloat16)
            self.given.append((place, held.clone()))
            lost = errors.TransferError("late")
            answers = {name: lost if name in self.failing else {} for name in calls}
        return SimpleNamespace(answers=lambda _: answers)


@pytest.fixture
def rig():
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0", "1"], init_lora_weights=False)
    source, client = AdapterSource(peft.get_peft_model(model, config)), Client()
    members = SimpleNamespace(client=client, incarnations={"0": "a", "1": "b"}, silent={})
    members.choose, members.drop = lambda _: None, lambda _: None
    return SimpleNamespace(sender=AdapterSender(lambda: 0), source=source, **vars(members))


def pushed(rig, version):
    """Where it was sent, after a change of all weights; what came is what iteration gives."""
    with torch.no_grad():
        for _, one in rig.source.views():
            one.add_(1.0)
    rig.sender.pack(rig.sender.look(rig.source), allow_nonfinite=False)
    rig.sender.open(rig, rig.source)
    rig.sender.send(rig, Push(rig.source, version, 1.0))
    place, values = rig.client.given[-1]
    wanted = torch.cat([one.reshape(-1) for _, one in rig.source]).to(torch.bfloat16)
    assert torch.equal(values, wanted)
    return place


def test_two_pieces_of_memory_take_turns(rig):
    first, second, *others = (pushed(rig, version) for version in range(1, 7))
    assert first != second
    assert others == [first, second] * 2


def test_what_a_replica_may_still_read_is_not_written_again(rig):
    pushed(rig, 1)
    rig.client.failing = {"1"}
    late = pushed(rig, 2)
    rig.client.failing = set()
    assert late not in [pushed(rig, version) for version in range(3, 8)]


def test_what_no_replica_took_is_not_written_again(rig):
    pushed(rig, 1)
    rig.client.failing = {"0", "1"}
    late = pushed(rig, 2)
    rig.client.failing = set()
    assert late not in [pushed(rig, version) for version in range(3, 8)]


def test_a_push_that_came_no_further_leaves_its_memory_to_the_next(rig):
    places = {pushed(rig, version) for version in (1, 2, 3)}
    for _ in range(3):
        rig.sender.pack(rig.source, allow_nonfinite=False)
    assert {pushed(rig, version) for version in (4, 5, 6)} == places


def test_values_that_are_too_large_for_engines_are_refused_by_name(rig):
    pushed(rig, 1)
    (_, first), (name, second), *_ = rig.source.views()
    torch.nn.init.constant_(first, 1e38)  # finite, and too much for a sum
    rig.sender.pack(rig.source, allow_nonfinite=False)
    torch.nn.init.constant_(second, 3e38)  # times what it is scaled by
    with pytest.raises(errors.NonFiniteWeightsError) as raised:
        rig.sender.pack(rig.source, allow_nonfinite=False)
    assert raised.value.names == [name]
    rig.sender.pack(rig.source, allow_nonfinite=True)


def test_engines_that_hold_adapters_in_unlike_dtypes_get_none(rig):
    rig.client.dtypes = {"1": "float32"}
    with pytest.raises(ValueError, match="too many values"):
        pushed(rig, 1)
    assert not rig.client.given
