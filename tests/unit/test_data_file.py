"""Data files in memory: their pages are there before the first byte is copied."""

import resource
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrl_vllm_sync import ParamMeta
from torchrl_vllm_sync.weights.snapshots import data_file
from torchrl_vllm_sync.weights.snapshots.data_file import (
    TAG_BYTES,
    DataFile,
    DataLayout,
    open_tensordict,
)

NUM_BYTES = 24 << 20
METADATA = [ParamMeta("large", torch.uint8, (NUM_BYTES - 99,)), ParamMeta("s", torch.uint8, (7,))]
LAYOUT = DataLayout.of(METADATA)


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory) / "weights.td"


def faults_of_writing(file, value):
    content = np.full(1 << 20, value, dtype=np.uint8)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for offset in range(0, NUM_BYTES - len(content), len(content)):
        file.write(content, LAYOUT.offsets[0] + offset)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@pytest.mark.parametrize("piece_bytes", [1 << 20, 5 << 20, 64 << 20])
def test_a_file_in_memory_is_written_without_page_faults(path, monkeypatch, piece_bytes):
    monkeypatch.setattr(data_file, "FAULT_BYTES", piece_bytes)
    file = DataFile(path, LAYOUT, allocate=True, mapped=True)
    assert faults_of_writing(file, 1) < 100  # of 6,144 pages
    file.close()
    again = DataFile(path, LAYOUT, allocate=True, mapped=True)
    assert faults_of_writing(again, 2) < 100
    again.close()
    stored = open_tensordict(path, METADATA)  # its description is whole
    assert (stored["large"][: NUM_BYTES - (1 << 20)] == 2).all()


def test_the_count_above_sees_faults(path, monkeypatch):
    monkeypatch.setattr(data_file, "_fault_in", lambda pages: None)
    file = DataFile(path, LAYOUT, allocate=True, mapped=True)
    assert faults_of_writing(file, 1) > 1000
    file.close()


@pytest.mark.parametrize("mapped", [True, False])
def test_a_file_that_is_taken_up_again_holds_no_version(path, mapped):
    """Its pages are written to before there is anything to copy."""
    file = DataFile(path, LAYOUT, allocate=True, mapped=mapped)
    file.tag(b"t" * TAG_BYTES)
    assert path.read_bytes()[:TAG_BYTES] == b"t" * TAG_BYTES
    file.close()
    DataFile(path, LAYOUT, allocate=True, mapped=mapped).close()
    assert path.read_bytes()[:TAG_BYTES] == bytes(TAG_BYTES)
