"""Rollouts at the pace of training over real engines: none too old, none lost, none too short."""

import itertools
import math
import os
import sys
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, wait
from functools import partial

import pytest
import ray
import torch
from ray.exceptions import RayActorError
from tensordict import set_list_to_stack
from torchrl.data import ConsumingSampler, LazyStackStorage
from torchrl.envs import StepCounter
from torchrl.envs.llm.chat import ChatEnv

from tests.engine.requests import eventually
from tests.engine.rollouts import QUIET, TOKENIZER
from torchrl_vllm_sync import Pacer, RayReplayBuffer, RolloutCollector, WeightUpdater, vLLMWrapper
from torchrl_vllm_sync.errors import PacingError
from torchrl_vllm_sync.requests.background import start
from torchrl_vllm_sync.rl.pacing import Ledger
from torchrl_vllm_sync.testing import load_tiny_model

pytestmark = QUIET
ROWS, GROUP = 8, 4


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


def make_env(rows=ROWS):
    """Questions by number, each for a group; a batch is gone when a collector is built."""
    gone = rows // GROUP
    questions = ({"query": [f"What is {max(at - gone, 0)}?"]} for at in itertools.count())
    env = ChatEnv.from_dataloader(
        questions, batch_size=(rows,), repeats=GROUP, tokenizer=TOKENIZER, input_mode="history"
    )
    return env.append_transform(StepCounter(max_steps=1))


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


def asked(rows):
    """The numbers of a batch's questions, sorted."""
    return sorted(int(one.split()[-1].rstrip("?")) for one in rows["query"])


def in_order(num_batches, rows=ROWS):
    groups = rows // GROUP
    return [sorted([*range(groups * at, groups * (at + 1))] * GROUP) for at in range(num_batches)]


class Trained:
    """What a trainer that pushes after each batch has seen."""

    def __init__(self, service, checkpoint):
        self.service = service
        self.updater = WeightUpdater(service, source=load_tiny_model(checkpoint))
        self.ages, self.asked, self.across, self.lengths = [], [], 0, []

    def step(self, rows):
        spans = rows["policy_versions", "response"]
        sampled = spans >= 0
        oldest = spans.where(sampled, spans.max()).amin(-1)
        assert oldest.tolist() == rows["policy_version"].tolist()
        self.ages.append(int(self.service.weight_version - oldest.min()))
        self.across += int((rows["max_policy_version"] > rows["policy_version"]).sum())
        self.lengths += sampled.sum(-1).tolist()
        self.asked.append(asked(rows))
        self.updater.push_weights()


def train(service, checkpoint, num_batches, staleness, rows=ROWS, **sampling):
    collector = RolloutCollector(
        make_env(rows),
        policy=make_policy(service, **sampling),
        dialog_turns_per_batch=rows,
        total_dialog_turns=num_batches * rows,
        max_staleness=staleness,
    )
    trained = Trained(service, checkpoint)
    for batch in collector:
        trained.step(batch)
    collector.shutdown()
    assert trained.asked == in_order(num_batches, rows)  # none is discarded, and none comes twice
    return trained


def test_no_row_is_older_than_the_bound_and_answers_go_on_across_pushes(service, checkpoint):
    trained = train(service, checkpoint, 10, 2, ignore_eos=True)
    assert trained.ages == [0, 1] + [2] * 8
    assert trained.across
    assert {*trained.lengths} == {60}


def test_without_the_pace_rows_get_older(service, checkpoint, monkeypatch):
    """The negative control."""
    monkeypatch.setattr(Ledger, "_batches_ahead", lambda *_: 0)
    assert max(train(service, checkpoint, 6, 2, ignore_eos=True).ages) > 2


MANY, BATCHES = 16, 30
# Some tokens end an answer, so that there are short and long ones.
SAMPLING = {"max_tokens": 200, "seed": 0, "stop_token_ids": [*range(40, 56)]}


def discarding(service, checkpoint, num_batches, staleness):
    """As many rows as of three batches are under way, and what is old when it ends is dropped."""
    trained, policy, questions = Trained(service, checkpoint), make_policy(service, **SAMPLING), 0
    requests, ready, dropped = set(), [], []
    while len(trained.lengths) < num_batches * MANY:
        while len(requests) < 3 * MANY:
            chat = [{"role": "user", "content": f"What is {questions // GROUP}?"}]
            requests.add(start(policy._asked([chat], 1)[0]))
            questions += 1
        done, requests = wait(requests, timeout=60, return_when=FIRST_COMPLETED)
        ready += [one for each in done for one in each.result()]
        if len(ready) >= MANY:
            for one in ready:
                is_old = service.weight_version - one.min_version > staleness
                (dropped if is_old else trained.lengths).append(len(one.outputs[0].token_ids))
            ready = []
            trained.updater.push_weights()
    for one in requests:
        one.cancel()
    return trained.lengths, dropped


def same(first, second):
    """The p-value of Kolmogorov and Smirnov's test of two samples, by its asymptotic form."""
    values = torch.tensor([*first, *second]).unique()
    shares = [
        torch.searchsorted(torch.tensor(sorted(one)), values, right=True) / len(one)
        for one in (first, second)
    ]
    distance = float((shares[0] - shares[1]).abs().max())
    scaled = distance**2 * len(first) * len(second) / (len(first) + len(second))
    terms = (-((-1) ** at) * math.exp(-2 * at**2 * scaled) for at in range(1, 101))
    return min(1.0, 2 * sum(terms)) if scaled > 0.04 else 1.0


@pytest.mark.slow
@pytest.mark.timeout(600)  # three runs of training, of 480 rows each
def test_lengths_are_those_of_synchronous_training_and_not_so_by_discarding(service, checkpoint):
    wanted = train(service, checkpoint, BATCHES, 0, MANY, **SAMPLING)
    found = train(service, checkpoint, BATCHES, 2, MANY, **SAMPLING)
    assert max(wanted.ages) == 0
    assert max(found.ages) == 2
    assert max(wanted.lengths) > 100 > 16 > min(wanted.lengths)
    assert same(wanted.lengths, found.lengths) > 0.01
    biased, dropped = discarding(service, checkpoint, BATCHES, 2)
    assert dropped
    assert same(wanted.lengths, biased) < 0.01


def is_dead(actor):
    try:
        ray.get(actor.__ray_call__.remote(lambda _: None), timeout=10)
    except RayActorError:
        return True
    return False


def die_between_writing_and_saying_so(collector):
    collector._deliver = lambda: os._exit(1)


def test_collectors_of_several_processes_share_a_pacer_and_one_may_die(service, checkpoint):
    pacer = Pacer(2, ROWS, shared=True, timeout_s=60.0)
    config = {"num_cpus": 0, "num_gpus": 0}
    environment = {"LIST_TO_STACK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    buffer = RayReplayBuffer(
        storage=partial(LazyStackStorage, ROWS),
        sampler=ConsumingSampler,
        batch_size=ROWS,
        remote_config=config,
    )
    remote = RolloutCollector.as_remote({**config, "runtime_env": {"env_vars": environment}})
    collectors = [
        remote.remote(
            make_env,
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
    trained = Trained(service, checkpoint)
    for step in range(10):
        eventually(lambda: len(buffer) == ROWS)
        trained.step(buffer.sample(ROWS))
        if step == 3:
            ray.kill(collectors[0])
            pacer.leave(names[0])
        pacer.trained(ROWS)
        if step == 5:
            ray.get(collectors[1].__ray_call__.remote(die_between_writing_and_saying_so))
            eventually(lambda: is_dead(collectors[1]))
            pacer.leave(names[1])
    assert trained.asked == in_order(10)
    assert max(trained.ages) <= 2
    assert {*Counter(itertools.chain(*trained.asked)).values()} == {GROUP}
    ray.kill(pacer._ledger)
    with pytest.raises(PacingError, match="the pacer's actor died"):
        pacer.trained(ROWS)
    ray.kill(collectors[2])
    buffer.close()
