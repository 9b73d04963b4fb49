"""Weights that are broadcast: on every replica, from every form, in every layout of an engine."""

import copy
import socket
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import ray
import torch
from tensordict import TensorDict
from torchrl.modules.llm import TransformersWrapper

from tests.engine.checks import TOLERANCE, assert_holds, distance, perturbed
from tests.engine.conftest import ENGINE
from tests.engine.requests import eventually
from tests.engine.trainers import BUCKET_BYTES, Trainer, broadcast
from torchrl_vllm_sync import AsyncVLLM, MemmapTransport, WeightUpdater
from torchrl_vllm_sync.errors import (
    StaleVersionError,
    TransferError,
    WeightMismatchError,
    WeightSyncError,
)
from torchrl_vllm_sync.observe.views import trace_of
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_tokenizer


@pytest.fixture(scope="module")
def broadcasting(service):
    """The shared service, pushed to by broadcast."""
    service.use_transport(broadcast())
    return service


# ---------------------------------------------------------------- what arrives


def test_pushes_one_after_another_reach_every_replica(broadcasting, model, other_model):
    service, before = broadcasting, broadcasting.weight_version
    service.push_weights(model)
    assert_holds(service, model)
    for step in range(2, 6):
        trained = perturbed(other_model, seed=step)
        assert min(distance(service, trained, index) for index in range(2)) > 100 * TOLERANCE
        report = service.push_weights(trained)
        assert report.version == service.weight_version == before + step
        assert [one.version for one in report.replicas] == [report.version] * 2
        assert_holds(service, trained)


def halved(model):
    return {name: p.bfloat16() for name, p in model.named_parameters()}


def rounded(model):
    for parameter in model.parameters():
        parameter.data = parameter.bfloat16().float()
    return model


def with_adapters(model):
    config = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(copy.deepcopy(model), config).eval()


def merged(wrapped):
    return copy.deepcopy(wrapped).merge_and_unload()


def wrapper(model):
    return TransformersWrapper(
        model,
        tokenizer=make_tiny_tokenizer(),
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        pad_output=False,
    )


def same(model):
    return model


# What is pushed, made of a model; and the model that the engines must equal then.
FORMS = {
    "module": (same, same),
    "state dict": (lambda model: model.state_dict(), same),
    "generator of pairs": (lambda model: model.named_parameters(), same),
    "nested TensorDict": (lambda model: TensorDict.from_module(model).data, same),
    "TensorDictParams": (lambda model: TensorDict.from_module(model, as_module=True), same),
    "TorchRL's wrapper": (wrapper, same),
    "double precision": (lambda model: copy.deepcopy(model).double(), same),
    "bfloat16": (halved, rounded),
    "not contiguous": (
        lambda model: {
            n: p.detach().t().contiguous().t() if p.dim() == 2 else p.detach()
            for n, p in model.named_parameters()
        },
        same,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_whatever_the_trainer_holds_arrives(broadcasting, model, form):
    make, reference = FORMS[form]
    perturbed(model, seed=len(form))
    assert distance(broadcasting, model, 1) > 100 * TOLERANCE
    weights = make(model)
    broadcasting.push_weights(weights)
    assert_holds(broadcasting, reference(model))


def test_adapters_arrive_merged(broadcasting, model):
    wrapped = with_adapters(perturbed(model, seed=3))
    for step in range(2):
        broadcasting.push_weights(wrapped)
        assert_holds(broadcasting, merged(wrapped))
        assert distance(broadcasting, model, 0) > 100 * TOLERANCE  # not the base alone
        perturbed(wrapped, seed=step, scale=0.02)


def test_steps_in_place_are_seen_through_what_was_kept(broadcasting, model):
    """Buckets are packed by views that were worked out at the first push."""
    for step in range(4):
        broadcasting.push_weights(perturbed(model, seed=20 + step))
        assert_holds(broadcasting, model)
    for parameter in model.parameters():  # other storages: the views are of no use any more
        parameter.data = parameter.data.clone() * 1.01
    broadcasting.push_weights(model)
    assert_holds(broadcasting, model)


@pytest.mark.parametrize("bucket_bytes", [256, 4096, 2**26])
def test_the_size_of_buckets_does_not_matter(broadcasting, model, bucket_bytes):
    transport = broadcast(bucket_bytes=bucket_bytes)
    if bucket_bytes == 256:  # shorter than a row of down_proj
        version = broadcasting.weight_version
        with pytest.raises(WeightMismatchError, match="bucket"):
            broadcasting.push_weights(model, transport=transport)
        assert broadcasting.weight_version == version
    else:
        broadcasting.push_weights(perturbed(model, seed=bucket_bytes), transport=transport)
        assert_holds(broadcasting, model)
    broadcasting.use_transport(broadcast())


def test_packed_weights_cannot_be_audited(broadcasting, model):
    before = broadcasting.weight_version
    for call in (broadcasting.audit, lambda one: broadcasting.push_weights(one, audit=True)):
        with pytest.raises(TransferError, match="CPU backend repacks weights"):
            call(perturbed(model, seed=1))
    assert broadcasting.weight_version == before


# ---------------------------------------------------------------- what is reported


def test_the_report_says_how_it_went(broadcasting, model):
    broadcasting.push_weights(model)
    reports = [broadcasting.push_weights(perturbed(model, seed=seed)) for seed in range(1, 6)]
    report = reports[-1]
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    assert (report.transport, report.num_bytes) == ("broadcast", num_bytes)
    assert report.version == broadcasting.weight_version
    outer = ("open_s", "join_s", "prepare_s", "send_s", "acknowledge_s")
    shares = [sum(one.phases[name] for name in outer) / one.seconds for one in reports]
    assert max(shares) > 0.9  # on a busy machine this process may have to wait in between
    assert max(shares) <= 1
    wanted = {"open_s", "join_s", "prepare_s", "ready_s", "transfer_s", "send_s", "acknowledge_s"}
    assert wanted <= set(report.phases)
    assert all(0 <= report.phases[name] <= report.seconds for name in wanted)
    assert report.phases["ready_s"] + report.phases["transfer_s"] <= report.phases["send_s"]
    assert report.gigabytes_per_s == pytest.approx(num_bytes / report.seconds / 1e9)
    for one in report.replicas:
        assert (one.version, one.error, one.path) == (report.version, "", "layerwise")
        assert "CPU backend repacks weights" in one.path_reason
        assert one.phases["num_tensors"] == len(list(model.parameters()))
        assert one.phases["whole_pause_s"] <= report.seconds
        assert report.began_at <= one.began_at <= report.began_at + report.seconds
    tracks = [one for one in trace_of(report)["traceEvents"] if one["name"] == "whole_pause"]
    assert len(tracks) == len(report.replicas)


# ---------------------------------------------------------------- when and by whom


def test_versions_may_skip_but_not_go_back(broadcasting, model, other_model):
    version = broadcasting.push_weights(model).version + 10
    assert broadcasting.push_weights(model, version=version).version == version
    for older in (version - 1, 0):
        with pytest.raises(StaleVersionError, match=f"version must be at least {version}, got"):
            broadcasting.push_weights(other_model, version=older)
    assert_holds(broadcasting, model)
    # The same version again is sent to everybody again.
    again = broadcasting.push_weights(model, version=version)
    assert [one.phases["loaded"] for one in again.replicas] == [1, 1]
    assert broadcasting.push_weights(model).version == version + 1


def test_a_push_that_does_not_fit_changes_nothing(broadcasting, model, other_model):
    version = broadcasting.push_weights(model).version
    for break_it, message in (
        (lambda sd: sd.pop("model.norm.weight"), r"1 missing: model\.norm\.weight"),
        (lambda sd: sd.update({"model.norm2.weight": torch.ones(64)}), "1 unknown"),
        (lambda sd: sd.update({"model.norm.weight": torch.ones(63)}), r"\[63\] instead of \[64\]"),
    ):
        weights = dict(other_model.state_dict())
        break_it(weights)
        with pytest.raises(WeightMismatchError, match=message):
            broadcasting.push_weights(weights)
    assert_holds(broadcasting, model)
    assert broadcasting.push_weights(other_model).version == version + 1


def test_transports_take_turns(broadcasting, model):
    for step in range(2):
        broadcasting.push_weights(perturbed(model, seed=step), transport=MemmapTransport())
        assert_holds(broadcasting, model)
        report = broadcasting.push_weights(perturbed(model, seed=9 + step), transport=broadcast())
        assert report.transport == "broadcast"
        assert_holds(broadcasting, model)


def test_opening_and_closing_as_often_as_one_likes(broadcasting, model):
    transport = broadcast()
    transport.close()
    broadcasting.use_transport(transport)
    broadcasting.init_weight_update_group()
    group = transport._group
    broadcasting.init_weight_update_group()
    assert transport._group is group
    for step in range(2):
        broadcasting.push_weights(perturbed(model, seed=step))
        assert transport.num_buffer_bytes == 3 * BUCKET_BYTES
        assert_holds(broadcasting, model)
        transport.close()
        transport.close()
        assert transport.num_buffer_bytes == 0
    broadcasting.push_weights(perturbed(model, seed=5))
    assert_holds(broadcasting, model)


def test_a_rendezvous_at_a_port_of_ones_own(broadcasting, model, monkeypatch):
    monkeypatch.setattr(broadcasting.replicas, "_met_at", None)
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    address = broadcasting.get_master_address()
    for step in range(3):  # the port is free again each time
        transport = broadcast()
        broadcasting.use_transport(transport)
        broadcasting.init_weight_update_group(address, str(port))
        assert transport._group.rendezvous.address == address
        assert transport._group.rendezvous.port == port
        assert transport._group.rendezvous.world_size == 1 + broadcasting.get_world_size()
        broadcasting.push_weights(perturbed(model, seed=step))
        assert_holds(broadcasting, model)


def test_an_updater_pushes_by_broadcast(broadcasting, model):
    updater = WeightUpdater(broadcasting, source=model, transport="broadcast")
    updater.init()
    for step in range(1, 4):
        before = broadcasting.weight_version
        report = updater.push_weights(perturbed(model, seed=step))
        assert (report.transport, report.version) == ("broadcast", before + 1)
        assert_holds(broadcasting, model)
    broadcasting.use_transport(broadcast())


@pytest.mark.slow
def test_a_trainer_in_another_process(broadcasting, checkpoint, model):
    trainer = Trainer.remote(broadcasting, checkpoint)
    versions = []
    for seed in (1, 2):
        versions.append(ray.get(trainer.push.remote(seed), timeout=60))
        assert_holds(broadcasting, perturbed(model, seed=seed))
    assert versions[1] == versions[0] + 1


@pytest.mark.slow
def test_two_trainers_take_turns(broadcasting, checkpoint, model):
    """Each of them finds that the workers have gone over to the other's group."""
    trainer, theirs = Trainer.remote(broadcasting, checkpoint), load_tiny_model(checkpoint)
    versions = []
    for seed in (1, 2, 3):
        versions.append(broadcasting.push_weights(perturbed(model, seed=seed + 50)).version)
        assert_holds(broadcasting, model)
        versions.append(ray.get(trainer.push.remote(seed, timeout_s=30), timeout=60))
        assert_holds(broadcasting, perturbed(theirs, seed=seed))
    assert versions == sorted(set(versions))


def test_two_pushes_at_once_go_one_after_the_other(broadcasting, checkpoint):
    models = [perturbed(load_tiny_model(checkpoint), seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(broadcasting.push_weights, models))
    versions = [one.version for one in reports]
    assert len(set(versions)) == 4
    last = models[versions.index(max(versions))]
    assert broadcasting.weight_version == max(versions)
    assert_holds(broadcasting, last)


# ---------------------------------------------------------------- an engine of several engines


def assert_all_engines_hold(service, model):
    """As ``assert_holds``; the engines of a data-parallel replica take requests in turn."""
    for _ in range(4):
        assert_holds(service, model)


@pytest.fixture(scope="module")
def parallel(cluster, checkpoint):
    """One replica of two data-parallel engines."""
    with AsyncVLLM.from_pretrained(
        str(checkpoint),
        data_parallel_size=2,
        num_replicas=1,
        worker_extension_cls="tests.engine.faults.FaultyWorker",
        **{**ENGINE, "kv_cache_memory_bytes": 32 * 2**20},
    ) as service:
        service.use_transport(broadcast())
        yield service


@pytest.mark.slow
def test_data_parallel_engines_each_get_everything(parallel, model):
    assert parallel.get_world_size() == 2
    for step in range(3):
        report = parallel.push_weights(perturbed(model, seed=step))
        assert report.replicas[0].phases["num_tensors"] == len(list(model.parameters()))
        assert_all_engines_hold(parallel, model)
    plan(parallel, rank=1, zero="model.layers.1.mlp.down_proj.weight")
    parallel.push_weights(perturbed(model, seed=4))
    with pytest.raises(AssertionError, match="replica 0 differs by"):
        assert_all_engines_hold(parallel, model)
    plan(parallel)


@pytest.mark.slow
def test_a_failure_in_the_second_engine_is_heard(parallel, model):
    plan(parallel, rank=1, fail_at=20, times=1)
    with pytest.raises(WeightSyncError, match="injected before tensor 20"):
        parallel.push_weights(perturbed(model, seed=5))
    parallel.push_weights(model)
    eventually(lambda: all(one.state.admits_requests for one in parallel.load.snapshots()))
    assert_all_engines_hold(parallel, model)


def plan(service, **faults):
    pids = ray.get(service.actors[0].collective_rpc.remote("sync_plan", kwargs=faults))
    assert len(set(pids)) == 2  # each worker of each engine answers
