"""Parameters and buffers copied chunk by chunk from one model into another like it."""

import os
import stat

import pytest
import torch

from torchrl_vllm_sync.engine.worker import PeerCopy
from torchrl_vllm_sync.errors import TransferError


def model(seed, width=5):
    """Tensors of several dtypes and layouts, an empty one and a buffer that is not saved."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype)

    made = torch.nn.Module()
    for name, tensor in {
        "plain": random(3, width),
        "brief": random(7, dtype=torch.bfloat16),
        "turned": random(4, 3).t(),
        "permuted": random(2, 3, 4).permute(2, 0, 1),
        "empty": torch.empty(0),
        "scalar": random(),
        "bytes": random(11, dtype=torch.int8),
    }.items():
        made.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    made.register_buffer("table", random(6, dtype=torch.float64), persistent=False)
    made.tied = made.plain
    return made


def values(of):
    return {name: one.clone() for name, one in (*of.named_parameters(), *of.named_buffers())}


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 10_000])
@pytest.mark.parametrize("by_value", [True, False])
def test_everything_arrives_whatever_the_chunks(tmp_path, chunk_bytes, by_value):
    source, target = model(0), model(1)
    giver, taker = PeerCopy(source, chunk_bytes), PeerCopy(target, chunk_bytes)
    wanted, path = values(source), str(tmp_path / "chunk")
    assert giver.layout == taker.layout
    assert giver.checksums() != taker.checksums()
    for index in range(giver.num_chunks + 1):  # another worker of the replica may have more
        if not by_value:
            giver.give_file(index, path)
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        taker.take(index, giver.give(index) if by_value else path)
    found = values(target)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert giver.checksums() == taker.checksums()


def test_checksums_notice_a_chunk_that_was_lost():
    giver, taker = PeerCopy(model(0), 64), PeerCopy(model(1), 64)
    for index in range(giver.num_chunks):
        if index != 1:
            taker.take(index, giver.give(index))
    assert giver.checksums() != taker.checksums()


def test_models_that_are_not_alike_show_it_and_chunks_of_another_size_write_nothing():
    giver, taker = PeerCopy(model(0), 64), PeerCopy(model(1, width=6), 64)
    assert giver.layout != taker.layout
    before = taker.checksums()
    with pytest.raises(TransferError, match="chunk 0 has 63 bytes, which do not fit"):
        taker.take(0, giver.give(0)[:-1])
    assert taker.checksums() == before


def test_a_tensor_with_gaps_is_refused():
    made = torch.nn.Module()
    made.register_parameter("gappy", torch.nn.Parameter(torch.ones(4, 4)[:, :2]))
    with pytest.raises(TransferError, match="gappy has gaps"):
        PeerCopy(made)


def test_a_file_is_not_written_through_a_link(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        PeerCopy(model(0), 64).give_file(0, str(tmp_path / "link"))
    assert not (tmp_path / "elsewhere").exists()
