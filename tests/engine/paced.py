"""Training that keeps account of its rows: for the tests of pacing, and its benchmark."""

import itertools
import math
import re
from queue import SimpleQueue

import torch
from torchrl.envs import StepCounter
from torchrl.envs.llm.chat import ChatEnv

from torchrl_vllm_sync import RolloutCollector
from torchrl_vllm_sync.requests.background import start
from torchrl_vllm_sync.rl.rollouts import _group_size
from torchrl_vllm_sync.rl.rows import Columns, joined

GROUP = 4


def make_env(rows, tokenizer, ask="What is {}?".format):
    """Questions by number, each for a group; a batch is gone when a collector is built."""
    gone = rows // GROUP
    questions = ({"query": [ask(max(at - gone, 0))]} for at in itertools.count())
    env = ChatEnv.from_dataloader(
        questions, batch_size=(rows,), repeats=GROUP, tokenizer=tokenizer, input_mode="history"
    )
    return env.append_transform(StepCounter(max_steps=1))


def asked(rows):
    """The numbers of a batch's questions, sorted."""
    return sorted(int(re.search(r"\d+", one)[0]) for one in rows["query"])


def in_order(num_batches, rows):
    groups = rows // GROUP
    return [sorted([*range(groups * at, groups * (at + 1))] * GROUP) for at in range(num_batches)]


class DiscardingCollector(RolloutCollector):
    """Batches of the groups that end first; those that are too old when they end are discarded.

    As many are under way as a paced collector of the same bound may have.
    """

    num_dropped = 0  # rows

    def __init__(self, env, *, max_staleness, **kwargs):
        kwargs |= {"max_staleness": max_staleness, "yield_completed_trajectories": True}
        super().__init__(env, **kwargs)

    def _rollout_groups(self):
        size, chosen = _group_size(self.env), []
        number = self.dialog_turns_per_batch // size
        while len(chosen) < number:
            self._send_groups((1 + self.max_staleness) * number - len(self._groups))
            ended = self._ended.get()
            version = self._groups.pop(ended)
            if self.policy.model.weight_version - version <= self.max_staleness:
                chosen.append(Columns.of(ended.result()()))
            else:
                self.num_dropped += size
        rows = joined(chosen, self._padding())
        return rows.trimmed(torch.arange(len(rows))).rows()


class Trained:
    """What a trainer that pushes after each batch has seen."""

    def __init__(self, service, updater, change=lambda: None):
        self.service, self.updater, self.change = service, updater, change
        self.ages, self.asked, self.across, self.lengths = [], [], 0, []

    def step(self, rows):
        spans = rows["policy_versions", "response"]
        sampled = spans >= 0
        oldest = spans.where(sampled, spans.max()).amin(-1)
        assert oldest.tolist() == rows["policy_version"].tolist()
        self.ages.append((self.service.weight_version - oldest).tolist())
        self.across += int((rows["max_policy_version"] > rows["policy_version"]).sum())
        self.lengths += sampled.sum(-1).tolist()
        self.asked.append(asked(rows))
        self.push()

    def push(self):
        self.change()
        self.updater.push_weights()

    @property
    def oldest(self):
        """The age of the oldest row of each batch."""
        return [*map(max, self.ages)]


def train(trained, policy, num_batches, rows, staleness, **asking):
    """Trains on so many batches."""
    collector = RolloutCollector(
        make_env(rows, policy.tokenizer, **asking),
        policy=policy,
        dialog_turns_per_batch=rows,
        total_dialog_turns=num_batches * rows,
        max_staleness=staleness,
    )
    for batch in collector:
        trained.step(batch)
    collector.shutdown()


def discard(trained, policy, num_batches, rows, staleness, ask="What is {}?".format):
    """The same number of rows, of those that end first; returns how many were too old by then.

    As many are under way as a paced collector may have.
    """
    under_way, ended, ready, num_asked, num_dropped = set(), SimpleQueue(), [], 0, 0
    while len(trained.lengths) < num_batches * rows:
        while len(under_way) < (1 + staleness) * rows:
            chat = [{"role": "user", "content": ask(num_asked // GROUP)}]
            under_way.add(one := start(policy._asked([chat], 1)[0]))
            one.add_done_callback(ended.put)
            num_asked += 1
        under_way.remove(one := ended.get(timeout=60))
        ready += one.result()
        if len(ready) >= rows:
            ages = [trained.service.weight_version - one.min_version for one in ready]
            kept = [at for at, age in enumerate(ages) if age <= staleness]
            trained.ages.append([ages[at] for at in kept])
            trained.lengths += [len(ready[at].outputs[0].token_ids) for at in kept]
            num_dropped += len(ready) - len(kept)
            ready = []
            trained.push()
    for one in under_way:
        one.cancel()
    return num_dropped


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
