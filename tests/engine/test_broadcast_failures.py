"""Broadcasts that go wrong: a typed error in time, no mixture served, and the next push repairs."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from vllm import SamplingParams

from tests.engine.checks import TOLERANCE, assert_holds, distance, perturbed
from tests.engine.faults import engine_core_pid
from tests.engine.requests import eventually, num_running, slowed
from tests.engine.trainers import Breaking, Rival, Trainer, broadcast
from torchrl_vllm_sync import ReplicaState, attach
from torchrl_vllm_sync.errors import (
    NoReplicaAvailableError,
    ReplicaUnavailableError,
    ServiceClosedError,
    StaleVersionError,
    SyncError,
    TransferError,
    WeightSyncError,
)
from torchrl_vllm_sync.testing import load_tiny_model

SERVING, STALE, FAILED = ReplicaState.SERVING, ReplicaState.STALE, ReplicaState.FAILED
KILLS = True


@pytest.fixture(scope="module")
def faulty(hurt):
    """Replicas that are pushed to by broadcast."""
    hurt.use_transport(broadcast(join_timeout_s=15))
    return hurt


@pytest.fixture
def trained(faulty, untied_checkpoint):
    """What all replicas hold, with no fault left over from another test."""
    model = load_tiny_model(untied_checkpoint)
    plan(faulty)
    faulty.push_weights(model)
    wait_until_admitted(faulty)
    assert_holds(faulty, model)
    return model


def plan(service, *replicas, **faults):
    """Plans ``faults`` for these replicas, by position, and none for the others."""
    for index, actor in enumerate(service.actors):
        own = faults if index in replicas else {}
        ray.get(actor.collective_rpc.remote("sync_plan", kwargs=own))


def reports(service):
    return list(service.replicas.call_replicas("report").values())


def states(service):
    return [getattr(report, "state", FAILED) for report in reports(service)]


def wait_until_admitted(service, *replicas):
    """Waits until this process has heard that these replicas serve, or all of them."""

    def admitted():
        found = [one.state.admits_requests for one in service.load.snapshots()]
        return all(found[index] for index in replicas or range(len(found)))

    eventually(admitted)


def assert_serve_only(service, version, *replicas):
    """Requests go to these replicas alone, whose version is ``version``."""
    outputs = service.generate([[i, 5, 6] for i in range(20)], SamplingParams(max_tokens=2))
    assert {output.replica_id for output in outputs} <= {str(one) for one in replicas}
    assert {output.min_version for output in outputs} == {version}


class Within:
    """What is done inside must not take longer."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        self.begin = time.monotonic()

    def __exit__(self, *_):
        took = time.monotonic() - self.begin
        assert took < self.seconds, f"it took {took:.1f} s"


# ---------------------------------------------------------------- twins that must fail


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.norm.weight", "model.layers.3.self_attn.v_proj.weight"]
)
def test_the_check_notices_one_tensor_lost_at_the_receiver(faulty, trained, name):
    perturbed(trained, seed=1)
    plan(faulty, 1, zero=name)
    faulty.push_weights(trained)
    assert_holds(faulty, trained, [0, 2])
    assert distance(faulty, trained, 1) > 100 * TOLERANCE
    with pytest.raises(AssertionError, match=r"replica 1 differs by"):
        assert_holds(faulty, trained)


# ---------------------------------------------------------------- before anything is touched


def test_a_pause_that_fails_leaves_all_serving_what_they_held(faulty, trained):
    version = faulty.weight_version
    ray.get(faulty.actors[1].fail_pauses.remote(1))
    other = perturbed(load_tiny_model(faulty.engine_args.model), seed=9)
    with Within(15), pytest.raises(WeightSyncError, match=r"injected at the pause") as caught:
        faulty.push_weights(other)
    # Nobody begins before everybody is ready.
    assert set(caught.value.failures) == {"0", "1", "2"}
    assert "called the transfer off: left: replica 1" in caught.value.failures["0"]
    assert states(faulty) == [SERVING] * 3
    assert {report.weight_version for report in reports(faulty)} == {version}
    assert_holds(faulty, trained)
    assert faulty.push_weights(other).version > version
    assert_holds(faulty, other)


def test_a_worker_that_never_gets_ready_leaves_all_as_they_were(faulty, trained):
    version = faulty.weight_version
    plan(faulty, 2, unready=True)
    other = perturbed(load_tiny_model(faulty.engine_args.model), seed=10)
    with Within(15), pytest.raises(WeightSyncError, match="injected before it was ready"):
        faulty.push_weights(other)
    assert states(faulty) == [SERVING] * 3
    assert_holds(faulty, trained)
    assert_serve_only(faulty, version, 0, 1, 2)
    plan(faulty)
    faulty.push_weights(other)
    assert_holds(faulty, other)


@pytest.mark.slow
def test_a_worker_that_is_late_is_left_behind_and_the_others_go_on(faulty, trained, tmp_path):
    marker = tmp_path / "marker"
    plan(faulty, 0, at="ready", touch=str(marker))
    other = perturbed(load_tiny_model(faulty.engine_args.model), seed=11)
    with Within(80), pytest.raises(WeightSyncError, match="took longer than") as caught:
        faulty.push_weights(other, timeout_s=8)
    assert set(caught.value.failures) == {"0"}
    assert_holds(faulty, other, [1, 2])
    assert_serve_only(faulty, caught.value.version, 1, 2)
    marker.unlink()
    plan(faulty)
    eventually(lambda: repaired(faulty, other), 60)
    assert_holds(faulty, other)


def test_an_older_version_than_replicas_hold_touches_nothing(faulty, trained):
    version = faulty.weight_version
    attached = attach(faulty.name)
    attached.use_transport(broadcast())
    perturbed(trained, seed=12)
    assert attached.push_weights(trained, version=version + 5).version == version + 5
    other = perturbed(load_tiny_model(faulty.engine_args.model), seed=13)
    # This process has not heard of it: its number is refused by the replicas themselves.
    with Within(15), pytest.raises((WeightSyncError, StaleVersionError), match="at least"):
        faulty.push_weights(other, version=version + 2)
    assert states(faulty) == [SERVING] * 3
    assert_holds(faulty, trained)
    assert faulty.push_weights(other).version == version + 6
    assert_holds(faulty, other)
    attached._let_go()


@pytest.mark.parametrize("kind", [RuntimeError, KeyError])
def test_a_source_that_breaks_off_is_named_and_repaired(faulty, trained, kind):
    perturbed(trained, seed=14)
    source = Breaking(trained.state_dict(), kind("the trainer has had enough"))
    with Within(15), pytest.raises(WeightSyncError) as caught:
        faulty.push_weights(source, timeout_s=60)
    assert set(caught.value.failures) == {"0", "1", "2"}
    for told in caught.value.failures.values():
        assert "the trainer has had enough" in told
        assert "its weights are not whole, and it is stale until the next push repairs it" in told
    for index, state in enumerate(states(faulty)):
        assert state is STALE, index
    with pytest.raises(NoReplicaAvailableError):
        faulty.generate([5, 6], SamplingParams(max_tokens=1))
    faulty.push_weights(trained)
    wait_until_admitted(faulty)
    assert_holds(faulty, trained)


# ---------------------------------------------------------------- in the middle of a load


@pytest.mark.parametrize("fail_at", [0, 21, 46])
def test_a_worker_that_fails_in_mid_load_is_stale_and_the_others_go_on(faulty, trained, fail_at):
    perturbed(trained, seed=fail_at)
    plan(faulty, 1, fail_at=fail_at, times=1)
    with Within(15), pytest.raises(WeightSyncError, match=r"injected before tensor") as caught:
        faulty.push_weights(trained)
    assert set(caught.value.failures) == {"1"}
    assert states(faulty) == [SERVING, STALE, SERVING]
    assert "injected" in reports(faulty)[1].reason
    assert_serve_only(faulty, caught.value.version, 0, 2)
    with pytest.raises(NoReplicaAvailableError):
        faulty.generate(prompt_token_ids=[5, 6], actor_index=1)
    assert_holds(faulty, trained, [0, 2])
    faulty.push_weights(trained, version=caught.value.version)
    wait_until_admitted(faulty)
    assert states(faulty) == [SERVING] * 3
    assert_holds(faulty, trained)


def test_failing_everywhere_and_once_more(faulty, trained):
    for step in range(2):
        plan(faulty, 0, 1, 2, fail_at=10 + step, times=1)
        with Within(15), pytest.raises(WeightSyncError) as caught:
            faulty.push_weights(perturbed(trained, seed=step))
        assert set(caught.value.failures) == {"0", "1", "2"}
        assert states(faulty) == [STALE] * 3
    plan(faulty)
    faulty.push_weights(perturbed(trained, seed=5))
    wait_until_admitted(faulty)
    assert_holds(faulty, trained)


def test_an_engine_that_stops_in_mid_load_is_left_behind_and_the_others_go_on(faulty, trained):
    pid = engine_core_pid(faulty.actors[1])
    plan(faulty, 1, at=5, signal="stop")
    perturbed(trained, seed=15)
    try:
        with Within(60):
            report = faulty.push_weights(trained, timeout_s=8, strict=False)
        assert set(report.left_behind) == {"1"}
        assert faulty.weight_version == report.version
        assert_holds(faulty, trained, [0, 2])
        assert_serve_only(faulty, report.version, 0, 2)
        # The next push does without the one that is still stopped, and without waiting for it.
        perturbed(trained, seed=16)
        with Within(15), pytest.raises(WeightSyncError) as caught:
            faulty.push_weights(trained, timeout_s=30, strict=True)
        assert set(caught.value.failures) == {"1"}
        assert_holds(faulty, trained, [0, 2])
        assert_serve_only(faulty, caught.value.version, 0, 2)
    finally:
        os.kill(pid, signal.SIGCONT)
    # It finds that its group was given up, and what it has is no whole version.
    eventually(lambda: reports(faulty)[1].reason.startswith("weight update failed"), 30)
    assert_serve_only(faulty, caught.value.version, 0, 2)
    eventually(lambda: repaired(faulty, trained), 60)
    assert states(faulty) == [SERVING] * 3
    assert_holds(faulty, trained)


@pytest.mark.slow
def test_an_actor_that_sleeps_through_a_push_serves_nothing_old_when_it_wakes(faulty, trained):
    pid = ray.get(faulty.actors[2].describe.remote()).pid
    old = faulty.weight_version
    os.kill(pid, signal.SIGSTOP)
    try:
        perturbed(trained, seed=31)
        with Within(60):
            report = faulty.push_weights(trained, timeout_s=8, strict=False)
        assert set(report.left_behind) == {"2"}
        assert_holds(faulty, trained, [0, 1])
    finally:
        os.kill(pid, signal.SIGCONT)
    # Whatever it says of itself: its first reports may be from before it read that it is behind.
    for _ in range(10):
        assert_serve_only(faulty, report.version, 0, 1)
    eventually(lambda: reports(faulty)[2].state is STALE, 30)
    assert reports(faulty)[2].weight_version == old
    with pytest.raises(ReplicaUnavailableError):  # and its own gate refuses who does not know
        ray.get(faulty.actors[2].generate.remote([5, 6], SamplingParams(max_tokens=1)))
    eventually(lambda: repaired(faulty, trained), 60)
    assert_holds(faulty, trained)


def repaired(service, model):
    try:
        service.push_weights(model, timeout_s=20)
    except WeightSyncError:
        return False
    wait_until_admitted(service)
    return True


@pytest.mark.slow
def test_requests_in_flight_on_a_replica_that_fails_finish_elsewhere(faulty, trained):
    perturbed(trained, seed=17)
    plan(faulty, 1, fail_at=10, times=1)
    long = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)
    prompts = [[i, 7, 8] for i in range(9)]
    generate = ray.remote(num_cpus=0)(lambda service: service.generate(prompts, long))
    with slowed(faulty):
        running = generate.remote(faulty)
        eventually(lambda: num_running(faulty) >= 9)
        with pytest.raises(WeightSyncError):
            faulty.push_weights(trained)
    outputs = ray.get(running, timeout=60)
    assert [one.finish_reason for output in outputs for one in output.outputs] == ["length"] * 9
    assert {output.replica_id for output in outputs} == {"0", "2"}


# ---------------------------------------------------------------- groups that do not fit


def info_of(rank_offset, port, world_size=2, timeout_s=3.0):
    return {
        "master_address": "127.0.0.1",
        "master_port": port,
        "world_size": world_size,
        "rank_offset": rank_offset,
    }, timeout_s


def join(service, index, *args, **kwargs):
    info, timeout_s = info_of(*args, **kwargs)
    return service.actors[index].join_broadcast.remote(info, timeout_s=timeout_s)


@pytest.mark.slow
def test_joining_with_ranks_that_do_not_fit(faulty, trained):
    import torch

    from torchrl_vllm_sync.weights.broadcast.group import BroadcastGroup, Rendezvous

    version = faulty.weight_version
    cpu = torch.device("cpu")
    group = BroadcastGroup.host(Rendezvous("127.0.0.1", 0, 3), cpu, timeout_s=10)
    port = group.rendezvous.port
    for rank_offset in (0, 3, 7):
        with Within(15), pytest.raises(SyncError, match=r"rank must be in \[1, 3\)"):
            ray.get(join(faulty, 0, rank_offset, port, 3))
    with ThreadPoolExecutor(1) as pool:
        mine = pool.submit(lambda: group.connect(timeout_s=10))
        both = [join(faulty, index, 1, port, 3, timeout_s=8.0) for index in (0, 1)]
        with Within(25):
            for ref in both:
                with pytest.raises(SyncError, match=r"taken already|did not come"):
                    ray.get(ref)
            with pytest.raises(TransferError, match="ranks 2 did not come"):
                mine.result()
    group.close()
    with Within(15), pytest.raises(SyncError, match="cannot reach the trainer"):
        ray.get(join(faulty, 2, 1, port))
    assert states(faulty) == [SERVING] * 3
    assert_serve_only(faulty, version, 0, 1, 2)
    faulty.push_weights(perturbed(trained, seed=18))
    assert_holds(faulty, trained)


def test_receiving_without_a_group_or_out_of_turn(faulty, trained):
    version = faulty.weight_version
    digest = faulty.weights.pusher.transport._layout.digest
    faulty.weights.pusher.transport.close()
    options = {"version": version + 1, "run_id": "another", "timeout_s": 3.0}

    def receive(push_id, **changes):
        actor = faulty.actors[0]
        return ray.get(actor.receive_broadcast.remote(push_id, digest, **{**options, **changes}))

    # Its trainer is gone, or it is asked by one who did not form the group.
    with Within(15), pytest.raises(SyncError, match="another trainer"):
        receive(1)
    ray.get(faulty.actors[0].leave_broadcast.remote())
    with Within(15), pytest.raises(SyncError, match="has not joined a group"):
        receive(1)
    with Within(15), pytest.raises(StaleVersionError, match="must be at least"):
        receive(1, version=version - 1)
    with Within(15), pytest.raises(SyncError, match="stage_weights=True"):
        receive(1, staged=True)
    assert states(faulty) == [SERVING] * 3
    assert_holds(faulty, trained)
    faulty.push_weights(perturbed(trained, seed=19))
    assert_holds(faulty, trained)


def test_staged_weights_need_memory_that_was_asked_for_at_launch(faulty, trained):
    version = faulty.weight_version
    other = perturbed(load_tiny_model(faulty.engine_args.model), seed=20)
    with Within(15), pytest.raises(WeightSyncError, match="launch it with stage_weights=True"):
        faulty.push_weights(other, transport=broadcast(staged=True))
    assert states(faulty) == [SERVING] * 3
    assert_holds(faulty, trained)
    faulty.push_weights(other, transport=broadcast(join_timeout_s=15))
    assert faulty.weight_version > version
    assert_holds(faulty, other)


# ---------------------------------------------------------------- two trainers


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["broadcast", "memmap"])
def test_of_two_trainers_at_once_one_pushes_and_the_other_is_told_who(
    faulty, trained, untied_checkpoint, tmp_path, transport
):
    rivals = [Rival.remote(faulty.name, untied_checkpoint, transport) for _ in range(2)]
    pids = ray.get([one.pid.remote() for one in rivals])
    marker = tmp_path / "marker"
    plan(faulty, 0, at=20, touch=str(marker))  # the first push lasts until the other was refused
    pushing = [rivals[0].push_all.remote(range(40, 50, 2))]
    eventually(marker.exists)
    pushing.append(rivals[1].push_all.remote(range(41, 51, 2)))
    eventually(lambda: ray.get(rivals[1].num_refused.remote()))
    marker.unlink()
    (first, refused), (second, refused_too) = ray.get(pushing, timeout=240)
    pushed = {version: seed for one in (first, second) for seed, version in one.items()}
    assert len(pushed) == 10, "each version is one trainer's"
    assert refused_too
    assert {pid for _, pid in refused} <= {pids[1]}
    assert {pid for _, pid in refused_too} <= {pids[0]}
    assert max(seconds for seconds, _ in refused + refused_too) < 20
    wait_until_admitted(faulty)
    assert {one.weight_version for one in reports(faulty)} == {max(pushed)}
    last = pushed[max(pushed)]
    assert_holds(faulty, perturbed(load_tiny_model(untied_checkpoint), seed=last))
    for one in rivals:
        ray.kill(one)
    assert faulty.push_weights(trained).version == max(pushed) + 1  # without being told
    assert_holds(faulty, trained)


# ---------------------------------------------------------------- a trainer that dies


@pytest.mark.parametrize("moment", [pytest.param("ready", marks=pytest.mark.slow), "in mid-load"])
def test_a_trainer_killed_in_mid_push_leaves_no_mixture(
    faulty, trained, untied_checkpoint, tmp_path, moment
):
    version, marker = faulty.weight_version, tmp_path / "marker"
    trainer = Trainer.remote(faulty, untied_checkpoint, bucket_bytes=2**12)
    pid = ray.get(trainer.pid.remote())
    if moment == "ready":
        plan(faulty, 1, at="ready", touch=str(marker))
    else:
        plan(faulty, 0, 1, 2, at=4, touch=str(marker))
    pushing = trainer.push.remote(21, timeout_s=60)
    eventually(marker.exists)
    if moment == "ready":
        eventually(lambda: {one.state for one in reports(faulty)} == {ReplicaState.UPDATING})
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(pushing, timeout=30)

    def has_ended():
        marker.unlink(missing_ok=True)  # again: one that is slow gets there after the others
        return ReplicaState.UPDATING not in states(faulty)

    with Within(20):
        eventually(has_ended)
    if moment == "ready":
        assert states(faulty) == [SERVING] * 3
        assert {one.weight_version for one in reports(faulty)} == {version}
        wait_until_admitted(faulty)
        assert_holds(faulty, trained)
    else:
        assert STALE in states(faulty)
        expected = perturbed(load_tiny_model(untied_checkpoint), seed=21)
        for index, state in enumerate(states(faulty)):
            if state is SERVING:
                assert_holds(faulty, expected, [index])
    plan(faulty)
    if moment == "in mid-load":
        successor = Trainer.remote(attach(faulty.name), untied_checkpoint)
        pushed = successor.push.remote(22, version=version + 10)
        assert ray.get(pushed, timeout=60) == version + 10
        wait_until_admitted(faulty)
        assert states(faulty) == [SERVING] * 3
        assert_holds(faulty, perturbed(load_tiny_model(untied_checkpoint), seed=22))
    faulty.push_weights(perturbed(trained, seed=23), version=version + 20)
    wait_until_admitted(faulty)
    assert states(faulty) == [SERVING] * 3
    assert_holds(faulty, trained)


# ---------------------------------------------------------------- the last tests: replicas die


@pytest.mark.slow
def test_an_engine_killed_in_mid_load_is_named_and_the_others_get_the_version(faulty, trained):
    plan(faulty, 2, at=10, signal="kill")
    perturbed(trained, seed=24)
    with Within(40), pytest.raises(WeightSyncError, match="engine core died") as caught:
        faulty.push_weights(trained)
    assert set(caught.value.failures) == {"2"}
    assert states(faulty) == [SERVING, SERVING, FAILED]
    assert_holds(faulty, trained, [0, 1])
    assert_serve_only(faulty, caught.value.version, 0, 1)
    for step in range(2):  # and so does each push that follows
        perturbed(trained, seed=25 + step)
        with Within(20), pytest.raises(WeightSyncError) as caught:
            faulty.push_weights(trained)
        assert set(caught.value.failures) == {"2"}
        assert_holds(faulty, trained, [0, 1])
    assert_serve_only(faulty, caught.value.version, 0, 1)


@pytest.mark.slow
def test_an_actor_killed_between_two_pushes(faulty, untied_checkpoint):
    """One of the two replicas that the test before has left."""
    model = perturbed(load_tiny_model(untied_checkpoint), seed=27)
    pid = ray.get(faulty.actors[1].describe.remote()).pid
    os.kill(pid, signal.SIGKILL)
    for step in range(2):
        perturbed(model, seed=28 + step)
        with Within(40), pytest.raises(WeightSyncError) as caught:
            faulty.push_weights(model)
        assert set(caught.value.failures) == {"1", "2"}
        assert_holds(faulty, model, [0])
        assert_serve_only(faulty, caught.value.version, 0)


@pytest.mark.slow
def test_the_last_engine_killed_before_it_is_ready(faulty, untied_checkpoint):
    model = perturbed(load_tiny_model(untied_checkpoint), seed=30)
    os.kill(engine_core_pid(faulty.actors[0]), signal.SIGKILL)
    with Within(40), pytest.raises((WeightSyncError, TransferError), match="engine core died"):
        faulty.push_weights(model)
    assert states(faulty) == [FAILED] * 3
    with Within(40), pytest.raises((WeightSyncError, TransferError, ReplicaUnavailableError)):
        faulty.push_weights(model)
    faulty.shutdown()
    faulty.shutdown()
    with Within(5), pytest.raises(ServiceClosedError):
        faulty.push_weights(model)
