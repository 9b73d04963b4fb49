"""Mixtures of experts, and a replica of two workers: the same proof."""

import tempfile

import pytest
import ray
import torch
from tensordict import TensorDict
from torchrl.collectors.llm.weight_update.vllm_v2 import vLLMUpdaterV2
from torchrl.modules.llm import TransformersWrapper
from torchrl.weight_update.llm import get_model_metadata

from tests.engine.checks import TOLERANCE, assert_holds, distance, perturbed
from tests.engine.conftest import ENGINE
from tests.engine.requests import eventually, sampling
from tests.engine.rollouts import TOKENIZER
from tests.engine.trainers import broadcast
from torchrl_vllm_sync import (
    AsyncVLLM,
    MemmapTransport,
    TrainerPolicy,
    VLLMDoubleBufferSyncScheme,
    VLLMWeightSyncScheme,
    WeightUpdater,
    replay_routed_experts,
)
from torchrl_vllm_sync.errors import WeightMismatchError, WeightSyncError
from torchrl_vllm_sync.rl.rows import NO_EXPERT
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint

pytestmark = pytest.mark.slow

MODELS = {
    "qwen3_moe, untied": {"architecture": "qwen3_moe", "tied": False},
    "qwen2_moe, tied": {"architecture": "qwen2_moe", "tied": True},
}


PROMPT = [*range(400, 340, -1)]  # nobody else's, so that all of it is computed
TRANSPORTS = {"memmap": MemmapTransport, "broadcast": broadcast}


@pytest.fixture(params=TRANSPORTS)
def transport(request):
    return TRANSPORTS[request.param]()


@pytest.fixture(scope="module", params=MODELS)
def experts(request, cluster, tmp_path_factory):
    """One replica of a mixture of experts; its checkpoint."""
    path = make_tiny_checkpoint(
        tmp_path_factory.mktemp("experts"), num_hidden_layers=2, seed=5, **MODELS[request.param]
    )
    with AsyncVLLM.from_pretrained(
        str(path),
        num_replicas=1,
        worker_extension_cls="tests.engine.faults.FaultyWorker",
        **ENGINE,
    ) as service:
        yield service, path


def test_experts_arrive(experts, transport):
    service, path = experts
    model = load_tiny_model(path)
    service.push_weights(model, transport=transport)
    assert_holds(service, model)
    for step in range(1, 4):
        perturbed(model, seed=step)
        assert distance(service, model, 0) > 100 * TOLERANCE
        service.push_weights(model)
        assert_holds(service, model)


@pytest.mark.parametrize("name", ["experts.3.down_proj.weight", "mlp.gate.weight"])
def test_the_check_notices_a_lost_expert(experts, transport, name):
    service, path = experts
    model = perturbed(load_tiny_model(path), seed=8)
    plan(service, zero=f"model.layers.1.mlp.{name.removeprefix('mlp.')}")
    service.push_weights(model, transport=transport)
    with pytest.raises(AssertionError, match="replica 0 differs by"):
        assert_holds(service, model)
    plan(service)
    service.push_weights(model)
    assert_holds(service, model)


def test_a_load_that_failed_among_the_experts_is_repaired(experts):
    service, path = experts
    model = perturbed(load_tiny_model(path), seed=9)
    service.use_transport(MemmapTransport())
    plan(service, fail_at=18, times=1)
    assert service.push_weights(model).replicas[0].phases["attempts"] == 2
    assert_holds(service, model)


def test_a_broadcast_that_failed_among_the_experts_is_repaired_by_the_next(experts):
    service, path = experts
    model = perturbed(load_tiny_model(path), seed=9)
    plan(service, fail_at=18, times=1)
    with pytest.raises(WeightSyncError, match="injected before tensor 18"):
        service.push_weights(model, transport=broadcast())
    service.push_weights(model)
    eventually(lambda: all(one.state.admits_requests for one in service.load.snapshots()))
    assert_holds(service, model)


def test_a_push_that_lacks_one_expert_is_refused(experts):
    service, path = experts
    model = load_tiny_model(path)
    service.push_weights(model)
    weights = {name: p for name, p in saved(path).items() if "1.mlp.experts.2.up_proj" not in name}
    with pytest.raises(WeightMismatchError, match=r"1 missing: model\.layers\.1\.mlp\.experts\.2"):
        service.push_weights(weights)
    service.push_weights(saved(path))
    assert_holds(service, model)


def test_where_routing_is_a_close_call_replayed_experts_give_the_engines_log_probs(experts):
    """The experts of a layer are as good as equally likely: rounding decides, and they differ."""
    service, path = experts
    model, generator = load_tiny_model(path), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in model.model.layers:
            gate = layer.mlp.gate.weight
            gate.copy_(gate[:1] + 1e-7 * torch.randn(gate.shape, generator=generator))
    service.push_weights(model)
    note = service.actors[0].collective_rpc.remote
    ray.get(note("sync_note_experts"))
    params = sampling(max_tokens=150, temperature=1.0, logprobs=0, ignore_eos=True, seed=0)
    (sample,) = service.generate(prompt_token_ids=PROMPT, sampling_params=params).outputs
    (noted,) = ray.get(note("sync_note_experts"))
    ids = torch.tensor([[*PROMPT, *sample.token_ids]])
    by_layer = torch.tensor([[*of_tokens, [NO_EXPERT] * 2] for of_tokens in noted])
    answer = torch.arange(ids.shape[1])[None] >= len(PROMPT)
    masks = {"all_attention_mask": answer | True, "all_assistant_mask": answer}
    rows = TensorDict({"tokens": {"full": ids}, "masks": masks}, [1])
    rows["routed_experts"] = {"full": by_layer.transpose(0, 1)[None]}
    pairs = zip(sample.logprobs, sample.token_ids, strict=True)
    wanted = torch.tensor([entry[token].logprob for entry, token in pairs])

    def apart(**settings):
        found = TrainerPolicy(model, **settings)(rows.clone())["log_probs", "full"]
        return (found[answer] - wanted).abs().max()

    assert apart(replay_experts=replay_routed_experts) < TOLERANCE
    assert apart() > 100 * TOLERANCE  # the twin: the trainer's own router decides


def test_two_workers_each_take_their_shard(cluster, checkpoint):
    model = load_tiny_model(checkpoint)
    with AsyncVLLM.from_pretrained(
        str(checkpoint),
        num_devices=2,
        num_replicas=1,
        worker_extension_cls="tests.engine.faults.FaultyWorker",
        **{**ENGINE, "kv_cache_memory_bytes": 32 * 2**20},
    ) as service:
        assert service.get_world_size() == 2
        assert_holds(service, model)
        for step in range(4):
            perturbed(model, seed=step)
            service.push_weights(model, transport=(broadcast if step % 2 else MemmapTransport)())
            assert_holds(service, model)
        plan(service, zero="model.layers.1.mlp.down_proj.weight")
        service.push_weights(perturbed(model, seed=4))
        assert distance(service, model, 0) > 100 * TOLERANCE
        plan(service, fail_at=20, times=1, rank=1)
        with pytest.raises(WeightSyncError, match=r"worker 1 could not load: .*injected"):
            service.push_weights(model)
        plan(service)
        service.push_weights(model)
        eventually(lambda: all(one.state.admits_requests for one in service.load.snapshots()))
        assert_holds(service, model)
        service.use_transport(MemmapTransport())
        perturbed(model, seed=3)
        plan(service, fail_at=20, times=1)
        assert service.push_weights(model).replicas[0].phases["attempts"] == 2
        assert_holds(service, model)


def updater_v2(service, model):
    updater = vLLMUpdaterV2(service)
    updater.init()
    updater.push_weights_from_transformers(
        TransformersWrapper(model, tokenizer=TOKENIZER, input_mode="tokens", generate=False)
    )


def grpo_sender(service, model):
    scheme = VLLMWeightSyncScheme(num_replicas=1, transport="broadcast", timeout_s=60)
    sender = scheme.create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model), service)
    sender.update_weights()
    sender.update_weights(dict(model.state_dict()))
    sender.shutdown()


def double_buffer(service, model):
    with tempfile.TemporaryDirectory() as directory:
        sender = VLLMDoubleBufferSyncScheme(directory, timeout_s=60).create_sender()
        sender.register_model(model)
        sender.init_all_workers_group(get_model_metadata(model), service)
        sender.update_weights()
        sender.shutdown()


FACES = {
    "module": lambda service, model: service.push_weights(model),
    "state dict": lambda service, model: service.push_weights(model.state_dict()),
    "TensorDict": lambda service, model: service.push_weights(TensorDict.from_module(model)),
    "pairs": lambda service, model: service.update_weights(iter(model.state_dict().items())),
    "updater": lambda service, model: WeightUpdater(service).push_weights(
        TensorDict(model.state_dict())
    ),
    "vLLMUpdaterV2": updater_v2,
    "VLLMWeightSyncScheme": grpo_sender,
    "VLLMDoubleBufferSyncScheme": double_buffer,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("face", FACES)
def test_every_face_brings_the_experts(experts, face):
    service, path = experts
    model = perturbed(load_tiny_model(path), seed=100 + list(FACES).index(face))
    assert distance(service, model, 0) > 100 * TOLERANCE
    FACES[face](service, model)
    assert_holds(service, model)


def plan(service, **faults):
    ray.get(service.actors[0].collective_rpc.remote("sync_plan", kwargs=faults))


def saved(path):
    """The checkpoint's own tensors, under their published names."""
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")
