"""The trainer writes into spare memory of the engines, which then serve it."""

import asyncio
import itertools
import os
import signal
import sys
from pathlib import Path

import pytest
import ray
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.engine.checks import TOLERANCE, assert_holds, assert_labelled, distance, perturbed
from tests.engine.requests import eventually
from tests.engine.test_sharded_push import Ranks, Whole
from tests.engine.test_version_spans import Weights, compare, pushes_under_load, scored_spans
from tests.engine.trainers import Breaking, broadcast
from torchrl_vllm_sync import ReplicaState, attach
from torchrl_vllm_sync.errors import (
    NoReplicaAvailableError,
    ReplicaUnavailableError,
    WeightSyncError,
)
from torchrl_vllm_sync.testing import load_tiny_model
from torchrl_vllm_sync.weights.p2p.memory import MappedMemory
from torchrl_vllm_sync.weights.p2p.transport import P2PTransport
from torchrl_vllm_sync.weights.p2p.writes import Places
from torchrl_vllm_sync.weights.source import MappingSource

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", autouse=True)
def transport(plain):
    plain.use_transport(P2PTransport())


@pytest.fixture
def model(checkpoint):
    return load_tiny_model(checkpoint)


def test_pushes_take_turns_between_two_memories(plain, model):
    assert_holds(plain, model)
    for seed in range(5):
        report = plain.push_weights(perturbed(model, seed=seed))
        assert report.transport == "p2p"
        assert {one.path for one in report.replicas} == {"plan"}
        assert_holds(plain, model)


def test_the_check_above_notices_a_tensor_that_is_not_written(plain, model, monkeypatch):
    plain.push_weights(model)
    assert_holds(plain, model)
    whole = Places.bound

    def all_but_one(places):
        return itertools.islice(whole(places), 1, None)

    monkeypatch.setattr(Places, "bound", all_but_one)
    for seed in range(2):  # the memory that is written to has held these values before
        plain.push_weights(perturbed(model, seed=seed))
    assert min(distance(plain, model, index) for index in range(2)) > 100 * TOLERANCE


def test_other_dtypes_and_forms_are_cast_on_the_way(plain, model):
    double = {name: one.double() for name, one in perturbed(model, seed=9).state_dict().items()}
    turned = {
        name: one.t().contiguous().t() if one.ndim == 2 else one for name, one in double.items()
    }
    plain.push_weights(turned)
    assert_holds(plain, model)


@pytest.fixture
def hand_on(plain):
    plain.use_transport(P2PTransport(hand_on=True))
    yield
    plain.use_transport(P2PTransport())


def test_what_one_replica_got_is_handed_on_to_the_next(plain, model, hand_on, monkeypatch):
    """What is handed on no more is missed at the second one alone."""
    for seed in range(3):
        plain.push_weights(perturbed(model, seed=seed))
        assert_holds(plain, model)
    monkeypatch.setattr(MappedMemory, "hand_on", lambda *args: None)
    plain.push_weights(perturbed(model, seed=3))
    distances = sorted(distance(plain, model, index) for index in range(2))
    assert distances[0] < TOLERANCE < distances[1] / 100


def test_a_source_that_breaks_off_leaves_the_weights_as_they_were(plain, model):
    plain.push_weights(model)
    other = perturbed(load_tiny_model(model.name_or_path), seed=3).state_dict()
    with pytest.raises(RuntimeError, match="broke off"):
        plain.push_weights(Breaking(other, RuntimeError("the source broke off")))
    assert_holds(plain, model)
    plain.push_weights(other)
    assert_holds(plain, perturbed(load_tiny_model(model.name_or_path), seed=3))


def test_ranks_of_a_sharded_trainer_write_their_own_parts(plain, model, checkpoint):
    ranks, whole = Ranks(plain.name, checkpoint), Whole(model)
    ranks.start()
    try:
        for _ in range(3):  # both memories, and one of them again
            whole.step()
            ranks.all("step")
            ranks.all("count_gathers")
            first, second = ranks.all("push", transport="p2p")
            assert (first, first[1]) == (second, "p2p")
            assert ranks.all("count_gathers") == [0, 0]
            assert_holds(plain, model)
    finally:
        ranks.close()


NUM_PUSHES = 40
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def staged():
    return broadcast(staged=True)


def count_pauses(actor):
    """From now on, of a replica's engine, in ``actor.pauses``."""
    actor.pauses, client = [], actor.engine.engine_core

    def counted(name, call):
        def count(*args, **kwargs):
            actor.pauses.append(name)
            return call(*args, **kwargs)

        setattr(client, name, count)

    counted("pause_scheduler_async", client.pause_scheduler_async)
    counted("resume_scheduler_async", client.resume_scheduler_async)


def pauses(actor):
    return actor.pauses


@pytest.fixture(params=[P2PTransport, broadcast, staged], ids=["p2p", "broadcast", "staged"])
def between_steps(plain, request):
    """The transports whose weights are swapped, or received, between two steps."""
    plain.use_transport(request.param())
    yield
    plain.use_transport(P2PTransport())


async def test_spans_are_exact_without_a_pause(plain, checkpoint, between_steps):
    weights = Weights(checkpoint)
    plain.push_weights(weights.at(plain.weight_version + 1))  # the first one pauses, and compares
    ray.get([one.__ray_call__.remote(count_pauses) for one in plain.actors])
    outputs = await pushes_under_load(plain, weights, num_pushes=NUM_PUSHES, seed=1)
    assert ray.get([one.__ray_call__.remote(pauses) for one in plain.actors]) == [[], []]
    switches = sum(len(spans) - 1 for output in outputs for spans in output.version_spans)
    assert switches > 5 * NUM_PUSHES
    for one in outputs:
        assert_labelled(one)
    scored = scored_spans(outputs, first_only=True)
    assert len(scored) > NUM_PUSHES / 2
    worst, foreign = 0.0, []
    for version, spans in scored.items():
        own, after = compare(weights.at(version), spans)
        worst = max(worst, own)
        foreign += after
    assert worst < TOLERANCE  # no boundary is late
    noticed = sum(one > 10 * TOLERANCE for one in foreign)
    assert len(foreign) > NUM_PUSHES / 2
    assert noticed > 0.95 * len(foreign)  # nor early
    model = weights.at(plain.weight_version + 1)
    await asyncio.to_thread(plain.push_weights, model, clear_cache=True)
    found = ray.get([one.__ray_call__.remote(pauses) for one in plain.actors])
    assert [{*one} for one in found] == [{"pause_scheduler_async", "resume_scheduler_async"}] * 2


def shift(actor, steps):
    """Counts boundaries that many steps later; without the step that is on its way if ``None``."""
    from torchrl_vllm_sync.engine import internals

    state = internals.SampleState
    actor.exact = getattr(actor, "exact", state.num_sampled)

    def shifted(self, computed):
        return 0 if steps is None else actor.exact(self, computed) + steps

    state.num_sampled = shifted if steps != 0 else actor.exact


class Stumbling:
    """A service to which each push breaks off in its middle, and is followed by a whole one."""

    def __init__(self, service, weights):
        self.service, self.weights, self.torn, self.outputs = service, weights, [], []

    def __getattr__(self, name):
        return getattr(self.service, name)

    async def agenerate(self, prompt, params, **options):
        """Keeps what was sampled before the weights were torn, too."""
        params.output_kind, params.n, last = RequestOutputKind.CUMULATIVE, 1, None
        try:
            async for output in self.service.astream(prompt, params, **options):
                last = output
        except (NoReplicaAvailableError, ReplicaUnavailableError):
            await asyncio.sleep(0.05)
        self.outputs += [] if last is None else [last]

    def push_weights(self, model):
        broken = Breaking({name: 2 * one for name, one in model.state_dict().items()}, OSError())
        with pytest.raises(WeightSyncError):
            self.service.push_weights(broken)
        self.torn += [one.state for one in self.service.status().replicas]
        self.service.push_weights(self.weights.at(self.service.weight_version + 2))


async def stumble(plain, checkpoint, num_pushes):
    """Returns the states after torn pushes, and how far each version's tokens are from its own."""
    weights = Weights(checkpoint)
    plain.use_transport(broadcast())
    plain.push_weights(weights.at(plain.weight_version + 1))
    service = Stumbling(plain, weights)
    await pushes_under_load(service, weights, num_pushes=num_pushes, seed=3)
    plain.use_transport(P2PTransport())
    scored = scored_spans(service.outputs, first_only=True)
    return service.torn, [compare(weights.at(one), spans)[0] for one, spans in scored.items()]


async def test_no_token_is_of_weights_that_a_broadcast_left_half_way(plain, checkpoint):
    states, differences = await stumble(plain, checkpoint, 8)
    assert states == [ReplicaState.STALE] * 16
    assert len(differences) > 4
    assert max(differences) < TOLERANCE


def overlook(actor, is_blind):
    """Has a replica take what a broken load left for what was sent, or no longer."""
    updates = actor._updates

    def take(answers, was_whole):
        for one in answers:
            one |= {"computed": {}, "seconds": 0.0, "num_tensors": 0, "path": "plan"}
            one["path_reason"] = ""

    updates._check = take if is_blind else type(updates)._check.__get__(updates)


async def test_the_check_above_notices_tokens_of_such_weights(plain, checkpoint):
    ray.get([one.__ray_call__.remote(overlook, True) for one in plain.actors])
    try:
        _, differences = await stumble(plain, checkpoint, 3)
    finally:
        ray.get([one.__ray_call__.remote(overlook, False) for one in plain.actors])
    assert max(differences) > 100 * TOLERANCE


@pytest.mark.parametrize("steps", [None, 1], ids=["early", "late"])
async def test_the_check_above_notices_boundaries_that_are_off_by_a_step(plain, checkpoint, steps):
    weights = Weights(checkpoint)
    plain.push_weights(weights.at(plain.weight_version + 1))
    ray.get([one.__ray_call__.remote(shift, steps) for one in plain.actors])
    outputs = await pushes_under_load(plain, weights, num_pushes=15, seed=2)
    ray.get([one.__ray_call__.remote(shift, 0) for one in plain.actors])
    worst, foreign = 0.0, []
    for version, spans in scored_spans(outputs, first_only=True).items():
        own, after = compare(weights.at(version), spans)
        worst = max(worst, own)
        foreign += after
    noticed = sum(one > 10 * TOLERANCE for one in foreign)
    assert (worst > 100 * TOLERANCE) if steps else (noticed < 0.9 * len(foreign))


@ray.remote(num_cpus=0)
class Rival:
    """A trainer that ends, or stops, in the middle of its writing, or of its broadcast."""

    def __init__(self, name, checkpoint, *, broadcasts=False):
        self.service, self.checkpoint = attach(name), checkpoint
        self.service.use_transport(broadcast() if broadcasts else P2PTransport())

    def broadcast(self, how):
        model = load_tiny_model(self.checkpoint)
        self.service.push_weights(model)  # by a plan, which is checked

        def half():
            for at, item in enumerate(perturbed(model, seed=5).state_dict().items()):
                if at == 20:
                    os.kill(os.getpid(), how)
                yield item

        whole = MappingSource.__iter__
        MappingSource.__iter__ = lambda source: half()
        MappingSource.views = lambda source: None
        try:
            return self.service.push_weights(MappingSource(model.state_dict())).version
        finally:
            MappingSource.__iter__ = whole

    def pid(self):
        return os.getpid()

    def push(self, seed, how):
        model = perturbed(load_tiny_model(self.checkpoint), seed=seed)
        whole = Places.bound

        def half(places):
            for at, pair in enumerate(whole(places)):
                if at == 10 and Places.bound is not whole:
                    Places.bound = whole
                    os.kill(os.getpid(), how)
                yield pair

        Places.bound = half
        return self.service.push_weights(model).version


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_that_ends_half_way_leaves_the_weights_as_they_were(
    plain, checkpoint, model, how
):
    plain.push_weights(model)
    rival = Rival.remote(plain.name, checkpoint)
    pid = ray.get(rival.pid.remote(), timeout=60)
    pushing = rival.push.remote(5, how)
    if how == signal.SIGKILL:
        with pytest.raises(ray.exceptions.RayError):
            ray.get(pushing, timeout=60)
    else:
        eventually(lambda: "T (stopped)" in Path(f"/proc/{pid}/status").read_text())
    assert_holds(plain, model)
    perturbed(model, seed=6)
    eventually(lambda: pushed(plain, model), timeout_s=90)
    assert_holds(plain, model)
    if how == signal.SIGSTOP:
        version = plain.weight_version + 1  # this process may have heard of it by then
        os.kill(pid, signal.SIGCONT)  # goes on to write, is refused, and sends under the next
        assert ray.get(pushing, timeout=60) == version
        assert_holds(plain, perturbed(load_tiny_model(checkpoint), seed=5))
    ray.kill(rival)


def pushed(service, model):
    from torchrl_vllm_sync.errors import PushUnderWayError

    try:
        return service.push_weights(model)
    except PushUnderWayError:
        return None


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_trainer_that_ends_amid_a_broadcast_leaves_nobody_waiting(
    plain, checkpoint, model, how
):
    """The engines, which were receiving between two steps, serve whole weights after the next."""
    plain.push_weights(model)
    rival = Rival.remote(plain.name, checkpoint, broadcasts=True)
    pid = ray.get(rival.pid.remote(), timeout=60)
    pushing = rival.broadcast.remote(how)
    if how == signal.SIGKILL:
        with pytest.raises(ray.exceptions.RayError):
            ray.get(pushing, timeout=60)
    else:
        eventually(lambda: "T (stopped)" in Path(f"/proc/{pid}/status").read_text())
    held_up = {ReplicaState.STALE, ReplicaState.UPDATING}  # and it was amid
    eventually(lambda: held_up.issuperset(one.state for one in plain.status().replicas))
    perturbed(model, seed=6)
    try:
        eventually(lambda: pushed(plain, model), timeout_s=90)
        assert_holds(plain, model)
    finally:
        if how == signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)
    outputs = await asyncio.gather(*(plain.agenerate([5, 6, 7 + one], GREEDY) for one in range(4)))
    assert {one.max_version for one in outputs} == {plain.weight_version}
