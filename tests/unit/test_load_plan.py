"""A recorded plan against the model's own loader, whose result it must equal bit by bit.

The second half holds vLLM's model classes, in the layout their loaders expect.
"""

import gc
import pickle
import re

import pytest
import torch
from torch import nn

from tests.unit.vllm_models import (
    CONFIGS,
    VllmModels,
    make_checkpoint,
    metadata_of,
    single_process_group,
)
from torchrl_vllm_sync import ParamMeta
from torchrl_vllm_sync.engine import plan as plans
from torchrl_vllm_sync.engine.plan import LoadPlan, PlanNotPossibleError, record_load_plan
from torchrl_vllm_sync.weights.broadcast.buckets import BucketLayout, bound_buckets

NUM_SLOTS = 3
BUCKET_BYTES = 4096


def push(plan, checkpoint, bucket_bytes=BUCKET_BYTES):
    """Sends a checkpoint bucket by bucket, as a trainer does; returns the number of copies."""
    layout = BucketLayout(metadata_of(checkpoint), bucket_bytes)
    slots = [torch.empty(layout.bucket_bytes, dtype=torch.uint8) for _ in range(NUM_SLOTS)]
    bound = bound_buckets(plan.copies, layout, slots)
    for number, bucket in enumerate(layout.buckets):
        slot = slots[number % NUM_SLOTS]
        slot.fill_(255)  # what the bucket before left behind must not matter
        for piece in bucket.pieces:
            flat = checkpoint[piece.meta.name].reshape(-1)
            rows = flat[piece.first_element : piece.first_element + piece.num_elements]
            piece.within(slot).copy_(rows)
        bound[number].unpack()
    return sum(len(targets) for bucket in bound for targets, _ in bucket.groups)


def skipped(plan, checkpoint):
    """Tensors of a checkpoint of which the model holds nothing."""
    return sorted(checkpoint.keys() - {one.name for one in plan.copies})


def assert_equal(found, expected):
    expected = dict(expected.named_parameters())
    for name, tensor in found.named_parameters():
        assert torch.equal(tensor, expected[name]), f"{name} differs"


class Model(nn.Module):
    """Parameters of the given shapes, and a loader that calls ``load(model, name, tensor)``."""

    def __init__(self, load, dtype=torch.float32, **shapes):
        super().__init__()
        self.load = load
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.load(self, name, tensor)


def agrees(load, checkpoint, bucket_bytes=BUCKET_BYTES, **shapes):
    """Loads by plan and by loader, asserts equality, and returns the plan and its copies."""
    model, expected = Model(load, **shapes), Model(load, **shapes)
    plan = record_load_plan(model, metadata_of(checkpoint))
    with torch.no_grad():
        expected.load_weights(checkpoint.items())
    num_copies = push(plan, checkpoint, bucket_bytes)
    assert_equal(model, expected)
    return plan, num_copies


def into(view):
    """A loader that copies ``view`` of each tensor into the parameter of its name."""

    def load(model, name, tensor):
        getattr(model, name).data.copy_(view(tensor))

    return load


def numbered(**shapes):
    return make_checkpoint([ParamMeta(*item) for item in with_dtype(shapes)])


def with_dtype(shapes, dtype=torch.float32):
    return [(name, dtype, shape) for name, shape in shapes.items()]


@pytest.mark.parametrize(
    ("view", "shape"),
    [
        (lambda w: w, (6, 8)),
        (lambda w: w.narrow(0, 2, 3), (3, 8)),
        (lambda w: w.narrow(1, 4, 4), (6, 4)),
        (lambda w: w.chunk(2, dim=1)[1], (6, 4)),
        (lambda w: w.t(), (8, 6)),
        (lambda w: w.t()[2:5], (3, 6)),
        (lambda w: w[:].unsqueeze(0), (1, 6, 8)),
        (lambda w: w.reshape(2, 3, 8), (2, 3, 8)),
        (lambda w: w.view(-1)[5:29], (24,)),
        (lambda w: w.view(2, 3, 8).transpose(0, 1), (3, 2, 8)),
        (lambda w: w.flatten()[::5], (10,)),
        (lambda w: w[1], (4, 8)),
        (lambda w: w[3, 3], (2, 2)),
        (lambda w: w.to(torch.float32), (6, 8)),
        (lambda w: w.to("cpu"), (6, 8)),
        (lambda w: w.contiguous(), (6, 8)),
        (lambda w: w.narrow(1, 4, 4).contiguous(), (6, 4)),
        (lambda w: w.clone().detach(), (6, 8)),
        (lambda w: w.to("cpu").t().contiguous(), (8, 6)),
    ],
)
def test_views_of_a_tensor_keep_their_place(view, shape):
    for bucket_bytes in (32, 40, 96, 4096):
        agrees(into(view), numbered(w=(6, 8)), bucket_bytes, w=shape)


def test_fused_experts_are_cut_and_merged():
    """One tensor for all experts, transposed and split on its way, with a row as large as one."""

    def load(model, name, tensor):
        if name == "down":
            model.w2.data.copy_(tensor.transpose(-1, -2))
        else:
            for i, half in enumerate(tensor.transpose(-1, -2).chunk(2, dim=1)):
                model.w13.data[:, i * 6 : (i + 1) * 6].copy_(half)

    checkpoint = numbered(gate_up=(3, 4, 12), down=(3, 6, 4))
    for bucket_bytes in (192, 400, 4096):
        agrees(load, checkpoint, bucket_bytes, w13=(3, 12, 4), w2=(3, 4, 6))


def test_neighbours_become_one_copy():
    def load(model, name, tensor):
        kind, expert = name.split(".")
        first = {"gate": 0, "up": 4}[kind]
        model.w13.data[int(expert)].narrow(0, first, 4).copy_(tensor)

    names = [f"{kind}.{expert}" for expert in range(16) for kind in ("gate", "up")]
    checkpoint = numbered(**dict.fromkeys(names, (4, 8)))
    plan, num_copies = agrees(load, checkpoint, 2**20, w13=(16, 8, 8))
    assert (len(plan.copies), num_copies) == (32, 1)
    backwards = dict(reversed(checkpoint.items()))
    assert agrees(load, backwards, 2**20, w13=(16, 8, 8))[1] == 32


def test_another_dtype_is_converted_on_the_way():
    model = Model(into(lambda w: w), w=(6, 8), v=(3,))
    metadata = [ParamMeta("v", torch.float32, (3,)), ParamMeta("w", torch.bfloat16, (6, 8))]
    checkpoint = make_checkpoint(metadata)
    push(record_load_plan(model, metadata), checkpoint, 40)
    assert torch.equal(model.w, checkpoint["w"].float())
    assert torch.equal(model.v, checkpoint["v"])


def test_padding_stays_and_can_be_written():
    def load(model, name, tensor):
        model.w[: len(tensor)].data.copy_(tensor)
        model.w[len(tensor) :].data.fill_(7)

    plan, _ = agrees(lambda *args: load(*args), numbered(w=(5, 2)), w=(5, 2))
    assert not plan.fills
    model = Model(load, w=(8, 2))
    plan = record_load_plan(model, metadata_of(numbered(w=(5, 2))))
    push(plan, numbered(w=(5, 2)))
    assert (model.w[5:] == 0).all()
    plan.fill_constants()
    assert (model.w[5:] == 7).all()


def test_assignment_is_a_copy_or_a_constant():
    def load(model, name, tensor):
        if name == "scale":
            model.scales.data[1] = tensor
            model.scales.data[:1] = 0
        else:
            model.w.data[:5] = tensor
            model.w.data[5:] = 0

    plan, _ = agrees(load, numbered(w=(5, 2), scale=()), w=(8, 2), scales=(2,))
    assert [fill.target.numel() for fill in plan.fills] == [6, 1]


def test_one_value_may_fill_a_slice():
    checkpoint = numbered(w=(1,), v=(2, 1))
    agrees(into(lambda w: w), checkpoint, w=(4,), v=(2, 3))


def test_recording_works_in_inference_mode():
    model = Model(into(lambda w: w.to(torch.float32).reshape(8, 6).contiguous()), w=(8, 6))
    with torch.inference_mode():
        plan = record_load_plan(model, metadata_of(numbered(w=(6, 8))))
    push(plan, numbered(w=(6, 8)))
    assert torch.equal(model.w.flatten(), numbered(w=(48,))["w"])


def test_neighbours_in_a_bucket_are_merged_within_one_parameter_only():
    """What is next in the bucket has the next offset, in another parameter."""
    places = {"a": ("v", 0), "b": ("w", 4), "c": ("w", 0), "d": ("v", 4)}

    def load(model, name, tensor):
        parameter, start = places[name]
        getattr(model, parameter).data[start : start + 4].copy_(tensor)

    checkpoint = numbered(a=(4,), b=(4,), c=(4,), d=(4,))
    _, num_copies = agrees(load, checkpoint, 4096, v=(8,), w=(8,))
    assert num_copies == 4


def test_neighbours_of_different_dtypes_are_not_merged():
    def load(model, name, tensor):
        start = {"narrow": 0, "wide": 4}[name]
        model.w.data[start : start + 4].copy_(tensor)

    metas = [ParamMeta("narrow", torch.bfloat16, (4,)), ParamMeta("wide", torch.float32, (4,))]
    _, num_copies = agrees(load, make_checkpoint(metas), 4096, w=(8,))
    assert num_copies == 2


def test_constants_may_come_before_a_copy_but_not_after():
    def before(model, name, tensor):
        model.w.data.zero_()
        model.w.data[:5].copy_(tensor)

    def after(model, name, tensor):
        model.w.data[:5].copy_(tensor)
        model.w.data[4:].zero_()

    agrees(before, numbered(w=(5, 2)), w=(8, 2))
    with pytest.raises(PlanNotPossibleError, match=r"w \(2 elements written twice\)"):
        record_load_plan(Model(after, w=(8, 2)), metadata_of(numbered(w=(5, 2))))


def test_tensors_that_go_nowhere_are_listed():
    def load(model, name, tensor):
        if name == "w":
            model.w.data.copy_(tensor)

    checkpoint = numbered(other=(3,), w=(2,))
    plan, _ = agrees(load, checkpoint, w=(2,))
    assert skipped(plan, checkpoint) == ["other"]


def test_a_plan_can_load_into_spare_memory():
    spare = {}

    def place(target):
        flat = spare.setdefault(target.data_ptr(), torch.full((16,), -1.0))
        return flat.as_strided(target.shape, target.stride(), target.storage_offset())

    checkpoint = numbered(w=(4, 4))
    model = Model(into(lambda w: w.t()), w=(4, 4))
    plan = record_load_plan(model, metadata_of(checkpoint))
    push(plan.redirected(place), checkpoint)
    assert not model.w.any()
    assert torch.equal(next(iter(spare.values())).view(4, 4), checkpoint["w"].t())


def doubled(model, name, tensor):
    model.w.data.copy_(tensor)
    model.w.data.mul_(2)


def replaced(model, name, tensor):
    model.w = nn.Parameter(torch.ones(4, 4))


def exchanged(model, name, tensor):
    model.w.data = torch.ones(4, 4)


def kept(model, name, tensor):
    model.w.data.copy_(tensor)
    model.scale = tensor


def elsewhere(model, name, tensor):
    torch.zeros(4, 4).copy_(tensor)


def composed(model, name, tensor):
    model.w.data.copy_(tensor)
    model.w.data.copy_(-torch.exp(model.w))


def branching(model, name, tensor):
    if tensor.sum() > 0:
        model.w.data.copy_(tensor)


def refusing(model, name, tensor):
    raise KeyError("no such layer")


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (into(lambda w: w.double()), "w is written from aten._to_copy.default of w"),
        (into(lambda w: 1 + w), "w is written from aten.add.Tensor of w"),
        (into(lambda w: -w), "aten.neg.default of w"),
        (into(lambda w: torch.cat([w[2:], w[:2]])), "aten.cat.default of w"),
        (into(lambda w: w.float().abs().t()), "aten.abs.default of w"),
        (into(lambda w: w.view(torch.int32)), "w is written from w"),
        (into(lambda w: w.mul_(2)), "w is changed in place by aten.mul_"),
        (into(lambda w: torch.ones(4, 4)), "a tensor that is not of the checkpoint while w loads"),
        (into(lambda w: w[0, 0].item()), "a value of w is read"),
        (into(lambda w: w.as_strided((4, 4), (1, 4))), "w is viewed by aten.as_strided"),
        (into(lambda w: w[torch.tensor([1, 0, 2, 3])]), "aten.index.Tensor of w"),
        (branching, "a value of aten.gt.Scalar of aten.sum.default of w is read"),
        (composed, "w is written from a tensor that is not of the checkpoint"),
        (doubled, "w is changed in place by aten.mul_"),
        (elsewhere, "a tensor outside of the model is written from w"),
        (replaced, "the loader replaces w"),
        (exchanged, "the loader replaces w"),
        (kept, "the loader replaces scale"),
        (refusing, "the loader failed at w: KeyError: 'no such layer'"),
        (lambda *_: None, r"w \(16 of 16 elements missing\)"),
        (lambda model, _, tensor: model.w.data[1:].copy_(tensor[1:]), r"w \(4 of 16 elements"),
        (
            lambda model, _, tensor: [model.w.data.copy_(tensor), model.w.data[0].copy_(tensor[0])],
            r"w \(4 elements written twice\)",
        ),
        (
            lambda model, _, tensor: [
                model.w.data[:, :3].copy_(tensor[:, :3]),
                model.w.data[1:, 2:].copy_(tensor[1:, 2:]),
            ],
            r"w \(1 of 16 elements missing\), w \(3 elements written twice\)",
        ),
    ],
)
def test_what_no_plan_can_hold_is_refused_by_name(load, message):
    model = Model(load, w=(4, 4))
    parameter, memory = model.w, model.w.data_ptr()
    with pytest.raises(PlanNotPossibleError, match=message) as caught:
        record_load_plan(model, [ParamMeta("w", torch.float32, (4, 4))])
    assert model.w is parameter
    assert model.w.data_ptr() == memory
    assert not model.w.any()
    assert "scale" not in model.__dict__
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_five_culprits_are_named_and_the_others_counted():
    shapes = {f"w{i}": (2,) for i in range(8)}
    with pytest.raises(PlanNotPossibleError, match=r"w4 \(2 of 2 elements missing\) and 3 more$"):
        record_load_plan(Model(lambda *_: None, **shapes), [])


def test_tied_parameters_are_written_once():
    def tied(load):
        model = Model(load, embedding=(4, 2))
        model.head = nn.Parameter(model.embedding.data)
        return model

    metadata = [ParamMeta(name, torch.float32, (4, 2)) for name in ("embedding", "head")]
    plan = record_load_plan(tied(into(lambda w: w)), metadata[:1])
    assert len(plan.copies) == 1
    with pytest.raises(PlanNotPossibleError, match=r"embedding \(8 elements written twice\)"):
        record_load_plan(tied(into(lambda w: w)), metadata)


def test_parameters_in_one_storage_are_compared_with_what_is_near_them(monkeypatch):
    """As in an arena; with all writes for each parameter, a model of many would take minutes."""
    shapes = {f"p{index}": (4, 3) for index in range(50)}
    model, looked = Model(into(lambda w: w), **shapes), []
    storage = torch.zeros(len(shapes), 4, 3)
    for parameter, place in zip(model.parameters(), storage, strict=True):
        parameter.data = place
    bounds = plans._bounds
    monkeypatch.setattr(plans, "_bounds", lambda tensor: looked.append(tensor) or bounds(tensor))
    metadata = [ParamMeta(*item) for item in with_dtype(shapes)]
    assert len(record_load_plan(model, metadata).copies) == len(shapes)
    assert len(looked) == 2 * len(shapes)
    with pytest.raises(PlanNotPossibleError, match=r"once: p7 \(12 of 12 elements missing\)$"):
        record_load_plan(model, [one for one in metadata if one.name != "p7"])


def test_a_name_given_twice_is_refused():
    meta = ParamMeta("w", torch.float32, (4, 4))
    with pytest.raises(ValueError, match="name each tensor once"):
        record_load_plan(Model(into(lambda w: w), w=(4, 4)), [meta, meta])


@pytest.fixture(scope="module")
def vllm_process(tmp_path_factory):
    """vLLM in this process, as a group of one."""
    pytest.importorskip("vllm")
    with single_process_group(tmp_path_factory.mktemp("group")):
        yield
    gc.collect()


def checkpoint_of(models):
    from torchrl_vllm_sync.engine.plan import checkpoint_metadata

    return make_checkpoint(checkpoint_metadata(models.model_config))


def recorded(models, checkpoint):
    """A model that vLLM loaded with other values, its plan, and one with the expected values."""
    model, expected = models.build(fill=5.0), models.build(fill=-2.0)
    models.load(model, {name: -tensor for name, tensor in checkpoint.items()})
    models.load(expected, checkpoint)
    with models.active():
        plan = record_load_plan(model, metadata_of(checkpoint))
    return model, plan, expected


RANKS = pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])


@RANKS
@pytest.mark.parametrize("name", CONFIGS)
def test_plan_loads_what_vllm_loads(name, rank, size, vllm_process, tmp_path):
    models = VllmModels(tmp_path, name, rank, size)
    checkpoint = checkpoint_of(models)
    model, plan, expected = recorded(models, checkpoint)
    assert skipped(plan, checkpoint) == []
    push(plan, checkpoint)
    assert_equal(model, expected)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_expert_parallel_ranks_skip_the_experts_of_others(name, rank, vllm_process, tmp_path):
    models = VllmModels(tmp_path, name, rank, 2, expert_parallel=True)
    checkpoint = checkpoint_of(models)
    model, plan, expected = recorded(models, checkpoint)
    theirs = range(2, 4) if rank == 0 else range(2)
    assert skipped(plan, checkpoint) == sorted(
        name
        for name in checkpoint
        if (found := re.search(r"experts\.(\d+)\.", name)) and int(found[1]) in theirs
    )
    push(plan, checkpoint)
    assert_equal(model, expected)


@RANKS
def test_bucket_size_does_not_matter(rank, size, vllm_process, tmp_path):
    models = VllmModels(tmp_path, "qwen3-moe", rank, size)
    checkpoint = checkpoint_of(models)
    model, plan, expected = recorded(models, checkpoint)
    largest_row = max(t.nbytes // t.shape[0] for t in checkpoint.values())
    for bucket_bytes in [largest_row, largest_row + 4, 300, 1000, 2**14, 2**22]:
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.zero_()
        push(plan, checkpoint, bucket_bytes)
        assert_equal(model, expected)


def test_in_storage_order_each_parameter_is_one_copy(vllm_process, tmp_path):
    models = VllmModels(tmp_path, "qwen3-moe", num_experts=16)
    checkpoint = checkpoint_of(models)
    model, plan, expected = recorded(models, checkpoint)
    assert len(plan.copies) == len(checkpoint) > 96
    targets = {one.name: one.target for one in reversed(plan.copies)}
    places = {
        name: (one.untyped_storage().data_ptr(), one.storage_offset())
        for name, one in targets.items()
    }
    in_order = {name: checkpoint[name] for name in sorted(places, key=places.__getitem__)}
    assert len(in_order) == len(checkpoint)
    assert push(plan, in_order, 2**22) == len(list(model.parameters()))
    assert_equal(model, expected)


def test_recording_changes_nothing(vllm_process, tmp_path):
    def state(model):
        return [
            (name, id(tensor), tensor.data_ptr(), tensor.shape, tensor.clone())
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        ], [sorted(module.__dict__) for module in model.modules()]

    models = VllmModels(tmp_path, "qwen3-moe")
    model = models.build(fill=3.0)
    before, attributes = state(model)
    with models.active():
        first = record_load_plan(model, metadata_of(checkpoint_of(models)))
        second = record_load_plan(model, metadata_of(checkpoint_of(models)))
    after, attributes_after = state(model)
    assert attributes == attributes_after
    for (*one, values), (*other, values_after) in zip(before, after, strict=True):
        assert one == other
        assert torch.equal(values, values_after)
    assert [(c.name, c.offset, c.shape, c.stride) for c in first.copies] == [
        (c.name, c.offset, c.shape, c.stride) for c in second.copies
    ]


def test_a_tensor_that_is_missing_is_named(vllm_process, tmp_path):
    models = VllmModels(tmp_path, "qwen3")
    checkpoint = checkpoint_of(models)
    del checkpoint["model.layers.1.self_attn.k_proj.weight"]
    with (
        models.active(),
        pytest.raises(PlanNotPossibleError, match=r"qkv_proj\.weight \(512 of 2048 elements miss"),
    ):
        record_load_plan(models.build(), metadata_of(checkpoint))


def test_the_comparison_notices_a_lost_copy(vllm_process, tmp_path):
    models = VllmModels(tmp_path, "qwen3")
    checkpoint = checkpoint_of(models)
    model, plan, expected = recorded(models, checkpoint)
    lost = "model.layers.0.mlp.up_proj.weight"
    kept_copies = [copy for copy in plan.copies if copy.name != lost]
    push(LoadPlan(metadata_of(checkpoint), kept_copies), checkpoint)
    with pytest.raises(AssertionError, match=r"layers\.0\.mlp\.gate_up_proj\.weight differs"):
        assert_equal(model, expected)
