"""What is damaged, foreign, full or stale is refused by name, and the version before stays."""

import errno
import os
import resource
import shutil
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchrl_vllm_sync import MemmapTransport, ParamMeta, SnapshotReader, SnapshotWriter
from torchrl_vllm_sync.errors import FencedWriterError, SnapshotError
from torchrl_vllm_sync.weights.snapshots import files
from torchrl_vllm_sync.weights.snapshots.data_file import DATA_FILE, ManifestFile
from torchrl_vllm_sync.weights.snapshots.files import (
    CURRENT,
    MARKER,
    TEMPORARY_PREFIX,
    _signature,
    read_json,
    write_json,
)

PAGE = 4096


@pytest.fixture(params=["slots", "versions"])
def layout(request):
    return request.param


@pytest.fixture
def published(tmp_path, layout):
    """A directory with version 1 of two one-page tensors, and no writer."""
    with SnapshotWriter(tmp_path / "run", layout=layout, run_id="ours") as writer:
        publish(writer, 1)
    return tmp_path / "run"


def publish(writer, version, pages=1):
    tensors = [(name, torch.full((pages * PAGE,), version, dtype=torch.int8)) for name in "ab"]
    return writer.publish(tensors, [ParamMeta.of(name, t) for name, t in tensors], version)


def read_version(directory, **kwargs):
    with SnapshotReader(directory, **kwargs).read() as snapshot:
        values = {int(value) for _, tensor in snapshot.tensors() for value in tensor.unique()}
        assert values == {snapshot.version}
        return snapshot.version


def data_file(directory):
    return directory / SnapshotReader(directory).current().path / DATA_FILE


@contextmanager
def largest_file(num_bytes):
    """Limits the size of files that this process writes: a disk that is full half-way.

    A log that pytest writes to is one of them, and may be larger already: nothing else goes inside.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def free_descriptors(number):
    """Leaves this process so many files to open, and no more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + number, before[1]))
    try:
        with suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(number):
            os.close(fillers.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for handle in fillers:
            os.close(handle)


def test_a_directory_with_other_content_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("42")
    with pytest.raises(SnapshotError, match=r"thesis\.tex"):
        SnapshotWriter(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("place", ["a_file", "a_file/below", "/proc/snapshots"])
def test_an_unusable_place_is_named(tmp_path, place):
    (tmp_path / "a_file").write_text("")
    with pytest.raises(SnapshotError, match=Path(place).name):
        SnapshotWriter(tmp_path / place)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"layout": "files"}, "'files'"),
        ({"num_slots": 1}, "num_slots must be at least 2, got 1"),
        ({"max_slots": 2}, "max_slots must be at least num_slots"),
        ({"run_id": "two words"}, "run_id"),
    ],
)
def test_settings_are_refused_by_name(tmp_path, setting, message):
    with pytest.raises(ValueError, match=message):
        SnapshotWriter(tmp_path / "run", **setting)
    with SnapshotWriter(tmp_path / "run") as writer:
        for version in (-1, 1.0, True, 1 << 63):
            with pytest.raises(ValueError, match="version must be a policy version, an integer"):
                writer.publish([], [], version)


def test_a_model_that_cannot_fit_is_refused_before_anything_is_written(published, layout):
    with SnapshotWriter(published, layout=layout) as writer:
        huge = torch.zeros(1).expand(1 << 60)
        with pytest.raises(SnapshotError, match="bytes are needed"):
            writer.publish([("a", huge)], [ParamMeta.of("a", huge)], 2)
        assert read_version(published) == 1
        publish(writer, 2)
    assert read_version(published) == 2


def test_a_disk_that_fills_up_half_way_leaves_the_version_before(published, layout):
    with SnapshotWriter(published, layout=layout) as writer:
        too_large = pytest.raises(SnapshotError, match="publishing version 2: File too large")
        with too_large, largest_file(64 * PAGE):
            publish(writer, 2, pages=100)
        assert read_version(published) == 1
        publish(writer, 3)
    assert read_version(published) == 3


def test_descriptors_that_run_out_are_named_and_the_same_version_can_be_stored(published, layout):
    with SnapshotWriter(published, layout=layout) as writer:
        failures = {}
        for number in range(12):
            version = writer.last_version + 1
            try:
                with free_descriptors(number):
                    publish(writer, version)
            except SnapshotError as error:
                failures[number] = str(error)
            is_current = "is current" in failures.get(number, "is current")
            assert writer.last_version == read_version(published) == version - (not is_current)
            publish(writer, writer.last_version + 1)
            assert read_version(published) == writer.last_version
    assert list(failures)[:3] == [0, 1, 2]
    assert len(failures) < 12
    for message in failures.values():
        assert message.startswith(f"{published}: ")
        assert "Too many open files" in message


def test_a_version_that_readers_see_is_current_for_its_writer_too(published, layout, monkeypatch):
    with SnapshotWriter(published, layout=layout) as writer:
        writer._fsync, fsync_folder, broken = True, files.fsync_folder, [2]

        def fails(path):
            if path == published and read_version(published) in broken:
                broken.clear()
                raise OSError(errno.EIO, "Input/output error")
            fsync_folder(path)

        monkeypatch.setattr(files, "fsync_folder", fails)
        with pytest.raises(SnapshotError, match="publishing version 2: Input/output error"):
            publish(writer, 2)
        assert writer.last_version == 2
        publish(writer, 3)
        assert read_version(published) == 3


def test_two_slots_go_on_when_there_is_no_space_for_a_third(tmp_path, monkeypatch):
    with SnapshotWriter(tmp_path) as writer:
        publish(writer, 1)
        publish(writer, 2)

        def full(directory):
            return os.statvfs_result((4096, 4096, 10, 0, 0, 0, 0, 0, 0, 255))

        monkeypatch.setattr(os, "statvfs", full)
        folders = {publish(writer, version).path.name for version in range(3, 9)}
    assert len(folders) == 2
    assert read_version(tmp_path) == 8


@pytest.mark.parametrize("keep", [0, 10, 60, 200, -1])
def test_a_truncated_manifest_is_named(published, keep):
    content = (published / CURRENT).read_bytes()
    (published / CURRENT).write_bytes(content[:keep])
    with pytest.raises(SnapshotError, match=f"{CURRENT}: truncated"):
        SnapshotReader(published).current()


def test_a_changed_manifest_is_named(published, layout):
    content = (published / CURRENT).read_bytes()
    (published / CURRENT).write_bytes(content.replace(b'"int8"', b'"int4"', 1))
    with pytest.raises(SnapshotError, match=f"{CURRENT}: truncated, corrupted"):
        SnapshotReader(published).current()
    with pytest.raises(SnapshotError, match=f"{CURRENT}: truncated, corrupted"):
        SnapshotWriter(published, layout=layout)


@pytest.mark.parametrize("field", ["version", "epoch"])
def test_a_number_that_does_not_fit_into_63_bits_is_named(published, layout, field):
    manifest = SnapshotReader(published).current()
    file = ManifestFile(published)
    file.write(replace(manifest, **{field: 1 << 63}), fsync=False)
    with pytest.raises(SnapshotError, match=f"{CURRENT}: corrupted: {field} .*{1 << 63}"):
        SnapshotReader(published).current()
    file.write(replace(manifest, **{field: (1 << 63) - 1}), fsync=False)
    assert getattr(SnapshotReader(published).current(), field) == (1 << 63) - 1


def test_a_record_of_any_depth_ends_in_a_typed_error(tmp_path):
    path = tmp_path / "record"
    path.touch(mode=0o600)
    for depth in (1_000, 10_000, 100_000):
        rest = b'"a":' + b"[" * depth + b"]" * depth + b"}"
        path.write_bytes(_signature(rest) + rest)
        with pytest.raises(SnapshotError, match=r"not JSON|corrupted"):
            read_json(path)


def test_another_format_is_named(published):
    write_json(published / CURRENT, {"format": 9}, fsync=False)
    with pytest.raises(SnapshotError, match="format must be 3, got 9"):
        SnapshotReader(published).current()
    write_json(published / MARKER, {"format": 9}, fsync=False)
    with pytest.raises(SnapshotError, match="format must be 3, got 9"):
        SnapshotWriter(published)


def test_a_truncated_data_file_is_named(published):
    os.truncate(data_file(published), 5000)
    with pytest.raises(SnapshotError, match=f"{DATA_FILE}: truncated or replaced: 5000 of"):
        read_version(published)


def test_a_missing_data_file_is_named_within_the_deadline(published):
    path = data_file(published)
    path.unlink()
    with pytest.raises(SnapshotError, match="cannot be read: No such file"):
        read_version(published, timeout_s=0.1)


def test_a_flipped_bit_is_found_by_the_checksum_and_only_by_it(published):
    path = data_file(published)
    content = bytearray(path.read_bytes())
    content[2 * PAGE] ^= 1
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=r"1 of 2 tensors differ .* first b"):
        read_version(published)
    with SnapshotReader(published, verify=False).read() as snapshot:
        assert snapshot.version == 1


def test_a_damaged_description_is_named(published):
    path = data_file(published)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"int8", b"bool"))
    with pytest.raises(SnapshotError, match="description is not the published one"):
        read_version(published, verify=False)
    path.write_bytes(content[:-8] + b"\xff" * 8)
    with pytest.raises(SnapshotError, match="description is not the published one"):
        read_version(published, verify=False)


def test_a_damaged_tag_is_named_by_readers_and_healed_by_the_writer(published, layout):
    with data_file(published).open("r+b") as file:
        file.write(b"{")
    with pytest.raises(SnapshotError, match=f"{DATA_FILE}: was recycled"):
        read_version(published)
    with SnapshotWriter(published, layout=layout) as writer:
        for version in (2, 3, 4):
            publish(writer, version)
    assert read_version(published) == 4


def test_a_slot_left_half_written_is_taken_again(published, layout):
    def dying():
        yield "a", torch.full((PAGE,), 2, dtype=torch.int8)
        raise KeyboardInterrupt

    metadata = list(SnapshotReader(published).current().metadata)
    with SnapshotWriter(published, layout=layout) as writer, pytest.raises(KeyboardInterrupt):
        writer.publish(dying(), metadata, 2)
    assert read_version(published) == 1
    with SnapshotWriter(published, layout=layout, num_slots=2) as writer:
        assert writer.last_version == 1
        publish(writer, 2)
    assert read_version(published) == 2
    assert len([path for path in published.iterdir() if (path / DATA_FILE).exists()]) == 2


def test_a_slot_that_somebody_removed_is_made_again(tmp_path):
    with SnapshotWriter(tmp_path) as writer:
        for version in range(3):
            publish(writer, version)
        shutil.rmtree(tmp_path / "slot-1-0")
        publish(writer, 3)
        assert data_file(tmp_path).parent.name == "slot-1-0"
        assert read_version(tmp_path) == 3


def test_temporary_files_of_killed_writers_go_with_the_next(published, layout):
    left = published / f"{TEMPORARY_PREFIX}1"
    left.touch(mode=0o600)
    with SnapshotWriter(published, layout=layout):
        assert not left.exists()
    assert read_version(published) == 1


def test_another_run_is_refused_unless_taken_over(published, layout):
    with pytest.raises(SnapshotError, match="belongs to run ours, this is run theirs"):
        SnapshotWriter(published, layout=layout, run_id="theirs")
    pinned = SnapshotReader(published, run_id="ours")
    with SnapshotWriter(published, layout=layout, run_id="theirs", takeover=True) as writer:
        assert writer.last_version is None
        assert pinned.current() is None
        publish(writer, 0)
        with pytest.raises(SnapshotError, match="is of run theirs, this reader follows run ours"):
            pinned.current()
    assert read_version(published, run_id="theirs") == 0


def test_without_a_run_id_the_next_writer_continues_the_run(published, layout):
    with SnapshotWriter(published, layout=layout) as writer:
        assert (writer.run_id, writer.last_version, writer.epoch) == ("ours", 1, 2)


def test_a_manifest_that_strayed_from_another_run_is_refused(published, layout, tmp_path):
    with SnapshotWriter(tmp_path / "other", layout=layout) as writer:
        publish(writer, 7)
    (published / CURRENT).write_bytes((tmp_path / "other" / CURRENT).read_bytes())
    with pytest.raises(SnapshotError, match="the directory of run ours"):
        SnapshotWriter(published, layout=layout)


def test_the_other_layout_is_refused(published, layout):
    other = {"slots": "versions", "versions": "slots"}[layout]
    with pytest.raises(SnapshotError, match=f"has layout '{layout}', got '{other}'"):
        SnapshotWriter(published, layout=other, takeover=True)


def test_a_closed_writer_says_so(tmp_path):
    writer = SnapshotWriter(tmp_path)
    writer.close()
    writer.close()
    with pytest.raises(SnapshotError, match="this writer is closed"):
        publish(writer, 1)


def test_a_removed_directory_is_an_error_not_a_wait(tmp_path):
    writer = SnapshotWriter(tmp_path / "run")
    publish(writer, 1)
    (tmp_path / "run").rename(tmp_path / "gone")
    with pytest.raises(SnapshotError, match="gone"):
        publish(writer, 2)
    writer.close()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("remove", [False, True])
def test_a_directory_that_cannot_be_looked_at_is_named_and_let_go(
    tmp_path, monkeypatch, code, remove
):
    transport = MemmapTransport(tmp_path / "run")
    transport.open(None)
    writer = transport._writer

    def stat(path, **_):
        raise OSError(code, os.strerror(code), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", stat)
        with pytest.raises(SnapshotError, match=rf"{tmp_path}/run: .*{os.strerror(code)}"):
            transport.open(None)
        writer.close(remove=remove)
        transport.close()
    assert writer._lock._handle == -1
    with SnapshotWriter(tmp_path / "run", takeover=True) as again:
        publish(again, 1)


def test_a_directory_made_anew_by_another_writer_is_not_taken_for_ones_own(tmp_path):
    """Its epochs begin again."""
    first = SnapshotWriter(tmp_path / "run")
    publish(first, 1)
    shutil.rmtree(tmp_path / "run")
    first._lock.owner = replace(first._lock.owner, pid=1)  # as if of another process
    with SnapshotWriter(tmp_path / "run") as second:
        publish(second, 1)
        with pytest.raises(FencedWriterError):
            publish(first, 2)
        with pytest.raises(FencedWriterError):
            first.close(remove=True)
        assert read_version(tmp_path / "run") == 1
