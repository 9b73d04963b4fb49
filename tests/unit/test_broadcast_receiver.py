"""A trainer's pushes into vLLM's own models, unpacked, through the receiver that engines run."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from tests.fakes.engine import BareUpdates
from tests.fakes.weights import send
from tests.unit.vllm_models import VllmModels, make_checkpoint, metadata_of, single_process_group
from torchrl_vllm_sync import BroadcastTransport, ReplicaState
from torchrl_vllm_sync.engine.args import BROADCAST_BACKEND, STAGED_BACKEND
from torchrl_vllm_sync.engine.arrivals import Arrivals
from torchrl_vllm_sync.errors import TransferError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import EngineDescription
from torchrl_vllm_sync.weights.broadcast.group import PUSH_ID_BITS
from torchrl_vllm_sync.weights.module import ParamMeta, to_json
from torchrl_vllm_sync.weights.source import MappingSource
from torchrl_vllm_sync.weights.transport import Standing

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def distributed(tmp_path_factory):
    with single_process_group(tmp_path_factory.mktemp("group")):
        yield


class Replica:
    """A replica's side of the transport, as the engine actor has it."""

    def __init__(self, name, workers):
        self.name, self.workers = name, workers
        self.loads = Arrivals(BareUpdates(workers), list)

    def describe(self):
        facts = {"pid": 1, "max_model_len": 8, "vocab_size": 8, "block_size": 8}
        return EngineDescription(
            replica_id=self.name,
            node_ip="127.0.0.1",
            num_kv_blocks=None,
            vllm_version="0",
            num_workers=len(self.workers),
            **facts,
        )

    def join_broadcast(self, info, *, timeout_s):
        asyncio.run(self.loads.join_broadcast(info, timeout_s=timeout_s))

    def prepare_broadcast(self, metadata, bucket_bytes, *, timeout_s):
        return asyncio.run(
            self.loads.prepare_broadcast(metadata, bucket_bytes, timeout_s=timeout_s)
        )

    def receive_broadcast(self, push_id, digest, **options):
        return asdict(asyncio.run(self.loads.receive_broadcast(push_id, digest, **options)))

    def leave_broadcast(self):
        asyncio.run(self.loads.leave_broadcast())


class Calls:
    def __init__(self, futures):
        self.futures = futures

    def failures(self):
        done = {name: one for name, one in self.futures.items() if one.done()}
        return {name: one.exception() for name, one in done.items() if one.exception()}

    def answers(self, deadline_s):
        deadline = time.monotonic() + deadline_s
        return {
            name: one.exception(max(deadline - time.monotonic(), 0)) or one.result()
            for name, one in self.futures.items()
        }


class Client:
    service_name, rendezvous = "unit", ("127.0.0.1", None)

    def __init__(self, replicas):
        self.replicas = {one.name: one for one in replicas}
        self.pool = ThreadPoolExecutor(8)
        self.called = []

    def start_calls(self, method, calls, **kwargs):
        self.called.append(method)
        return Calls(
            {
                name: self.pool.submit(getattr(self.replicas[name], method), *args, **kwargs)
                for name, args in calls.items()
            }
        )

    def standings(self):
        return dict.fromkeys(self.replicas, Standing(state=ReplicaState.SERVING))


class World:
    """One replica of one worker with a model, what it must hold, and a trainer."""

    def __init__(self, directory, monkeypatch, name="qwen3", *, stage=False, **overrides):
        from torchrl_vllm_sync.engine import receiver
        from torchrl_vllm_sync.engine.plan import checkpoint_metadata
        from torchrl_vllm_sync.engine.receiver import BroadcastReceiver
        from torchrl_vllm_sync.engine.worker import SyncWorkerExtension

        # On a CPU vLLM repacks weights after a reload; these models stay as loaders expect them.
        monkeypatch.setattr(receiver, "reload_model", self.reload)
        monkeypatch.setattr(receiver, "current_platform", SimpleNamespace(is_cpu=lambda: False))
        self.models = VllmModels(directory, name, **overrides)
        self.model = self.models.build(fill=-1.0)
        self.metadata = checkpoint_metadata(self.models.model_config)
        config = SimpleNamespace(backend=STAGED_BACKEND if stage else BROADCAST_BACKEND)
        with self.models.active():
            self.receiver = BroadcastReceiver(config, self.models.vllm_config, CPU, self.model)
        self.worker = SyncWorkerExtension()
        self.worker.execute_model = None  # vLLM's worker has it
        self.worker.weight_transfer_engine = self.receiver
        self.worker.vllm_config = self.models.vllm_config
        self.client = Client([Replica("0", [self.worker])])

    def checkpoint(self, start=1):
        return make_checkpoint(self.metadata, start)

    def reload(self, model, vllm_config, weights):
        with self.models.active(), torch.no_grad():
            model.load_weights(weights)

    def push(self, transport, checkpoint, version=1):
        return send(transport, self.client, MappingSource(checkpoint), version)

    def assert_holds(self, checkpoint):
        reference = self.models.build(fill=0.0)
        self.models.load(reference, checkpoint)
        wanted = dict(reference.named_parameters())
        for name, tensor in self.model.named_parameters():
            assert torch.equal(tensor, wanted[name]), name


@pytest.fixture
def world(tmp_path, monkeypatch):
    return lambda *args, **options: World(tmp_path, monkeypatch, *args, **options)


@pytest.fixture
def transports():
    made = []

    def make(**options):
        made.append(BroadcastTransport(**{"bucket_bytes": 4096, "join_timeout_s": 20, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def only(outcome):
    (one,) = outcome.replicas
    return one


@pytest.mark.parametrize("name", ["qwen3", "qwen2-tied", "gemma3", "qwen3-moe"])
@pytest.mark.parametrize("verify", ["never", "first", "always"])
def test_pushes_land_by_plan(world, transports, name, verify):
    here = world(name)
    transport = transports(verify=verify)
    for version in (1, 2, 3):
        checkpoint = here.checkpoint(start=1000 * version)
        one = only(here.push(transport, checkpoint, version))
        assert (one.error, one.version, one.path, one.path_reason) == ("", version, "plan", "")
        here.assert_holds(checkpoint)
    assert here.client.called.count("prepare_broadcast") == 1
    assert here.client.called.count("receive_broadcast") == 3


def test_a_check_notices_a_plan_that_is_wrong(world, transports):
    """The twin of the tests above: one row lands beside its place."""
    here = world("qwen3")
    transport = transports(verify="never")
    here.push(transport, here.checkpoint(), 1)
    targets = here.receiver._planned.whole_targets
    targets[0] = targets[0].roll(1)  # a copy: what arrives there is lost
    lost = here.checkpoint(start=5000)
    assert only(here.push(transport, lost, 2)).path == "plan"
    with pytest.raises(AssertionError):
        here.assert_holds(lost)
    transport._verify = "always"
    found = here.checkpoint(start=700)
    one = only(here.push(transport, found, 3))
    assert one.path == "layerwise"
    assert "the plan left other values than a reload in 1 parameters: " in one.path_reason
    here.assert_holds(found)
    good = here.checkpoint(start=9000)
    assert only(here.push(transport, good, 4)).path == "layerwise"
    here.assert_holds(good)
    # For good: a new trainer does not bring the plan back.
    transport.close()
    one = only(here.push(transports(), found, 5))
    assert one.path == "layerwise"
    assert "the plan left other values" in one.path_reason
    here.assert_holds(found)


def test_strided_and_cast_tensors_go_through_buckets(world, transports):
    here = world("qwen3")
    transport = transports()
    checkpoint = here.checkpoint()
    given = {name: one.double() for name, one in checkpoint.items()}
    given = {
        name: one.t().contiguous().t() if one.dim() == 2 else one for name, one in given.items()
    }

    class Cast(MappingSource):
        def metadata(self):
            return here.metadata

    outcome = send(transport, here.client, Cast(given), 1)
    assert only(outcome).error == ""
    here.assert_holds(checkpoint)
    assert transport.num_buffer_bytes > 0


def test_whole_tensors_need_no_buckets_after_the_first_push(world, transports):
    here = world("qwen3")
    transport = transports()
    for version in (1, 2):
        here.push(transport, here.checkpoint(start=version), version)
        assert transport.num_buffer_bytes == 0
        assert here.receiver._buffers == []


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_staged_weights_wait_beside_the_model(world, transports, name):
    here = world(name, stage=True)
    transport = transports(staged=True)
    first = here.checkpoint()
    assert only(here.push(transport, first, 1)).path == "plan"
    here.assert_holds(first)
    second = here.checkpoint(start=4000)
    install, seen = here.receiver.install_staged, []

    def watched():
        here.assert_holds(first)  # nothing has moved yet
        seen.append(True)
        install()

    here.receiver.install_staged = watched
    assert only(here.push(transport, second, 2)).error == ""
    assert seen == [True]
    here.assert_holds(second)


def test_buffers_that_a_model_loads_are_staged_too(world):
    here = world("qwen3", stage=True)
    table = torch.full((3,), -1.0)
    here.model.register_buffer("table", table)
    rest, load = here.metadata, here.model.load_weights

    def load_all(weights):
        weights = dict(weights)
        table.copy_(weights.pop("table"))
        return load(weights.items())

    here.model.load_weights = load_all
    metadata = [*rest, ParamMeta("table", torch.float32, (3,))]
    with here.models.active():
        here.receiver.prepare(metadata, 2**20)
    assert here.receiver.path_taken == {"path": "plan", "path_reason": ""}
    (copy,) = [one for one in here.receiver._staged_plan.copies if one.name == "table"]
    copy.target.fill_(7.0)
    assert (table == -1).all()
    here.receiver._staged = []
    here.receiver.install_staged()
    assert (table == 7).all()


def test_staged_weights_need_memory(world, transports):
    here = world("qwen3")
    one = only(here.push(transports(staged=True), here.checkpoint(), 1))
    assert "launch it with stage_weights=True" in one.error
    assert all((tensor == -1).all() for tensor in here.model.parameters())


def test_a_gpu_without_room_for_staged_weights_is_named(world, transports, monkeypatch):
    from torchrl_vllm_sync.engine.receiver import BroadcastReceiver

    here = world("qwen3")
    needed = sum(tensor.nbytes for tensor in here.model.parameters())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (needed - 1, 2 * needed))
    with here.models.active():
        cramped = BroadcastReceiver(
            SimpleNamespace(backend=STAGED_BACKEND),
            here.models.vllm_config,
            torch.device("cuda", 0),
            here.model,
        )
    here.worker.weight_transfer_engine = cramped
    wanted = f"staged weights need {needed / 1e9:.2f} GB on cuda:0 beside the model"
    assert here.worker.sync_staging_refusal().startswith(wanted)
    with pytest.raises(TransferError, match=wanted):
        cramped.require_staging()


def test_two_tensor_parallel_workers_get_their_slices(tmp_path, monkeypatch, transports):
    ranks = [
        World(tmp_path / str(rank), monkeypatch, "qwen3", rank=rank, size=2) for rank in (0, 1)
    ]
    for rank, one in enumerate(ranks):
        one.receiver.parallel_config = SimpleNamespace(
            data_parallel_index=0, world_size=2, rank=rank
        )
        # Recorded here, because vLLM's rank is patched for the whole process.
        with one.models.active():
            one.receiver.prepare(one.metadata, 4096)
        one.receiver.prepare = lambda metadata, bucket_bytes: None
    client = Client([Replica("0", [one.worker for one in ranks])])
    transport = transports(verify="never")
    for version in (1, 2):
        checkpoint = ranks[0].checkpoint(start=version * 500)
        outcome = send(transport, client, MappingSource(checkpoint), version)
        assert only(outcome).path == "plan"
        for one in ranks:
            one.assert_holds(checkpoint)


def test_a_changed_push_is_announced_anew(world, transports):
    here = world("qwen3")
    transport = transports(verify="never")
    here.push(transport, here.checkpoint(), 1)
    backwards = dict(reversed(here.checkpoint(start=3000).items()))
    here.push(transport, backwards, 2)
    here.assert_holds(backwards)
    assert here.client.called.count("prepare_broadcast") == 2


def test_an_unannounced_push_touches_nothing(world, transports):
    here = world("qwen3")
    transport = transports(verify="never")
    here.push(transport, here.checkpoint(), 1)
    transport._layout.digest = transport._announced = "other"
    one = only(here.push(transport, here.checkpoint(start=900), 2))
    assert "other tensors than this worker was prepared for" in one.error
    here.assert_holds(here.checkpoint())
    assert only(here.push(transports(verify="never"), here.checkpoint(start=900), 2)).error == ""
    here.assert_holds(here.checkpoint(start=900))


@pytest.mark.parametrize("by_plan", [True, False])
def test_staged_weights_are_installed_once(world, transports, by_plan):
    here = world("qwen3", stage=True)
    here.receiver._distrust = "" if by_plan else "a check has failed"
    checkpoint = here.checkpoint()
    one = only(here.push(transports(staged=True), checkpoint, 1))
    assert (one.error, one.path) == ("", "plan" if by_plan else "layerwise")
    here.assert_holds(checkpoint)
    assert "no weights are staged" in here.worker.sync_install_staged()["error"]


def test_a_plan_found_wrong_is_not_used_for_staged_weights_either(world, transports):
    here = world("qwen3", stage=True)
    transport = transports(verify="always")
    here.push(transport, here.checkpoint(), 1)
    targets = here.receiver._planned.whole_targets
    targets[0] = targets[0].roll(1)  # a copy: what arrives there is lost
    assert only(here.push(transport, here.checkpoint(start=700), 2)).path == "layerwise"
    here.receiver.device = torch.device("cuda")  # where staging takes a plan
    with pytest.raises(TransferError, match=r"need a load plan, .*: the plan left other values"):
        here.receiver.require_staging()


def test_larger_buckets_get_buffers_of_their_own(world, transports):
    here = world("qwen3")
    here.receiver._distrust = "a check has failed"
    for version, bucket_bytes in enumerate((4096, 1 << 16), start=1):
        here.receiver.prepare(here.metadata, bucket_bytes)
        assert here.receiver._buffers == []  # those before are too small
        checkpoint = here.checkpoint(start=version)
        one = only(here.push(transports(bucket_bytes=bucket_bytes), checkpoint, version))
        assert (one.error, one.path) == ("", "layerwise")
        here.assert_holds(checkpoint)


@pytest.mark.parametrize("direct", [True, False])
def test_a_load_ends_when_its_transfer_has_ended(world, transports, monkeypatch, direct):
    """On a GPU everything is only queued; here the order in which it is shows."""
    from torchrl_vllm_sync.engine import receiver
    from torchrl_vllm_sync.weights.broadcast.buckets import BoundBucket

    here, order = world("qwen3"), []
    transport = transports(verify="never")
    checkpoint = here.checkpoint()
    if not direct:  # strided tensors go through buckets
        checkpoint = {
            name: one.t().contiguous().t() if one.dim() == 2 else one
            for name, one in checkpoint.items()
        }
    here.push(transport, checkpoint, 1)
    group = here.receiver._group

    def noting(word, call):
        def noted(*args, **kwargs):
            call(*args, **kwargs)
            if word != "direct" or args[0] is group:  # the trainer's thread calls it, too
                order.append(word)

        return noted

    monkeypatch.setattr(
        receiver.buckets, "broadcast_tensors", noting("direct", receiver.buckets.broadcast_tensors)
    )
    monkeypatch.setattr(BoundBucket, "unpack", noting("bucket", BoundBucket.unpack))
    monkeypatch.setattr(group, "synchronize", noting("end", group.synchronize), raising=False)
    assert only(here.push(transport, checkpoint, 2)).error == ""
    *loads, end = order
    assert (set(loads), end) == ({"direct" if direct else "bucket"}, "end")
    here.assert_holds(checkpoint)


def test_a_worker_leaves_a_group_that_broke(world, transports, monkeypatch):
    from torchrl_vllm_sync.engine import receiver

    here = world("qwen3")
    here.push(transports(verify="never"), here.checkpoint(), 1)

    def breaks(*args, **kwargs):
        raise RuntimeError("the communicator failed")

    monkeypatch.setattr(receiver.buckets, "broadcast_tensors", breaks)
    deadline = time.monotonic() + 5
    with pytest.raises(TransferError, match="the transfer broke off: the communicator failed"):
        here.receiver.receive(deadline, direct=True)
    with pytest.raises(TransferError, match="or left it after a failure"):
        here.receiver.receive(deadline, direct=True)


def test_a_push_of_another_group_is_not_taken_part_in(world, transports):
    here = world("qwen3")
    checkpoint = here.checkpoint()
    here.push(transports(verify="never"), checkpoint, 1)
    foreign = (here.receiver._group_id + 1) << PUSH_ID_BITS | 1
    answer = here.worker.sync_receive(foreign, here.receiver.digest, True, 1, 5.0)
    assert "another trainer has brought this worker into a group of its own" in answer["error"]
    assert answer["untouched"]
    here.assert_holds(checkpoint)


def test_a_late_worker_waits_as_long_as_the_others_wait_for_it(world, monkeypatch):
    from torchrl_vllm_sync.engine.receiver import BroadcastInitInfo
    from torchrl_vllm_sync.weights.broadcast.group import BroadcastGroup

    here, waited = world("qwen3"), []

    def join(*args, timeout_s):
        waited.append(timeout_s)
        raise TransferError("nobody is there")

    monkeypatch.setattr(BroadcastGroup, "join", join)
    for rest, why in ((9.0, "nobody is there"), (-1.0, "came too late to the rendezvous")):
        deadline = time.monotonic() + rest
        info = BroadcastInitInfo("127.0.0.1", 1, 1, 2, timeout_s=60.0, deadline=deadline)
        with pytest.raises(TransferError, match=why):
            here.receiver.init_transfer_engine(info)
    assert len(waited) == 1
    assert waited[0] <= 9.0


def test_a_worker_without_a_group_says_so(world):
    here = world("qwen3")
    answer = here.worker.sync_receive(1, here.receiver.digest, False, 1, 5.0)
    assert "has not joined a group" in answer["error"]
    assert answer["untouched"]
    with pytest.raises(TransferError, match="has not joined a group"):
        here.receiver.await_start(1, time.monotonic() + 1)


def test_another_transfer_engine_is_named(world):
    here = world("qwen3")
    here.worker.weight_transfer_engine = SimpleNamespace()
    answer = here.worker.sync_prepare(to_json(here.metadata), 4096)
    assert "weight_transfer_config to be left unset" in answer["error"]


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1, got 0"),
        ({"join_timeout_s": 0}, "join_timeout_s must be a finite number"),
        ({"verify": "sometimes"}, "verify must be 'first', 'always' or 'never', got 'sometimes'"),
    ],
)
def test_bad_settings_are_refused(options, culprit):
    with pytest.raises(UnsupportedArgumentError, match=culprit):
        BroadcastTransport(**options)


def test_a_trainer_on_another_kind_of_device_is_refused(world, transports):
    here = world("qwen3")
    with pytest.raises(UnsupportedArgumentError, match="the engines are on cpu, the trainer is on"):
        here.push(transports(device="cuda:0"), here.checkpoint())


def test_one_wide_row_is_refused_before_anything_is_sent(world, transports):
    here = world("qwen3")
    with pytest.raises(ValueError, match="a bucket of 16 bytes cannot hold one row of"):
        here.push(transports(bucket_bytes=16), here.checkpoint())


def test_metadata_names_are_the_checkpoints(world):
    here = world("qwen3-moe")
    assert metadata_of(here.checkpoint()) == here.metadata


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_tensors_can_be_put_together_again_from_what_a_model_holds(world, transports, name):
    here = world(name)
    wanted = here.checkpoint()
    here.push(transports(), wanted, 1)
    found = dict(here.receiver._planned.tensors())
    assert found.keys() == wanted.keys()
    for key, one in found.items():
        assert torch.equal(one, wanted[key]), key


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_first_weights_written_from_outside_are_checked_against_a_reload(world, is_wrong):
    here = world("qwen3", stage=True)
    receiver, wanted = here.receiver, here.checkpoint()
    receiver.plan_writes(here.metadata)
    if is_wrong:  # two layers' weights in each other's place
        copies = receiver._staged_plan.copies
        first, second = (i for i, one in enumerate(copies) if "input_layernorm" in one.name)
        one, other = copies[first], copies[second]
        copies[first] = replace(one, target=other.target)
        copies[second] = replace(other, target=one.target)
    number = receiver.arena.begin("run")
    for copy in receiver._staged_plan.copies:
        source = wanted[copy.name].as_strided(copy.shape, copy.stride, copy.offset)
        copy.target.copy_(source)
    receiver.take_written("run", number)
    here.assert_holds(wanted)
    if not is_wrong:
        assert receiver.path_taken == {"path": "plan", "path_reason": ""}
        return
    assert receiver.path == "layerwise"
    assert "the plan left other values than a reload" in receiver.path_reason
    with pytest.raises(TransferError, match="the plan left other values"):
        receiver.plan_writes(here.metadata)
