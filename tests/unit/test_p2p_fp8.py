"""Writes into vLLM's models of fp8 without a GPU: bit by bit what its own quantisation makes."""

import contextlib
from dataclasses import replace
from multiprocessing import connection
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.engine import BareUpdates
from tests.fakes.weights import OneRoom, mapped_memory, send
from tests.unit import test_broadcast_receiver as broadcast
from tests.unit import test_p2p_shards
from tests.unit.test_audit import quantise
from tests.unit.test_p2p import CPU, Replica
from tests.unit.test_sharded_source import succeed
from tests.unit.vllm_models import VllmModels, single_process_group
from torchrl_vllm_sync import P2PTransport
from torchrl_vllm_sync.engine import receiver
from torchrl_vllm_sync.engine.args import SHARED_BACKEND, STAGED_BACKEND
from torchrl_vllm_sync.engine.arrivals import Arrivals
from torchrl_vllm_sync.engine.plan import checkpoint_metadata, reload_model
from torchrl_vllm_sync.engine.worker import SyncWorkerExtension
from torchrl_vllm_sync.weights.module import ModuleSource, fp8_scale, to_fp8
from torchrl_vllm_sync.weights.p2p import writes
from torchrl_vllm_sync.weights.source import MappingSource, fit_to_model

# The greatest value of each layer and row, in the part of the last worker.
GREATEST = 7.25


@pytest.fixture(scope="module", autouse=True)
def distributed(tmp_path_factory):
    with single_process_group(tmp_path_factory.mktemp("group")):
        yield


class InTurn(BareUpdates):
    """Calls workers one after the other, as the rank that each is."""

    async def call_workers(self, method, *args, timeout_s, what=""):
        del timeout_s, what
        found = []
        for worker in self.workers:
            with worker.models.active(), torch.no_grad():
                found.append(getattr(worker, method)(*args))
        return found


class World:
    """One replica, whose workers have quantised a checkpoint as it arrived."""

    def __init__(
        self, directory, monkeypatch, size, *, backend=STAGED_BACKEND, whole=True, how="fp8"
    ):
        from vllm import _custom_ops
        from vllm.model_executor.kernels.linear.scaled_mm import cpu
        from vllm.model_executor.layers.quantization.online import fp8

        monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", quantise)
        kernel = cpu.CPUFp8PerTensorScaledMMLinearKernel  # which packs weights
        monkeypatch.setattr(kernel, "process_weights_after_loading", lambda *_: None)
        if how == "fp8_per_channel":  # of which there is none for CPUs
            linear = SimpleNamespace(process_weights_after_loading=lambda _: None)
            monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: linear)
            monkeypatch.setattr(fp8, "expose_input_quant_key", lambda *_: None)
        monkeypatch.setattr(receiver, "current_platform", SimpleNamespace(is_cpu=lambda: False))
        # There is no group of workers to take the greatest of.
        self.greatest, self.whole = GREATEST, whole
        monkeypatch.setattr(receiver, "SCALES_ARE_OF_ALL_WORKERS", whole)
        monkeypatch.setattr(fp8, "amax_for_tp_weight_quant", self.of_all)
        monkeypatch.setattr(receiver, "reload_model", self.reload)
        self.models = [
            VllmModels(directory, "qwen2-tied", rank, size, quantization=how)
            for rank in range(size)
        ]
        self.metadata = checkpoint_metadata(self.models[0].model_config)
        self.loaded = [self.load(models, self.checkpoint(0)) for models in self.models]
        self.workers = []
        for models, model in zip(self.models, self.loaded, strict=True):
            config = SimpleNamespace(backend=backend)
            with models.active():
                made = receiver.BroadcastReceiver(config, models.vllm_config, CPU, model)
            made.parallel_config = SimpleNamespace(
                data_parallel_index=0, world_size=size, rank=models.rank
            )
            worker = SyncWorkerExtension()
            worker.execute_model, worker.models = None, models
            worker.weight_transfer_engine, worker.vllm_config = made, models.vllm_config
            self.workers.append(worker)
        replica = Replica("0", self.workers)
        replica.loads = Arrivals(InTurn(self.workers), list)
        self.client = broadcast.Client([replica])

    def of_all(self, amax, is_sharded):
        return torch.full_like(amax, self.greatest) if is_sharded and self.whole else amax

    def checkpoint(self, seed, scale=1.0):
        generator, found = torch.Generator().manual_seed(seed), {}
        for meta in self.metadata:
            one = torch.randn(meta.shape, generator=generator).clamp(-4, 4)
            if one.dim() == 2:
                one[:, -1] = GREATEST  # of each row, too
            found[meta.name] = (one * scale).to(meta.dtype)
        return found

    def load(self, models, checkpoint):
        from vllm.model_executor.model_loader import reload
        from vllm.utils.torch_utils import set_default_torch_dtype

        with set_default_torch_dtype(torch.bfloat16):
            model = models.build(fill=-1.0)
            reload.record_metadata_for_reloading(model)
            models.load(model, checkpoint)
            reload.finalize_layerwise_processing(model, models.model_config)
        return model

    def reload(self, model, vllm_config, weights):
        self.greatest, before = 448.0, self.greatest  # of what a reload of fp8's values is given
        reload_model(model, vllm_config, weights)
        self.greatest = before

    def push(self, transport, checkpoint, version):
        return broadcast.only(send(transport, self.client, MappingSource(checkpoint), version))

    def differences(self, checkpoint):
        """Names of parameters that are not, bit by bit, what vLLM's loading makes."""
        found = set()
        for models, model in zip(self.models, self.loaded, strict=True):
            wanted = dict(self.load(models, checkpoint).named_parameters())
            for name, one in model.named_parameters():
                bits = [
                    each.detach().contiguous().view(torch.uint8) for each in (one, wanted[name])
                ]
                if not torch.equal(*bits):
                    found.add(name)
        return found


@pytest.fixture
def world(tmp_path, monkeypatch):
    return lambda *args, **options: World(tmp_path, monkeypatch, *args, **options)


@pytest.fixture
def transport():
    with contextlib.closing(P2PTransport()) as made:
        yield made


@pytest.mark.parametrize("how", ["fp8", "fp8_per_channel"])
@pytest.mark.parametrize(("size", "whole"), [(1, True), (2, True), (2, False)])
def test_what_is_written_is_what_vllm_would_make_of_it(world, transport, size, whole, how):
    here = world(size, whole=whole, how=how)
    for version in (1, 2, 3):  # two memories take turns
        here.greatest = GREATEST * version
        checkpoint = here.checkpoint(seed=version, scale=version)
        one = here.push(transport, checkpoint, version)
        assert (one.error, one.version, one.path, one.path_reason) == ("", version, "plan", "")
        assert here.differences(checkpoint) == set()
        here.greatest = GREATEST
        other = here.differences(here.checkpoint(seed=version))
        assert ("model.layers.0.mlp.down_proj.weight_scale" in other) == (version > 1)


@pytest.mark.parametrize("how", ["fp8", "fp8_per_channel"])
def test_scales_of_parts_are_not_those_of_whole_layers(world, transport, monkeypatch, how):
    here = world(2, whole=True, how=how)
    monkeypatch.setattr(receiver, "SCALES_ARE_OF_ALL_WORKERS", False)
    checkpoint = here.checkpoint(seed=1)
    assert here.push(transport, checkpoint, 1).version == 1
    wrong = here.differences(checkpoint)
    assert "model.layers.0.mlp.down_proj.weight_scale" in wrong
    assert not any("norm" in name for name in wrong)  # all else has arrived


def test_tensors_may_become_strided_between_pushes(world, transport):
    here = world(1)
    name = "model.layers.0.self_attn.k_proj.weight"
    for version, strided in enumerate([False, True, False], 1):
        checkpoint = here.checkpoint(seed=version)
        sent = {**checkpoint}
        if strided:
            sent[name] = checkpoint[name].t().contiguous().t()
        assert here.push(transport, sent, version).version == version
        assert here.differences(checkpoint) == set()


def test_rows_of_next_to_nothing_are_no_fault(world, transport):
    """The scale of a row is not less than a limit, so that its values do not reach to fp8's end."""
    here = world(1, how="fp8_per_channel")
    checkpoint = here.checkpoint(seed=1)
    for one in checkpoint.values():
        if one.dim() == 2:
            one[0], one[1] = 0, one[1] * 1e-5
    one = here.push(transport, checkpoint, 1)
    assert (one.error, one.path) == ("", "plan")
    assert here.differences(checkpoint) == set()


def test_parts_that_do_not_stay_until_the_last_one_comes_are_kept(world, transport):
    here = world(1)
    checkpoint = here.checkpoint(seed=1)
    one = broadcast.only(send(transport, here.client, OneRoom(checkpoint), 1))
    assert one.error == ""
    assert here.differences(checkpoint) == set()


def places(names, *plain):
    """Where matrices of 64 by 64 go: quantised, each alone, and some of them also as they are."""
    shape = [64, 64], [64, 1]
    fp8 = "float8_e4m3fn", "bfloat16"
    rows = [
        [one, 0, *shape, fp8[0], 4096 * at, [64, 1], 2**17 + 512 * at, [1], fp8[1], True]
        for at, one in enumerate(names)
    ]
    rows += [
        [one, 0, *shape, "bfloat16", 2**18 + 8192 * at, [64, 1]] for at, one in enumerate(plain)
    ]
    return writes.Places(rows, mapped_memory(2**19))


@pytest.mark.parametrize("kind", [list, iter, tuple])
def test_a_tensor_may_be_written_as_it_is_besides(kind):
    where, tensor = places(["one"], "one"), torch.randn(64, 64).bfloat16()
    writes.write(kind([("one", tensor)]), [where], CPU)
    (copy,) = where.copies["one"]
    assert torch.equal(copy.target, tensor)
    (group,) = where._groups.values()
    assert torch.equal(group.scale, fp8_scale(tensor.abs().max().reshape(1)))


@pytest.fixture
def joined():
    """Where two matrices go that are quantised together."""
    rows = [
        ["two", 0, [64, 64], [64, 1], "float8_e4m3fn", 4096, [64, 1], 2**17, [1], "bfloat16", True]
    ]
    rows += [["one", *rows[0][1:5], 0, *rows[0][6:]]]
    return writes.Places(rows, mapped_memory(2**18))


def breaks_off():
    yield "one", torch.full((64, 64), 8.0)
    raise RuntimeError("the trainer failed")


def test_a_part_that_never_came_of_a_push_before_is_not_mixed_in(joined):
    with pytest.raises(RuntimeError, match="the trainer failed"):
        writes.write(breaks_off(), [joined], CPU)
    tensors = {name: torch.randn(64, 64).bfloat16() for name in ("two", "one")}
    writes.write(iter(tensors.items()), [joined], CPU)
    greatest = torch.stack([one.abs().max() for one in tensors.values()]).max()
    (group,) = joined._groups.values()
    assert torch.equal(group.scale, fp8_scale(greatest.reshape(1)))
    for copy in group.copies:
        expected = to_fp8(tensors[copy.name], group.scale)
        assert torch.equal(copy.target.view(torch.uint8), expected.view(torch.uint8))


def test_what_came_of_a_push_that_broke_off_is_let_go(joined):
    with pytest.raises(RuntimeError, match="the trainer failed"):
        writes.write(breaks_off(), [joined], CPU)
    (group,) = joined._groups.values()
    assert group.arrived
    joined.let_go()
    assert not group.arrived


class Alive(TorchDispatchMode):
    """How many matrices in bfloat16 are there at once, at most."""

    def __init__(self):
        super().__init__()
        self._seen, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and (out.dtype, out.numel()) == (torch.bfloat16, 4096):
            storage = out.untyped_storage()
            self._seen[storage._cdata] = StorageWeakRef(storage)
            self.most = max(self.most, sum(not one.expired() for one in self._seen.values()))
        return out


def test_a_trainer_in_another_dtype_does_not_cast_all_of_its_model_at_once():
    names = [str(number) for number in range(8)]
    tensors = [(one, torch.randn(64, 64)) for one in names]
    with Alive() as alive:
        writes.write(tensors, [places(names)], CPU)
    assert 0 < alive.most <= 2


def test_a_plan_that_loses_a_part_is_noticed_and_not_served(world, transport):
    here = world(1)
    made = here.workers[0].weight_transfer_engine
    made.plan_writes(here.metadata)
    for plan in (made._writes.live, made._writes.spare):
        one, other = (at for at, copy in enumerate(plan.copies) if "input_layernorm" in copy.name)
        plan.copies[one] = plan.copies[other]
    one = here.push(transport, here.checkpoint(seed=1), 1)
    assert one.version is None
    assert "the plan left other values than a reload" in one.error


def test_a_plan_that_exchanges_parts_is_noticed_and_not_served(world, transport):
    """All is written, so that nothing but the comparison shows it."""
    here = world(1)
    made = here.workers[0].weight_transfer_engine
    made.plan_writes(here.metadata)
    for plan in (made._writes.live, made._writes.spare):
        found = [at for at, copy in enumerate(plan.copies) if "layers.0.mlp.gate" in copy.name]
        found += [at for at, copy in enumerate(plan.copies) if "layers.0.mlp.up" in copy.name]
        gate, up = (plan.copies[at] for at in found)
        for at, copy, other in zip(found, (gate, up), (up, gate), strict=True):
            plan.copies[at] = replace(copy, target=other.target)
    one = here.push(transport, here.checkpoint(seed=1), 1)
    assert one.version is None
    assert "in 1 parameters: model.layers.0.mlp.gate_up_proj.weight" in one.error


class Engines(test_p2p_shards.Engines):
    """A world that the first rank of a trainer reaches."""

    def __init__(self, world, directory):
        self.world, self.names, self.client = world, ["0"], world.client
        self.config, self.metadata = world.models[0].config, world.metadata
        self._listener = connection.Listener(str(directory / "engines"), "AF_UNIX")


@pytest.mark.timeout(60)
def test_of_a_sharded_trainer_what_is_quantised_is_gathered_and_nothing_else(world, tmp_path):
    here = Engines(world(1), tmp_path)
    _, how, _ = test_p2p_shards.job("qwen2-tied")
    with here.reached() as at:
        ranks = succeed(test_p2p_shards.train_and_push, world_size=2, limit_s=50.0, **at, **how)
    pushed = fit_to_model(ModuleSource(test_p2p_shards.whole_model(here.config, 3)), here.metadata)
    checkpoint = {name: one.to(torch.bfloat16) for name, one in pushed}
    assert here.world.differences(checkpoint) == set()
    assert here.world.differences({name: -one for name, one in checkpoint.items()})
    num_layers = here.config.num_hidden_layers
    assert [gathered for gathered, *_ in ranks] == [3 * num_layers] * 2
    assert all(written for _, written, _ in ranks)


def test_what_is_quantised_otherwise_says_so(world, transport):
    here = world(1)
    made = here.workers[0].weight_transfer_engine
    assert made.why_not_written() == ""
    layer = here.loaded[0].get_submodule("model.layers.0.self_attn.qkv_proj")
    layer.weight_scale.data = layer.weight_scale.data.repeat(2)  # such as one a shard
    assert "qkv_proj.weight has more than one scale" in made.why_not_written()
    one = here.push(transport, here.checkpoint(seed=1), 1)
    assert "qkv_proj.weight has more than one scale" in one.error


def test_weights_that_kernels_pack_are_not_written(world):
    """As Marlin's do: four of fp8 in each integer."""
    here = world(1)
    for layer in here.loaded[0].modules():
        if getattr(layer, "weight_scale", None) is not None:
            packed = torch.zeros(2, 8, dtype=torch.int32)
            layer._parameters["weight"] = torch.nn.Parameter(packed, requires_grad=False)
    made = here.workers[0].weight_transfer_engine
    assert "none of its weights is held in fp8" in made.why_not_written()


def test_weights_that_are_quantised_are_not_shared(world):
    made = world(1, backend=SHARED_BACKEND).workers[0].weight_transfer_engine
    assert "a trainer has no use of its weights' memory" in made.why_not_written()


def test_zeros_become_what_the_kernel_makes_of_them():
    scale = fp8_scale(torch.zeros(1))
    assert to_fp8(torch.zeros(2, 2), scale).float().tolist() == [[448.0, 448.0]] * 2
    assert scale.tolist() == [0.0]
