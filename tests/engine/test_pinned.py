"""One replica keeps its version while others are pushed to, and then it is one of them again."""

import contextlib
import functools
import os
import signal
import sys
import time

import pytest
from transformers import AutoTokenizer

from tests.engine.checks import TOLERANCE, assert_holds, distance, perturbed
from tests.engine.conftest import ENGINE
from tests.engine.requests import eventually, is_idle, sampling
from torchrl_vllm_sync import (
    AsyncVLLM,
    Evaluator,
    ReplicaState,
    SnapshotWriter,
    attach,
    vLLMWrapper,
)
from torchrl_vllm_sync.errors import (
    NoReplicaAvailableError,
    RequestLostError,
    TransferNotReadyError,
    UnsupportedArgumentError,
    VersionNotReachedError,
    WeightSyncError,
)
from torchrl_vllm_sync.service.replicas import Membership
from torchrl_vllm_sync.testing import load_tiny_model
from torchrl_vllm_sync.weights.source import as_weight_source

pytestmark = pytest.mark.slow
REPAIR_S = 200.0
PROMPTS = [[5 + one, 9, 11] for one in range(16)]


@pytest.fixture(scope="module")
def elastic(cluster, checkpoint):
    """Two replicas, which are restarted."""
    own = {**ENGINE, "max_restarts": 3}
    with AsyncVLLM.from_pretrained(str(checkpoint), num_replicas=2, **own) as service:
        yield service


@pytest.fixture
def trained(elastic, checkpoint):
    """What all replicas hold."""
    model = perturbed(load_tiny_model(checkpoint), seed=elastic.weight_version + 1)
    elastic.push_weights(model)
    elastic.wait_until_serving(timeout_s=REPAIR_S)
    return model


def users(service):
    return {one.replica_id for one in service.generate(PROMPTS, sampling())}


def test_a_pinned_replica_keeps_its_version_and_comes_back(elastic, trained, checkpoint):
    before = elastic.weight_version
    with attach(elastic.name) as late, elastic.pinned() as pinned:
        (held,) = (one.replica_id for one in pinned.replicas)
        (other,) = {"0", "1"} - {held}
        later = perturbed(load_tiny_model(checkpoint), seed=100)
        for _ in range(2):
            report = elastic.push_weights(perturbed(later, seed=101))
            assert [one.replica_id for one in report.replicas] == [other]
            assert report.left_behind == {}
        report = late.push_weights(perturbed(later, seed=102), version=before + 3)
        assert [one.replica_id for one in report.replicas] == [other]  # another trainer's, too
        assert pinned.weight_version == before
        assert distance(pinned, trained, 0) < TOLERANCE
        assert distance(pinned, later, 0) > 100 * TOLERANCE
        assert_holds(elastic, later, [int(other)])
        outputs = pinned.generate(PROMPTS, sampling())
        assert {(o.replica_id, o.min_version, o.max_version) for o in outputs} == {
            (held, before, before)
        }
        assert users(elastic) == {other}
        with pytest.raises(VersionNotReachedError, match=f"version {before}"):
            elastic.pinned(before, allow_last=True).__enter__()
        with pytest.raises(NoReplicaAvailableError, match="must be 2"):
            elastic.pinned().__enter__()
        with pytest.raises(UnsupportedArgumentError, match="pinned"):
            pinned.push_weights(later)
    assert_holds(elastic, later)
    assert elastic.weight_versions == {"0": before + 3, "1": before + 3}
    eventually(lambda: users(elastic) == {"0", "1"})
    eventually(lambda: is_idle(elastic))


def test_neither_a_snapshot_nor_a_push_that_finds_it_moves_a_pinned_replica(
    elastic, trained, checkpoint, tmp_path
):
    before = elastic.weight_version
    later = perturbed(load_tiny_model(checkpoint), seed=103)
    source = as_weight_source(later)
    elastic.follow_snapshots(tmp_path, interval_s=0.02)
    with elastic.pinned() as pinned, SnapshotWriter(tmp_path) as writer:
        (held,) = pinned.replicas
        writer.publish(source, source.metadata(), before + 1)
        elastic.wait_for_version(before + 1, timeout_s=60)
        time.sleep(0.5)  # the follower's time for many a look
        blind = attach(elastic.name)  # as a trainer that has yet to learn of the pin
        blind.replicas.membership = Membership([held], epoch=sys.maxsize)
        with pytest.raises(WeightSyncError, match=f"is pinned at version {before}"):
            blind.push_weights(later, version=before + 2, timeout_s=60)
        with pytest.raises(TransferNotReadyError, match="is pinned"):
            blind.start_weight_update()
        assert pinned.weight_version == before
        assert {one.max_version for one in pinned.generate(PROMPTS, sampling())} == {before}
        assert distance(pinned, trained, 0) < TOLERANCE
    elastic.stop_following()
    elastic.wait_until_serving(timeout_s=60)
    assert_holds(elastic, later)


def test_it_is_handed_back_when_the_body_raises(elastic, trained):
    version = elastic.weight_version
    with contextlib.suppress(ZeroDivisionError), elastic.pinned(version) as pinned:
        elastic.push_weights(perturbed(trained, seed=7))
        raise ZeroDivisionError
    elastic.wait_until_serving(timeout_s=0)
    assert_holds(elastic, trained)
    assert not pinned.replicas


def test_the_only_replica_may_be_pinned_if_that_is_allowed(elastic, trained):
    with elastic.pinned() as first, elastic.pinned(allow_last=True) as second:
        assert {one.replica_id for one in (*first.replicas, *second.replicas)} == {"0", "1"}
        with pytest.raises(NoReplicaAvailableError):
            elastic.generate(PROMPTS, sampling())
        second.generate(PROMPTS, sampling())
    elastic.wait_until_serving(timeout_s=0)
    assert_holds(elastic, trained)


def test_an_evaluation_goes_on_while_the_version_moves(elastic, trained, checkpoint):
    class Log:
        seen = ()

        def log_scalar(self, name, value, step):
            self.seen = (*self.seen, (name, value, step))

    def length(questions, answers, *, answer):
        assert answer == ["5"] * 8
        return [float(len(one)) for one in answers]

    policy = functools.partial(
        vLLMWrapper,
        tokenizer=AutoTokenizer.from_pretrained(checkpoint),
        input_mode="history",
        generate_kwargs={"max_tokens": 8, "temperature": 0.0},
    )
    problems = [{"query": [f"What is {one} + 3?"], "answer": ["5"]} for one in range(8)]
    evaluator, before = (
        Evaluator(elastic, problems, length, policy, logger=Log()),
        elastic.weight_version,
    )
    with pytest.raises(UnsupportedArgumentError, match="repeats must be at least 1, got 0"):
        Evaluator(elastic, problems, length, policy, repeats=0)
    assert evaluator.start() == before
    elastic.push_weights(perturbed(trained, seed=8))
    found = evaluator.result(timeout_s=120)
    assert (found.version, found.num_rows, len(found.rows)) == (before, 8, 8)
    assert found.rows["next", "reward"].mean().item() == pytest.approx(found.reward)
    assert evaluator._logger.seen == (("evaluation/reward", found.reward, before),)
    elastic.wait_until_serving(timeout_s=0)
    again = evaluator.evaluate()
    assert again.version == before + 1
    answers = [one.rows.get(("tokens", "response"), as_list=True) for one in (found, again)]
    assert str(answers[0]) != str(answers[1])  # of other weights, greedily


def test_a_replica_that_dies_while_it_is_pinned_is_replaced(elastic, trained):
    """Last of this service, as it takes longest."""
    with elastic.pinned() as pinned:
        (held,) = pinned.replicas
        os.kill(held.description.pid, signal.SIGKILL)
        with pytest.raises((RequestLostError, NoReplicaAvailableError)):
            pinned.generate(PROMPTS, sampling(), timeout_seconds=60)
        elastic.push_weights(perturbed(trained, seed=9))
    eventually(lambda: elastic.replicas.membership.find(held.replica_id).num_restarts, REPAIR_S)
    elastic.wait_until_serving(timeout_s=REPAIR_S)
    assert_holds(elastic, trained)
    states = [one.state for one in elastic.load.snapshots()]
    assert states == [ReplicaState.SERVING] * 2
