"""Whatever the files of a snapshot directory hold: a typed error, or exactly what was stored."""

import json
import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest
import torch
from fuzz_examples import bounded
from hypothesis import given
from hypothesis import strategies as st

from torchrl_vllm_sync import ParamMeta, SnapshotReader, SnapshotWriter
from torchrl_vllm_sync.errors import SnapshotError, WeightMismatchError
from torchrl_vllm_sync.weights.snapshots import files
from torchrl_vllm_sync.weights.snapshots.data_file import (
    DATA_FILE,
    TAG_BYTES,
    ManifestFile,
    Snapshot,
    open_tensordict,
)
from torchrl_vllm_sync.weights.snapshots.files import COMMIT, CURRENT, LOCK, MARKER

VERSION = 3
TENSORS = {
    "model.embed.weight": torch.arange(700, dtype=torch.float32).reshape(7, 100),
    "scale": torch.tensor(2.5, dtype=torch.bfloat16),
    "quantised": torch.arange(64).to(torch.float8_e4m3fn),
}
METADATA = [ParamMeta.of(name, tensor) for name, tensor in TENSORS.items()]
FILES = (CURRENT, MARKER, DATA_FILE, LOCK, COMMIT)
LAYOUTS = ("slots", "versions")


@pytest.fixture(scope="module")
def place():
    """A folder in memory, where nothing is flushed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture(scope="module")
def templates(place):
    """A directory of each layout with version 3 current."""
    for layout in LAYOUTS:
        directory = place / "templates" / layout
        with SnapshotWriter(directory, layout=layout, run_id="ours", num_slots=2) as writer:
            for version in range(1, VERSION + 1):
                writer.publish(TENSORS.items(), METADATA, version)
    return place / "templates"


class Case:
    """A copy of a template, one file of which is to be damaged."""

    def __init__(self, templates, place, layout):
        self.directory, self.layout = place / "case", layout
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.copytree(templates / layout, self.directory)
        self.manifest = ManifestFile(self.directory).read()

    def path(self, name):
        if name == DATA_FILE:
            return self.directory / self.manifest.path / name
        return self.directory / name

    def check(self):
        """Reads, publishes and reads again, each of which may end in a typed error."""
        self.check_read(VERSION)
        try:
            with SnapshotWriter(self.directory, layout=self.layout, num_slots=2) as writer:
                assert (writer.run_id, writer.last_version) in {("ours", VERSION), ("ours", None)}
                writer.publish(TENSORS.items(), METADATA, VERSION + 1)
        except SnapshotError:
            return
        assert self.check_read(VERSION + 1)

    def check_read(self, version):
        """Whether there was something to read."""
        try:
            with SnapshotReader(self.directory, timeout_s=0).read() as snapshot:
                assert snapshot is not None
                assert (snapshot.manifest.run_id, snapshot.version) == ("ours", version)
                found = dict(snapshot.tensors())
                assert snapshot.metadata == METADATA
                for name, tensor in TENSORS.items():
                    assert bits(found[name]) == bits(tensor), f"{name} was damaged and accepted"
        except SnapshotError:
            return False
        return True


def bits(tensor):
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


flips = st.builds(
    lambda at, mask: lambda old: flipped(old, at, mask), st.integers(0), st.integers(1, 255)
)
damages = st.one_of(
    *[flips] * 4,
    st.builds(lambda content: lambda old: content, st.binary(max_size=300)),
    st.builds(lambda keep: lambda old: old[: keep % (len(old) + 1)], st.integers(0)),
    st.builds(lambda more: lambda old: old + more, st.binary(min_size=1, max_size=20)),
    st.builds(
        lambda at, new: lambda old: spliced(old, at, new), st.integers(0), st.binary(min_size=1)
    ),
    st.sampled_from(
        [
            lambda old: old + old,
            lambda old: b"[" * 60_000,
            lambda old: b"\xff\xfe" + old,
            lambda old: old.replace(b"1", b"9"),
            lambda old: old.replace(b"3", b"4"),
            lambda old: old.replace(b"true", b"1"),
            lambda old: old.replace(b'"', b"'"),
            lambda old: bytes(len(old)),
        ]
    ),
)


def flipped(old, at, mask):
    new = bytearray(old or b"\0")
    new[at % len(new)] ^= mask
    return bytes(new)


def spliced(old, at, new):
    at %= len(old) + 1
    return old[:at] + new + old[at + len(new) :]


@bounded(150)
@given(st.sampled_from(FILES), st.sampled_from(LAYOUTS), damages)
def test_damaged_files_are_named_or_do_not_matter(templates, place, name, layout, damage):
    case = Case(templates, place, layout)
    path = case.path(name)
    path.write_bytes(damage(path.read_bytes()))
    case.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_damage_everything_is_read(templates, place, layout):
    case = Case(templates, place, layout)
    assert case.check_read(VERSION)
    case.check()
    assert case.check_read(VERSION + 1)


def test_the_check_above_notices_damage_that_was_accepted(templates, place, monkeypatch):
    monkeypatch.setattr(Snapshot, "verify", lambda snapshot: None)
    case = Case(templates, place, "slots")
    path = case.path(DATA_FILE)
    path.write_bytes(flipped(path.read_bytes(), 4096 + 5, 1))
    with pytest.raises(AssertionError, match=r"embed\.weight was damaged and accepted"):
        case.check()


@pytest.mark.parametrize("name", [CURRENT, DATA_FILE])
def test_every_single_bit_counts(templates, place, name):
    """Of the manifest, and of the tag of the data, which decide what is read."""
    case = Case(templates, place, "slots")
    path = case.path(name)
    content = path.read_bytes()
    for bit in range(8 * (TAG_BYTES if name == DATA_FILE else len(content))):
        path.write_bytes(flipped(content, bit // 8, 1 << bit % 8))
        assert not case.check_read(VERSION), f"bit {bit} does not matter"
    path.write_bytes(content)
    assert case.check_read(VERSION)


# Values that a well-formed file may hold in any place.
ESCAPES = [
    "../outside",
    "../../etc",
    "slot-1-0/../../outside",
    ".",
    "",
    "/",
    "a\0b",
    "\ud800",
    "v3-1\n",
]
json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.sampled_from([-1, 0, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400, 1e308]),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from(
            [*ESCAPES, "slots", "versions", "slot-9-9", "v9-9", "v٣-1", "float32", "\ud800"]
        ),
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=6,
)


@bounded(150)
@given(st.sampled_from(LAYOUTS), st.data())
def test_records_with_other_values_and_right_checksums(templates, place, layout, data):
    case = Case(templates, place, layout)
    path = case.path(MARKER)
    record = files.read_json(path)
    key = data.draw(st.sampled_from([*record, "more"]), "key")
    if data.draw(st.booleans(), "remove"):
        record.pop(key, None)
    else:
        record[key] = data.draw(json_values, "value")
    try:
        files.write_json(path, record, fsync=False)
    except ValueError:
        return  # longer than Python turns into text
    case.check()


def forge(case, changes):
    """Puts a manifest with other fields, whatever their types, and the right checksum there."""
    record = case.manifest.to_record() | changes
    files.write_json(case.path(CURRENT), record, fsync=False)


@bounded(200)
@given(st.sampled_from(LAYOUTS), st.data())
def test_manifests_with_other_values_and_right_checksums(templates, place, layout, data):
    case = Case(templates, place, layout)
    body = json.loads(json.dumps(case.manifest.to_record()))
    key = data.draw(st.sampled_from([*body, "metadata", "path"]), "key")
    value = body[key]
    if isinstance(value, list) and value and data.draw(st.booleans(), "one item"):
        at = data.draw(st.integers(0, len(value) - 1), "at")
        if key == "metadata" and data.draw(st.booleans(), "inside"):
            value[at][data.draw(st.integers(0, 2), "part")] = data.draw(json_values, "part's value")
        else:
            value[at] = data.draw(json_values, "item")
    else:
        body[key] = data.draw(json_values, "value")
    try:
        forge(case, body)
    except ValueError:
        return  # longer than Python turns into text
    case.check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "changes",
    [
        {"version": VERSION + 6},
        {"version": -1},
        {"version": "٣"},
        {"version": "1_0"},
        {"epoch": 9},
        {"epoch": 10**30},
        {"run_id": "theirs"},
        {"checksums": None},
        {"checksums": (0, 0, 0)},
        {"checksums": (1, 2)},
        {"checksums": (True, 2.0, 3)},
        {"metadata": ()},
    ],
    ids=str,
)
def test_manifests_that_say_something_else_are_refused(templates, place, layout, changes):
    case = Case(templates, place, layout)
    forge(case, changes)
    assert not case.check_read(VERSION)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["parent", "absolute", "link", "nested"])
def test_nothing_outside_the_directory_is_read(templates, place, layout, kind):
    """The same files lie there, and would be accepted."""
    case = Case(templates, place, layout)
    outside = place / "outside"
    shutil.rmtree(outside, ignore_errors=True)
    shutil.copytree(case.directory / case.manifest.path, outside)
    link = "slot-9-9" if layout == "slots" else "v99-9"
    (case.directory / link).symlink_to(outside)
    (case.directory / case.manifest.path / "inner").mkdir(mode=0o700)
    path = {
        "parent": "../outside",
        "absolute": str(outside),
        "link": link,
        "nested": f"{case.manifest.path}/../{case.manifest.path}",
    }[kind]
    forge(case, {"path": path})
    with (
        pytest.raises(SnapshotError, match="is a symbolic link" if kind == "link" else "no folder"),
        SnapshotReader(case.directory, timeout_s=0).read(),
    ):
        pass
    forge(case, {})
    assert case.check_read(VERSION)


def make_pipe(path):
    os.mkfifo(path, 0o600)


def make_folder(path):
    path.mkdir(mode=0o700)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def make_huge(path):
    path.touch(mode=0o600)
    os.truncate(path, 1 << 42)


def make_loop(path):
    path.symlink_to(path)


@pytest.mark.parametrize("make", [make_pipe, make_folder, make_socket, make_huge, make_loop])
@pytest.mark.parametrize("name", [CURRENT, MARKER, DATA_FILE])
def test_no_kind_of_file_keeps_a_reader_waiting_or_fills_its_memory(templates, place, name, make):
    case = Case(templates, place, "slots")
    path = case.path(name)
    path.unlink()
    make(path)
    if name != MARKER:
        assert not case.check_read(VERSION)
    case.check()


@bounded(100)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_description_but_the_published_one_is_refused(place, content, description):
    path = place / "any"
    path.write_bytes(content + description + len(description).to_bytes(8, "little"))
    path.chmod(0o600)
    with pytest.raises(SnapshotError):
        open_tensordict(path, METADATA)


names = st.text(max_size=12) | st.sampled_from(
    ["<NJT>x", "<NJT_OFFSETS>", "a.b", "", "\ud800", "\0"]
)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
dtypes = st.sampled_from([torch.float32, torch.bool, torch.float8_e5m2, torch.int16, torch.qint8])


@bounded(60)
@given(st.lists(st.builds(ParamMeta, names, dtypes, shapes), max_size=4), st.sampled_from(LAYOUTS))
def test_whatever_can_be_published_is_read(place, metadata, layout):
    directory = place / "names"
    shutil.rmtree(directory, ignore_errors=True)
    tensors = [
        (one.name, torch.ones(one.shape, dtype=torch.uint8).to(one.dtype))
        for one in metadata
        if one.dtype != torch.qint8
    ]
    with SnapshotWriter(directory, layout=layout) as writer:
        try:
            writer.publish(tensors, metadata, 1)
        except WeightMismatchError:
            assert writer.current() is None
            return
    with SnapshotReader(directory).read() as snapshot:
        assert snapshot.metadata == metadata
        for (name, wanted), (found_name, found) in zip(tensors, snapshot.tensors(), strict=True):
            assert name == found_name
            assert found.dtype == wanted.dtype
            assert found.shape == wanted.shape
            assert found.float().eq(wanted.float()).all()
