"""What a push sends: names, shapes and values, from each form in which a trainer holds a model."""

import copy
import gc
import re
from types import SimpleNamespace

import peft
import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules.llm import TransformersWrapper
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from torchrl_vllm_sync import ParamMeta, as_weight_source
from torchrl_vllm_sync.errors import NonFiniteWeightsError, WeightMismatchError
from torchrl_vllm_sync.rl.schemes import check_metadata
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint, token_log_probs
from torchrl_vllm_sync.weights import module as module_module
from torchrl_vllm_sync.weights import source as source_module
from torchrl_vllm_sync.weights.audit import refuse_nonfinite
from torchrl_vllm_sync.weights.module import ModuleSource
from torchrl_vllm_sync.weights.source import (
    MappingSource,
    StableSource,
    WeightSource,
    fit_to_model,
    tensors_of,
)

IDS = list(range(5, 45))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "tied": make_tiny_checkpoint(root / "tied", num_hidden_layers=2),
        "untied": make_tiny_checkpoint(root / "untied", tied=False, num_hidden_layers=2),
        "moe": make_tiny_checkpoint(
            root / "moe", architecture="qwen3_moe", tied=False, num_hidden_layers=2
        ),
        "mixtral": make_mixtral(root / "mixtral"),
    }


def make_mixtral(path):
    """A checkpoint whose experts and router are called otherwise than in the model."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 100, "head_dim": 8}
    config = MixtralConfig(
        **sizes,
        num_hidden_layers=2,
        num_local_experts=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    MixtralForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def tied(checkpoints):
    return load_tiny_model(checkpoints["tied"])


@pytest.fixture
def untied(checkpoints):
    return load_tiny_model(checkpoints["untied"])


def expected_of(model):
    """What engines that run ``model`` ask for."""
    return ModuleSource(model).metadata()


def saved(path):
    """Names of the tensors in a checkpoint's file."""
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def assert_agrees(source):
    """Metadata and iteration agree item by item."""
    items = [ParamMeta.of(name, tensor) for name, tensor in source]
    assert items == source.metadata()
    assert len({meta.name for meta in items}) == len(items)


@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
def test_a_module_is_published_as_its_checkpoint_is(checkpoints, kind):
    source = ModuleSource(load_tiny_model(checkpoints[kind]))
    wanted = saved(checkpoints[kind])
    assert_agrees(source)
    found = dict(source)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_every_iteration_reads_the_parameters_as_they_are_then(tied):
    source = ModuleSource(tied)
    before = {name: tensor.clone() for name, tensor in source}
    with torch.no_grad():
        tied.model.norm.weight += 1
    after = dict(source)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        "model.norm.weight"
    }
    assert not any(tensor.requires_grad for tensor in after.values())


def test_plain_tensors_are_not_copied(tied):
    pointers = {p.data_ptr() for p in tied.parameters()}
    assert {tensor.data_ptr() for _, tensor in ModuleSource(tied)} == pointers


def test_the_names_of_experts_are_worked_out_once(checkpoints, monkeypatch):
    model = load_tiny_model(checkpoints["moe"])
    calls = []
    convert = module_module._revert
    monkeypatch.setattr(
        module_module,
        "_revert",
        lambda model, tensors: calls.append(len(tensors)) or convert(model, tensors),
    )
    ModuleSource(model).metadata()
    assert calls == [len(model.state_dict())]
    source = ModuleSource(model)
    source.metadata()
    list(source)
    assert len(calls) == 1
    gc.collect()
    known = module_module._KNOWN
    assert known[model].plan is not None
    assert known[model].state is not None
    del model, source
    gc.collect()
    assert not [key for key in known if "Moe" in type(key).__name__]


@pytest.mark.parametrize("wrap", ["TransformersWrapper", "DDP", "compile", "both"])
def test_wrappers_are_looked_through(checkpoints, wrap, tmp_path):
    model = load_tiny_model(checkpoints["moe"])
    wanted = ModuleSource(model).metadata()
    if wrap == "DDP":
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        try:
            wrapped = nn.parallel.DistributedDataParallel(model)
            assert ModuleSource(wrapped).metadata() == wanted
        finally:
            torch.distributed.destroy_process_group()
        return
    wrapped = torch.compile(model) if wrap in ("compile", "both") else model
    if wrap in ("TransformersWrapper", "both"):
        tokenizer = source_tokenizer()
        wrapped = TransformersWrapper(wrapped, tokenizer=tokenizer, input_mode="tokens")
    assert ModuleSource(wrapped).metadata() == wanted


def source_tokenizer():
    from torchrl_vllm_sync.testing import make_tiny_tokenizer

    return make_tiny_tokenizer()


# ---------------------------------------------------------------- forms


def test_a_generator_is_read_once_and_pushed_as_often_as_needed(untied):
    reads = []

    def pairs():
        for name, parameter in untied.named_parameters():
            reads.append(name)
            yield name, parameter

    source = as_weight_source(pairs())
    for _ in range(2):
        assert [name for name, _ in source] == [meta.name for meta in source.metadata()] == reads


@pytest.mark.parametrize(
    "form",
    [
        lambda model: model,
        lambda model: model.state_dict(),
        lambda model: list(model.named_parameters()),
        lambda model: TensorDict.from_module(model),
        lambda model: TensorDict.from_module(model, as_module=True),
        lambda model: TensorDict(model.state_dict()),
        lambda model: TensorDict(model.state_dict()).unflatten_keys("."),
        lambda model: {f"policy.module.{name}": p for name, p in model.named_parameters()},
    ],
)
@pytest.mark.parametrize("kind", ["tied", "untied", "moe", "mixtral"])
def test_every_form_fits_and_holds_the_same_values(checkpoints, kind, form):
    model = load_tiny_model(checkpoints[kind])
    wanted = dict(ModuleSource(model))
    fitted = fit_to_model(as_weight_source(form(model)), expected_of(model))
    assert_agrees(fitted)
    found = dict(fitted)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_experts_are_views_of_the_tensor_that_holds_them_all(checkpoints):
    model = load_tiny_model(checkpoints["moe"])
    source = as_weight_source(model.state_dict())
    fitted = fit_to_model(source, expected_of(model))
    held = {one.untyped_storage().data_ptr() for one in model.state_dict().values()}
    assert {one.untyped_storage().data_ptr() for _, one in fitted} == held
    views = fitted.views()
    assert [name for name, _ in views] == [meta.name for meta in fitted.metadata()]
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3] += 1
    assert fitted.views() is views
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert torch.equal(dict(views)[name], model.model.layers[1].mlp.experts.down_proj[3])


def test_what_a_trainer_announces_of_experts_fits(checkpoints):
    model = load_tiny_model(checkpoints["moe"])
    announced = {name: (one.dtype, one.shape) for name, one in model.state_dict().items()}
    expected = {meta.name: (meta.dtype, meta.shape) for meta in expected_of(model)}
    check_metadata(announced, SimpleNamespace(get_model_metadata=lambda: expected))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    announced[name] = announced[name][0], torch.Size([3, *announced[name][1][1:]])
    with pytest.raises(WeightMismatchError, match=r"2 missing: model\.layers\.1\.mlp\.experts\.3"):
        check_metadata(announced, SimpleNamespace(get_model_metadata=lambda: expected))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda one: one[:, :-2], r"8 of another shape: .*gate_proj\.weight \[63, 64\] instead of"),
        (lambda one: one[:, :-1], r"1 unknown: model\.layers\.0\.mlp\.experts\.gate_up_proj"),
        (lambda one: torch.cat([one, one]), "8 unknown: "),
        (lambda one: one[0], r"1 unknown: model\.layers\.0\.mlp\.experts\.gate_up_proj"),
        (lambda one: one.to(torch.int32), "8 of another kind of dtype: "),
    ],
)
def test_experts_that_do_not_fit_are_refused(checkpoints, change, problem):
    model = load_tiny_model(checkpoints["moe"])
    weights = model.state_dict()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weights[name] = change(weights[name])
    with pytest.raises(WeightMismatchError, match=problem):
        fit_to_model(as_weight_source(weights), expected_of(model))


def test_experts_that_are_given_twice_are_refused(checkpoints):
    model = load_tiny_model(checkpoints["moe"])
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    weights = {**model.state_dict(), name: torch.zeros(64, 64)}
    with pytest.raises(WeightMismatchError, match=rf"1 given twice: {name}"):
        fit_to_model(as_weight_source(weights), expected_of(model))


def test_transformers_holds_experts_in_no_other_way():
    found = set()
    for model_type in CONFIG_MAPPING_NAMES:
        for one in get_checkpoint_conversion_mapping(model_type) or ():
            steps = one.operations if isinstance(one, WeightConverter) else []
            if any(isinstance(step, MergeModulelist) for step in steps):
                places = [(type(step), step.dim) for step in steps]
                assert places in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
                leaf = one.target_patterns[0].rpartition("experts.")[2]
                parts = [name.rpartition("*.")[2].split(".")[0] for name in one.source_patterns]
                found.add((leaf, tuple(parts)))
    known = {(leaf, parts) for leaf, kinds in source_module.EXPERTS.items() for parts in kinds}
    assert ("gate_up_proj", ("gate_proj", "up_proj")) in found
    assert found <= known


@pytest.mark.parametrize("weights", [None, 3, "weights", b"weights", object()])
def test_other_things_are_refused(weights):
    with pytest.raises(TypeError, match=f"got {type(weights).__name__}"):
        as_weight_source(weights)


@pytest.mark.parametrize("form", ["module", "adapters", "state dict"])
def test_tensors_without_storage_are_refused_by_name(untied, form):
    untied.model.layers[1].mlp.to("meta")
    weights = {
        "module": lambda: untied,
        "adapters": lambda: with_adapters(untied, target_modules=["q_proj"]),
        "state dict": untied.state_dict,
    }[form]()
    with pytest.raises(
        WeightMismatchError, match=r"layers\.1\.mlp\.gate_proj\.weight .* meta device: so are 3 of"
    ):
        as_weight_source(weights).metadata()


def test_a_module_that_was_filled_since_is_taken(untied):
    untied.to("meta")
    with pytest.raises(WeightMismatchError, match="meta device"):
        ModuleSource(untied).metadata()
    assert ModuleSource(untied.to_empty(device="cpu")).metadata()


def test_a_value_that_is_no_tensor_is_named():
    with pytest.raises(TypeError, match="got list for 'a'"):
        as_weight_source({"a": [1.0]})


# ---------------------------------------------------------------- fitting


def test_a_tied_head_may_come_along(tied):
    with_head = {"lm_head.weight": tied.get_input_embeddings().weight.clone(), **tied.state_dict()}
    fitted = fit_to_model(MappingSource(with_head), expected_of(tied))
    assert "lm_head.weight" not in dict(fitted)
    assert "lm_head.weight" not in {meta.name for meta in fitted.metadata()}


@pytest.mark.parametrize("prefix", ["", "actor."])
def test_a_head_that_came_untied_is_refused(tied, prefix):
    weights = {f"{prefix}{name}": tensor for name, tensor in tied.state_dict().items()}
    weights[f"{prefix}lm_head.weight"] = tied.get_input_embeddings().weight + 1
    with pytest.raises(WeightMismatchError, match=r"lm_head\.weight differs from model\.embed"):
        fit_to_model(MappingSource(weights), expected_of(tied))


def test_a_module_whose_head_came_untied_is_refused(tied):
    expected = expected_of(tied)
    tied.lm_head.weight = nn.Parameter(tied.lm_head.weight.detach() + 1)
    with pytest.raises(WeightMismatchError, match=r"lm_head\.weight differs"):
        fit_to_model(ModuleSource(tied), expected)


def test_problems_are_listed_together(untied):
    weights = dict(untied.state_dict())
    del weights["model.layers.0.self_attn.q_proj.weight"]
    weights["extra"] = torch.ones(2)
    weights["model.norm.weight"] = torch.ones(3)
    weights["lm_head.weight"] = weights["lm_head.weight"].to(torch.int8)
    with pytest.raises(WeightMismatchError) as caught:
        fit_to_model(MappingSource(weights), expected_of(untied))
    assert str(caught.value) == (
        "the push does not fit the engines' model: "
        "1 missing: model.layers.0.self_attn.q_proj.weight; 1 unknown: extra; "
        "1 of another shape: model.norm.weight [3] instead of [64]; "
        "1 of another kind of dtype: lm_head.weight torch.int8 instead of torch.float32"
    )


def test_dtypes_announced_are_those_of_the_engines(untied):
    expected = [ParamMeta(m.name, torch.bfloat16, m.shape) for m in expected_of(untied)]
    fitted = fit_to_model(ModuleSource(untied), expected)
    assert {meta.dtype for meta in fitted.metadata()} == {torch.bfloat16}


def test_what_was_found_to_fit_is_looked_up(checkpoints, monkeypatch):
    model = load_tiny_model(checkpoints["moe"])
    expected = expected_of(model)
    calls = []
    fit = source_module._fit
    monkeypatch.setattr(source_module, "_fit", lambda *args: calls.append(1) or fit(*args))
    first = fit_to_model(as_weight_source(model), expected)
    again = fit_to_model(as_weight_source(model), expected)
    assert len(calls) == 1
    assert again.metadata() is first.metadata()
    fit_to_model(as_weight_source(model), list(expected))
    assert len(calls) == 2
    model.to(torch.bfloat16)
    assert {m.dtype for m in as_weight_source(model).metadata()} == {torch.bfloat16}
    fit_to_model(as_weight_source(model), expected)
    assert len(calls) == 3


def test_a_head_that_came_untied_later_is_refused_though_all_else_is_known(tied):
    source = MappingSource(dict(tied.state_dict()))  # both names, one storage
    expected = expected_of(tied)
    fit_to_model(source, expected)
    weights = dict(tied.state_dict())
    weights["lm_head.weight"] = weights["lm_head.weight"].clone()
    source = MappingSource(weights)
    for _ in range(2):
        fit_to_model(source, expected)
    weights["lm_head.weight"] += 1
    with pytest.raises(WeightMismatchError, match=r"lm_head\.weight differs from model\.embed"):
        fit_to_model(source, expected)


# ---------------------------------------------------------------- views


def assert_shows_what_iteration_yields(source):
    views = source.views()
    items = list(source)
    assert [name for name, _ in views] == [name for name, _ in items]
    for (name, view), (_, tensor) in zip(views, items, strict=True):
        assert view.dtype == tensor.dtype, name
        assert torch.equal(view, tensor), name


@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
def test_views_are_the_live_parameters(checkpoints, kind):
    model = load_tiny_model(checkpoints[kind])
    expected = expected_of(model)
    for source in (ModuleSource(model), fit_to_model(as_weight_source(model), expected)):
        assert isinstance(source, StableSource)
        assert_shows_what_iteration_yields(source)
        storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
        assert {t.untyped_storage().data_ptr() for _, t in source.views()} == storages
        assert not any(tensor.requires_grad for _, tensor in source.views())
    views = fit_to_model(as_weight_source(model), expected).views()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    assert fit_to_model(as_weight_source(model), expected).views() is views
    assert_shows_what_iteration_yields(fit_to_model(as_weight_source(model), expected))


@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
def test_whatever_is_sent_is_looked_at_once_experts_together(checkpoints, kind):
    model = load_tiny_model(checkpoints[kind])
    fitted = fit_to_model(as_weight_source(model), expected_of(model))
    looked_at, sent = dict(tensors_of(fitted)), fitted.views()
    storages = [one.untyped_storage().data_ptr() for one in looked_at.values()]
    assert {*storages} == {one.untyped_storage().data_ptr() for _, one in sent}
    assert len({*storages}) == len(storages) == sum(one.nbytes > 0 for one in looked_at.values())
    assert (len(looked_at) < len(sent)) == (kind == "moe")
    for name, one in looked_at.items():
        before = one.clone()
        one.view(-1)[-1] = torch.nan
        with pytest.raises(NonFiniteWeightsError, match=re.escape(name)):
            refuse_nonfinite(fit_to_model(as_weight_source(model), expected_of(model)))
        one.copy_(before)
    refuse_nonfinite(fitted)


def replace_data(model):
    parameter = model.model.layers[1].mlp.experts.down_proj
    parameter.data = parameter.data * 2


def replace_parameter(model):
    model.model.norm.weight = nn.Parameter(torch.full_like(model.model.norm.weight, 7.0))


def move_storage(model):
    experts = model.model.layers[0].mlp.experts
    flat = torch.zeros(experts.gate_up_proj.numel() + 5)
    experts.gate_up_proj.data = flat[5:].view(experts.gate_up_proj.shape)


@pytest.mark.parametrize(
    "change",
    [
        replace_data,
        replace_parameter,
        move_storage,
        lambda model: model.to(torch.float64),
        lambda model: model.register_parameter("extra", nn.Parameter(torch.ones(3))),
        lambda model: model.model.layers.__delitem__(1),
    ],
)
def test_a_change_of_storages_is_noticed(checkpoints, change):
    model = load_tiny_model(checkpoints["moe"])
    before = ModuleSource(model).views()
    assert ModuleSource(model).views() is before
    change(model)
    source = ModuleSource(model)
    assert source.views() is not before
    assert source.views() is ModuleSource(model).views()
    assert_shows_what_iteration_yields(source)
    assert_agrees(source)
    changed = dict(source.views())
    assert (
        any(
            name not in changed or changed[name].data_ptr() != tensor.data_ptr()
            for name, tensor in before
        )
        or changed.keys() != dict(before).keys()
    )


def test_a_head_that_is_equal_without_sharing_is_compared_each_time(tied):
    tied.lm_head.weight = nn.Parameter(tied.lm_head.weight.detach().clone())
    names = [name for name, _ in ModuleSource(tied).views()]
    assert "lm_head.weight" not in names
    with torch.no_grad():
        tied.lm_head.weight += 1
    assert [name for name, _ in ModuleSource(tied).views()] == [*names, "lm_head.weight"]


def test_there_are_no_views_of_what_is_computed(untied):
    wrapped = with_adapters(untied, target_modules=["q_proj"])
    assert ModuleSource(wrapped).views() is None
    fitted = fit_to_model(as_weight_source(wrapped), expected_of(untied))
    assert fitted.views() is None
    with wrapped.disable_adapter():
        assert_shows_what_iteration_yields(ModuleSource(wrapped))


def test_a_state_dict_that_hooks_compute_is_read_each_time(untied):
    def double(module, state, prefix, local):
        state[prefix + "model.norm.weight"] = state[prefix + "model.norm.weight"] * 2

    untied.register_state_dict_post_hook(double)
    first = dict(ModuleSource(untied))["model.norm.weight"].clone()
    with torch.no_grad():
        untied.model.norm.weight += 1
    assert torch.equal(dict(ModuleSource(untied))["model.norm.weight"], first + 2)


def test_a_state_dict_has_views_too(untied):
    weights = {f"policy.{name}": tensor for name, tensor in untied.state_dict().items()}
    source = MappingSource(weights)
    expected = expected_of(untied)
    views = fit_to_model(source, expected).views()
    assert fit_to_model(source, expected).views() is views
    assert_shows_what_iteration_yields(fit_to_model(source, expected))
    name = "policy.model.norm.weight"
    weights[name].data = weights[name] * 2
    assert fit_to_model(source, expected).views() is not views
    assert_shows_what_iteration_yields(fit_to_model(source, expected))


def test_a_source_without_views_is_as_good(untied):
    class Plain:
        def metadata(self):
            return ModuleSource(untied).metadata()

        def __iter__(self):
            return iter(ModuleSource(untied))

    source = as_weight_source(Plain())
    assert isinstance(source, WeightSource)
    assert not isinstance(source, StableSource)
    fitted = fit_to_model(source, expected_of(untied))
    assert fitted.views() is None
    assert_agrees(fitted)


# ---------------------------------------------------------------- adapters


LORA = {
    "attention and mlp": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "all linear": {"target_modules": "all-linear"},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head", "q_proj"]},
    "saved modules": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "rank-stabilised": {"target_modules": ["q_proj"], "use_rslora": True, "lora_alpha": 32},
}


EXPERT_LORA = {
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "lora_dropout": 0.0,
}


def with_adapters(model, seed=0, autocast=True, **config):
    """Wraps a copy of ``model`` and gives its adapters values that matter."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 16, **config})
    wrapped = peft.get_peft_model(
        copy.deepcopy(model), config, autocast_adapter_dtype=autocast
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return wrapped


def loaded(like, source):
    """A copy of ``like`` that holds what ``source`` sends."""
    plain = copy.deepcopy(like)
    plain.load_state_dict(dict(source), strict=False)
    return plain


@pytest.mark.parametrize("kind", LORA)
def test_adapters_are_merged_without_touching_the_training_copy(untied, kind):
    wrapped = with_adapters(untied, **LORA[kind])
    before = {name: tensor.clone() for name, tensor in wrapped.state_dict().items()}
    source = fit_to_model(ModuleSource(wrapped), expected_of(untied))
    assert_agrees(source)
    plain = loaded(untied, source)
    # The adapters' product is added to the weight here, and to its output there.
    torch.testing.assert_close(
        token_log_probs(plain, IDS), token_log_probs(wrapped, IDS), atol=2e-4, rtol=0
    )
    assert (token_log_probs(plain, IDS) - token_log_probs(untied, IDS)).abs().max() > 0.01
    after = wrapped.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    found = dict(source)
    merged = dict(ModuleSource(wrapped.merge_and_unload()))
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("autocast", [True, False], ids=["float32 adapters", "bfloat16 adapters"])
@pytest.mark.parametrize("kind", [*LORA, "experts"])
def test_what_is_sent_equals_a_merge_by_peft_bit_by_bit(checkpoints, kind, autocast):
    model = load_tiny_model(checkpoints["moe" if kind == "experts" else "untied"]).bfloat16()
    config = EXPERT_LORA if kind == "experts" else LORA[kind]
    wrapped = with_adapters(model, autocast=autocast, **config)
    other = peft.LoraConfig(**{"r": 2, **config, "init_lora_weights": False})
    if kind != "saved modules":  # of which only one copy can be active
        wrapped.add_adapter("other", other, autocast_adapter_dtype=autocast)
        wrapped.base_model.set_adapter(["default", "other"])
    found = dict(ModuleSource(wrapped))
    merged = dict(ModuleSource(wrapped.merge_and_unload()))
    assert found.keys() == merged.keys()
    assert [name for name in merged if not torch.equal(found[name], merged[name])] == []
    plain = dict(ModuleSource(model))
    assert any(not torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_biases_of_adapters_are_refused(untied):
    wrapped = with_adapters(untied, target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(
        WeightMismatchError, match=r"q_proj\.weight: adapter 'default' is no plain LoRA \(lora_bias"
    ):
        ModuleSource(wrapped).metadata()
    with wrapped.disable_adapter():
        assert ModuleSource(wrapped).metadata()


def test_disabled_and_merged_adapters(untied):
    wrapped = with_adapters(untied, target_modules=["q_proj"], modules_to_save=["norm"])
    merged = {name: tensor.clone() for name, tensor in ModuleSource(wrapped)}
    with wrapped.disable_adapter():
        plain = dict(ModuleSource(wrapped))
    wanted = dict(ModuleSource(untied))
    assert all(torch.equal(plain[name], wanted[name]) for name in wanted)
    wrapped.merge_adapter()
    again = dict(ModuleSource(wrapped))
    assert all(torch.allclose(again[name], merged[name], atol=1e-6) for name in merged)


def test_several_active_adapters_add_up(untied):
    wrapped = with_adapters(untied, target_modules=["q_proj", "o_proj"])
    wrapped.add_adapter(
        "other", peft.LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False)
    )
    wrapped.base_model.set_adapter(["default", "other"])
    plain = loaded(untied, ModuleSource(wrapped))
    torch.testing.assert_close(
        token_log_probs(plain, IDS), token_log_probs(wrapped, IDS), atol=2e-4, rtol=0
    )


def test_adapters_on_experts(checkpoints):
    model = load_tiny_model(checkpoints["moe"])
    wrapped = with_adapters(model, **EXPERT_LORA)
    source = ModuleSource(wrapped)
    assert_agrees(source)
    assert {m.name for m in source.metadata()} == {m.name for m in ModuleSource(model).metadata()}
    merged = dict(ModuleSource(wrapped.merge_and_unload()))
    changed = dict(ModuleSource(model))
    found = dict(source)
    for name in merged:
        torch.testing.assert_close(found[name], merged[name], atol=1e-6, rtol=1e-6)
    expert = "model.layers.1.mlp.experts.3.down_proj.weight"
    assert not torch.equal(found[expert], changed[expert])


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
)
def test_adapters_on_one_of_two_tied_tensors_are_refused(tied, config):
    wrapped = with_adapters(tied, **config)
    with pytest.raises(WeightMismatchError, match=r"lm_head\.weight differs from model\.embed"):
        fit_to_model(ModuleSource(wrapped), expected_of(tied))


def test_adapters_elsewhere_leave_the_head_tied(tied):
    wrapped = with_adapters(tied, target_modules=["q_proj"])
    fitted = fit_to_model(ModuleSource(wrapped), expected_of(tied))
    assert "lm_head.weight" not in dict(fitted)
    torch.testing.assert_close(
        token_log_probs(loaded(tied, fitted), IDS), token_log_probs(wrapped, IDS), atol=2e-4, rtol=0
    )


def test_adapters_that_do_not_add_up_are_refused_by_name(untied):
    wrapped = with_adapters(untied, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(WeightMismatchError, match=r"q_proj\.weight: adapter 'default' is no plain"):
        ModuleSource(wrapped).metadata()
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(WeightMismatchError, match="prompt learning changes no weights"):
        ModuleSource(peft.get_peft_model(copy.deepcopy(untied), config)).metadata()
