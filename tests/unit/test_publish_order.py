"""The order in which a publish writes: what a crash of the machine in between would leave."""

import os
from pathlib import Path

import pytest
import torch

from torchrl_vllm_sync import ParamMeta, SnapshotWriter
from torchrl_vllm_sync.weights.snapshots import files
from torchrl_vllm_sync.weights.snapshots.data_file import DATA_FILE, DataFile, TensorWriter
from torchrl_vllm_sync.weights.snapshots.files import CURRENT

METADATA = [ParamMeta("weight", torch.float32, (300,))]


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """Names what the system is asked to do with tag, data and manifest, in its order."""
    found = []
    replace, fsync, tag = os.replace, os.fsync, DataFile.tag
    enter, leave = TensorWriter.__enter__, TensorWriter.__exit__

    def note_replace(source, target, **kwargs):
        replace(source, target, **kwargs)
        if Path(target).name == CURRENT:
            found.append("manifest")

    def note_fsync(handle):
        fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.name == DATA_FILE:
            found.append("data on disk")
        elif path.is_dir():
            found.append("names on disk" if path == tmp_path else "names of the folder on disk")
        else:  # a temporary one, before it is renamed
            found.append("record on disk")

    def note_tag(file, *args):
        tag(file, *args)
        found.append("tagged" if args and any(args[0]) else "tag removed")

    def note_enter(writer):
        found.append("data begins")
        return enter(writer)

    def note_exit(writer, *args):
        leave(writer, *args)
        found.append("data ends")

    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(DataFile, "tag", note_tag)
    monkeypatch.setattr(TensorWriter, "__enter__", note_enter)
    monkeypatch.setattr(TensorWriter, "__exit__", note_exit)
    return found


BEGUN = ["tag removed", "data begins", "data ends", "tagged"]
DATA_DURABLE = ["data on disk", "names of the folder on disk"]
MANIFEST_DURABLE = ["names on disk", "record on disk", "manifest", "names on disk"]


@pytest.mark.parametrize("layout", ["slots", "versions"])
@pytest.mark.parametrize(
    ("in_memory", "order"),
    [
        (True, [*BEGUN, "manifest"]),
        (False, [*BEGUN, *DATA_DURABLE, *MANIFEST_DURABLE]),
    ],
)
def test_a_publish_writes_in_an_order_that_any_crash_may_interrupt(
    tmp_path, steps, monkeypatch, layout, in_memory, order
):
    monkeypatch.setattr(files, "is_memory_file_system", lambda path: in_memory)
    with SnapshotWriter(tmp_path, layout=layout) as writer:
        for version in range(5):  # into new folders, and over old ones
            steps.clear()
            writer.publish([("weight", torch.rand(300))], METADATA, version)
            assert steps == order
