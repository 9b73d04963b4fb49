"""Twelve ways for an engine to come to wrong weights, planted in engines: an audit names each.

Without a GPU they are planted in engines on the CPU whose repacking is off, all but that of fp8.
"""

import contextlib
import re
import sys

import cloudpickle
import peft
import pytest
import ray
import torch

from tests.engine.checks import perturbed
from tests.engine.conftest import ENGINE as CPU_ENGINE
from tests.engine.test_audit import DOWN, HEAD, QKV, change, found, one_bit, swap
from tests.gpu.test_ipc_gpu import ENGINE as GPU_ENGINE
from tests.gpu.test_ipc_gpu import engine_log_probs, service_beside
from torchrl_vllm_sync import AsyncVLLM, MemmapTransport, P2PTransport, errors
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint, make_tiny_tokenizer

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ON_GPU = torch.cuda.is_available()
pytestmark = (
    [pytest.mark.gpu] if ON_GPU else [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]
)
WORKER = "tests.engine.plain_worker.PlainWorker"
EXPERTS = WORKER if ON_GPU else "tests.engine.plain_experts.PlainExpertsWorker"
BUFFER = "model.layers.1.layer_scalar"


def engine(checkpoint, **options):
    """One replica; of one worker on a GPU, beside this process."""
    options = {"worker_extension_cls": WORKER, **options}
    if ON_GPU and "num_devices" not in options:
        return service_beside(checkpoint, **options)
    options |= GPU_ENGINE if ON_GPU else CPU_ENGINE
    return AsyncVLLM.from_pretrained(str(checkpoint), num_replicas=1, **options)


@pytest.fixture(scope="module")
def start(cluster):
    """Starts an engine in place of the one before: there may be one GPU."""
    with contextlib.ExitStack() as running:

        def start(*args, **options):
            running.close()
            return running.enter_context(engine(*args, **options))

        yield start


def trained(checkpoint):
    """What a trainer holds, on its device."""
    return load_tiny_model(checkpoint).to("cuda" if ON_GPU else "cpu")


def names(differences):
    assert differences[0].num_different > 0
    return {one.name for one in differences}


@pytest.fixture(scope="module")
def dense(start, checkpoints):
    # Nothing is staged, as what is does not sleep.
    service = start(checkpoints[0], **({"enable_sleep_mode": True} if ON_GPU else {}))
    service.use_transport(MemmapTransport())
    return service


@pytest.fixture
def model(dense, checkpoints):
    """What the dense engine holds, by an audited push, and by another audit."""
    model = load_tiny_model(checkpoints[0])
    dense.push_weights(model, audit=True)
    assert dense.audit(model).num_tensors == 50
    return model


def put_back(tensor):
    """As where a later push leaves a tensor out."""
    before = tensor.detach().cpu().clone()
    return lambda one, _: one.copy_(before)


IN_MEMORY = {
    "swapped": (DOWN, swap, {DOWN, DOWN.replace("2", "3", 1)}),
    "scaled": (DOWN, lambda one, _: one.mul_(1.01), {DOWN}),
    # Of one fused parameter: the keys' rows are the values'.
    "wrong slice": (QKV, lambda one, _: one[64:96].copy_(one[96:128]), {QKV.replace("qkv", "k")}),
    "one bit": (DOWN, one_bit, {DOWN}),
}


@pytest.mark.parametrize("fault", IN_MEMORY)
def test_what_is_done_to_memory_is_named(dense, model, fault):
    name, how, expected = IN_MEMORY[fault]
    change(dense, 0, name, how)
    assert names(found(dense, model)) == expected


def test_a_tensor_that_was_left_out_is_named(dense, model):
    before = put_back(model.get_parameter(DOWN))
    dense.push_weights(perturbed(model, seed=1), audit=True)
    change(dense, 0, DOWN, before)
    assert names(found(dense, model)) == {DOWN}


def test_an_adapter_that_was_not_merged_is_named(dense, model):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    names_of_both = QKV.replace("qkv", "q"), DOWN
    of_layers = {re.sub(r"\d", str(at), one) for at in range(4) for one in names_of_both}
    assert names(found(dense, adapted)) == of_layers
    dense.push_weights(adapted, audit=True)


def test_weights_of_another_run_are_named(dense, model, checkpoints):
    assert len(names(found(dense, load_tiny_model(checkpoints[1])))) > 40


def test_memory_that_was_asleep_is_named_if_nothing_was_loaded_since(dense, model):
    dense.sleep(level=2)
    dense.wake_up(["weights"])
    with pytest.raises(errors.TransferError, match="no whole version"):
        dense.audit(model)
    dense.push_weights(model, audit=True)
    dense.wake_up(["kv_cache"])
    if ON_GPU:  # behind the service's back
        for call in ("sleep", {"level": 2}), ("wake_up", {}):
            ray.get(dense.actors[0].collective_rpc.remote(call[0], kwargs=call[1]))
    else:
        change(dense, 0, DOWN, lambda _, tensors: [one.zero_() for one in tensors.values()])
    assert len(names(found(dense, model))) > 40
    dense.push_weights(model, audit=True)


@pytest.fixture(scope="module")
def experts(start, tmp_path_factory):
    """A mixture of experts with a head of its own, and its checkpoint."""
    options = {"architecture": "qwen3_moe", "tied": False, "num_hidden_layers": 2, "seed": 5}
    checkpoint = make_tiny_checkpoint(tmp_path_factory.mktemp("experts"), **options)
    service = start(checkpoint, stage_weights=True, worker_extension_cls=EXPERTS)
    service.use_transport(P2PTransport())
    # The first one shows whether vLLM has laid experts out anew.
    service.push_weights(trained(checkpoint))
    return service, checkpoint


def test_experts_in_another_order_are_named(experts):
    service, checkpoint = experts
    model = trained(checkpoint)
    service.push_weights(model, audit=True)

    def permute(_, tensors):
        for name, one in tensors.items():
            if name.startswith("model.layers.1.mlp.experts") and one.ndim == 3:
                one.copy_(one.roll(1, 0))

    change(service, 0, HEAD, permute)
    expected = {
        f"model.layers.1.mlp.experts.{at}.{of}_proj.weight"
        for at in range(4)
        for of in ("gate", "up", "down")
    }
    assert names(found(service, model)) == expected


def test_a_tied_head_that_was_not_sent_is_named(experts):
    service, checkpoint = experts
    model = trained(checkpoint)
    model.lm_head.weight = model.model.embed_tokens.weight  # the engine has two
    service.push_weights(model, audit=True)
    before = put_back(model.lm_head.weight)
    service.push_weights(perturbed(model, seed=1), audit=True)
    change(service, 0, HEAD, before)
    assert names(found(service, model)) == {HEAD}


def test_a_buffer_that_was_changed_is_named(start, tmp_path):
    from transformers import AutoModelForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        architectures=["Gemma4ForCausalLM"],
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        max_position_embeddings=2048,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    service = start(tmp_path)
    service.push_weights(model, transport=MemmapTransport(), audit=True)
    change(service, 0, BUFFER, lambda one, _: one.mul_(1.5))
    assert names(found(service, model)) == {BUFFER}


@pytest.mark.gpu
def test_a_stale_scale_of_fp8_is_named(start, checkpoints):
    service, model = start(checkpoints[0], quantization="fp8"), load_tiny_model(checkpoints[0])
    service.push_weights(model, transport=MemmapTransport(), audit=True)
    service.audit(model)
    scale = DOWN.replace("weight", "weight_scale")
    before = put_back(
        model.get_parameter(DOWN).bfloat16().abs().max().float() / torch.tensor(448.0)
    )
    change(service, 0, scale, before)
    service.audit(model)  # it is the one that was there
    service.push_weights(perturbed(model, seed=1), audit=True)
    change(service, 0, scale, before)
    assert [one.name for one in found(service, model)] == [scale]


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["fp8", "fp8_per_channel"])
def test_what_a_trainer_quantised_computes_as_what_vllm_did(start, checkpoints, how):
    service, transport = start(checkpoints[0], quantization=how, stage_weights=True), P2PTransport()
    own, answers = trained(checkpoints[0]), []
    for seed in (1, 2, 3):  # two memories take turns
        model = perturbed(own, seed=seed)
        (replica,) = service.push_weights(model, transport=transport).replicas
        assert (replica.path, replica.path_reason) == ("plan", "")
        by_trainer = engine_log_probs(service)
        service.push_weights(model, transport=MemmapTransport())  # which vLLM reloads
        assert torch.equal(by_trainer, engine_log_probs(service))
        answers.append(by_trainer)
    assert all((one - answers[0]).abs().mean() > 0.01 for one in answers[1:])


@pytest.mark.multigpu if ON_GPU else pytest.mark.slow
def test_the_slice_of_another_worker_is_named(start, tmp_path):
    checkpoint = make_tiny_checkpoint(tmp_path, architecture="qwen3", tied=False, seed=3)
    model = load_tiny_model(checkpoint)
    service = start(checkpoint, num_devices=2)
    service.push_weights(model, transport=MemmapTransport(), audit=True)
    change(service, 0, HEAD, put_back(model.lm_head.weight[:256]), rank=1)
    (one,) = found(service, model)
    assert (one.name, one.rank) == (HEAD, 1)
