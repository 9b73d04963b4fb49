"""vLLM's own RL calls on a service: they move weights, and out of turn they harm nothing."""

import asyncio
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import (
    VLLMWeightSyncClient,
    WeightTransferInitRequest,
    WeightTransferUpdateRequest,
)

from tests.engine.checks import SEQUENCES, TOLERANCE, assert_holds, distance, perturbed
from tests.engine.requests import slowed
from tests.engine.salts import freeze_salt, thaw_salt
from torchrl_vllm_sync import as_weight_source
from torchrl_vllm_sync.errors import (
    SilentEngineError,
    StaleVersionError,
    TransferError,
    TransferNotReadyError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.testing import token_log_probs
from torchrl_vllm_sync.weights.broadcast.buckets import (
    BucketLayout,
    bound_views,
    make_buffers,
    send_buckets,
)
from torchrl_vllm_sync.weights.broadcast.group import BroadcastGroup, Rendezvous
from torchrl_vllm_sync.weights.module import to_json
from torchrl_vllm_sync.weights.source import fit_to_model

CPU = torch.device("cpu")
BUCKET_BYTES = 1 << 18


class Trainer:
    """A trainer's end of the library's own transfer engine, driven by hand."""

    def __init__(self, service):
        self.service, self.group, self.push_id = service, None, 0

    def meet(self, wrap=lambda info: {"init_info": info}):
        """Forms the group: one payload for all replicas, as vLLM's examples have it."""
        world_size = 1 + self.service.get_world_size()
        at = Rendezvous("127.0.0.1", 0, world_size)
        self.group = BroadcastGroup.host(at, CPU, timeout_s=20)
        info = {
            "master_address": "127.0.0.1",
            "master_port": self.group.rendezvous.port,
            "rank_offset": 1,
            "world_size": world_size,
            "timeout_s": 20.0,
        }
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(self.service.init_weight_transfer_engine, wrap(info))
            self.group.connect(timeout_s=20)
            joined.result(timeout=30)
        self.push_id = 0

    def send(self, model, wrap=lambda info: {"update_info": info}):
        """Sends ``model`` while the service receives it."""
        source = fit_to_model(as_weight_source(model), self.service.weights.expected())
        layout = BucketLayout(source.metadata(), BUCKET_BYTES)
        buffers = make_buffers(layout, CPU)
        packing = (one.pack() for one in bound_views(layout, buffers, list(source)))
        self.push_id += 1
        info = {
            "push_id": self.push_id,
            "timeout_s": 20.0,
            "metadata": to_json(layout.metadata),
            "bucket_bytes": BUCKET_BYTES,
        }
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(self.service.update_weights, wrap(info))
            deadline = time.monotonic() + 20
            self.group.start(self.push_id, deadline=deadline, watch=lambda: None)
            send_buckets(self.group, layout, buffers, packing, deadline=deadline)
            received.result(timeout=30)

    def update(self, model, label=None):
        self.service.start_weight_update()
        self.send(model)
        self.service.finish_weight_update(label)

    def close(self):
        if self.group is not None:
            self.group.close()


@pytest.fixture
def trainer(service):
    trainer = Trainer(service)
    yield trainer
    service.shutdown_weight_transfer_engine()
    service.resume_generation()
    trainer.close()


def states(service):
    return {one.state for one in service.replicas.call_replicas("report").values()}


def greedy(tokens=1, **options):
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **options)


def in_background(call):
    """Starts ``call`` in a thread; returns the thread and the list its result goes to."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def wait_for(condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------- the four calls


@pytest.mark.parametrize("form", ["mappings", "vLLM's requests", "bare payloads"])
def test_the_four_calls_bring_the_trainers_weights(service, trainer, model, form):
    wrap_init, wrap_update = {
        "mappings": (lambda info: {"init_info": info}, lambda info: {"update_info": info}),
        "vLLM's requests": (
            lambda info: WeightTransferInitRequest(init_info=info),
            lambda info: WeightTransferUpdateRequest(update_info=info),
        ),
        "bare payloads": (lambda info: info, lambda info: info),
    }[form]
    perturbed(model, seed=40 + len(form))
    assert distance(service, model, 0) > 100 * TOLERANCE
    trainer.meet(wrap_init)
    service.pause_generation()
    service.start_weight_update()
    trainer.send(model, wrap_update)
    version = service.weight_version + 1
    service.finish_weight_update(weight_version=str(version))
    assert service.is_paused()
    assert states(service) == {"updating"}
    service.resume_generation()
    assert not service.is_paused()
    assert states(service) == {"serving"}
    assert service.weight_version == version
    assert_holds(service, model)
    output = service.generate(prompt_token_ids=[5, 6, 7], sampling_params=greedy())
    assert (output.min_version, output.max_version) == (version, version)


def test_the_service_is_vllms_own_client(service):
    assert isinstance(service, VLLMWeightSyncClient)


def test_updates_and_pushes_take_turns(service, trainer, model, other_model):
    before = service.weight_version
    trainer.meet()
    trainer.update(perturbed(model, seed=50), str(before + 1))
    report = service.push_weights(perturbed(other_model, seed=51))
    assert report.version == service.weight_version == before + 2
    assert_holds(service, other_model)
    trainer.update(perturbed(model, seed=52), str(before + 7))
    assert_holds(service, model)
    assert service.push_weights(other_model).version == before + 8
    assert_holds(service, other_model)


def test_a_broadcast_push_takes_the_workers_back(service, trainer, model, other_model):
    from torchrl_vllm_sync import BroadcastTransport, MemmapTransport

    transport = BroadcastTransport()
    service.push_weights(perturbed(model, seed=60), transport=transport)
    assert_holds(service, model)
    trainer.meet()
    trainer.update(perturbed(other_model, seed=61))
    assert_holds(service, other_model)
    report = service.push_weights(perturbed(model, seed=62))
    assert report.transport == "broadcast"
    assert_holds(service, model)
    service.use_transport(MemmapTransport())


def test_requests_in_flight_outlive_an_update_that_nobody_paused_for(service, trainer, model):
    trainer.meet()
    version = service.weight_version + 1
    with slowed(service):
        thread, results = in_background(
            lambda: service.generate([{"prompt_token_ids": [7, 8, 9]}] * 4, greedy(200))
        )
        wait_for(lambda: sum(service.get_num_unfinished_requests()) == 4)
        service.start_weight_update()
        assert service.is_paused()
        late, answers = in_background(
            lambda: service.generate(prompt_token_ids=[5, 6], sampling_params=greedy(4))
        )
        trainer.send(perturbed(model, seed=70))
        time.sleep(0.2)
        assert late.is_alive()  # it waits at the gate
        service.finish_weight_update(str(version))
    late.join(30)
    thread.join(60)
    assert [len(one.outputs[0].token_ids) for one in results[0]] == [200] * 4
    assert {one.max_version for one in results[0]} == {version}
    assert (answers[0].min_version, answers[0].max_version) == (version, version)
    assert_holds(service, model)


def test_each_replica_gets_ranks_of_its_own_or_the_group_is_refused(service, trainer):
    trainer.meet()  # one payload with rank_offset 1 for two replicas: ranks 1 and 2 came
    info = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    with pytest.raises(UnsupportedArgumentError, match="world_size must be at least 3"):
        service.init_weight_transfer_engine(info)


# ---------------------------------------------------------------- cached prefixes


def cached_log_probs(service, token_ids, salt=None):
    """Greedy log-probabilities of one token after a prompt whose prefix may be cached."""
    prompt = {"prompt_token_ids": list(token_ids)}
    if salt is not None:
        prompt["cache_salt"] = salt
    output = service.generate(prompt, greedy(1, logprobs=0, prompt_logprobs=None), actor_index=0)
    ((token, entry),) = output.outputs[0].logprobs[0].items()
    return output.num_cached_tokens, token, entry.logprob


def trainer_log_prob(model, token_ids, token):
    return token_log_probs(model, [*token_ids, token])[-1].item()


@pytest.mark.parametrize("label", [None, "after-step-7"])
def test_an_update_without_a_number_is_not_answered_from_old_keys(service, trainer, model, label):
    prompt = [*SEQUENCES[0], *SEQUENCES[1]]
    service.push_weights(perturbed(model, seed=80))
    cached_log_probs(service, prompt)
    assert cached_log_probs(service, prompt)[0] > 0  # the prefix is cached
    trainer.meet()
    version = service.weight_version
    for step in (81, 82):  # the second one must keep off the keys of the first one, too
        trainer.update(perturbed(model, seed=step, scale=0.2), label)
        assert service.weight_version == version
        cached, token, found = cached_log_probs(service, prompt)
        assert cached == 0
        assert abs(found - trainer_log_prob(model, prompt, token)) < TOLERANCE
        assert cached_log_probs(service, prompt)[0] > 0


def test_the_check_above_notices_old_keys(service, trainer, model):
    prompt = [*SEQUENCES[1], *SEQUENCES[0]]
    service.push_weights(perturbed(model, seed=90))
    cached_log_probs(service, prompt)
    trainer.meet()
    ray.get([one.__ray_call__.remote(freeze_salt) for one in service.actors])
    try:
        trainer.update(perturbed(model, seed=91, scale=0.2))
        cached, token, found = cached_log_probs(service, prompt)
    finally:
        ray.get([one.__ray_call__.remote(thaw_salt) for one in service.actors])
    assert cached > 0
    assert abs(found - trainer_log_prob(model, prompt, token)) > 100 * TOLERANCE


# ---------------------------------------------------------------- misuse


def test_calls_out_of_turn_are_refused_and_harm_nothing(service, trainer, model):
    service.push_weights(perturbed(model, seed=100))
    out_of_turn = {
        "not initialised": service.start_weight_update,
        "start_weight_update comes first": service.finish_weight_update,
        "no weight update is open": lambda: service.update_weights({"update_info": {}}),
    }
    for message, call in out_of_turn.items():
        with pytest.raises(TransferNotReadyError, match=message):
            call()
    trainer.meet()
    service.start_weight_update()
    while_open = {
        "start_weight_update": service.start_weight_update,
        "resume_generation": service.resume_generation,
        "pause_generation": service.pause_generation,
        "sleep": service.sleep,
        "wake_up": service.wake_up,
        "use_transfer_engine": lambda: service.use_transfer_engine("nccl"),
        "init_weight_transfer_engine": lambda: service.init_weight_transfer_engine({}),
    }
    for name, call in while_open.items():
        with pytest.raises(TransferNotReadyError, match=f"{name} has to wait"):
            call()
    with pytest.raises(StaleVersionError, match="weight_version must be at least"):
        service.finish_weight_update("0")
    with pytest.raises(UnsupportedArgumentError, match="weight_version must be at most"):
        service.finish_weight_update(str(2**63))
    service.shutdown_weight_transfer_engine()  # nothing had come yet: the old weights are whole
    assert states(service) == {"serving"}
    assert_holds(service, model)
    service.push_weights(perturbed(model, seed=101))
    assert_holds(service, model)


def test_a_start_that_one_replica_refuses_begins_on_none(service, trainer, model):
    trainer.meet()
    ray.get(service.actors[1].shutdown_weight_transfer_engine.remote())
    with pytest.raises(TransferNotReadyError, match="not initialised"):
        service.start_weight_update()
    assert states(service) == {"serving"}
    service.push_weights(perturbed(model, seed=105))
    assert_holds(service, model)


def test_an_update_that_does_not_fit_ends_it_and_leaves_the_weights(service, trainer, model):
    service.push_weights(perturbed(model, seed=110))
    trainer.meet()
    service.start_weight_update()
    with pytest.raises(TransferError, match="Invalid update_info for BroadcastReceiver"):
        service.update_weights({"update_info": {"names": ["model.norm.weight"]}})
    with pytest.raises(TransferNotReadyError, match="no weight update is open"):
        service.finish_weight_update("99")
    assert states(service) == {"serving"}
    assert_holds(service, model)
    assert service.push_weights(model).version == service.weight_version


def test_a_trainer_that_never_sends_costs_the_update_only(service, trainer, model):
    service.push_weights(perturbed(model, seed=120))
    trainer.meet()
    service.start_weight_update()
    metadata = to_json(fit_to_model(as_weight_source(model), service.weights.expected()).metadata())
    info = {"push_id": 1, "timeout_s": 1.0, "metadata": metadata}
    with pytest.raises(TransferError, match="the trainer did not begin the transfer"):
        service.update_weights({"update_info": info})
    assert states(service) == {"serving"}
    assert_holds(service, model)


# Seconds after which an update is given up that nobody goes on with; the tests' own calls follow
# each other much faster, on a busy machine too.
IDLE_S = 4.0


def start_and_be_gone(service, idle_timeout_s=IDLE_S):
    """What a client does that dies after its first call."""
    calls = [
        one.start_weight_update.remote(idle_timeout_s=idle_timeout_s) for one in service.actors
    ]
    ray.get(calls, timeout=60)


def test_a_client_that_dies_before_it_sends_costs_nothing(service, trainer, model):
    version = service.push_weights(perturbed(model, seed=121)).version
    trainer.meet()
    start_and_be_gone(service)
    assert states(service) == {"updating"}
    asked = service.generate([[5, 6, 7]] * 2, greedy(3))  # they wait at the gate meanwhile
    assert {one.min_version for one in asked} == {version}
    assert states(service) == {"serving"}
    with pytest.raises(TransferNotReadyError, match="no weight update is open"):
        service.finish_weight_update("99")
    assert_holds(service, model)
    trainer.update(perturbed(model, seed=122))  # the group is as it was
    assert_holds(service, model)


def test_a_client_that_dies_half_way_leaves_replicas_stale_until_a_push(service, trainer, model):
    service.push_weights(perturbed(model, seed=123))
    trainer.meet()
    perturbed(model, seed=124)
    start_and_be_gone(service)
    trainer.send(model)
    wait_for(lambda: states(service) == {"stale"})
    reports = service.replicas.call_replicas("report").values()
    assert all("given up half-way: no call came for 4 s" in one.reason for one in reports)
    service.push_weights(perturbed(model, seed=125))
    assert states(service) == {"serving"}
    assert_holds(service, model)


@pytest.mark.slow
def test_a_client_that_is_slow_is_waited_for(service, trainer, model):
    """Calls under way do not count, and each call begins the wait anew."""
    trainer.meet()
    start_and_be_gone(service)
    for step in range(3):
        perturbed(model, seed=126 + step)
        time.sleep(IDLE_S * 0.35)
        trainer.send(model)
    time.sleep(IDLE_S * 0.35)
    service.finish_weight_update()
    time.sleep(IDLE_S * 1.2)
    assert states(service) == {"serving"}
    assert_holds(service, model)


def test_a_transfer_that_breaks_off_makes_replicas_stale_until_a_push(service, trainer, model):
    trainer.meet()
    service.start_weight_update()
    source = fit_to_model(as_weight_source(model), service.weights.expected())
    info = {"push_id": 1, "timeout_s": 20.0, "metadata": to_json(source.metadata())}
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(service.update_weights, {"update_info": info})
        trainer.group.start(1, deadline=time.monotonic() + 20, watch=lambda: None)
        trainer.group.close()
        with pytest.raises(TransferError, match="broke off"):
            received.result(timeout=40)
    assert states(service) == {"stale"}
    service.push_weights(perturbed(model, seed=130))
    assert states(service) == {"serving"}
    assert_holds(service, model)


def test_arguments_are_checked(service):
    with pytest.raises(UnsupportedArgumentError, match="mode must be one of"):
        service.pause_generation(mode="hibernate")
    with pytest.raises(UnsupportedArgumentError, match="level must be one of"):
        service.sleep(level=3)
    with pytest.raises(UnsupportedArgumentError, match="tags must be among"):
        service.wake_up(tags=["curtains"])
    with pytest.raises(UnsupportedArgumentError, match=r"backend must be one of .*'carrier'"):
        service.use_transfer_engine("carrier")
    with pytest.raises(TransferError, match="Invalid init_info for BroadcastReceiver"):
        service.init_weight_transfer_engine({"host": "localhost"})
    assert states(service) == {"serving"}


def test_the_new_error_pickles():
    error = pickle.loads(pickle.dumps(TransferNotReadyError("later")))
    assert (type(error), str(error)) == (TransferNotReadyError, "later")


# ---------------------------------------------------------------- the engine


def test_the_transfer_engine_is_torn_down_and_set_up_again(service, trainer, model):
    for step in (140, 141):
        trainer.meet()
        trainer.update(perturbed(model, seed=step))
        assert_holds(service, model)
        service.shutdown_weight_transfer_engine()
        trainer.close()
        with pytest.raises(TransferNotReadyError, match="not initialised"):
            service.start_weight_update()


def test_another_engine_and_back(service, trainer, model):
    names = [["NCCLWeightTransferEngine"]] * 2
    service.use_transfer_engine("nccl")
    assert [
        *service.replicas.call_replicas("collective_rpc", "native_engine_name").values()
    ] == names
    with pytest.raises(TransferNotReadyError, match="NCCLWeightTransferEngine is not initialised"):
        service.start_weight_update()
    service.push_weights(perturbed(model, seed=150))
    assert_holds(service, model)
    service.use_transfer_engine()
    trainer.meet()
    trainer.update(perturbed(model, seed=151))
    assert_holds(service, model)


# ---------------------------------------------------------------- pause and sleep


def test_a_pause_outlives_a_push(service, model):
    service.pause_generation(mode="keep", clear_cache=False)
    assert service.is_paused()
    thread, results = in_background(
        lambda: service.generate(prompt_token_ids=[5, 6], sampling_params=greedy(4))
    )
    report = service.push_weights(perturbed(model, seed=160))
    assert service.is_paused()
    assert states(service) == {"updating"}
    assert thread.is_alive()
    service.resume_generation()
    thread.join(30)
    assert results[0].min_version == report.version
    assert_holds(service, model)


def test_vllms_defaults_end_requests_in_flight(service):
    with slowed(service):
        thread, results = in_background(
            lambda: service.generate(prompt_token_ids=[5, 6], sampling_params=greedy(240))
        )
        wait_for(lambda: sum(service.get_num_unfinished_requests()) == 1)
        service.pause_generation()
    thread.join(30)
    service.resume_generation()
    (completion,) = results[0].outputs
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) < 240


def test_sleep_and_wake_up(service, model):
    service.push_weights(perturbed(model, seed=170))
    service.sleep(level=1)
    assert service.is_paused()
    with pytest.raises(TransferNotReadyError, match="is asleep: wake_up"):
        service.resume_generation()
    assert not service.wake_up(tags=["weights"])
    assert service.wake_up(tags=["kv_cache"])
    assert not service.is_paused()
    assert_holds(service, model)
    service.sleep(level=0)
    assert service.wake_up()
    assert states(service) == {"serving"}


def test_an_engine_that_is_not_idle_in_time_does_not_fall_asleep_later(service, model):
    def is_sleeping(actor):  # in a thread of its own
        loop = actor.engine.output_handler.get_loop()
        return asyncio.run_coroutine_threadsafe(actor.engine.is_sleeping(), loop).result(30)

    service.push_weights(perturbed(model, seed=175))
    with slowed(service):
        thread, results = in_background(lambda: service.generate([5, 6], greedy(60), actor_index=1))
        wait_for(lambda: sum(service.get_num_unfinished_requests()) == 1)
        with pytest.raises(SilentEngineError, match=r"falling asleep took longer than 0\.5 s"):
            service.sleep(2, "wait", timeout_s=0.5)
        assert thread.is_alive()
    thread.join(60)
    assert len(results[0].outputs[0].token_ids) == 60
    asleep = service.replicas.call_replicas("__ray_call__", is_sleeping)
    assert asleep == {"0": True, "1": False}
    assert distance(service, model, 1) < TOLERANCE
    service.wake_up(tags=["weights"])
    service.push_weights(model)
    assert service.wake_up(tags=["kv_cache"])
    assert_holds(service, model)


def test_weights_that_were_dropped_must_come_before_the_engine_is_awake(service, model):
    service.sleep(level=2)
    with pytest.raises(TransferNotReadyError, match="has no weights to serve with"):
        service.wake_up()
    service.wake_up(tags=["weights"])
    service.push_weights(perturbed(model, seed=180))
    assert service.wake_up(tags=["kv_cache"])
    assert_holds(service, model)
