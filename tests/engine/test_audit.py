"""What engines compute with is compared with what the trainer holds; planted faults are named."""

import sys

import cloudpickle
import peft
import pytest
import ray
import torch

from tests.engine.checks import TOLERANCE, assert_holds, distance, perturbed
from tests.engine.trainers import broadcast
from torchrl_vllm_sync import MemmapTransport, P2PTransport, ReplicaState, errors
from torchrl_vllm_sync.testing import load_tiny_model

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
HEAD = "lm_head.weight"
DOWN, QKV = "model.layers.2.mlp.down_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"


@pytest.fixture
def model(plain, checkpoint):
    """What both replicas hold."""
    model = load_tiny_model(checkpoint)
    plain.push_weights(model, transport=MemmapTransport())
    return model


def change(service, index, name, how, rank=None):
    args = {"name": name, "how": cloudpickle.dumps(how), "rank": rank}
    ray.get(service.actors[index].collective_rpc.remote("sync_change", kwargs=args))


def found(service, weights):
    with pytest.raises(errors.WeightAuditError) as caught:
        service.audit(weights)
    return caught.value.differences


@pytest.mark.parametrize("make", [MemmapTransport, broadcast, P2PTransport])
def test_nothing_is_found_where_nothing_is_wrong(plain, model, make):
    for seed in range(5):
        report = plain.push_weights(perturbed(model, seed=seed), transport=make(), audit=True)
        assert report.phases["audit_s"] > 0
        audited = plain.audit(model)
        assert audited.versions == {"0": report.version, "1": report.version}
        assert (audited.num_tensors, audited.num_bytes) == (50, report.num_bytes)


def test_workers_are_audited_while_they_have_an_engine_of_vllms(plain, model):
    """As they have after a push by ``ipc``, which needs a GPU."""
    plain.use_transfer_engine("nccl")
    plain.push_weights(perturbed(model, seed=1), audit=True)
    change(plain, 1, DOWN, lambda one, _: one.mul_(2))
    (difference,) = found(plain, model)
    assert (difference.replica_id, difference.name) == ("1", DOWN)
    plain.use_transfer_engine()
    plain.push_weights(model, audit=True, transport=broadcast())


def test_other_dtypes_and_forms_are_compared_as_a_load_takes_them(plain, model):
    tensors = {name: one.double() for name, one in model.state_dict().items()}
    turned = {n: one.t().contiguous().t() if one.ndim == 2 else one for n, one in tensors.items()}
    plain.audit(turned)
    plain.audit(iter(model.state_dict().items()))
    tensors[DOWN][3, 5] += 1e-12  # nothing in the engines' dtype
    plain.audit(tensors)


def one_bit(tensor, _):
    tensor.view(-1).view(torch.uint8)[4] ^= 1


def swap(tensor, tensors):
    other = tensors[DOWN.replace("2", "3", 1)].data
    kept = tensor.clone()
    tensor.copy_(other)
    other.copy_(kept)


FAULTS = {
    "one bit": (DOWN, one_bit, {DOWN}),
    "scaled": (DOWN, lambda one, _: one.mul_(1.001), {DOWN}),
    "swapped": (DOWN, swap, {DOWN, DOWN.replace("2", "3", 1)}),
    "left out": (DOWN, lambda one, _: one.zero_(), {DOWN}),
    # One fused parameter: rows of its middle are the keys'.
    "wrong slice": (QKV, lambda one, _: one[64:96].copy_(one[96:128]), {QKV.replace("qkv", "k")}),
    "bias": (QKV.replace("weight", "bias"), lambda one, _: one.add_(1), None),
    "embedding": ("model.embed_tokens.weight", lambda one, _: one[-1].add_(1), None),
    "norm": ("model.norm.weight", lambda one, _: one[:1].mul_(1 + 2e-7), None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(plain, model, fault):
    name, how, expected = FAULTS[fault]
    change(plain, 1, name, how)
    differences = found(plain, model)
    assert {(one.replica_id, one.rank) for one in differences} == {("1", 0)}
    if expected:
        assert {one.name for one in differences} == expected
    assert differences[0].num_different > 0
    assert differences[0].largest > 0
    assert [one.largest for one in differences[1:]] == [None] * (len(differences) - 1)
    plain.push_weights(model)  # which repairs it
    plain.audit(model)


def test_how_much_differs_is_exact(plain, model):
    change(plain, 0, DOWN, lambda one, _: one[2:4, 5].add_(torch.tensor([0.5, -3.0])))
    (one,) = found(plain, model)
    assert (one.name, one.replica_id, one.rank, one.num_different) == (DOWN, "0", 0, 2)
    assert one.largest == pytest.approx(3.0)
    assert str(one) == f"{DOWN} on worker 0 of replica 0 (2 elements differ, by up to 3)"
    change(plain, 0, DOWN, lambda one, _: one[2, 5].fill_(torch.nan))
    (one,) = found(plain, model)
    assert str(one.largest) == "nan"


def test_equal_numbers_of_other_bits_differ_by_nothing(plain, model):
    with torch.no_grad():
        model.get_parameter(DOWN).view(-1)[:2] = 0.0
    plain.push_weights(model)
    change(plain, 0, DOWN, lambda one, _: one.view(-1)[1].fill_(-0.0))
    (one,) = found(plain, model)
    assert (one.num_different, one.largest) == (1, 0.0)


def test_weights_of_another_run_differ_in_every_tensor(plain, model, other_checkpoint):
    differences = found(plain, load_tiny_model(other_checkpoint))
    assert len({one.name for one in differences}) > 40
    assert {one.replica_id for one in differences} == {"0", "1"}


def test_an_adapter_that_was_not_merged_is_named(plain, checkpoint):
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(load_tiny_model(checkpoint), config).eval()
    plain.push_weights(adapted, audit=True)
    plain.audit(adapted)
    plain.push_weights(load_tiny_model(checkpoint))
    names = {one.name for one in found(plain, adapted)}
    assert {name.split(".")[-2] for name in names} == {"q_proj", "down_proj"}
    assert len(names) == 8


def test_weights_that_were_asleep_are_compared_once_they_are_there_again(plain, model):
    plain.sleep(level=2)
    plain.wake_up(["weights"])
    with pytest.raises(errors.TransferError, match="no whole version"):
        plain.audit(model)
    plain.push_weights(model, audit=True)
    plain.wake_up(["kv_cache"])
    plain.audit(model)


def lose(service, index, name):
    ray.get(service.actors[index].collective_rpc.remote("sync_plan", kwargs={"zero": name}))


def test_a_replica_that_got_other_weights_is_left_behind(plain, model):
    lose(plain, 1, DOWN)
    with pytest.raises(errors.WeightSyncError, match=f"replica 1: .*{DOWN}") as caught:
        plain.push_weights(perturbed(model, seed=1), audit=True)
    version = caught.value.version
    assert set(caught.value.failures) == {"1"}
    states = [one.state for one in plain.replicas.call_replicas("report").values()]
    assert states == [ReplicaState.SERVING, ReplicaState.STALE]
    assert {one.replica_id for one in plain.generate([[i, 5] for i in range(8)])} == {"0"}
    with pytest.raises(errors.TransferError, match=r"replica 1: .*no whole version"):
        plain.audit(model)
    lose(plain, 1, "")
    assert plain.push_weights(model, version=version, audit=True).left_behind == {}
    assert_holds(plain, model)


def test_without_an_audit_the_same_fault_is_served(plain, model):
    lose(plain, 1, DOWN)
    plain.push_weights(perturbed(model, seed=1))
    lose(plain, 1, "")
    assert distance(plain, model, 1) > 100 * TOLERANCE
    assert {one.name for one in found(plain, model)} == {DOWN}


@pytest.mark.parametrize(
    ("value", "transport"),
    [(torch.nan, MemmapTransport), (torch.inf, broadcast), (-torch.inf, P2PTransport)],
)
def test_weights_that_are_not_finite_are_refused_before_they_are_served(
    plain, model, value, transport
):
    before, kept = plain.weight_version, load_tiny_model(model.name_or_path)
    with torch.no_grad():
        model.get_parameter(DOWN)[3, 5] = value
    with pytest.raises(errors.NonFiniteWeightsError, match=DOWN) as caught:
        plain.push_weights(model, transport=transport())
    assert caught.value.names == [DOWN]
    assert plain.weight_version == before
    assert_holds(plain, kept)
    assert plain.push_weights(model, allow_nonfinite=True, audit=True).version == before + 1
