"""The routers that the simulation compares: each rule of each, where it decides."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.routing_sim.engine import COSTS
from benchmarks.routing_sim.policies import (
    POLICIES,
    LMetric,
    RoundRobin,
    SimRequest,
    TorchRLRule,
)
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.replica import EngineReport

BLOCK = 64
LARGE_BLOCKS = replace(COSTS, block_size=BLOCK)


def prompt(*blocks):
    """Whole blocks of equal tokens."""
    return np.repeat(np.asarray(blocks, np.int32), BLOCK)


class Driver:
    """Sends requests to a policy, one number after the other."""

    def __init__(self, policy):
        self.policy, self.requests, self.now = policy, [], 0.0

    def send(self, *blocks, session=None, rest=0):
        self.now += 1e-3
        tokens = prompt(*blocks, blocks[-1])[: len(blocks) * BLOCK + rest]
        request = SimRequest(len(self.requests), tokens, session)
        replica = self.policy.choose(request, self.now)
        self.requests.append((request, replica))
        return replica

    def end(self, number):
        request, replica = self.requests[number]
        self.policy.finish(request, replica, prompt(7)[:9], self.now)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_survives_a_life_and_repeats_it(name):
    report = EngineReport(
        replica_id="0",
        state=ReplicaState.SERVING,
        weight_version=1,
        num_unfinished=1,
        num_running=1,
        num_waiting=0,
        kv_cache_usage=0.1,
    )

    def life():
        driver = Driver(POLICIES[name](4, LARGE_BLOCKS, 3))
        generator = np.random.default_rng(5)
        choices, running = [], []
        for number in range(300):
            session = int(generator.integers(40))
            choices.append(driver.send(session, *generator.integers(100, 110, 3), session=session))
            running.append(number)
            driver.policy.report(report, driver.now)
            while len(running) > 20:
                driver.end(running.pop(int(generator.integers(len(running)))))
            if generator.random() < 0.1:
                driver.policy.end_session(session)
        return choices

    choices = life()
    assert set(choices) <= {0, 1, 2, 3}
    assert life() == choices


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"ours"}))
def test_every_policy_counts_what_is_in_flight(name):
    driver = Driver(POLICIES[name](4, LARGE_BLOCKS, 0))
    for number in range(20):
        driver.send(number)
    assert sum(driver.policy.in_flight) == 20
    for number in range(20):
        driver.end(number)
    assert set(driver.policy.in_flight) == {0}


def test_round_robin_takes_turns():
    driver = Driver(RoundRobin(3, LARGE_BLOCKS, 0))
    assert [driver.send(1) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_torchrl_sends_every_prompt_with_one_header_to_one_replica():
    driver = Driver(TorchRLRule(4, LARGE_BLOCKS, 0))
    assert len({driver.send(1, number) for number in range(100)}) == 1
    assert len({driver.send(number) for number in range(100)}) == 4


def test_lmetric_multiplies_what_is_unseen_by_load():
    driver = Driver(LMetric(2, LARGE_BLOCKS, 0))
    assert driver.send(1, 2, 3, 4) == 0
    assert driver.send(1, 2, 3, 5) == 0  # 1 x 2 against 4 x 1
    assert driver.send(1, 2, 3, 6) == 0  # 1 x 3 against 4 x 1
    assert driver.send(1, 2, 3, 7) == 1  # 1 x 4 against 4 x 1: fewer requests
    assert driver.send(1, 2, 3, 4) == 0  # seen whole: nothing times four


def test_lmetric_counts_the_rest_of_a_prompt():
    driver = Driver(LMetric(2, LARGE_BLOCKS, 0))
    assert driver.send(1, rest=40) == 0
    assert driver.send(1, rest=40) == 0  # seen whole: nothing times two
    assert driver.send(1, rest=20) == 0  # 20 x 3 against 84 x 1: another rest
    assert driver.send(2, rest=20) == 1
