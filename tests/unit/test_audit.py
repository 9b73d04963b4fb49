"""Audits through the load plans of vLLM's own models, and what is refused before a push."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from tests.fakes.engine import BareUpdates
from tests.fakes.weights import OneRoom
from tests.unit.vllm_models import VllmModels, make_checkpoint, single_process_group
from torchrl_vllm_sync.engine import receiver
from torchrl_vllm_sync.engine.args import BROADCAST_BACKEND
from torchrl_vllm_sync.engine.arrivals import Arrivals
from torchrl_vllm_sync.engine.plan import checkpoint_metadata, reload_model
from torchrl_vllm_sync.engine.worker import SyncWorkerExtension
from torchrl_vllm_sync.errors import NonFiniteWeightsError, TransferError, TransferNotReadyError
from torchrl_vllm_sync.weights import audit
from torchrl_vllm_sync.weights.audit import Auditor, WeightDifference, refuse_nonfinite
from torchrl_vllm_sync.weights.source import MappingSource, as_weight_source

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def distributed(tmp_path_factory):
    with single_process_group(tmp_path_factory.mktemp("group")):
        yield


class World:
    """One replica, its workers, and what reaches them."""

    def __init__(self, directory, name, size=1, **options):
        self.workers, self.models = [], []
        for rank in range(size):
            models = VllmModels(directory, name, rank, size, **options)
            self.models.append((models, models.build(fill=-1.0)))
            config = SimpleNamespace(backend=BROADCAST_BACKEND)
            with models.active():
                made = receiver.BroadcastReceiver(
                    config, models.vllm_config, CPU, self.models[-1][1]
                )
            made.parallel_config = SimpleNamespace(
                data_parallel_index=0, world_size=size, rank=rank
            )
            worker = SyncWorkerExtension()
            worker.execute_model = None  # vLLM's worker has it
            worker.weight_transfer_engine, worker.vllm_config = made, models.vllm_config
            self.workers.append(worker)
        self.metadata = checkpoint_metadata(models.model_config)
        self.updates = BareUpdates(self.workers, version=3)
        self.auditor = Auditor(self)

    def start_calls(self, method, calls, **kwargs):
        def answer(args):
            try:
                return asyncio.run(getattr(Arrivals(self.updates, list), method)(*args, **kwargs))
            except TransferError as error:
                return error

        found = {name: answer(args) for name, args in calls.items()}
        return SimpleNamespace(answers=lambda _: found)

    def load(self, checkpoint):
        for models, model in self.models:
            models.load(model, checkpoint)

    def differences(self, checkpoint):
        self.auditor.plan({"0": "a"}, self.metadata, timeout_s=5)
        source = checkpoint if isinstance(checkpoint, MappingSource) else MappingSource(checkpoint)
        found = self.auditor.compare(source, ["0"], timeout_s=5)
        assert not found.failures
        assert found.versions == {"0": 3}
        return found.differences


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(receiver, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    return lambda *args, **options: World(tmp_path, *args, **options)


def agree(here):
    """As after a first push whose plan was compared with a reload."""
    for worker in here.workers:
        worker.weight_transfer_engine._agrees = True


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["llama-one-kv-head", "qwen2-tied", "gemma4", "qwen3-moe"])
def test_one_wrong_tensor_is_named_at_any_place(world, name, size):
    here = world(name, size)
    agree(here)
    checkpoint = make_checkpoint(here.metadata)
    here.load(checkpoint)
    assert here.differences(checkpoint) == []
    for wrong in checkpoint:
        changed = checkpoint[wrong].clone()
        changed.view(-1)[-1] += 2
        (one, *others) = here.differences({**checkpoint, wrong: changed})
        assert (one.name, one.num_different, one.largest) == (wrong, 1, 2.0)
        assert {other.name for other in others} <= {wrong}  # of a tensor that every worker has


HEAD, UP, SCALAR = "lm_head.weight", "model.layers.{}.mlp.up_proj.weight", "layers.1.layer_scalar"
EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


def exchange(checkpoint, one, other):
    return {**checkpoint, one: checkpoint[other], other: checkpoint[one]}


def without(checkpoint, name):
    return {other: tensor for other, tensor in checkpoint.items() if other != name}


def tensors_of(here, rank):
    return {name: one.data for name, one in here.models[rank][1].named_parameters()}


# What is planted: architecture and workers, what they load instead of the trainer's tensors, what
# happens to their memory then, and which tensors an audit must name, on which workers. Faults that
# need an engine are in tests/engine/test_audit.py, and a stale scale of fp8 needs a GPU.
PLANTED = {
    "left out": (
        "qwen3",
        2,
        lambda all_: without(all_, UP.format(1)),
        None,
        {UP.format(1)},
        {0, 1},
    ),
    "swapped": (
        "qwen3",
        1,
        lambda all_: exchange(all_, UP.format(0), UP.format(1)),
        None,
        {UP.format(0), UP.format(1)},
        {0},
    ),
    "scaled": (
        "qwen3",
        1,
        lambda all_: {**all_, HEAD: all_[HEAD] * (1 + 1e-6)},
        None,
        {HEAD},
        {0},
    ),
    "another worker's slice": (
        "qwen3",
        2,
        None,
        lambda here: tensors_of(here, 1)[HEAD].copy_(tensors_of(here, 0)[HEAD]),
        {HEAD},
        {1},
    ),
    # The trainer's head is its embedding, which was sent once; the engine has one of its own.
    "tied head not sent": ("qwen3", 1, lambda all_: without(all_, HEAD), None, {HEAD}, {0}),
    "woken without a reload": (
        "qwen2-tied",
        1,
        None,
        lambda here: [one.zero_() for one in tensors_of(here, 0).values()],
        None,
        {0},
    ),
    "experts exchanged": (
        "qwen3-moe",
        2,
        lambda all_: exchange(all_, EXPERT.format(0), EXPERT.format(1)),
        None,
        {EXPERT.format(0), EXPERT.format(1)},
        {0},
    ),
    "buffer": (
        "gemma4",
        1,
        None,
        lambda here: here.models[0][1].get_buffer(f"model.{SCALAR}").add_(1e-3),
        {f"model.{SCALAR}"},
        {0},
    ),
    "one bit": (
        "qwen3",
        2,
        None,
        lambda here: tensors_of(here, 1)[HEAD].view(torch.int32)[3, 7:8].bitwise_xor_(1),
        {HEAD},
        {1},
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_named(world, fault):
    name, size, loaded, then, named, ranks = PLANTED[fault]
    here = world(name, size, expert_parallel=name == "qwen3-moe")
    agree(here)
    checkpoint = make_checkpoint(here.metadata)
    if fault == "tied head not sent":
        checkpoint[HEAD] = checkpoint["model.embed_tokens.weight"]
    here.load(loaded(checkpoint) if loaded else checkpoint)
    if then:
        assert here.differences(checkpoint) == []
        then(here)
    found = here.differences(checkpoint)
    assert {one.name for one in found} == (named or {*checkpoint})
    assert {one.rank for one in found} == ranks
    assert found[0].num_different > 0
    assert found[0].largest > 0


QKV = "model.layers.0.self_attn.qkv_proj"
QUANTISED = {
    "a scale": (f"{QKV}.weight_scale", lambda one: one.mul_(1.001), f"{QKV}.weight_scale"),
    "one bit": (
        f"{QKV}.weight",
        lambda one: one.t().view(torch.uint8)[-1, :1].bitwise_xor_(1),  # of the last part
        "model.layers.0.self_attn.v_proj.weight",
    ),
    "bias": (f"{QKV}.bias", lambda one: one[:1].add_(1), "model.layers.0.self_attn.q_proj.bias"),
}


def quantise(weight, scale=None):
    """As vLLM's kernels do, which are for GPUs."""
    scale = (
        (weight.abs().max().float() / torch.tensor(448.0)).reshape(1) if scale is None else scale
    )
    scaled = weight.float() * (1 / scale)
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn), scale


@pytest.fixture
def fp8(world, monkeypatch):
    """A world that has quantised a checkpoint as it arrived, and that."""
    from vllm import _custom_ops
    from vllm.model_executor.kernels.linear.scaled_mm import cpu
    from vllm.model_executor.model_loader import reload
    from vllm.utils.torch_utils import set_default_torch_dtype

    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", quantise)
    kernel = cpu.CPUFp8PerTensorScaledMMLinearKernel  # which packs weights
    monkeypatch.setattr(kernel, "process_weights_after_loading", lambda *_: None)
    with set_default_torch_dtype(torch.bfloat16):
        here = world("qwen2-tied", quantization="fp8")
    ((models, model),) = here.models
    checkpoint = {m.name: torch.randn(m.shape, dtype=m.dtype) for m in here.metadata}
    reload.record_metadata_for_reloading(model)
    here.load(checkpoint)
    reload.finalize_layerwise_processing(model, models.model_config)
    return here, checkpoint


@pytest.mark.parametrize("fault", QUANTISED)
def test_weights_of_fp8_are_compared_with_what_is_made_of_the_trainers(fp8, fault):
    here, checkpoint = fp8
    name, how, expected = QUANTISED[fault]
    ((_, model),) = here.models
    order = [name for name, _ in model.named_parameters()]  # replicas copy in it from each other
    assert here.differences(checkpoint) == []
    assert [name for name, _ in model.named_parameters()] == order
    how(tensors_of(here, 0)[name])
    (one,) = here.differences(checkpoint)
    assert (one.name, one.num_different is None) == (expected, fault != "bias")


def test_weights_of_fp8_are_compared_after_a_reload_too(fp8):
    here, checkpoint = fp8
    assert here.differences(checkpoint) == []
    other = {name: 4 * one for name, one in checkpoint.items()}
    ((models, model),) = here.models
    with models.active():
        reload_model(model, models.vllm_config, other.items())
    assert here.differences(other) == []
    found = {one.name for one in here.differences(checkpoint)}
    assert f"{QKV}.weight_scale" in found
    # Of whole tensors that are four times as large, only the scale is another.
    assert "model.layers.0.self_attn.q_proj.weight" not in found


def test_parts_that_do_not_stay_are_compared_too(fp8):
    here, checkpoint = fp8
    assert here.differences(OneRoom(checkpoint)) == []


def test_what_is_quantised_otherwise_is_not_compared(fp8):
    here, checkpoint = fp8
    here.workers[0].weight_transfer_engine.parallel_config.world_size = 2
    with pytest.raises(TransferError, match=r"the model is quantised \(fp8"):
        here.differences(checkpoint)
    here.workers[0].weight_transfer_engine.parallel_config.world_size = 1
    layer = here.models[0][1].get_submodule(QKV)
    layer.weight_scale.data = layer.weight_scale.data.repeat(2)
    with pytest.raises(TransferError, match=rf"{QKV}.weight has more than one scale"):
        here.differences(checkpoint)


def test_experts_are_not_judged_before_a_plan_was_compared_with_a_reload(world):
    here = world("qwen3-moe")
    with pytest.raises(TransferError, match="experts may be laid out anew"):
        here.differences(make_checkpoint(here.metadata))


def test_tensors_that_a_reload_replaced_are_looked_at_where_they_are(world):
    here = world("qwen3")
    checkpoint = make_checkpoint(here.metadata)
    here.load(checkpoint)
    assert here.differences(checkpoint) == []
    ((_, model),) = here.models
    model.model.norm.weight.data = model.model.norm.weight.data + 1
    (one,) = here.differences(checkpoint)
    assert one.name == "model.norm.weight"


def test_a_worker_that_was_asked_about_other_tensors_says_so(world):
    here, other = world("qwen3"), None
    checkpoint = make_checkpoint(here.metadata)
    here.load(checkpoint)
    here.differences(checkpoint)
    other = Auditor(here)
    other.plan({"0": "a"}, here.metadata[::-1], timeout_s=5)
    found = here.auditor.compare(MappingSource(checkpoint), ["0"], timeout_s=5)
    assert "asked about other tensors" in str(found.failures["0"])


def test_replicas_are_asked_again_for_other_metadata_and_when_they_were_replaced(world):
    here, asked = world("qwen3"), []
    start = here.start_calls
    here.start_calls = lambda method, *args, **kwargs: (
        asked.append(method) or start(method, *args, **kwargs)
    )
    for incarnation in ("a", "a", "b"):
        here.auditor.plan({"0": incarnation}, here.metadata, timeout_s=5)
    assert asked == ["plan_audit"] * 2
    here.auditor.plan({"0": "b"}, here.metadata[:], timeout_s=5)
    assert asked == ["plan_audit"] * 2
    here.auditor.plan({"0": "b"}, here.metadata[::-1], timeout_s=5)
    assert asked == ["plan_audit"] * 3


def test_a_replica_without_whole_weights_is_not_compared(world):
    here = world("qwen3")
    here.updates.whole = False
    here.auditor.plan({"0": "a"}, here.metadata, timeout_s=5)  # for what is about to arrive
    checkpoint = make_checkpoint(here.metadata)
    found = here.auditor.compare(MappingSource(checkpoint), ["0"], timeout_s=5)
    assert not found.versions
    assert "holds no whole version" in str(found.failures["0"])
    here.updates.asleep = frozenset({"weights"})
    with pytest.raises(TransferNotReadyError, match="weights of replica 0 are asleep"):
        here.auditor.plan({"0": "b"}, here.metadata, timeout_s=5)


def test_differences_are_exact_across_chunks(world, monkeypatch):
    monkeypatch.setattr(audit, "CHUNK_WORDS", 8)
    here = world("qwen3")
    checkpoint = make_checkpoint(here.metadata)
    here.load(checkpoint)
    name = "model.layers.0.mlp.down_proj.weight"
    changed = checkpoint[name].clone()
    changed.view(-1)[[0, 100, -1]] += torch.tensor([1.0, -7.0, 2.0])
    (one,) = here.differences({**checkpoint, name: changed})
    assert (one.num_different, one.largest) == (3, 7.0)


def test_a_difference_says_as_much_as_is_known():
    one = WeightDifference(name="w", replica_id="1", rank=0)
    assert str(one) == "w on worker 0 of replica 1"
    one = WeightDifference(name="w", replica_id="1", rank=0, num_different=3, largest=0.25)
    assert str(one) == "w on worker 0 of replica 1 (3 elements differ, by up to 0.25)"


def test_what_is_not_finite_is_refused_wherever_it_is():
    good = {"a": torch.ones(3, dtype=torch.float16), "b": torch.arange(3), "c": torch.zeros(0)}
    refuse_nonfinite(MappingSource(good))
    refuse_nonfinite(MappingSource({}))
    large = torch.full((9,), torch.finfo(torch.float32).max)
    refuse_nonfinite(MappingSource({"single": large, "double": large.double() * 1e200}))
    for value in (torch.nan, torch.inf, -torch.inf):
        bad = {**good, "d": torch.tensor([1.0, value]), "e": torch.tensor([value]).bfloat16()}
        with pytest.raises(NonFiniteWeightsError, match="d, as one of 2 tensors") as caught:
            refuse_nonfinite(MappingSource(bad))
        assert caught.value.names == ["d", "e"]


def test_of_adapters_the_parameters_are_looked_at():
    import peft

    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules=["0"]))
    source = as_weight_source(adapted)
    refuse_nonfinite(source)
    with torch.no_grad():
        next(one for n, one in adapted.named_parameters() if "lora_A" in n)[0, 0] = torch.nan
    with pytest.raises(NonFiniteWeightsError, match="lora_A"):
        refuse_nonfinite(source)
