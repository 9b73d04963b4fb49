"""Rollouts at the pace of training over real engines: none too old, none lost, none too short."""

import itertools
import os
import sys
from collections import Counter
from functools import partial

import pytest
import ray
from ray.exceptions import RayActorError
from tensordict import set_list_to_stack
from torchrl.data import ConsumingSampler, LazyStackStorage

from tests.engine.paced import GROUP, Trained, discard, in_order, make_env, same, train
from tests.engine.requests import eventually
from tests.engine.rollouts import QUIET, TOKENIZER
from torchrl_vllm_sync import Pacer, RayReplayBuffer, RolloutCollector, WeightUpdater, vLLMWrapper
from torchrl_vllm_sync.errors import PacingError
from torchrl_vllm_sync.rl.pacing import Ledger
from torchrl_vllm_sync.testing import load_tiny_model

pytestmark = QUIET
ROWS = 8
CONFIG = {"num_cpus": 0, "num_gpus": 0}  # of actors
ENVIRONMENT = {"env_vars": {"LIST_TO_STACK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}}


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


def env_of(rows=ROWS):
    return make_env(rows, TOKENIZER)


def make_policy(service, **sampling):
    return vLLMWrapper(
        service,
        tokenizer=TOKENIZER,
        input_mode="history",
        chat_template=TOKENIZER.chat_template,
        generate_kwargs={"temperature": 1.0, "max_tokens": 60} | sampling,
        return_log_probs=True,
        pad_output=False,
    )


def run(service, checkpoint, num_batches, staleness, rows=ROWS, **sampling):
    trained = Trained(service, WeightUpdater(service, source=load_tiny_model(checkpoint)))
    train(trained, make_policy(service, **sampling), num_batches, rows, staleness)
    assert trained.asked == in_order(num_batches, rows)  # none is lost, and none comes twice
    return trained


def test_no_row_is_older_than_the_bound_and_answers_go_on_across_pushes(service, checkpoint):
    trained = run(service, checkpoint, 10, 2, ignore_eos=True)
    assert trained.oldest == [0, 1] + [2] * 8
    assert trained.across
    assert {*trained.lengths} == {60}


@pytest.mark.slow
def test_without_the_pace_rows_get_older(service, checkpoint, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(Ledger, "_batches_ahead", lambda *_: 0)
    assert max(run(service, checkpoint, 6, 2, ignore_eos=True).oldest) > 2


MANY, BATCHES = 16, 30
# Some tokens end an answer, so that there are short and long ones.
SAMPLING = {"seed": 0, "stop_token_ids": [*range(40, 56)]}


@pytest.mark.parametrize(
    ("most", "longest"),
    [
        pytest.param(64, 50, marks=pytest.mark.slow),
        pytest.param(200, 100, marks=pytest.mark.long),
    ],
)
@pytest.mark.timeout(600)  # three runs of training, of 480 rows each
def test_lengths_are_those_of_synchronous_training_and_not_so_by_discarding(
    service, checkpoint, most, longest
):
    sampling = SAMPLING | {"max_tokens": most}
    wanted = run(service, checkpoint, BATCHES, 0, MANY, **sampling)
    found = run(service, checkpoint, BATCHES, 2, MANY, **sampling)
    assert max(wanted.oldest) == 0
    assert max(found.oldest) == 2
    assert max(wanted.lengths) > longest > 16 > min(wanted.lengths)
    assert same(wanted.lengths, found.lengths) > 0.01
    biased = Trained(service, WeightUpdater(service, source=load_tiny_model(checkpoint)))
    assert discard(biased, make_policy(service, **sampling), BATCHES, MANY, 2)
    assert same(wanted.lengths, biased.lengths) < 0.01


def is_dead(actor):
    try:
        ray.get(actor.__ray_call__.remote(lambda _: None), timeout=10)
    except RayActorError:
        return True
    return False


def die_between_writing_and_saying_so(collector):
    collector._deliver = lambda: os._exit(1)


@pytest.mark.slow
def test_collectors_of_several_processes_share_a_pacer_and_one_may_die(service, checkpoint):
    pacer = Pacer(2, ROWS, shared=True, timeout_s=60.0)
    buffer = RayReplayBuffer(
        storage=partial(LazyStackStorage, ROWS),
        sampler=ConsumingSampler,
        batch_size=ROWS,
        remote_config=CONFIG,
    )
    remote = RolloutCollector.as_remote(CONFIG | {"runtime_env": ENVIRONMENT})
    collectors = [
        remote.remote(
            env_of,
            policy=make_policy(service),
            dialog_turns_per_batch=GROUP,
            replay_buffer=buffer,
            pacer=pacer,
        )
        for _ in range(3)
    ]
    names = [ray.get(one.__ray_call__.remote(lambda self: self.name)) for one in collectors]
    assert len({*names}) == 3
    for one in collectors:
        ray.get(one.start.remote())
    trained = Trained(service, WeightUpdater(service, source=load_tiny_model(checkpoint)))
    for step in range(10):
        pacer.wait_for_batch()
        trained.step(buffer.sample(ROWS))
        if step == 3:
            ray.kill(collectors[0])
            pacer.leave(names[0])
        pacer.trained(ROWS)
        if step == 5:
            ray.get(collectors[1].__ray_call__.remote(die_between_writing_and_saying_so))
            eventually(lambda: is_dead(collectors[1]))
            pacer.leave(names[1])
    assert trained.asked == in_order(10, ROWS)
    assert max(trained.oldest) <= 2
    assert {*Counter(itertools.chain(*trained.asked)).values()} == {GROUP}
    ray.kill(pacer._ledger)
    eventually(lambda: is_dead(pacer._ledger))
    with pytest.raises(PacingError, match="the pacer's actor died"):
        pacer.trained(ROWS)
    ray.kill(collectors[2])
    buffer.close()
