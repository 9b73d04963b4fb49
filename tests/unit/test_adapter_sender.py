"""Memory that adapters are written to: used again, but not while somebody may be reading it."""

import contextlib
import gc
import itertools
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import torch

from torchrl_vllm_sync import AdapterSource, errors
from torchrl_vllm_sync.weights.adapters import AdapterSender
from torchrl_vllm_sync.weights.p2p.memory import MappedMemory, hand_over, new_memory, this_node
from torchrl_vllm_sync.weights.source import MappingSource
from torchrl_vllm_sync.weights.transport import Push

CPU = torch.device("cpu")
NUM_WORKERS = 2
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Client:
    """Replicas that note what their workers read, and fail as told."""

    def __init__(self):
        self.given, self.dtypes, self.failing, self.memories = [], {}, set(), {}
        self.let_go, self.by_value = set(), []  # of whose memory; who got bytes
        self.far = set()  # whose second worker cannot reach the door
        self.reading, self.versions = {}, {}

    def start_calls(self, method, calls, **_):
        answer = self._prepare if method == "prepare_adapter" else self._put
        answers = {name: answer(name, *args) for name, args in calls.items()}
        return SimpleNamespace(answers=lambda _: answers)

    def _prepare(self, name, _config, metadata, door):
        dtype = self.dtypes.get(name, "bfloat16")
        size = sum(torch.Size(shape).numel() for _, _, shape, *_ in metadata)
        size *= 2 * DTYPES[dtype].itemsize
        for rank in reversed(range(NUM_WORKERS) if door else ()):
            if name in self.far and rank == 0:
                return errors.TransferError("memory was not taken at the other end")
            with contextlib.closing(new_memory(size, CPU)) as memory:
                mapped = MappedMemory(size, CPU, memory.export())
                self.memories.setdefault(door["token"], []).append(mapped.data)
                said = {"replica_id": name, "rank": rank, "token": door["token"]}
                hand_over(door["path"], said, [memory.export()], 1.0)
        return dtype

    def _put(self, name, adapter, place):
        if isinstance(place, bytes):
            self.by_value.append((name, place))
            return {"loaded": True}
        if self.versions.get(name) == adapter.version:
            return {"loaded": False}
        token, half = place
        if token in self.let_go:
            return errors.TransferNotReadyError("another trainer's memory has replaced it")
        views = [one.view(2, adapter.num_bytes)[half] for one in self.memories[token]]
        self.reading[name] = views  # until the next comes
        read = [one.clone() for one in views]
        self.given.append((name, token, read))
        if name in self.failing:
            return errors.TransferError("late")
        self.versions[name] = adapter.version
        return {"loaded": True}


def adapted(rank):
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    config = {"lora_alpha": 6, "target_modules": ["0", "1"], "init_lora_weights": False}
    return AdapterSource(peft.get_peft_model(model, peft.LoraConfig(r=rank, **config)))


@pytest.fixture
def rig():
    source, client = adapted(2), Client()
    members = SimpleNamespace(client=client, incarnations={"0": "a", "1": "b"}, silent={})
    engine = SimpleNamespace(
        node_id=this_node(), device_type="cpu", device_uuids=(), num_workers=NUM_WORKERS
    )
    members.describe = lambda: dict.fromkeys(members.incarnations, engine)
    members.choose, members.drop = lambda _: None, lambda _: None
    return SimpleNamespace(sender=AdapterSender(lambda: 0), source=source, **vars(members))


def pushed(rig, version):
    """Whose memory it was read from, after a change of all weights; it is what iteration gives."""
    with torch.no_grad():
        for _, one in rig.source.views():
            one.add_(1.0)
    rig.sender.pack(rig.sender.look(rig.source), allow_nonfinite=False)
    rig.sender.open(rig, rig.source)
    rig.sender.send(rig, Push(rig.source, version, 1.0))
    wanted = torch.cat([one.reshape(-1) for _, one in rig.source]).to(torch.bfloat16)
    latest = {name: (token, read) for name, token, read in rig.client.given}
    for _, read in latest.values():
        assert [torch.equal(one.view(torch.bfloat16), wanted) for one in read] == [True] * 2
    return {name: token for name, (token, _) in latest.items()}


def test_every_worker_has_one_memory_that_is_used_again(rig):
    first, *others = (pushed(rig, version) for version in range(1, 7))
    assert first["0"] != first["1"]
    assert others == [first] * 5
    assert len(rig.client.memories) == 2


def test_what_workers_took_last_is_not_written_before_they_take_the_next(rig):
    both = dict(rig.incarnations)
    for version, absent in enumerate(("", "", "1", "", "1", "1", ""), 1):
        for name in set(both) - {absent}:
            rig.incarnations[name] = both[name]
        rig.incarnations.pop(absent, None)
        rig.client.given.clear()
        pushed(rig, version)
        taken = {name: [one.clone() for one in some] for name, some in rig.client.reading.items()}
        with torch.no_grad():
            rig.source.views()[0][1].add_(1.0)
        for _ in range(2):  # as where the first was given up before it was sent
            rig.sender.pack(rig.sender.look(rig.source), allow_nonfinite=False)
        for name, some in taken.items():
            assert all(map(torch.equal, some, rig.client.reading[name])), (version, name)


def test_what_workers_took_is_not_written_where_they_are_sent_the_same_version_again(rig):
    for version in (1, 2):
        pushed(rig, version)
    taken = {name: [one.clone() for one in some] for name, some in rig.client.reading.items()}
    for _ in range(3):
        rig.sender.send(rig, Push(rig.source, 2, 1.0))
        rig.source.views()[0][1].data.add_(1.0)
        rig.sender.pack(rig.sender.look(rig.source), allow_nonfinite=False)
        for name, some in taken.items():
            assert all(map(torch.equal, some, rig.client.reading[name]))
    pushed(rig, 3)


def test_of_one_adapter_in_many_forms_the_last_two_keep_their_memory(rig):
    mapped, tokens = [], []
    for version, rank in enumerate((2, 1, 2, 1, 3, 4, 5, 6), 1):
        rig.source = adapted(rank)
        tokens.append(pushed(rig, version))
        gc.collect()
        theirs = sum(map(len, rig.client.memories.values()))  # in this process, too
        mapped.append(Path("/proc/self/maps").read_text().count("/memfd:weights") - theirs)
    assert tokens[2:4] == tokens[:2]
    assert mapped[1:] == [mapped[1]] * 7


@pytest.mark.parametrize("failing", [{"1"}, {"0", "1"}])
def test_what_a_replica_may_still_read_is_not_written_again(rig, failing):
    pushed(rig, 1)
    rig.client.failing = failing
    late = pushed(rig, 2)
    before = {name: [one.clone() for one in rig.client.memories[late[name]]] for name in late}
    rig.client.failing = set()
    tokens = [pushed(rig, version) for version in range(3, 6)]
    assert tokens == [tokens[0]] * 3
    for name, token in late.items():
        unchanged = map(torch.equal, rig.client.memories[token], before[name])
        assert (set(unchanged), tokens[0][name] != token) == ({name in failing}, name in failing)


def test_a_worker_that_has_let_go_of_its_memory_gets_the_bytes_and_gives_other_memory(
    rig, monkeypatch
):
    monkeypatch.setattr("ray.put", lambda one: one.tobytes())
    first = pushed(rig, 1)
    rig.client.let_go = {first["1"]}
    rig.sender.pack(rig.source, allow_nonfinite=False)
    rig.sender.open(rig, rig.source)
    answers = rig.sender.send(rig, Push(rig.source, 2, 1.0))
    assert answers == {"0": {"loaded": True}, "1": {"loaded": True}}
    sent = rig.sender.content.flat.view(torch.uint8).numpy().tobytes()
    assert rig.client.by_value == [("1", sent)]
    then = pushed(rig, 3)
    assert (then["0"] == first["0"], then["1"] == first["1"]) == (True, False)
    assert len(rig.client.by_value) == 1


def test_a_replica_that_cannot_reach_the_door_gets_the_bytes(rig, monkeypatch):
    monkeypatch.setattr("ray.put", lambda one: one.tobytes())
    rig.client.far, dropped = {"1"}, []
    monkeypatch.setattr(rig, "drop", dropped.append)
    assert pushed(rig, 1).keys() == {"0"}
    for version in (2, 3):
        assert pushed(rig, version).keys() == {"0"}
        sent = rig.sender.content.flat.view(torch.uint8).numpy().tobytes()
        assert rig.client.by_value[version - 1 :] == [("1", sent)]
    assert not any(dropped)


def test_memory_of_a_push_that_was_broken_off_is_not_written_again(rig):
    first = pushed(rig, 1)

    def confirm():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rig.sender.send(rig, Push(rig.source, 2, 1.0, confirm=confirm))
    assert not {*first.values()} & {*pushed(rig, 3).values()}


def test_pushes_in_inference_mode_and_outside_go_on_with_the_same_memory(rig):
    with torch.inference_mode():
        rig.sender.open(rig, rig.source)
        rig.sender.send(rig, Push(rig.source, 1, 1.0))
    first = pushed(rig, 2)
    with torch.inference_mode():
        rig.sender.pack(rig.source, allow_nonfinite=False)
    assert pushed(rig, 3) == first


def test_a_push_that_came_no_further_is_not_what_the_next_one_sends(rig):
    first = pushed(rig, 1)
    for _ in range(3):
        rig.sender.pack(rig.source, allow_nonfinite=False)
    assert pushed(rig, 2) == first


def test_a_replica_that_restarted_gets_memory_of_its_own(rig):
    first = pushed(rig, 1)
    rig.incarnations["1"] = "c"
    for _ in range(2):
        assert rig.sender.late(rig.incarnations, ()) == ["1"]  # until it has taken something
        rig.sender.open(rig, rig.source)
    second = pushed(rig, 2)
    assert (first["0"] == second["0"], first["1"] == second["1"]) == (True, False)
    assert rig.sender.late(rig.incarnations, ()) == []


def test_what_was_sent_is_recognised(rig):
    pushed(rig, 1)
    sent, (name, one) = rig.sender.content, rig.source.views()[1]
    assert not sent.difference(rig.source)
    torch.nn.init.zeros_(one)
    assert sent.difference(rig.source) == f"1 not as they were: {name}"
    assert sent.difference(MappingSource({name: one}))
    other = peft.LoraConfig(r=1, target_modules=["0", "1"])
    base = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    assert sent.difference(AdapterSource(peft.get_peft_model(base, other)))


def test_what_was_sent_is_recognised_where_it_is_no_number(rig):
    pushed(rig, 1)
    torch.nn.init.constant_(rig.source.views()[1][1], torch.nan)
    rig.sender.pack(rig.source, allow_nonfinite=True)
    rig.sender.send(rig, Push(rig.source, 2, 1.0, allow_nonfinite=True))
    assert not rig.sender.content.difference(rig.source)


def test_an_adapter_without_values_is_refused_before_memory_is_asked_for(rig):
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    config = peft.LoraConfig(target_modules=["0", "1"])
    rig.source = AdapterSource(peft.get_peft_model(model, config, low_cpu_mem_usage=True))
    for _ in range(2):
        with pytest.raises(errors.WeightMismatchError, match=r"lora_A.*on the meta device"):
            rig.sender.look(rig.source)
    for layer, half in itertools.product(rig.source.owner.base_model.model, ("A", "B")):
        getattr(layer, f"lora_{half}").to_empty(device="cpu")
    rig.sender.look(rig.source)


def test_an_adapter_of_no_layer_is_refused(rig):
    for layer in rig.source.owner.base_model.model:
        layer.delete_adapter("default")
    with pytest.raises(errors.WeightMismatchError, match="'default' is of no layer"):
        AdapterSource(rig.source.owner)


def test_values_that_are_too_large_for_engines_are_refused_by_name(rig):
    pushed(rig, 1)
    (_, first), _, (name, second), _ = rig.source.views()
    torch.nn.init.constant_(first, 1e38)  # finite, and too much for a sum
    rig.sender.pack(rig.source, allow_nonfinite=False)
    torch.nn.init.constant_(second, 3e38)  # times what it is scaled by
    with pytest.raises(errors.NonFiniteWeightsError) as raised:
        rig.sender.pack(rig.source, allow_nonfinite=False)
    assert raised.value.names == [name]
    rig.sender.pack(rig.source, allow_nonfinite=True)


def test_engines_that_hold_adapters_in_unlike_dtypes_get_none(rig):
    rig.client.dtypes = {"1": "float32"}
    for version in (1, 2):
        with pytest.raises(errors.UnsupportedArgumentError, match=r"bfloat16.*float32"):
            pushed(rig, version)
    assert not rig.client.given
    rig.client.dtypes, rig.incarnations["1"] = {}, "c"
    pushed(rig, 3)
