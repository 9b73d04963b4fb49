"""A trainer of two processes under FSDP2 and real engines: what they compute, and who hears what.

The trainer's processes are started once. They are told through pipes what to do next, and answer
with what it returned or raised.
"""

import contextlib
import multiprocessing
import os
import signal
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.engine.checks import TOLERANCE, assert_holds, distance
from tests.engine.requests import eventually
from tests.engine.trainers import broadcast
from torchrl_vllm_sync import MemmapTransport, ReplicaState, WeightUpdater, attach
from torchrl_vllm_sync.errors import (
    NoReplicaAvailableError,
    ReplicaUnavailableError,
    StaleVersionError,
    WeightSyncError,
)
from torchrl_vllm_sync.testing import load_tiny_model
from torchrl_vllm_sync.weights import sharded
from torchrl_vllm_sync.weights.sharded import ShardedModuleSource, TrainerRankError

pytestmark = pytest.mark.slow

PROCESSES = multiprocessing.get_context("spawn")
NUM_RANKS = 2
STEP_S = 6.0
START_S, ANSWER_S = 120.0, 60.0
LEARNING_RATE = 0.02
# One row of the batch for each rank; the whole model is stepped with all of it.
BATCH = torch.stack([torch.arange(5, 45), torch.arange(300, 260, -1)])


def train(model, optimizer, ids):
    """One optimizer step, which changes every parameter."""
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()


def optimizer_of(model):
    return torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, eps=1e-3)


# ---------------------------------------------------------------- the trainer's processes


class Rank:
    """What one process of the trainer does when it is told to."""

    def __init__(self, rank, checkpoint, service_name):
        self._rank = rank
        self._launch = sharded.Gather.launch
        self._prepare = ShardedModuleSource._prepare
        self._sharded_launch = sharded._Sharded.launch
        self._checkpoint = checkpoint
        self._service = attach(service_name) if rank == 0 else None
        self._updaters = {}
        self.restart()

    def restart(self):
        """Goes back to the checkpoint."""
        self._updaters.clear()
        self._model = load_tiny_model(self._checkpoint)
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        assert all(isinstance(one, DTensor) for one in self._model.parameters())
        self._optimizer = optimizer_of(self._model)

    def step(self):
        train(self._model, self._optimizer, BATCH[self._rank : self._rank + 1])

    def push(self, transport="broadcast", version=None):
        """Returns the report's version, transport and number of bytes."""
        if transport not in self._updaters:
            self._updaters[transport] = WeightUpdater(
                self._service, source=self._model, transport=transport
            )
        report = self._updaters[transport].push_weights(version=version)
        return report.version, report.transport, report.num_bytes

    def count_gathers(self):
        """Counts from now on; returns how many there have been since the last call."""
        before, self._gathers = getattr(self, "_gathers", []), []

        def launch(gather, *args):
            self._gathers.append(1)
            self._launch(gather, *args)

        sharded.Gather.launch = launch
        return len(before)

    def push_in_small_buckets(self):
        """A push that is on its way long before the last layer is gathered."""
        source = ShardedModuleSource(self._model, timeout_s=STEP_S)
        return WeightUpdater(self._service, source, transport=broadcast()).push_weights().version

    def break_down(self, how, when):
        """Lets this process fail in its next push once ``when`` groups are being gathered."""
        launched = []

        def launch(gather, *args):
            if how == "killed" and len(launched) == when:
                os.kill(os.getpid(), signal.SIGKILL)
            launched.append(1)
            self._launch(gather, *args)

        def prepare(source, *args):
            if how == "raises" and len(launched) == when:
                ShardedModuleSource._prepare, sharded.Gather.launch = self._prepare, self._launch
                raise OSError("out of luck")
            return self._prepare(source, *args)

        ShardedModuleSource._prepare, sharded.Gather.launch = prepare, launch

    def gather_nothing(self, do_it=True):
        """Lets the first shard stand for the whole."""

        def launch(part):
            if part._room is not None:
                part._room.zero_()[: len(part._mine)] = part._mine
            return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

        sharded._Sharded.launch = launch if do_it else self._sharded_launch

    def end(self):
        if self._service is not None:
            self._service._let_go()


def child(pipe, rank, port, ray_address, service_name, checkpoint):
    """One rank, which obeys until its pipe closes."""
    os.environ["RAY_ADDRESS"] = ray_address
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    me = Rank(rank, checkpoint, service_name)
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            method, kwargs = pipe.recv()
            begin = time.monotonic()
            try:
                answer = getattr(me, method)(**kwargs)
            except Exception as error:  # noqa: BLE001  whatever it is, it is the answer
                answer = error
            pipe.send((answer, time.monotonic() - begin))
            # Errors whose tracebacks live on, here or in a cycle, keep Gloo's connections open.
            del answer
    me.end()
    with contextlib.suppress(RuntimeError):  # the peer may be gone
        dist.destroy_process_group()


class Ranks:
    """The trainer's processes, seen from the test."""

    def __init__(self, service_name, checkpoint):
        self._arguments = ray.get_runtime_context().gcs_address, service_name, str(checkpoint)
        self._pipes, self._processes = [], []

    def start(self):
        """Starts the processes, unless they all run."""
        if self._processes and all(one.is_alive() for one in self._processes):
            return
        self.close()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(NUM_RANKS):
            ours, theirs = PROCESSES.Pipe()
            args = (theirs, rank, self._store.port, *self._arguments)
            process = PROCESSES.Process(target=child, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.poll(START_S), "a rank does not start"
            assert pipe.recv() == "ready"

    def tell(self, rank, method, **kwargs):
        self._pipes[rank].send((method, kwargs))

    def answer(self, rank):
        """What a rank's last call returned or raised, and after how many seconds.

        ``None`` if it was killed.
        """
        assert self._pipes[rank].poll(ANSWER_S), f"rank {rank} hangs"
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return None

    def answers(self, method, **kwargs):
        """Both ranks' answers to the same call."""
        for rank in range(NUM_RANKS):
            self.tell(rank, method, **kwargs)
        return [self.answer(rank) for rank in range(NUM_RANKS)]

    def all(self, method, **kwargs):
        """Both ranks' results of a call that must not fail."""
        results = []
        for result, _ in self.answers(method, **kwargs):
            if isinstance(result, Exception):
                raise result
            results.append(result)
        return results

    def close(self):
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._pipes, self._processes = [], []


@pytest.fixture(scope="module")
def trainer(service, checkpoint):
    """The trainer's processes; engines are left serving what they were launched with."""
    ranks = Ranks(service.name, checkpoint)
    try:
        yield ranks
    finally:
        ranks.close()
    service.use_transport(MemmapTransport())
    service.push_weights(load_tiny_model(checkpoint))


@pytest.fixture
def ranks(trainer):
    """The trainer as it begins: with the checkpoint's weights."""
    trainer.start()
    trainer.all("restart")
    return trainer


class Whole:
    """The same training in one process, on the whole model."""

    def __init__(self, model):
        self.model, self._optimizer = model, optimizer_of(model)

    def step(self):
        train(self.model, self._optimizer, BATCH)


@pytest.fixture
def whole(model):
    return Whole(model)


# ---------------------------------------------------------------- what arrives


@pytest.mark.parametrize("transport", ["broadcast", "memmap", "ipc"])
def test_every_replica_computes_what_the_trainer_does_after_each_step(
    service, ranks, whole, transport
):
    num_bytes = sum(p.numel() * p.element_size() for p in whole.model.parameters())
    versions = []
    for _ in range(2):
        whole.step()
        assert min(distance(service, whole.model, index) for index in range(2)) > 100 * TOLERANCE
        ranks.all("step")
        first, second = ranks.all("push", transport=transport)
        assert first == second
        assert first[1:] == (transport, num_bytes)
        versions.append(first[0])
        assert_holds(service, whole.model)
    assert versions[1] == versions[0] + 1


def test_the_comparison_above_notices_a_step_that_was_not_pushed(service, ranks, whole):
    ranks.all("push")
    assert_holds(service, whole.model)
    ranks.all("step")
    whole.step()
    with pytest.raises(AssertionError, match="replica 0 differs by"):
        assert_holds(service, whole.model)


def test_the_comparison_above_notices_that_nothing_is_gathered(service, ranks, whole):
    ranks.all("gather_nothing")
    ranks.all("push")
    ranks.all("gather_nothing", do_it=False)
    for index in range(2):
        assert distance(service, whole.model, index) > 100 * TOLERANCE
    ranks.all("push")
    assert_holds(service, whole.model)


# ---------------------------------------------------------------- what goes wrong


def reports(service):
    return list(service.replicas.call_replicas("report").values())


def assert_no_mixture(service, old):
    """Each replica serves what it served before, or nothing."""
    eventually(lambda: ReplicaState.UPDATING not in [one.state for one in reports(service)], 30)
    for index, report in enumerate(reports(service)):
        if report.state.admits_requests:
            assert_holds(service, old, [index])
        else:
            assert report.state is ReplicaState.STALE
            with pytest.raises((NoReplicaAvailableError, ReplicaUnavailableError)):
                service.generate(prompt_token_ids=[5, 6], actor_index=index)


@pytest.mark.parametrize("method", ["push", "push_in_small_buckets"])
def test_a_rank_that_raises_in_mid_gather_ends_the_push_on_both(service, ranks, whole, method):
    ranks.all("push")
    ranks.all("step")
    ranks.tell(1, "break_down", how="raises", when=2)
    assert ranks.answer(1)[0] is None
    (first, seconds), (second, _) = ranks.answers(method)
    assert isinstance(first, TrainerRankError), first
    assert (first.rank, first.reason) == (1, "OSError: out of luck")
    assert seconds < 30
    assert isinstance(second, OSError)
    assert_no_mixture(service, whole.model)
    # The trainer goes on, and so do the engines with it.
    whole.step()
    ranks.all(method)
    eventually(lambda: all(one.state.admits_requests for one in service.load.snapshots()))
    assert_holds(service, whole.model)


def test_engines_that_refuse_are_heard_of_on_both(service, ranks, whole):
    version = ranks.all("push")[0][0]
    ranks.all("step")
    for _ in range(2):
        (first, first_s), (second, second_s) = ranks.answers("push", version=version - 1)
        assert isinstance(first, StaleVersionError), first
        assert isinstance(second, TrainerRankError), second
        assert second.rank == 0
        assert f"StaleVersionError: version must be at least {version}" in second.reason
        assert max(first_s, second_s) < 30
    assert_holds(service, whole.model)
    whole.step()
    assert [version + 1] * 2 == [one[0] for one in ranks.all("push")]
    assert_holds(service, whole.model)


def test_versions_that_another_trainer_took_are_refused_on_both(service, ranks, whole, other_model):
    """The engines themselves refuse: the trainer has not heard of the newer version."""
    version = ranks.all("push")[0][0]
    service.push_weights(other_model, version=version + 5)
    (first, first_s), (second, second_s) = ranks.answers("push", version=version + 1)
    assert isinstance(first, WeightSyncError | StaleVersionError), first
    assert isinstance(second, TrainerRankError), second
    assert second.rank == 0
    assert type(first).__name__ in second.reason
    assert max(first_s, second_s) < 30
    assert_holds(service, other_model)
    assert ranks.all("push")[0][0] > version + 5
    assert_holds(service, whole.model)


def test_a_rank_that_is_killed_in_mid_gather_ends_the_push_on_the_other(service, ranks, whole):
    ranks.all("push_in_small_buckets")
    assert_holds(service, whole.model)
    ranks.all("step")
    ranks.tell(1, "break_down", how="killed", when=2)
    assert ranks.answer(1)[0] is None
    (first, seconds), second = ranks.answers("push_in_small_buckets")
    assert second is None
    assert isinstance(first, TrainerRankError), first
    assert first.rank == 1
    assert "was not ready within" in first.reason
    assert seconds < STEP_S + 30
    assert_no_mixture(service, whole.model)
    # One process that holds the whole model brings every replica to it.
    whole.step()
    service.push_weights(whole.model)
    eventually(lambda: all(one.state.admits_requests for one in service.load.snapshots()))
    assert_holds(service, whole.model)
