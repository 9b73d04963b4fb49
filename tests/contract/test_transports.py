"""What every transport owes, run on all of them over replicas that read as real ones do."""

import errno
import gc
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.fakes import weights as fakes
from torchrl_vllm_sync import MemmapTransport, ReplicaState, SnapshotReader, SnapshotWriter
from torchrl_vllm_sync.errors import SnapshotError, StaleVersionError, SyncError
from torchrl_vllm_sync.weights.p2p.memory import WeightArena, hand_over, this_node
from torchrl_vllm_sync.weights.p2p.transport import P2PTransport
from torchrl_vllm_sync.weights.push import WeightPusher
from torchrl_vllm_sync.weights.snapshots import transport as transport_module
from torchrl_vllm_sync.weights.snapshots.transport import PREFIX, SHARED_MEMORY
from torchrl_vllm_sync.weights.source import MappingSource
from torchrl_vllm_sync.weights.transport import Standing

NUM_TENSORS = 8


def weights(value, size=64):
    """Tensors that all hold one number: a mixture of versions shows."""
    return MappingSource({f"t{i}": torch.full((size,), float(value)) for i in range(NUM_TENSORS)})


class MemmapReplica:
    """Reads snapshots as an engine actor does, and keeps what it applied."""

    def __init__(self, name):
        self.name, self.version, self.loads, self.values, self.fail = name, 0, 0, None, False

    def load_snapshot(self, directory, run_id, *, at_least, verify, **options):
        reader = SnapshotReader(directory, run_id=run_id, verify=verify)
        with reader.read(newer_than=self.version) as snapshot:
            if snapshot is None:
                if self.version < at_least:
                    raise SnapshotError(f"{directory} holds no version {at_least} or later")
                return {"version": self.version, "loaded": False}
            if self.fail:
                raise SyncError("injected")
            self.values = {name: tensor.clone() for name, tensor in snapshot.tensors()}
            self.version, self.loads = snapshot.version, self.loads + 1
        return {"version": self.version, "loaded": True}

    def begin_push(self, trainer, sender, number):
        return True

    def end_push(self, sender, number):
        pass


class P2PReplica:
    """Serves tensors that are written from outside, as a worker's do."""

    def __init__(self, name):
        self.name, self.version, self.loads, self.values, self.fail = name, 0, 0, None, False
        self.model = torch.nn.Module()

    def describe(self):
        return SimpleNamespace(device_type="cpu", node_id=this_node())

    def plan_writes(self, metadata, *, timeout_s):
        for name, _, shape, *_ in metadata:
            self.model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
        self.arena = WeightArena(self.model, torch.device("cpu"))
        writes = [
            (name, 0, one.shape, one.stride(), "float32", self.arena.place(one), one.stride())
            for name, one in self.model.named_parameters()
        ]
        about = {"device": "", "is_shared": False}
        return [{"num_bytes": self.arena.num_bytes, "writes": writes, **about}]

    def begin_writing(self, known, *, run_id, path, timeout_s):
        number = self.arena.begin(run_id)
        if number not in known[0]:
            about = {"replica_id": self.name[1:], "rank": 0, "number": number}
            hand_over(path, about, [self.arena.export()], timeout_s)
        return [number]

    def take_written(self, numbers, *, version, run_id, **options):
        if self.fail:
            raise SyncError("injected")
        if version == self.version:
            return {"version": self.version, "loaded": False}
        self.arena.take(run_id, numbers[0])
        self.values = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        self.version, self.loads = version, self.loads + 1
        return {"version": version, "loaded": True}

    def begin_push(self, trainer, sender, number):
        return True

    def end_push(self, sender, number):
        pass


class Client:
    """Two replicas; calls them side by side, as Ray does."""

    def __init__(self, replica=MemmapReplica, name="contract"):
        self.service_name = name
        self.replicas = {str(i): replica(f"r{i}") for i in range(2)}

    def standings(self):
        return dict.fromkeys(self.replicas, Standing(state=ReplicaState.SERVING))

    def start_calls(self, method, calls, **kwargs):
        return SimpleNamespace(answers=lambda deadline_s: self._answers(method, calls, **kwargs))

    def _answers(self, method, calls, **kwargs):
        answers = {}

        def call(name, replica):
            try:
                answers[name] = getattr(replica, method)(*calls[name], **kwargs)
            except SyncError as error:
                answers[name] = error

        called = {name: self.replicas[name] for name in calls}
        threads = [threading.Thread(target=call, args=pair) for pair in called.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {name: answers[name] for name in calls}


TRANSPORTS = {
    "memmap slots": lambda path: MemmapTransport(path / "slots"),
    "memmap slots in memory": lambda path: MemmapTransport(),
    "memmap versions": lambda path: MemmapTransport(path / "versions", layout="versions"),
    "memmap without verifying": lambda path: MemmapTransport(path / "quick", verify=False),
    "p2p": lambda path: P2PTransport(),
}
STORING = [one for one in TRANSPORTS if one != "p2p"]


@pytest.fixture
def client(request):
    of = request.getfixturevalue("transport") if "transport" in request.fixturenames else None
    return Client(P2PReplica if isinstance(of, P2PTransport) else MemmapReplica)


@pytest.fixture(params=TRANSPORTS)
def transport(request, tmp_path):
    transport = TRANSPORTS[request.param](tmp_path)
    yield transport
    transport.close()


def send(transport, client, value, version, **options):
    return fakes.send(transport, client, weights(value, **options), version)


def assert_holds(replica, value, version):
    assert replica.version == version
    assert set(replica.values) == {f"t{i}" for i in range(NUM_TENSORS)}
    assert {tensor.unique().item() for tensor in replica.values.values()} == {value}


def own_directories():
    return set(SHARED_MEMORY.glob(f"{PREFIX}contract*"))


def test_every_replica_gets_every_version_whole(transport, client):
    for version in range(1, 8):
        outcome = send(transport, client, 10 * version, version)
        assert {one.replica_id: one.version for one in outcome.replicas} == {
            "0": version,
            "1": version,
        }
        assert not any(one.error for one in outcome.replicas)
        assert outcome.num_bytes == NUM_TENSORS * 64 * 4
        for replica in client.replicas.values():
            assert_holds(replica, 10 * version, version)
        assert transport.last_version == (0 if isinstance(transport, P2PTransport) else version)


def test_the_check_above_notices_a_mixture(transport, client):
    send(transport, client, 1, 1)
    client.replicas["0"].values["t3"] += 1
    with pytest.raises(AssertionError):
        assert_holds(client.replicas["0"], 1, 1)


def test_the_same_version_again_reaches_only_those_that_lack_it(transport, client):
    client.replicas["1"].fail = True
    outcome = send(transport, client, 5, 1)
    assert [(one.version, one.error) for one in outcome.replicas] == [(1, ""), (None, "injected")]
    client.replicas["1"].fail = False
    outcome = send(transport, client, 5, 1)
    assert [one.version for one in outcome.replicas] == [1, 1]
    for replica in client.replicas.values():
        assert_holds(replica, 5, 1)
        assert replica.loads == 1


@pytest.mark.parametrize("transport", STORING, indirect=True)
def test_a_version_stays_what_it_was_sent_as(transport, client):
    client.replicas["1"].fail = True
    send(transport, client, 5, 1)
    client.replicas["1"].fail = False
    with pytest.raises(StaleVersionError, match="version 1 is stored already, and there t0 is"):
        send(transport, client, 6, 1)
    with pytest.raises(StaleVersionError, match="version 1 is stored already, and there t0 is"):
        send(transport, client, 5, 1, size=65)
    last = weights(5)
    dict(last)["t7"][-1] += 1
    with pytest.raises(StaleVersionError, match="version 1 is stored already, and there t7 is"):
        fakes.send(transport, client, last, 1)
    assert [replica.loads for replica in client.replicas.values()] == [1, 0]
    send(transport, client, 5, 1)
    assert_holds(client.replicas["1"], 5, 1)


def test_a_send_that_breaks_off_leaves_the_old_version(transport, client):
    send(transport, client, 1, 1)

    class Breaking(MappingSource):
        def views(self):
            return None

        def __iter__(self):
            for index, item in enumerate(super().__iter__()):
                if index == NUM_TENSORS // 2:
                    raise RuntimeError("the trainer broke off")
                yield item

    source = Breaking(dict(weights(2)))
    with pytest.raises(RuntimeError, match="broke off"):
        fakes.send(transport, client, source, 2)
    for replica in client.replicas.values():
        assert_holds(replica, 1, 1)
    # The version was not used up: it can be sent whole now.
    outcome = send(transport, client, 3, 2)
    assert [one.version for one in outcome.replicas] == [2, 2]
    for replica in client.replicas.values():
        assert_holds(replica, 3, 2)


def test_what_is_not_confirmed_is_not_served(transport, client):
    send(transport, client, 1, 1)

    def refuse():
        raise RuntimeError("not these")

    with pytest.raises(RuntimeError, match="not these"):
        fakes.send(transport, client, weights(2), 2, confirm=refuse)
    for replica in client.replicas.values():
        assert_holds(replica, 1, 1)
    send(transport, client, 3, 2)
    for replica in client.replicas.values():
        assert_holds(replica, 3, 2)


@pytest.mark.parametrize("transport", STORING, indirect=True)
def test_going_back_is_refused(transport, client):
    send(transport, client, 1, 5)
    with pytest.raises(StaleVersionError, match="greater than 5, got 4"):
        send(transport, client, 1, 4)
    for replica in client.replicas.values():
        assert_holds(replica, 1, 5)


def test_shapes_may_change_between_versions(transport, client):
    for version, size in enumerate([64, 100_000, 3], start=1):
        send(transport, client, version, version, size=size)
        for replica in client.replicas.values():
            assert_holds(replica, version, version)
            assert replica.values["t0"].shape == (size,)


def test_opening_and_closing_twice_does_no_harm(transport, client):
    fakes.open_transport(transport, client)
    fakes.open_transport(transport, client)
    send(transport, client, 1, 1)
    transport.close()
    transport.close()
    assert own_directories() == set()
    version = transport.last_version + 2
    outcome = send(transport, client, 2, version)
    assert [one.version for one in outcome.replicas] == [version] * 2


def test_a_pickled_copy_holds_nothing_open(transport, client):
    send(transport, client, 1, 1)
    copy = pickle.loads(pickle.dumps(transport))
    assert copy.last_version == 0
    copy.close()
    send(transport, client, 2, 2)
    assert_holds(client.replicas["0"], 2, 2)


# ---------------------------------------------------------------- memmap alone


@pytest.mark.parametrize("layout", ["slots", "versions"])
def test_tensordicts_own_loader_reads_what_was_sent(client, tmp_path, layout):
    from tensordict import TensorDict

    transport = MemmapTransport(tmp_path, layout=layout)
    for version in (1, 2):
        send(transport, client, version, version)
    (folder,) = {one.path for one in [SnapshotReader(tmp_path).current()]}
    read = TensorDict.from_consolidated(tmp_path / folder / "weights.td")
    assert {tensor.unique().item() for tensor in read.values()} == {2.0}
    transport.close()
    assert (tmp_path / folder).exists()


def test_two_transports_on_one_directory(client, tmp_path):
    first, second = MemmapTransport(tmp_path), MemmapTransport(tmp_path)
    send(first, client, 1, 1)
    with pytest.raises(SnapshotError, match="writer"):
        fakes.open_transport(second, client)
    first.close()
    assert second.last_version == 0
    fakes.open_transport(second, client)
    assert second.last_version == 1
    with pytest.raises(StaleVersionError):  # stored, but not by this one: it may be other weights
        send(second, client, 9, 1)
    send(second, client, 2, 2)
    assert_holds(client.replicas["1"], 2, 2)
    third = MemmapTransport(tmp_path, takeover=True)
    send(third, client, 3, 3)
    with pytest.raises(SyncError):
        send(second, client, 4, 4)
    assert_holds(client.replicas["1"], 3, 3)
    second.close()
    third.close()


def test_unusable_directories_are_refused_before_anything_is_sent(client, tmp_path):
    (tmp_path / "file").write_text("")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    for path in (tmp_path / "file", foreign, "/proc/no-such-place"):
        with pytest.raises(SnapshotError, match=Path(path).name):
            send(MemmapTransport(path), client, 1, 1)
    assert (foreign / "thesis.tex").read_text() == "years of work"
    assert [replica.loads for replica in client.replicas.values()] == [0, 0]


CHILD = """
import os, signal, sys
sys.path.insert(0, {here!r})
from test_transports import Client, MemmapTransport, send
transport, client = MemmapTransport(), Client(name="contract" + sys.argv[1])
send(transport, client, 1, 1)
print(transport.directory, flush=True)
{ending}
"""
ENDINGS = {
    "without shutdown": "",
    "by an error": "raise SystemExit(3)",
    "after forking": """
child = os.fork()
if child == 0:
    transport.close()
    sys.exit()
os.waitpid(child, 0)
assert transport.directory.exists()
send(transport, client, 2, 2)
assert client.replicas["0"].version == 2
""",
}


def run_child(ending, name):
    code = CHILD.format(here=str(Path(__file__).parent), ending=ending)
    done = subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, text=True, check=False
    )
    return done.returncode, Path(done.stdout.strip()), done.stderr


@pytest.mark.parametrize(
    "ending",
    ["without shutdown", *(pytest.param(one, marks=pytest.mark.slow) for one in [*ENDINGS][1:])],
)
def test_memory_is_given_back_however_the_trainer_ends(ending):
    code, directory, errors = run_child(ENDINGS[ending], ending.replace(" ", "-"))
    assert code == (3 if ending == "by an error" else 0), errors
    assert directory.name.startswith(PREFIX)
    assert not directory.exists()


@pytest.mark.slow
def test_memory_of_a_trainer_that_was_killed_goes_with_the_next_one(client):
    code, directory, _ = run_child("os.kill(os.getpid(), signal.SIGKILL)", "killed")
    assert code == -signal.SIGKILL
    assert directory.exists()
    with_writer = MemmapTransport()
    fakes.open_transport(with_writer, client)
    assert not directory.exists()
    other = MemmapTransport()
    fakes.open_transport(other, client)
    assert with_writer.directory.exists()  # alive: not taken for an orphan
    other.close()
    with_writer.close()


def test_only_what_default_transports_have_left_behind_is_removed(client, tmp_path, monkeypatch):
    monkeypatch.setattr(transport_module, "SHARED_MEMORY", tmp_path)
    alive = MemmapTransport()
    send(alive, client, 1, 1)
    # Nobody holds the lock of a copy, as if its owner had been killed.
    _, with_notes, with_notes_below, adopted = (
        shutil.copytree(alive.directory, tmp_path / f"{PREFIX}{name}") for name in "abcd"
    )
    (with_notes / "notes.txt").write_text("years of work")
    (with_notes_below / "slot-1-0" / "notes.txt").write_text("years of work")
    SnapshotWriter(adopted, takeover=True).close()
    named = MemmapTransport(tmp_path / f"{PREFIX}named")
    send(named, client, 2, 2)
    named.close()
    other = MemmapTransport()
    fakes.open_transport(other, client)
    kept = {with_notes, with_notes_below, adopted, tmp_path / f"{PREFIX}named"}
    assert set(tmp_path.iterdir()) == kept | {alive.directory, other.directory}
    other.close()
    alive.close()
    assert set(tmp_path.iterdir()) == kept


def test_a_default_directory_that_vanished_is_made_anew(client):
    transport = MemmapTransport()
    send(transport, client, 1, 1)
    shutil.rmtree(transport.directory)
    send(transport, client, 2, 2)
    assert_holds(client.replicas["0"], 2, 2)
    shutil.rmtree(transport.directory)
    transport.close()
    assert own_directories() == set()


def test_a_named_directory_that_vanished_is_an_error_until_the_transport_is_closed(
    client, tmp_path
):
    transport = MemmapTransport(tmp_path / "named")
    send(transport, client, 1, 1)
    shutil.rmtree(tmp_path / "named")
    for _ in range(2):
        with pytest.raises(SnapshotError, match=r"named: was removed .* close the transport"):
            send(transport, client, 2, 2)
    transport.close()
    send(transport, client, 2, 2)
    assert_holds(client.replicas["0"], 2, 2)
    transport.close()


def test_a_version_that_is_stored_although_publishing_failed_can_be_sent_again(
    client, tmp_path, monkeypatch
):
    transport = MemmapTransport(tmp_path)
    send(transport, client, 1, 1)

    def collect():
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(transport._writer._store, "collect", collect)
        with pytest.raises(SnapshotError, match="version 2 is current, but removing old ones"):
            send(transport, client, 2, 2)
    outcome = send(transport, client, 2, 2)
    assert [one.version for one in outcome.replicas] == [2, 2]
    assert_holds(client.replicas["0"], 2, 2)
    transport.close()


def test_another_transport_can_be_used_after_a_directory_vanished(client, tmp_path):
    pusher = WeightPusher(client, expected=list)
    transport = MemmapTransport()
    pusher.use(transport)
    pusher.open()
    shutil.rmtree(transport.directory)
    pusher.use(MemmapTransport(tmp_path / "other"))
    pusher.open()
    assert (tmp_path / "other").exists()
    pusher.close()


def test_a_transport_that_is_dropped_gives_its_memory_back(client):
    transport = MemmapTransport()
    fakes.open_transport(transport, client)
    directory = transport.directory
    del transport
    gc.collect()
    assert not directory.exists()
