"""Checksums tell apart what a wrong transfer leaves behind, and nothing else."""

import pytest
import torch

from torchrl_vllm_sync.weights import audit
from torchrl_vllm_sync.weights.audit import checksum, checksums

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex128]
# Pinned: replicas of different hosts and releases compare them.
OF_A_HUNDRED = -7188943439257889505


def tensor_checksum(tensor):
    return checksums([tensor])[0]


def values(count, dtype=torch.float32):
    return torch.arange(1, count + 1).to(dtype)


def test_the_numbers_stay():
    assert tensor_checksum(values(100)) == OF_A_HUNDRED
    assert checksum([("w", values(100)), ("b", values(0))]) == {"w": OF_A_HUNDRED, "b": 0}


def reference(tensor):
    """The same in plain integers."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    total = len(data)
    for position in range(0, len(data), 8):
        word = int.from_bytes(data[position : position + 8], "little")
        word ^= (position // 8 + 1) * 0x9E3779B97F4A7C15 % 2**64
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        total += word ^ word >> 31
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 3, 8, 1001])
def test_any_dtype_and_length(dtype, count):
    assert tensor_checksum(values(count, dtype)) == reference(values(count, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_and_strides_do_not_matter(dtype, monkeypatch):
    tensor = values(7 * 13 * 11, dtype).reshape(7, 13, 11)
    expected = tensor_checksum(tensor)
    wide = torch.zeros(7, 13, 22, dtype=dtype)
    wide[:, :, 3:14] = tensor
    variants = [tensor, wide[:, :, 3:14], tensor.transpose(0, 2).contiguous().transpose(0, 2)]
    shifted = torch.zeros(1002, dtype=dtype)
    shifted[1:] = tensor.flatten()
    for chunk_words in (8, 24, 2**22):
        monkeypatch.setattr(audit, "CHUNK_WORDS", chunk_words)
        assert {tensor_checksum(one) for one in [*variants, shifted[1:]]} == {expected}


def test_faults_of_a_transfer_show():
    tensor = values(4096)
    swapped, moved, stale, rows = tensor.clone(), tensor.roll(1), tensor.clone(), tensor.clone()
    swapped[[10, 3000]] = swapped[[3000, 10]]
    stale[-1] = 0
    rows = rows.view(64, 64)[torch.arange(64).roll(2)].flatten()
    within_a_word = tensor.view(-1, 2).flip(1).flatten()
    faulty = [swapped, moved, stale, rows, within_a_word, tensor[:-1], torch.zeros(4096)]
    found = {tensor_checksum(one) for one in [tensor, *faulty]}
    assert len(found) == 1 + len(faulty)
    assert tensor_checksum(torch.zeros(2)) != tensor_checksum(torch.zeros(4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gives_the_same_numbers(dtype):
    tensor = values(3 * 2**20 + 5, dtype)
    torch.cuda.reset_peak_memory_stats()
    assert tensor_checksum(tensor.cuda()) == tensor_checksum(tensor)
    assert tensor_checksum(tensor.cuda()[::3]) == tensor_checksum(tensor[::3])
    assert torch.cuda.max_memory_allocated() < 256 * 2**20 + 2 * tensor.nbytes


@pytest.mark.parametrize("limit", [1, 300, 10**9])
def test_batches_for_a_kernel_keep_the_order_and_their_bound(monkeypatch, limit):
    """By a stand-in for the kernel, which takes what is of whole words and not too small."""
    seen = []

    def of_all(tensors):
        seen.append([one.nbytes for one in tensors])
        return torch.tensor([int(audit._sum(one)) for one in tensors])

    monkeypatch.setattr(audit, "_fused_sums", of_all)
    monkeypatch.setattr(audit, "_is_fusible", lambda one: one.nbytes % 8 == 0)
    monkeypatch.setattr(audit, "BATCH_BYTES", limit)
    tensors = [values(count) for count in (20, 40, 60, 7, 80, 100)]
    alone = [int(audit._sum(one)) for one in tensors]
    assert len({*alone}) == len(alone)
    assert audit.checksums(iter(tensors)) == alone
    assert sum(map(len, seen)) == sum(one.nbytes % 8 == 0 for one in tensors)
    assert all(sum(sizes[:-1]) <= limit for sizes in seen)
    assert (max(map(len, seen)) > 1) == (limit > 1)
