"""The broadcast transport over NCCL: a trainer on one GPU, an engine on another, and their ends.

The tests share one service and one trainer, in this order; the last one with that service kills its
engine. The model is small but has some 60 MB, far more than NCCL sends on its own before a
receiver takes it: a transfer whose receiver is gone does not end by itself.
"""

import faulthandler
import multiprocessing
import os
import signal
import socket
import sys
import time

import pytest
import ray
import torch
from ray import cloudpickle

from torchrl_vllm_sync import AsyncVLLM, BroadcastTransport, ParamMeta, ReplicaState
from torchrl_vllm_sync.errors import LaunchError, SyncError
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint, token_log_probs
from torchrl_vllm_sync.weights.source import WeightSource

ENGINE = {
    "num_devices": 1,
    "dtype": "bfloat16",
    "enforce_eager": True,
    "compile": False,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 2**30,
    "verbose": False,
    "max_restarts": 0,  # what has failed stays so
}
SHAPE = {
    "architecture": "qwen3",
    "tied": False,
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "initializer_range": 0.05,
}
TOKEN_IDS = list(range(5, 69))
# Mean difference of log-probabilities. On a CPU, bfloat16 differed from float32 by 0.03, the other
# checkpoint by 2, and the same one without the tensor below by 0.9.
TOLERANCE = 0.2
DIFFERENT = 0.5
LOST = "model.layers.1.mlp.down_proj.weight"
BUCKET_BYTES = 2**20
# Ray's workers cannot import test modules.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Acting(WeightSource):
    """A source that does something before the middle one of its tensors."""

    def __init__(self, model, action, *args):
        self.items = list(model.named_parameters())
        self.action = lambda: getattr(self, action)(*args)

    def metadata(self):
        return [ParamMeta.of(name, tensor) for name, tensor in self.items]

    def __iter__(self):
        for index, (name, tensor) in enumerate(self.items):
            if index == len(self.items) // 2:
                time.sleep(0.2)  # workers have taken what was sent before
                self.action()
            yield name, tensor.detach()

    def fail(self):
        raise RuntimeError("the trainer had enough")

    def send_signal(self, pid, number):
        os.kill(pid, number)
        time.sleep(0.2)


@ray.remote(num_gpus=1, num_cpus=1)
class Trainer:
    """Holds the checkpoints on a GPU of its own and pushes them."""

    def __init__(self, checkpoints):
        self.models = [load_tiny_model(one).cuda() for one in checkpoints]
        self.transport = None

    def use(self, service, **options):
        self.close()
        options = {"bucket_bytes": BUCKET_BYTES, "join_timeout_s": 60, **options}
        self.service, self.transport = service, BroadcastTransport(**options)
        service.use_transport(self.transport)

    def close(self):
        if self.transport is not None:
            self.transport.close()

    def push(self, index, *, dtype="float32", lost=None, **options):
        tensors = {
            name: tensor.detach().to(getattr(torch, dtype)) * (name != lost)
            for name, tensor in self.models[index].named_parameters()
        }
        return self.service.push_weights(tensors, **{"timeout_s": 60, **options})

    def failure(self, index, action=None, *args, **options):
        """Pushes, which must fail; returns the error's type and message, and the seconds."""
        begin = time.monotonic()
        model = self.models[index]
        faulthandler.dump_traceback_later(75)  # where it hangs, before ``get`` gives it up
        try:
            self.service.push_weights(Acting(model, action, *args) if action else model, **options)
        except SyncError as error:
            return type(error).__name__, str(error), time.monotonic() - begin
        finally:
            faulthandler.cancel_dump_traceback_later()
        return "", "it succeeded", time.monotonic() - begin

    def multiply(self):
        """Whether this process can still compute on its GPU."""
        ones = torch.ones(512, 512, device="cuda")
        return (ones @ ones).sum().item() == 512**3

    def log_probs(self, index):
        return token_log_probs(self.models[index], TOKEN_IDS).flatten()


def get(answer, timeout_s=100):
    return ray.get(answer, timeout=timeout_s)


def engine_core_pid(service):
    """Process id of the engine core, which on one GPU is the worker too."""

    def children(_):
        return [(one.name, one.pid) for one in multiprocessing.active_children()]

    found = get(service.actors[0].__ray_call__.remote(children), 30)
    cores = [pid for name, pid in found if name.startswith("EngineCore")]
    assert len(cores) == 1, f"the actor's children are {found}"
    return cores[0]


def report(service):
    (one,) = service.replicas.call_replicas("report").values()
    return one


def wait_until_served(service):
    deadline = time.monotonic() + 30
    while not (
        report(service).state is ReplicaState.SERVING
        and all(one.state.admits_requests for one in service.load.snapshots())
    ):
        assert time.monotonic() < deadline, report(service)
        time.sleep(0.05)


def difference(service, trainer, index):
    """Mean difference between the engine's log-probabilities and those of a trainer's model."""
    from vllm import SamplingParams

    wait_until_served(service)
    output = service.generate(
        prompt_token_ids=TOKEN_IDS,
        sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0),
        actor_index=0,
    )
    pairs = zip(output.prompt_logprobs[1:], TOKEN_IDS[1:], strict=True)
    found = torch.tensor([entry[token].logprob for entry, token in pairs])
    return (found - get(trainer.log_probs.remote(index))).abs().mean().item()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return [
        str(make_tiny_checkpoint(tmp_path_factory.mktemp(f"qwen3-{seed}"), seed=seed, **SHAPE))
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def service(cluster, paths):
    with AsyncVLLM.from_pretrained(paths[0], stage_weights=True, **ENGINE) as service:
        yield service


@pytest.fixture(scope="module")
def trainer(cluster, paths):
    """Must answer after each test; whoever breaks it makes the next ones fail too."""
    trainer = Trainer.remote(paths)
    yield trainer
    ray.kill(trainer)


@pytest.mark.multigpu
def test_an_interface_that_exists_is_used(service, trainer):
    """The first test, because NCCL looks at its interface once in the life of a process."""
    known = [name for _, name in socket.if_nameindex()]
    name = "lo" if "lo" in known else known[0]
    get(trainer.use.remote(service, interface=name))
    pushed = get(trainer.push.remote(1))
    assert [one.path for one in pushed.replicas] == ["plan"]
    assert difference(service, trainer, 1) < TOLERANCE


@pytest.mark.multigpu
def test_an_interface_that_does_not_exist_is_refused(service, trainer):
    version = report(service).weight_version
    get(trainer.use.remote(service, interface="nosuch0"))
    kind, message, seconds = get(trainer.failure.remote(0))
    assert kind == "UnsupportedArgumentError"
    assert "nosuch0" in message
    assert seconds < 30
    assert report(service).weight_version == version
    assert difference(service, trainer, 1) < TOLERANCE


@pytest.mark.multigpu
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_computes_what_was_sent(service, trainer, dtype, staged):
    """float32 is cast into buckets; bfloat16 goes straight into the parameters."""
    get(trainer.use.remote(service, staged=staged))
    for index, other in ((0, 1), (1, 0)):
        pushed = get(trainer.push.remote(index, dtype=dtype))
        (replica,) = pushed.replicas
        assert pushed.transport == "broadcast"
        assert (replica.path, replica.path_reason) == ("plan", "")
        assert (replica.phases["stage_s"] > 0) == staged
        assert difference(service, trainer, index) < TOLERANCE
        assert difference(service, trainer, other) > DIFFERENT


@pytest.mark.multigpu
def test_the_check_above_notices_a_lost_tensor(service, trainer):
    get(trainer.use.remote(service))
    get(trainer.push.remote(1, lost=LOST))
    assert difference(service, trainer, 1) > DIFFERENT
    get(trainer.push.remote(1))
    assert difference(service, trainer, 1) < TOLERANCE


@pytest.mark.multigpu
def test_requests_go_on_while_staged_weights_arrive(service, trainer):
    from vllm import SamplingParams

    @ray.remote(num_cpus=0)
    def generate(service):
        params = SamplingParams(max_tokens=900, min_tokens=900, ignore_eos=True)
        outputs = service.generate([TOKEN_IDS] * 4, params)
        return [(len(one.outputs[0].token_ids), one.outputs[0].finish_reason) for one in outputs]

    get(trainer.use.remote(service, staged=True))
    get(trainer.push.remote(1))  # forms the group
    running = generate.remote(service)
    deadline = time.monotonic() + 60
    while service.get_num_unfinished_requests(0) < 4:
        assert not ray.wait([running], timeout=0.01)[0]
        assert time.monotonic() < deadline
    (replica,) = get(trainer.push.remote(0)).replicas
    assert replica.phases["num_kept"] == 4
    assert replica.phases["stage_s"] > 0
    assert get(running) == [(900, "length")] * 4
    assert difference(service, trainer, 0) < TOLERANCE


@pytest.mark.multigpu
@pytest.mark.parametrize("staged", [True, False])
def test_a_trainer_that_gives_up_in_mid_transfer_is_named(service, trainer, staged):
    get(trainer.use.remote(service, staged=staged))
    before = get(trainer.push.remote(1)).version
    kind, message, seconds = get(
        trainer.failure.remote(0, "fail", version=before + 1, timeout_s=60)
    )
    assert kind == "WeightSyncError"
    assert "the trainer had enough" in message
    assert "the trainer gave the transfer up" in message  # the worker's words
    assert seconds < 40
    after = report(service)
    if staged:
        assert (after.state, after.weight_version) == (ReplicaState.SERVING, before)
        assert difference(service, trainer, 1) < TOLERANCE
    else:
        assert after.state is ReplicaState.STALE
    assert get(trainer.multiply.remote(), 30)
    assert get(trainer.push.remote(0, version=before + 1)).version == before + 1
    assert difference(service, trainer, 0) < TOLERANCE
    get(trainer.close.remote(), 30)


@pytest.mark.multigpu
def test_an_engine_killed_in_mid_transfer_ends_the_push(service, trainer):
    """The end of the shared service."""
    get(trainer.use.remote(service, staged=False))
    get(trainer.push.remote(1))
    pid = engine_core_pid(service)
    kind, message, seconds = get(
        trainer.failure.remote(0, "send_signal", pid, signal.SIGKILL, timeout_s=60)
    )
    assert kind == "WeightSyncError"
    assert "engine core died" in message
    assert seconds < 40
    assert report(service).state is ReplicaState.FAILED
    assert get(trainer.multiply.remote(), 30)
    kind, message, seconds = get(trainer.failure.remote(0, timeout_s=30))
    assert kind in ("WeightSyncError", "TransferError", "ReplicaUnavailableError"), message
    get(trainer.close.remote(), 30)
    begin = time.monotonic()
    service.shutdown()
    assert time.monotonic() - begin < 60


# ---------------------------------------------------------------- services of their own


@pytest.mark.multigpu
def test_an_engine_stopped_in_mid_transfer_runs_into_the_time_limit(service, trainer, paths):
    service.shutdown()  # one GPU is the trainer's, the other was this service's
    with AsyncVLLM.from_pretrained(paths[0], **ENGINE) as stopping:
        get(trainer.use.remote(stopping))
        get(trainer.push.remote(1))
        pid = engine_core_pid(stopping)
        try:
            kind, message, seconds = get(
                trainer.failure.remote(0, "send_signal", pid, signal.SIGSTOP, timeout_s=8)
            )
            assert kind == "WeightSyncError", message
            assert "in time" in message or "longer than" in message
            assert 8 <= seconds < 60
            assert report(stopping).state is not ReplicaState.SERVING
            assert get(trainer.multiply.remote(), 30)
        finally:
            os.kill(pid, signal.SIGKILL)  # stopped or not
        kind, message, seconds = get(trainer.failure.remote(0, timeout_s=10))
        assert kind in ("WeightSyncError", "TransferError", "ReplicaUnavailableError"), message
        assert seconds < 60
        get(trainer.close.remote(), 30)
        assert get(trainer.multiply.remote(), 30)


@pytest.mark.multigpu
def test_a_launch_without_memory_for_staged_weights_says_how_much_is_needed(
    service, tmp_path_factory
):
    """Dummy weights that fill more than half of a GPU: a second set cannot fit beside them."""
    from transformers import Qwen3Config

    from torchrl_vllm_sync.testing import make_tiny_tokenizer

    service.shutdown()
    directory, hidden, layers = tmp_path_factory.mktemp("large"), 8192, 32
    wanted = 0.6 * torch.cuda.get_device_properties(0).total_memory
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=int(wanted / (3 * hidden * layers * 2)) // 256 * 256,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(directory)
    make_tiny_tokenizer().save_pretrained(directory)
    options = {name: one for name, one in ENGINE.items() if name != "kv_cache_memory_bytes"}
    with pytest.raises(LaunchError, match=r"staged weights need \d+\.\d\d GB on cuda"):
        AsyncVLLM.from_pretrained(
            str(directory),
            stage_weights=True,
            load_format="dummy",
            gpu_memory_utilization=0.95,
            max_num_batched_tokens=2048,
            **options,
        )
