"""The ipc transport without CUDA: what it refuses, and how it fills its buffer."""

import pickle

import pytest
import torch

from tests.fakes.weights import DescribingClient, open_transport
from torchrl_vllm_sync import IPCTransport, ParamMeta
from torchrl_vllm_sync.errors import TransferError, UnsupportedArgumentError, WeightMismatchError
from torchrl_vllm_sync.replica import EngineDescription
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
    with pytest.raises(UnsupportedArgumentError, match=r"replica 0 is on \['GPU-1'\]"):
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
