"""The ipc transport without CUDA: what it refuses, and how it fills its buffer."""

import pickle

import pytest
import torch

from tests.fakes.weights import SERVING, Answered, DescribingClient, open_transport, send
from torchrl_vllm_sync import IPCTransport, ParamMeta
from torchrl_vllm_sync.errors import TransferError, UnsupportedArgumentError, WeightMismatchError
from torchrl_vllm_sync.replica import EngineDescription
from torchrl_vllm_sync.weights import ipc, source
from torchrl_vllm_sync.weights.source import MappingSource

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.arange(3, dtype=torch.uint8),
    "c": torch.arange(4, dtype=torch.bfloat16).reshape(2, 2).t(),
    "d": torch.full((40,), 7.0),
    "e": torch.tensor([1.5]),
}


def description(**facts):
    return EngineDescription(
        replica_id="0",
        node_ip="192.0.2.1",
        pid=1,
        max_model_len=16,
        vocab_size=8,
        block_size=16,
        num_kv_blocks=4,
        vllm_version="0.32.0",
        **facts,
    )


def filled(tensors, buffer_bytes, source=None):
    """What a receiver that splits each filling without gaps would read."""
    transport = IPCTransport(buffer_bytes=buffer_bytes)
    source = source or MappingSource(tensors)
    transport._make_buffer(source.metadata())
    found, sizes = {}, []
    for chunk in transport._chunks(source):
        offset = 0
        for meta in chunk:
            raw = transport._buffer[offset : offset + meta.num_bytes]
            found[meta.name] = raw.view(meta.dtype).view(meta.shape).clone()
            offset += meta.num_bytes
        sizes.append(offset)
    return transport, found, sizes


@pytest.mark.parametrize("buffer_bytes", [1, 160, 200, 1 << 20])
def test_every_tensor_passes_through_the_buffer(buffer_bytes):
    transport, found, sizes = filled(TENSORS, buffer_bytes)
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor), name
    assert max(sizes) <= transport.num_buffer_bytes == max(buffer_bytes, 160)
    assert sum(sizes) == sum(one.numel() * one.itemsize for one in TENSORS.values())
    assert len(sizes) >= 2  # a wider type that would be misaligned begins a new filling


class Other(MappingSource):
    """Yields something else than it announces."""

    def metadata(self):
        return [ParamMeta("x", torch.float32, (2,)), *super().metadata()]


def test_a_source_that_does_not_keep_its_word_is_refused():
    with pytest.raises(WeightMismatchError, match=r"announced x \[2\] and yielded a \[2, 3\]"):
        filled(TENSORS, 1 << 10, Other(TENSORS))


def test_what_cannot_share_memory_is_refused():
    with pytest.raises(UnsupportedArgumentError, match="buffer_bytes must be at least 1, got 0"):
        IPCTransport(buffer_bytes=0)
    with pytest.raises(UnsupportedArgumentError, match="one CUDA device, and the engines are on c"):
        open_transport(IPCTransport(), DescribingClient(description(device_type="cpu")))
    with pytest.raises(TransferError, match=r"no replica can be reached: .*gone"):
        open_transport(IPCTransport(), DescribingClient(RuntimeError("gone")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has CUDA")
def test_a_trainer_without_cuda_is_refused():
    engine = description(device_type="cuda", device_uuids=("GPU-1",))
    with pytest.raises(UnsupportedArgumentError, match="the trainer is on a host without CUDA"):
        open_transport(IPCTransport(), DescribingClient(engine))


@pytest.mark.gpu
def test_another_gpu_is_refused():
    engine = description(device_type="cuda", device_uuids=("GPU-1",))
    with pytest.raises(
        UnsupportedArgumentError, match=r"replica 0 is on \['GPU-1'\], which are not"
    ):
        open_transport(IPCTransport(), DescribingClient(engine))


def test_a_copy_in_another_process_starts_afresh():
    copy = pickle.loads(pickle.dumps(IPCTransport(buffer_bytes=77)))
    assert (copy._buffer_bytes, copy.num_buffer_bytes, copy.last_version) == (77, 0, 0)
    copy.close()
    copy.close()


def test_the_installed_vllm_takes_the_payload():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    assert WeightTransferEngineFactory._registry["ipc"]() is IPCWeightTransferEngine
    info = IPCWeightTransferEngine.update_info_cls(
        names=["a"],
        dtype_names=["float32"],
        shapes=[[2]],
        tensor_sizes=[8],
        ipc_handles={"GPU-1": ()},
    )
    assert info.ipc_handles == {"GPU-1": ()}
    assert IPCWeightTransferEngine.init_info_cls(packed=True).packed


# ---------------------------------------------------------------- a push, without a GPU


class Engines:
    """Replicas on this process's device that take parts, or fail at one of the calls."""

    service_name = "fake"

    def __init__(self, num=2, **failing):
        self.names, self.failing, self.called = [str(one) for one in range(num)], failing, []
        self.devices = {}

    def standings(self):
        return dict.fromkeys(self.names, SERVING)

    def start_calls(self, method, calls, **options):
        self.called.append((method, sorted(calls)))
        return Answered({name: self.answer(method, name, args) for name, args in calls.items()})

    def answer(self, method, name, args):
        at, number, error = self.failing.get(f"replica_{name}", ("", 0, None))
        if at == method and [one for one, _ in self.called].count(method) > number:
            return error
        if method == "describe":
            own = self.devices.get(name, "GPU-own")
            return description(device_type="cuda", device_uuids=(own,))
        return {"version": 7} if method == "finish_weight_update" else None

    def count(self, method):
        return [one for one, _ in self.called].count(method)


@pytest.fixture
def here(monkeypatch):
    """A trainer whose one device passes for a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(source, "current_device", lambda kind: torch.device("cpu"))
    monkeypatch.setattr(ipc, "visible_gpus", lambda: {"GPU-own": torch.device("cpu")})
    monkeypatch.setattr("torch.multiprocessing.reductions.reduce_tensor", lambda one: (None, "it"))


def push_parts(engines, source=None):
    return send(IPCTransport(buffer_bytes=160), engines, source or MappingSource(TENSORS), 7)


def test_every_part_is_taken_by_all_before_the_next_is_filled_in(here):
    engines = Engines()
    outcome = push_parts(engines)
    assert {one.replica_id: one.version for one in outcome.replicas} == {"0": 7, "1": 7}
    order = [method for method, _ in engines.called]
    num_chunks = outcome.phases["num_chunks"]
    assert num_chunks > 1
    assert order[3:] == [
        "start_weight_update",
        *["update_weights"] * num_chunks,
        "finish_weight_update",
    ]


def test_engines_on_other_gpus_are_shown_copies_there(here, monkeypatch):
    """A GPU's stand-in is a device without values, so that only who is shown what is seen."""
    gpus = {"GPU-own": torch.device("cpu"), "GPU-2": torch.device("meta"), "GPU-3": None}
    monkeypatch.setattr(ipc, "visible_gpus", lambda: gpus)
    shown = []

    class Shown(Engines):
        def answer(self, method, name, args):
            if method == "update_weights":
                shown.append((name, pickle.loads(args[0]["ipc_handles_bytes"])))
            return super().answer(method, name, args)

    monkeypatch.setattr(
        "torch.multiprocessing.reductions.reduce_tensor", lambda one: (None, str(one.device))
    )
    engines = Shown()
    engines.devices = {"1": "GPU-2"}
    assert not push_parts(engines).failures
    assert len(shown) > 2
    assert dict(shown) == {"0": {"GPU-own": "cpu"}, "1": {"GPU-2": "meta"}}


def test_an_engine_on_a_gpu_that_the_trainer_does_not_see_is_refused(here):
    engines = Engines()
    engines.devices = {"1": "GPU-other"}
    with pytest.raises(UnsupportedArgumentError, match=r"replica 1 is on \['GPU-other'\]"):
        push_parts(engines)
    assert {method for method, _ in engines.called} == {"describe"}


@pytest.mark.parametrize(
    ("method", "number", "num_parts"),
    [("start_weight_update", 0, 0), ("update_weights", 0, 1), ("update_weights", 1, 2)],
)
def test_a_replica_that_fails_ends_the_push_for_all(here, method, number, num_parts):
    engines = Engines(replica_1=(method, number, OSError("no room")))
    outcome = push_parts(engines)
    assert outcome.failures == {"0": "the push was given up half-way", "1": "no room"}
    assert engines.count("update_weights") == num_parts
    assert engines.called[-1] == ("give_up_update", ["0", "1"])
    assert engines.count("finish_weight_update") == 0


def test_half_a_push_is_given_up_by_all(here):
    class Breaking(MappingSource):
        def __iter__(self):
            yield from list(super().__iter__())[:4]
            raise RuntimeError("the trainer broke off")

        def views(self):
            return None

    engines = Engines()
    with pytest.raises(RuntimeError, match="broke off"):
        push_parts(engines, Breaking(TENSORS))
    assert engines.count("update_weights") >= 1
    assert engines.called[-1] == ("give_up_update", ["0", "1"])


def test_a_replica_that_is_lost_is_done_without(here):
    engines = Engines(replica_1=("update_weights", 0, TimeoutError("no answer")))
    outcome = push_parts(engines)
    assert outcome.failures == {"1": "no answer"}
    assert engines.called[-1] == ("finish_weight_update", ["0"])


def test_engines_have_their_own_way_again_where_one_cannot_begin(here):
    engines = Engines(replica_1=("init_weight_transfer_engine", 0, OSError("no")))
    transport = IPCTransport(buffer_bytes=160)
    with pytest.raises(TransferError, match="replica 1: no"):
        send(transport, engines, MappingSource(TENSORS), 7)
    assert engines.called[-1] == ("use_transfer_engine", ["0", "1"])
    engines.failing = {}
    assert not send(transport, engines, MappingSource(TENSORS), 7).failures
