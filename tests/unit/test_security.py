"""Nothing listens in public, nobody else's files are read, and no pickle of others is loaded."""

import ast
import base64
import contextlib
import os
import pickle
import shutil
import socket
import stat
import subprocess
import tempfile
from pathlib import Path

import psutil
import pytest
import torch
from tensordict import NonTensorData, TensorDict

import torchrl_vllm_sync
from tests.fakes.weights import Replicas, open_transport
from torchrl_vllm_sync import (
    LoadReport,
    MemmapTransport,
    ParamMeta,
    PushReport,
    SnapshotReader,
    SnapshotWriter,
)
from torchrl_vllm_sync.errors import SnapshotError, SyncError, TransferError
from torchrl_vllm_sync.weights.broadcast.group import BroadcastGroup, Rendezvous, free_port
from torchrl_vllm_sync.weights.sharded import MOST_BYTES, TrainerRankError, Verdict, _read, _written
from torchrl_vllm_sync.weights.snapshots import files
from torchrl_vllm_sync.weights.snapshots.data_file import DATA_FILE, open_tensordict
from torchrl_vllm_sync.weights.snapshots.files import (
    COMMIT,
    CURRENT,
    LOCK,
    MARKER,
    TEMPORARY,
)

OTHER_USER = 65533
LAYOUTS = ("slots", "versions")
TENSOR = torch.arange(300.0)
METADATA = [ParamMeta.of("weight", TENSOR)]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


def publish(writer, version):
    writer.publish([("weight", TENSOR)], METADATA, version)


def read(directory):
    with SnapshotReader(directory, timeout_s=0).read() as snapshot:
        return None if snapshot is None else snapshot.version


@pytest.fixture(params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.fixture
def published(tmp_path, layout):
    with SnapshotWriter(tmp_path / "run", layout=layout) as writer:
        publish(writer, 1)
    return tmp_path / "run"


# ---- who may write what


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o177])
def test_everything_is_made_for_its_owner_alone_whatever_the_umask(tmp_path, layout, umask, mask):
    umask(mask)
    with SnapshotWriter(tmp_path / "run", layout=layout) as writer:
        publish(writer, 1)
        with SnapshotReader(tmp_path / "run").read():
            publish(writer, 2)
            made = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in made}
    wrong = [
        f"{path.name} {mode:o}"
        for path, mode in modes.items()
        if mode != (0o700 if path.is_dir() else 0o600)
    ]
    names = {path.name for path in made}
    assert not wrong
    assert {CURRENT, MARKER, LOCK, COMMIT, DATA_FILE} <= names


def test_the_default_directory_is_its_owners_alone(umask):
    umask(0)
    transport = MemmapTransport()

    open_transport(transport, Replicas())
    try:
        assert stat.S_IMODE(transport.directory.stat().st_mode) == 0o700
    finally:
        transport.close()


def entries(directory):
    """Every folder and file that decides what is read, from the top."""
    folder = directory / SnapshotReader(directory).current().path
    return {
        "directory": directory,
        "current": directory / CURRENT,
        "folder": folder,
        "data": folder / DATA_FILE,
        "marker": directory / MARKER,
        "commit": directory / COMMIT,
        "lock": directory / LOCK,
    }


READ = ("directory", "current", "folder", "data")
WRITTEN = ("directory", "current", "marker", "commit", "lock")


def assert_refused(published, layout, path, name, message):
    if name in READ:
        with pytest.raises(SnapshotError, match=message) as caught:
            read(published)
        assert str(path) in str(caught.value)
    if name in WRITTEN or (name == "folder" and layout == "slots"):
        with pytest.raises(SnapshotError, match=message) as caught:
            SnapshotWriter(published, layout=layout)
        assert str(path) in str(caught.value)


@pytest.fixture(params=sorted({*READ, *WRITTEN}))
def name(request):
    return request.param


@pytest.fixture
def path(published, name):
    return entries(published)[name]


@needs_root
def test_what_another_user_owns_is_refused(published, layout, path, name):
    os.chown(path, OTHER_USER, -1)
    assert_refused(published, layout, path, name, f"belongs to user {OTHER_USER}")
    os.chown(path, 0, -1)
    assert read(published) == 1


@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_is_refused_and_mended_as_said(published, layout, path, name, mode):
    path.chmod(stat.S_IMODE(path.stat().st_mode) | mode)
    assert_refused(published, layout, path, name, r"others can write it \(mode .*chmod go-w")
    subprocess.run(["chmod", "go-w", path], check=True)
    assert read(published) == 1


def test_what_others_can_read_is_accepted(published, layout):
    for path in entries(published).values():
        path.chmod(0o755 if path.is_dir() else 0o644)
    assert read(published) == 1
    with SnapshotWriter(published, layout=layout) as writer:
        publish(writer, 2)
    assert read(published) == 2


def test_symbolic_links_are_refused_wherever_they_lead(published, layout, path, name, tmp_path):
    path.rename(tmp_path / "target")
    path.symlink_to(tmp_path / "target")
    assert_refused(published, layout, path, name, "is a symbolic link")
    if name == "directory":
        assert read(tmp_path / "target") == 1


def test_the_new_directory_may_lie_in_a_sticky_one_but_not_be_one(tmp_path):
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    with SnapshotWriter(sticky / "run") as writer:
        publish(writer, 1)
    assert read(sticky / "run") == 1
    shutil.rmtree(sticky / "run")
    with pytest.raises(SnapshotError, match="others can write it"):
        SnapshotWriter(sticky)
    assert os.listdir(sticky) == []


@needs_root
def test_an_owner_that_the_file_system_puts_there_is_this_user(published, monkeypatch):
    """As under NFS with root_squash, where what root makes is nobody's."""
    for path in [published, *published.rglob("*")]:
        os.chown(path, OTHER_USER, -1)
    with pytest.raises(SnapshotError, match="belongs to user"):
        read(published)
    device = published.stat().st_dev
    monkeypatch.setitem(files._mapped_owners, device, OTHER_USER)
    assert read(published) == 1


@needs_root
def test_asking_the_file_system_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_mapped_owners", {})
    os.chown(tmp_path, OTHER_USER, -1)
    with pytest.raises(SnapshotError, match="belongs to user"):
        read(tmp_path)
    assert files._mapped_owners == {tmp_path.stat().st_dev: 0}
    assert os.listdir(tmp_path) == []


@needs_root
def test_another_user_can_neither_read_nor_write(layout):
    def complaint(command):
        other = {"user": OTHER_USER, "group": OTHER_USER, "extra_groups": []}
        return subprocess.run(command, **other, capture_output=True, check=False, text=True).stderr

    with tempfile.TemporaryDirectory(dir="/dev/shm") as parent:
        os.chmod(parent, 0o755)
        directory = Path(parent) / "run"
        with SnapshotWriter(directory, layout=layout) as writer:
            publish(writer, 1)
        commands = [["cat", directory / CURRENT], ["touch", directory / "new"], ["ls", directory]]
        assert ["Permission denied" in complaint(command) for command in commands] == [True] * 3
        directory.chmod(0o755)
        (directory / CURRENT).chmod(0o644)
        assert complaint(commands[0]) == ""


# ---- what listens


def listening():
    connections = psutil.Process().net_connections(kind="inet")
    return {
        (one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN
    }


def host_group(address, port=0):
    at = Rendezvous(address, port, world_size=2)
    return BroadcastGroup.host(at, torch.device("cpu"), timeout_s=5)


def test_the_rendezvous_listens_at_its_address_alone():
    before = listening()
    group = host_group("127.0.0.1")
    port = group.rendezvous.port
    assert listening() - before == {("127.0.0.1", port)}
    with pytest.raises(TransferError, match=f"cannot listen at 127.0.0.1:{port}"):
        host_group("127.0.0.1", port)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    del group
    assert listening() <= before


def test_the_check_above_notices_torchs_own_way():
    before = listening()
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ("::", store.port) in listening() - before


def test_a_group_on_one_host_listens_on_loopback_alone():
    before = listening()
    at = Rendezvous("127.0.0.1", 0, world_size=1)
    group = BroadcastGroup.host(at, torch.device("cpu"), timeout_s=10)
    group.connect(timeout_s=10)
    assert len(listening() - before) >= 2  # the store, and Gloo
    assert {address for address, _ in listening() - before} == {"127.0.0.1"}
    group.close()


def test_an_address_of_another_host_is_refused_by_name():
    with pytest.raises(TransferError, match=r"cannot listen at 192\.0\.2\.1:"):
        host_group("192.0.2.1")


def test_a_probe_for_a_free_port_does_not_listen():
    before = listening()
    port = free_port("127.0.0.1")
    assert listening() <= before
    with contextlib.closing(socket.create_server(("127.0.0.1", port))):
        pass


# ---- pickles


class Malicious:
    """Leaves a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def malicious(tmp_path):
    """A pickle, and the folder that it makes; the twin shows that it would."""
    trace = tmp_path / "executed"
    pickled = pickle.dumps(Malicious(trace))
    pickle.loads(pickled)
    trace.rmdir()
    return pickled, trace


@pytest.mark.parametrize("name", [CURRENT, MARKER, DATA_FILE])
def test_a_pickle_in_place_of_any_file_is_not_executed(published, layout, name, malicious):
    pickled, trace = malicious
    entries = {path.name: path for path in published.rglob("*") if path.is_file()}
    entries[name].write_bytes(pickled)
    if name != MARKER:  # which readers have no use for
        with pytest.raises(SnapshotError):
            read(published)
    if name != DATA_FILE:  # which is written anew
        with pytest.raises(SnapshotError):
            SnapshotWriter(published, layout=layout)
    assert not trace.exists()


def test_a_memmap_of_tensordict_with_a_pickle_is_refused(tmp_path, malicious):
    """Neither as the directory, nor under the names of ours."""
    _, trace = malicious
    theirs = tmp_path / "theirs"
    TensorDict({"a": TENSOR, "b": NonTensorData(Malicious(trace))}).memmap(theirs)
    trace.rmdir() if trace.exists() else None
    for path in theirs.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    assert list(theirs.rglob("*.pickle")) or list(theirs.rglob("*.pkl"))
    with pytest.raises(SnapshotError):
        SnapshotWriter(theirs)
    assert read(theirs) is None
    with pytest.raises((SnapshotError, OSError)):
        open_tensordict(theirs / DATA_FILE, METADATA)
    with pytest.raises((SnapshotError, OSError)):
        open_tensordict(theirs, METADATA)
    assert not trace.exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing vLLM
def test_a_checkpoint_with_a_pickle_is_refused_by_the_engines_loader(tmp_path, malicious):
    from vllm.model_executor.model_loader.weight_utils import pt_weights_iterator

    _, trace = malicious
    torch.save({"weight": Malicious(trace)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights.only"):
        list(pt_weights_iterator([str(tmp_path / "pytorch_model.bin")], False, "cpu"))
    assert not trace.exists()


def test_trainer_ranks_take_plain_verdicts_only(malicious):
    pickled, trace = malicious
    for text in (base64.b64encode(pickled).decode(), pickled.decode("latin-1"), "", "[", "{}", "7"):
        with pytest.raises(TrainerRankError, match="their store holds no verdict"):
            _read("v" + text)
    assert not trace.exists()
    with pytest.raises(TrainerRankError, match=r"no verdict: .*got `str`"):
        _read('v"text"')
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for outcome in (Malicious(trace), SyncError("x"), deep):
        with pytest.raises(TypeError, match="plain values"):
            _written(Verdict("", outcome=outcome))
    with pytest.raises(TypeError, match="at most"):
        _written(Verdict("", outcome="x" * MOST_BYTES))
    verdict = Verdict("", outcome={"a": [1, 2.5, None, [True, "\ud800"]], "": {"s": {}}})
    assert _read(_written(verdict)) == verdict


# Modules that read what a file or another process wrote, and what of it may be unpickled.
UNPICKLING = {
    # A saved run that the user names: rows and parts of the user's own, see ``RunState.load``.
    "rl/run_state.py",
    # YAML by a ``SafeLoader``, which makes plain values only.
    "rl/config.py",
    # Of a connection whose other end has said the key, or to where Ray has led.
    "requests/messages.py",
}
NAMES = {"load", "loads", "Unpickler", "load_memmap", "from_pickle", "read_pickle"}
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "joblib", "torch", "np"}


def test_nothing_else_unpickles():
    package = Path(torchrl_vllm_sync.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or node.attr not in NAMES:
                continue
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if owner in MODULES or node.attr in {"load_memmap", "Unpickler"}:
                found.add(str(path.relative_to(package)))
    assert found == UNPICKLING


def test_leftovers_of_dead_trainers_are_found_without_following_links(monkeypatch, tmp_path):
    from torchrl_vllm_sync.weights.snapshots import transport as transport_module

    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / LOCK).write_text("")
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / f"{transport_module.PREFIX}x").symlink_to(victim)
        (Path(root) / f"{transport_module.PREFIX}y").mkdir(mode=0o700)
        for name in (COMMIT, LOCK, TEMPORARY):
            (Path(root) / f"{transport_module.PREFIX}y" / name).touch(mode=0o600)
        transport_module._remove_orphans(Path(root))
        assert os.listdir(root) == [f"{transport_module.PREFIX}x"]
    assert (victim / LOCK).exists()


def test_a_trainer_that_begins_is_not_taken_for_a_dead_one(monkeypatch, tmp_path):
    from torchrl_vllm_sync.weights.snapshots import transport as transport_module

    take_lock, others = files.take_lock, []

    def late(handle):
        """Another trainer begins when the lock is there, and nobody has it yet."""
        if Path(os.readlink(f"/proc/self/fd/{handle}")).name == LOCK and not others:
            others.append("other")
            transport_module._new_directory("other")
        return take_lock(handle)

    monkeypatch.setattr(transport_module, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(files, "take_lock", late)
    with SnapshotWriter(transport_module._new_directory("one")) as writer:
        publish(writer, 1)
    assert others


def test_a_report_of_a_push_is_plain_enough_for_the_other_ranks():
    replicas = [
        LoadReport(replica_id="0", version=3, load_s=0.5),
        LoadReport(replica_id="1", version=None, error="dead"),
    ]
    report = PushReport(
        began_at=1.0,
        version=3,
        transport="memmap",
        num_bytes=10,
        seconds=1.5,
        phases={"publish_s": 1.0},
        replicas=replicas,
        left_behind={"1": "dead"},
    )
    assert _read(_written(Verdict("", outcome=report)), PushReport).outcome == report
