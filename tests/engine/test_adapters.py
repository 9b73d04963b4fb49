"""LoRA adapters beside the base weights: what engines compute, for whom, and what is refused."""

import copy
import functools
import multiprocessing
import os
import threading

import peft
import psutil
import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig

from tests.engine.checks import TOLERANCE, assert_holds, distance, perturbed
from tests.engine.conftest import ENGINE
from tests.engine.faults import engine_core_pid, memory_files, num_loras_in_use
from tests.engine.requests import eventually, num_running, sampling, slowed
from tests.engine.test_torchrl_faces import asked, policy_of
from torchrl_vllm_sync import (
    AdapterSource,
    AsyncVLLM,
    MemmapTransport,
    WeightUpdater,
    attach,
    errors,
    vLLMWrapper,
)
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint, token_log_probs
from torchrl_vllm_sync.weights import adapters

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
UP = "base_model.model.model.layers.1.mlp.up_proj"
# Longer than two blocks of the prefix cache.
PROMPT = list(range(5, 75))
SHAPE = {"num_hidden_layers", "hidden_size"}
START_S = 200.0
# Tokens that take longer, at the pace of the tests, than some pushes and short answers.
LONG = 100
# Seconds that a worker is late, in which another process can be killed.
LATE_S = 5.0


@pytest.fixture(scope="module")
def tuned(cluster, checkpoint):
    """Two replicas that can hold adapters of rank 8."""
    service = AsyncVLLM.from_pretrained(
        str(checkpoint),
        num_replicas=2,
        enable_lora=True,
        max_lora_rank=8,
        worker_extension_cls="tests.engine.faults.AdapterWorker",
        **{**ENGINE, "max_restarts": 3},
    )
    yield service
    service.shutdown()


def adapted(checkpoint, seed=0, **config):
    """The launched model, or one of another shape, with an adapter that its outputs show."""
    base = load_tiny_model(checkpoint)
    if shape := {name: config.pop(name) for name in SHAPE & config.keys()}:
        types = ["full_attention"] * shape.get("num_hidden_layers", 4)
        base = type(base)(AutoConfig.from_pretrained(checkpoint, layer_types=types, **shape))
    config = {"r": 4, "lora_alpha": 12, "target_modules": LINEAR, **config}
    return changed(peft.get_peft_model(base, peft.LoraConfig(**config)).eval(), seed)


@torch.no_grad()
def changed(model, seed):
    """Changes the adapter in place, as an optimizer step does."""
    generator = torch.Generator().manual_seed(seed)
    for name, one in model.named_parameters():
        if "lora_" in name:
            one.copy_(0.1 * torch.randn(one.shape, generator=generator))
    return model


def error(model, output):
    """How far an answer's log-probabilities are from the model's."""
    (sample,), prompt = output.outputs, output.prompt_token_ids
    wanted = token_log_probs(model, [*prompt, *sample.token_ids])[len(prompt) - 1 :]
    pairs = zip(sample.logprobs, sample.token_ids, strict=True)
    return (wanted - torch.tensor([one[token].logprob for one, token in pairs])).abs().max().item()


def answer(service, **options):
    return service.generate(PROMPT, sampling(max_tokens=8, logprobs=0), **options)


def versions(output):
    return [one.version for spans in output.version_spans for one in spans]


def loaded(service):
    """How many adapters each worker holds, of this library and in vLLM's cache."""
    found = service.replicas.call_replicas("collective_rpc", "sync_count_adapters").values()
    return [count for one in found for count in one]


def mapped(service):
    """How often the processes of each replica have memory of an adapter mapped, or open."""
    return service.replicas.call_replicas("__ray_call__", memory_files)


def spoil(service, index, **how):
    """Has the worker of one replica take adapters late, or as zeros."""
    call = service.actors[index].collective_rpc
    ray.get(call.remote("sync_spoil_adapters", None, (), how))


def test_engines_compute_what_the_model_with_its_adapter_does(tuned, checkpoint):
    model = adapted(checkpoint)
    assert distance(tuned, model, 0) > 100 * TOLERANCE  # of the base weights alone
    report = WeightUpdater(tuned, source=model, adapters="keep").push_weights()
    sizes = [one.nbytes for name, one in model.named_parameters() if "lora_" in name]
    assert (report.transport, report.num_bytes) == ("adapters", sum(sizes))
    assert tuned.weight_version == report.version
    assert_holds(tuned, model)
    assert_holds(tuned, copy.deepcopy(model).merge_and_unload())
    assert versions(answer(tuned)) == [report.version]
    alone = answer(tuned, adapter="")
    assert versions(alone) == [0]
    with model.disable_adapter():
        assert error(model, alone) < TOLERANCE
    assert error(model, alone) > 100 * TOLERANCE


def test_ranks_and_scales_are_each_layers_own(tuned, checkpoint):
    patterns = {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"o_proj": 3}}
    some = ["k_proj", "o_proj", "up_proj"]
    model = adapted(checkpoint, 1, use_rslora=True, target_modules=some, **patterns)
    tuned.push_weights(AdapterSource(model))
    assert_holds(tuned, model)


def test_requests_in_flight_end_with_the_version_they_began_with(tuned, checkpoint):
    """Also where more versions came meanwhile than are kept; those go with the next push."""
    model, found = adapted(checkpoint, 2), []
    before, source = copy.deepcopy(model), AdapterSource(model)
    for _ in range(3):
        old = tuned.push_weights(source).version
    kept = loaded(tuned)
    with slowed(tuned):
        asked = [[5, 6, one] for one in range(7, 11)]
        options = sampling(max_tokens=LONG, ignore_eos=True, logprobs=0)
        call = threading.Thread(target=lambda: found.extend(tuned.generate(asked, options)))
        call.start()
        eventually(lambda: num_running(tuned) == len(asked))
        for seed in (20, 21, 3):
            new = tuned.push_weights(changed(model, seed) and source).version
        assert [one - its for (one, _), (its, _) in zip(loaded(tuned), kept, strict=True)] == [1, 1]
        in_use = tuned.replicas.call_replicas("__ray_call__", num_loras_in_use)
        assert [*in_use.values()] == [1, 1]
        late = tuned.generate(asked, sampling(logprobs=0))
        assert not found
        call.join()
    in_use = tuned.replicas.call_replicas("__ray_call__", num_loras_in_use)
    assert [*in_use.values()] == [0, 0]
    assert tuned.push_weights(source).version == new + 1
    assert [one for one, _ in loaded(tuned)] == [one for one, _ in kept]
    assert [versions(one) for one in found] == [[old]] * 4
    assert [len(one.outputs[0].token_ids) for one in found] == [LONG] * 4
    assert max(error(before, one) for one in found) < TOLERANCE
    assert min(error(model, one) for one in found) > 100 * TOLERANCE
    assert [versions(one) for one in late] == [[new]] * 4
    assert max(error(model, one) for one in late) < TOLERANCE
    for one in (*found, *late):  # as vLLM says it, too
        assert [span.version for span in one.outputs[0].weight_versions] == [str(versions(one)[0])]


def test_a_push_has_vllm_not_look_anew_for_slots_that_running_requests_use(tuned, checkpoint):
    """As that waits for the GPU; also where a slot gets free, or is still to be filled."""
    source = AdapterSource(adapted(checkpoint, 23))

    def lookups():
        call = tuned.actors[0].collective_rpc.remote("sync_count_lookups")
        return ray.get(call)[0]

    tuned.push_weights(source)
    with slowed(tuned):
        options = sampling(max_tokens=LONG, ignore_eos=True)
        ask = functools.partial(tuned.generate, [5, 6, 7], options, actor_index=0)
        call = threading.Thread(target=ask)
        call.start()
        eventually(lambda: num_running(tuned) == 1)
        looked = list[int]()
        for seed in range(4):
            tuned.push_weights(changed(source.owner, seed) and source)
            if seed == 0:
                assert error(source.owner, answer(tuned, actor_index=0)) < TOLERANCE
                eventually(lambda: num_running(tuned) == 1)
            steps, _ = lookups()
            eventually(lambda steps=steps: lookups()[0] > steps + 2)
            looked.append(lookups()[1])
        assert call.is_alive()
        assert looked == [looked[0]] * 4
        call.join()
    assert error(source.owner, answer(tuned, actor_index=0)) < TOLERANCE


def test_a_version_that_was_dropped_stays_until_answers_are_done_with_it(tuned, checkpoint):
    source, found = AdapterSource(adapted(checkpoint, 27)), []
    before, old = copy.deepcopy(source.owner), tuned.push_weights(source).version
    with slowed(tuned):
        options = sampling(max_tokens=LONG // 2, ignore_eos=True, logprobs=0)
        call = threading.Thread(
            target=lambda: found.append(tuned.generate([5, 6, 7], options, actor_index=0))
        )
        call.start()
        eventually(lambda: num_running(tuned) == 1)
        dropped = tuned.replicas.call_replicas(
            "__ray_call__", lambda one: (one._adapters._drop(old), one._adapters.newest())[1]
        )
        assert all(old not in newest.values() for newest in dropped.values())
        for seed in (28, 29):
            tuned.push_weights(changed(source.owner, seed) and source)
        assert not found
        call.join()
    assert versions(found[0]) == [old]
    assert error(before, found[0]) < TOLERANCE
    tuned.wait_until_serving(timeout_s=60)


def test_a_version_is_pushed_again_with_the_same_values_alone(tuned, checkpoint):
    source = AdapterSource(adapted(checkpoint, 21))
    version = tuned.push_weights(source).version
    assert tuned.push_weights(source, version=version).version == version
    changed(source.owner, 22)
    with pytest.raises(errors.StaleVersionError, match=r"default:.*lora_A"):
        tuned.push_weights(source, version=version)
    assert tuned.push_weights(source).version == version + 1


def test_a_pinned_replica_takes_no_adapter_from_another(tuned, checkpoint):
    tuned.push_weights(AdapterSource(adapted(checkpoint, 24)))
    with tuned.pinned() as pinned:
        tuned.push_weights(AdapterSource(adapted(checkpoint, 25)))
        (given,) = tuned.replicas.call_replicas("give_adapters", timeout_s=60.0).values()
        before = loaded(pinned)
        taken = pinned.replicas.call_replicas("take_adapters", given, timeout_s=60.0)
        assert [type(one) for one in taken.values()] == [errors.TransferNotReadyError]
        assert loaded(pinned) == before
    tuned.wait_until_serving(timeout_s=60)


def test_workers_of_one_engine_know_whose_logits_are_whose_after_they_slept(cluster, tmp_path):
    checkpoint = make_tiny_checkpoint(tmp_path, architecture="qwen3", tied=False)
    how = {"tensor_parallel_size": 2, "worker_extension_cls": "tests.engine.faults.AdapterWorker"}
    model = adapted(checkpoint, 36)
    with AsyncVLLM.from_pretrained(checkpoint, enable_lora=True, **how, **ENGINE) as service:
        service.push_weights(AdapterSource(model))
        assert error(model, answer(service)) < TOLERANCE
        service.sleep(2, "keep")
        assert service.replicas.call_replicas("collective_rpc", "sync_lose_slots").good
        service.wake_up(["weights"])
        service.push_weights(load_tiny_model(checkpoint))
        service.wake_up(["kv_cache"])
        assert error(model, answer(service)) < TOLERANCE


def test_cached_prefixes_are_those_of_one_version(tuned, checkpoint):
    model = adapted(checkpoint, 4)
    tuned.push_weights(AdapterSource(model))
    for index in (0, 1, 0, 1):
        first = answer(tuned, actor_index=index)
    assert first.num_cached_tokens == 64  # of the same version
    tuned.push_weights(AdapterSource(changed(model, 5)))
    then = answer(tuned, actor_index=0)
    assert then.num_cached_tokens == 0
    assert error(model, then) < TOLERANCE


def test_many_pushes_leave_memory_and_the_number_of_adapters_where_they_were(tuned, checkpoint):
    model = adapted(checkpoint, 6, r=8)
    source = AdapterSource(model, "many", max_versions=3)

    def push(times):
        for seed in range(times):
            tuned.push_weights(changed(model, seed) and source)

    push(10)
    before, held, own = loaded(tuned), mapped(tuned), psutil.Process().num_fds()
    push(200)
    assert loaded(tuned) == before
    assert mapped(tuned) == held
    assert psutil.Process().num_fds() <= own
    assert error(model, answer(tuned, adapter="many")) < TOLERANCE


def test_each_policy_of_a_service_has_its_name_and_version(tuned, checkpoint):
    left, right = adapted(checkpoint, 7), adapted(checkpoint, 8, r=8, target_modules=["q_proj"])
    updater = WeightUpdater(tuned, source=left, adapters="keep", adapter="left")
    older = updater.push_weights().version
    newer = tuned.push_weights(AdapterSource(right, "right")).version
    for name, model, version in (("left", left, older), ("right", right, newer)):
        output = answer(tuned, adapter=name)
        assert versions(output) == [version]
        assert error(model, output) < TOLERANCE
    with pytest.raises(errors.UnsupportedArgumentError, match=r"'left'.*'right'.*, got none"):
        answer(tuned)
    with pytest.raises(errors.UnsupportedArgumentError, match="got 'middle'"):
        answer(tuned, adapter="middle")
    policy = policy_of(vLLMWrapper, tuned, "tokens", adapter="left", sampling={"max_tokens": 8})
    out = policy(asked("tokens", (2,)))
    assert out["policy_version"].unique().tolist() == [older]


REFUSED = {
    "DoRA": {"use_dora": True},
    "modules_to_save": {"modules_to_save": ["q_proj"], "target_modules": ["k_proj"]},
    "bias": {"bias": "lora_only"},
    "LoRA bias": {"lora_bias": True, "target_modules": ["q_proj"]},
    "rank 16": {"r": 16},
    "rank 9": {"rank_pattern": {"q_proj": 9}},
    "embed_tokens is adapted as Embedding": {"target_modules": ["embed_tokens"]},
    "lm_head": {"target_modules": ["q_proj", "lm_head"]},
    "olora": {"init_lora_weights": "olora"},
    r"layers\.4\.": {"num_hidden_layers": 5},
    r"q_proj\.lora_A\.weight \[4, 48\]": {"hidden_size": 48},
}


@pytest.mark.parametrize("named", REFUSED)
@pytest.mark.filterwarnings("ignore")
def test_what_engines_cannot_keep_apart_is_refused_by_name(tuned, checkpoint, named):
    before = tuned.weight_version
    with pytest.raises(errors.WeightMismatchError, match=named):
        tuned.push_weights(AdapterSource(adapted(checkpoint, **REFUSED[named])))
    assert tuned.weight_version == before


def test_what_is_no_adapter_or_not_kept_is_refused(tuned, checkpoint):
    with pytest.raises(errors.UnsupportedArgumentError, match="PEFT model's, got a Qwen2"):
        AdapterSource(load_tiny_model(checkpoint))
    with pytest.raises(errors.UnsupportedArgumentError, match="name must be text"):
        AdapterSource(adapted(checkpoint), "a:b")
    with pytest.raises(errors.UnsupportedArgumentError, match="mode must be 'keep'"):
        tuned.push_weights(AdapterSource(adapted(checkpoint)), mode="abort")
    model = adapted(checkpoint)
    torch.nn.init.constant_(model.get_submodule(f"{UP}.lora_B.default").weight, torch.nan)
    with pytest.raises(errors.NonFiniteWeightsError, match=r"left_out:.*up_proj\.lora_B"):
        tuned.push_weights(AdapterSource(model, "left_out"))


def test_an_audit_names_the_adapter_that_was_not_delivered(tuned, checkpoint):
    model = adapted(checkpoint, 9)
    report = tuned.push_weights(AdapterSource(model, "audited"), audit=True)
    assert report.phases["audit_s"] > 0
    assert tuned.audit(AdapterSource(model, "audited")).num_bytes == report.num_bytes
    spoil(tuned, 1, loses=True)
    try:
        with pytest.raises(errors.WeightSyncError, match=r"replica 1.*audited:.*q_proj\.lora_A"):
            tuned.push_weights(
                AdapterSource(changed(model, 10), "audited"), audit=True, strict=True
            )
    finally:
        spoil(tuned, 1)
    beside = adapted(checkpoint, 19)
    tuned.push_weights(AdapterSource(beside, "beside"))  # with which comes what was missed
    for index in (0, 1):
        assert error(model, answer(tuned, adapter="audited", actor_index=index)) < TOLERANCE
        assert error(beside, answer(tuned, adapter="beside", actor_index=index)) < TOLERANCE


def test_an_audit_is_of_what_is_served_and_not_of_what_came_too_late(tuned, checkpoint):
    model, name = adapted(checkpoint, 33), "late"
    version = tuned.push_weights(AdapterSource(model, name)).version
    for index in (0, 1):
        spoil(tuned, index, delay_s=LATE_S)
    late = AdapterSource(changed(copy.deepcopy(model), 34), name)
    with pytest.raises(errors.WeightSyncError, match="longer than 1 s"):
        tuned.push_weights(late, timeout_s=1.0)
    for index in (0, 1):
        spoil(tuned, index)  # which waits until the worker has taken it
    assert_one_version(tuned, name, model, version)
    with pytest.raises(errors.WeightAuditError, match=f"{name}:"):
        tuned.audit(late)
    assert tuned.audit(AdapterSource(model, name)).versions == {"0": version, "1": version}
    tuned.push_weights(AdapterSource(model, "beside"))
    with pytest.raises(errors.WeightAuditError, match=f"{name}:"):
        tuned.audit(late)


def test_other_nodes_get_an_adapter_by_value(tuned, checkpoint, monkeypatch):
    monkeypatch.setattr(adapters, "this_node", lambda: "another")
    model, held = adapted(checkpoint, 16), []
    for seed in range(6):
        tuned.push_weights(AdapterSource(changed(model, seed), "audited"))
        held.append(mapped(tuned))
    for index in (0, 1):
        assert error(model, answer(tuned, adapter="audited", actor_index=index)) < TOLERANCE
    assert held[-1] == held[2]


def sharded_trainer(rank, checkpoint, port, address, name, pipe):
    """One of two ranks: pushes the adapter of a sharded model, twice, and sends it whole."""
    os.environ["RAY_ADDRESS"] = address
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model, mesh = adapted(checkpoint, 11), init_device_mesh("cpu", (2,))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    service = attach(name) if rank == 0 else None
    updater = WeightUpdater(service, source=model, adapters="keep", adapter="sharded")
    updater.push_weights()
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_" in name:
                one.mul_(-1.5)
    report = updater.push_weights(audit=rank == 0)
    dist.all_gather_object(told := [None, None], report.version)
    state = {name: one.full_tensor() for name, one in model.state_dict().items() if "lora" in name}
    if rank == 0:
        pipe.send((told, {name: one.numpy() for name, one in state.items()}))
    dist.barrier()
    dist.destroy_process_group()


def test_every_rank_of_a_sharded_model_gathers_its_adapter(tuned, checkpoint):
    spawn, (ours, theirs) = multiprocessing.get_context("spawn"), multiprocessing.Pipe()
    address = ray.get_runtime_context().gcs_address
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = checkpoint, store.port, address, tuned.name, theirs
    ranks = [
        spawn.Process(target=sharded_trainer, args=(rank, *given), daemon=True) for rank in (0, 1)
    ]
    for one in ranks:
        one.start()
    eventually(lambda: ours.poll() or not ranks[0].is_alive(), START_S)
    assert ours.poll()
    (version, same), weights = ours.recv()
    for one in ranks:
        one.join(60)
    assert version == same
    model = adapted(checkpoint, 11)
    state = {name: torch.from_numpy(one) for name, one in weights.items()}
    model.load_state_dict(state, strict=False)
    output = answer(tuned, adapter="sharded")
    assert versions(output) == [version]
    assert error(model, output) < TOLERANCE
    assert error(adapted(checkpoint, 11), output) > 100 * TOLERANCE


def lone_trainer(checkpoint, address, name, seed):
    """Pushes an adapter that others push, too."""
    os.environ["RAY_ADDRESS"] = address
    attach(name).push_weights(AdapterSource(adapted(checkpoint, seed), "shared"))


def test_trainers_of_one_adapter_take_turns_and_one_that_is_killed_leaves_no_mixture(
    tuned, checkpoint
):
    """It is killed while one replica has its version, and the other is about to take it."""
    ours, theirs = adapted(checkpoint, 17), adapted(checkpoint, 18)
    address = ray.get_runtime_context().gcs_address
    spawn = multiprocessing.get_context("spawn")
    given = checkpoint, address, tuned.name, 18
    before = spawn.Process(target=lone_trainer, args=given, daemon=True)
    before.start()
    before.join(START_S)
    assert before.exitcode == 0
    for _ in range(3):
        old = tuned.push_weights(AdapterSource(ours, "shared")).version
    held = mapped(tuned)  # with what two trainers have written to
    spoil(tuned, 1, delay_s=LATE_S)
    trainer = spawn.Process(target=lone_trainer, args=given, daemon=True)
    trainer.start()
    first = tuned.actors[0].report
    eventually(
        lambda: ray.get(first.remote()).adapters["shared"] > old or not trainer.is_alive(), START_S
    )
    with pytest.raises(errors.PushUnderWayError):
        tuned.push_weights(AdapterSource(ours, "shared"))
    trainer.kill()
    trainer.join()
    spoil(tuned, 1)  # which waits until the worker is back
    models = {old: ours, old + 1: theirs}
    for index in (0, 1):
        output = answer(tuned, adapter="shared", actor_index=index)
        (version,) = versions(output)
        assert error(models[version], output) < TOLERANCE
        assert error(models[2 * old + 1 - version], output) > 100 * TOLERANCE
    assert tuned.push_weights(AdapterSource(ours, "shared")).version == old + 2
    assert tuned.push_weights(AdapterSource(ours, "shared")).version == old + 3
    assert_one_version(tuned, "shared", ours, old + 3)
    assert mapped(tuned) == held


def test_more_trainers_of_one_adapter_than_workers_keep_memory_of_all_reach_them(tuned, checkpoint):
    model, trainers = adapted(checkpoint, 23), [tuned, attach(tuned.name), attach(tuned.name)]
    for seed, trainer in enumerate((*trainers, *trainers)):
        report = trainer.push_weights(AdapterSource(changed(model, seed), "crowded"))
        assert not report.left_behind
        assert_one_version(tuned, "crowded", model, report.version)


def test_a_trainer_goes_on_after_its_push_failed_everywhere_and_another_pushed(tuned, checkpoint):
    """What it sent before takes the place of nothing that came since."""
    ours, theirs, beside = (adapted(checkpoint, seed) for seed in (24, 25, 26))
    tuned.push_weights(AdapterSource(ours, "failed"))
    for index in (0, 1):
        spoil(tuned, index, loses=True)
    try:
        with pytest.raises(errors.WeightSyncError, match="other weights than were sent"):
            tuned.push_weights(AdapterSource(changed(ours, 27), "failed"), audit=True)
    finally:
        for index in (0, 1):
            spoil(tuned, index)
    version = attach(tuned.name).push_weights(AdapterSource(theirs, "failed")).version
    report = tuned.push_weights(AdapterSource(beside, "beside"))
    assert report.version == version + 1
    assert_one_version(tuned, "failed", theirs, version)
    assert_one_version(tuned, "beside", beside, version + 1)


def assert_one_version(service, name, model, version):
    for index in range(service.num_replicas):
        output = answer(service, adapter=name, actor_index=index)
        assert versions(output) == [version]
        assert error(model, output) < TOLERANCE


def test_a_replica_that_is_killed_in_mid_push_or_added_catches_up(tuned, checkpoint):
    """First where weights are the checkpoint's, then where a push has replaced them."""
    model, other = adapted(checkpoint, 12), adapted(checkpoint, 13)
    beside = tuned.push_weights(AdapterSource(other, "other")).version
    source = AdapterSource(model, "killed")
    tuned.push_weights(source)
    spoil(tuned, 0, delay_s=LATE_S)
    told, report = [], tuned.actors[1].report

    def push():
        with pytest.raises(errors.WeightSyncError, match="replica 0") as raised:
            tuned.push_weights(changed(model, 15) and source, strict=True)
        told.append(raised.value)

    call = threading.Thread(target=push)
    call.start()
    eventually(lambda: ray.get(report.remote()).adapters["killed"] > beside + 1)
    ray.kill(tuned.actors[0])
    call.join()
    assert told[0].version == beside + 2
    tuned.wait_until_serving(timeout_s=START_S)
    assert tuned.weight_versions == {"0": beside + 2, "1": beside + 2}
    assert_one_version(tuned, "killed", model, beside + 2)
    assert_one_version(tuned, "other", other, beside)

    base = perturbed(load_tiny_model(checkpoint), seed=14)
    tuned.push_weights(base, transport=MemmapTransport())
    for one in (model, other):
        layers = base.state_dict()
        names = {name: name.replace(".base_layer", "") for name in one.state_dict()}
        kept = {
            n: layers[to.removeprefix("base_model.model.")]
            for n, to in names.items()
            if "lora_" not in n
        }
        one.load_state_dict(kept, strict=False)
    version = tuned.push_weights(source).version
    added = tuned.add_replicas(1)
    assert tuned.weight_versions == dict.fromkeys(["0", "1", *added], version)
    assert_one_version(tuned, "killed", model, version)
    assert_one_version(tuned, "other", other, version - 1)
    tuned.remove_replicas(added)


# ---- Base weights pushed anew, which a replica that restarts would not find


def test_merged_weights_beside_kept_adapters_are_told_of(tuned, checkpoint, caplog):
    model = adapted(checkpoint, 26)
    tuned.push_weights(load_tiny_model(checkpoint))
    tuned.push_weights(AdapterSource(model))
    assert "merged" not in caplog.text
    tuned.push_weights(model)
    assert "an adapter is merged into what is pushed" in caplog.text
    assert error(model, answer(tuned, adapter="")) < TOLERANCE
    assert error(model, answer(tuned, adapter="default")) > 100 * TOLERANCE  # which it warns of
    tuned.push_weights(load_tiny_model(checkpoint))


def test_adapters_are_put_into_memory_anew_that_was_lost_while_engines_slept(tuned, checkpoint):
    """Also where one of a lower rank, and of fewer layers, leaves some of it as it was.

    The step after it is like the one before.
    """
    model, engines = adapted(checkpoint, 31), [engine_core_pid(one) for one in tuned.actors]
    tuned.push_weights(AdapterSource(model))
    params = sampling(max_tokens=1, logprobs=0)
    ask = functools.partial(tuned.generate, sampling_params=params, adapter="default")
    assert max(error(model, ask(PROMPT, actor_index=index)) for index in (0, 1)) < TOLERANCE
    assert max(error(model, ask([5, 6, 7], actor_index=index)) for index in (0, 1)) < TOLERANCE
    tuned.sleep(2, "keep")
    assert tuned.replicas.call_replicas("collective_rpc", "sync_lose_slots").good
    tuned.wake_up(["weights"])
    tuned.push_weights(load_tiny_model(checkpoint))
    tuned.wake_up(["kv_cache"])
    assert max(error(model, ask([5, 6, 7], actor_index=index)) for index in (0, 1)) < TOLERANCE
    assert [engine_core_pid(one) for one in tuned.actors] == engines
    ask = functools.partial(answer, tuned, adapter="default")
    assert max(error(model, ask(actor_index=index)) for index in (0, 1)) < TOLERANCE
    model = adapted(checkpoint, 32, r=2, target_modules=["up_proj"])
    tuned.push_weights(AdapterSource(model))
    assert max(error(model, ask(actor_index=index)) for index in (0, 1)) < TOLERANCE
