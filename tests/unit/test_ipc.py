"""The ``ipc`` transport without engines: what it refuses, and whose memory buckets are in."""

import pickle

import pytest
import torch

from tests.fakes.weights import DescribingClient, description, open_transport
from torchrl_vllm_sync import IPCTransport
from torchrl_vllm_sync.errors import TransferError, UnsupportedArgumentError
from torchrl_vllm_sync.weights.broadcast.buckets import BucketLayout, make_buffers, room_for
from torchrl_vllm_sync.weights.module import ParamMeta


def test_what_cannot_share_memory_is_refused():
    with pytest.raises(UnsupportedArgumentError, match="buffer_bytes must be at least 3, got 2"):
        IPCTransport(buffer_bytes=2)
    for node, named in (("another", "another"), ("", "an unknown one")):
        engine = description(node_id=node, device_type="cpu")
        with pytest.raises(UnsupportedArgumentError, match=f"replica 0 is on {named}, the trainer"):
            open_transport(IPCTransport(), DescribingClient(engine))
    with pytest.raises(TransferError, match=r"no replica can be reached: .*gone"):
        open_transport(IPCTransport(), DescribingClient(RuntimeError("gone")))


def test_a_copy_in_another_process_starts_afresh():
    copy = pickle.loads(pickle.dumps(IPCTransport(buffer_bytes=77)))
    assert (copy._bucket_bytes, copy._shared_bytes) == (25, room_for(25))
    assert (copy.num_buffer_bytes, copy.last_version) == (0, 0)
    copy.close()
    copy.close()


@pytest.mark.parametrize("bucket_bytes", [25, 512, 1000])
@pytest.mark.parametrize("rows", [1, 2, 9, 1000])
def test_buffers_do_not_overlap_and_have_room(bucket_bytes, rows):
    layout = BucketLayout([ParamMeta("a", torch.float64, (rows, 3))], bucket_bytes)
    memory = torch.zeros(room_for(bucket_bytes), dtype=torch.uint8)
    buffers = make_buffers(layout, torch.device("cpu"), memory)
    assert len(buffers) == min(3, len(layout.buckets))
    for number, one in enumerate(buffers):
        assert one.numel() == layout.bucket_bytes
        assert not one.storage_offset() % 512
        assert not one.any()
        one += number + 1
