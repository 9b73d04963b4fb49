"""The same seed and the same history give the same decisions, in every process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_vllm_sync import known_strategies

SCRIPT = '''
import random
from types import SimpleNamespace
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.replica import EngineReport


def decisions(strategy, seed, history=0):
    """Replicas of 300 requests that come, end and are reported in every way."""
    chance, now = random.Random(history), [1000.0]
    load = LoadTracker(
        [f"r{at}" for at in range(6)], state=ReplicaState.SERVING, clock=lambda: now[0]
    )
    for replica_id in load.replica_ids:
        load.describe(replica_id, block_size=16, num_kv_blocks=500)
    balancer = LoadBalancer([object()] * 6, strategy, seed=seed, tracker=load)
    chosen, running = [], []
    for step in range(60):
        now[0] += chance.random()
        prompts = [
            chance.choice([
                "a text %d" % chance.randrange(9),
                [chance.randrange(3)] * chance.randrange(1, 700),
                {"prompt_token_ids": [1, 2, 3], "cache_salt": "salt"},
            ])
            for _ in range(5)
        ]
        places = balancer.reserve_batch(
            prompts,
            session_id=[chance.choice([None, None, f"chat {step % 7}"]) for _ in prompts],
            group_id=[chance.choice([None, None, "prompt", step % 5]) for _ in prompts],
            sampling_params=[SimpleNamespace(n=chance.randint(1, 3), max_tokens=90)] * 5,
        )
        chosen += [place.replica_id for place in places]
        running += places
        while len(running) > 30:
            running.pop(chance.randrange(30)).release([[step] * chance.randrange(200)])
        if step % 4 == 0:
            for replica_id in load.replica_ids:
                load.observe(EngineReport(
                    replica_id=replica_id, state=ReplicaState.SERVING,
                    num_unfinished=chance.randrange(20), kv_cache_usage=chance.random(),
                    weight_version=step // 20,
                ))
        if step == 30:
            load.mark("r2", ReplicaState.FAILED)
    return chosen
'''

STRATEGIES = [*([name] for name in known_strategies()), ["prefix-aware", "requests"],
              ["kv-cache", "round-robin"]]  # fmt: skip


@pytest.fixture(scope="module")
def decisions():
    names = {}
    exec(SCRIPT, names)  # what the other processes run
    return names["decisions"]


@pytest.mark.parametrize("strategy", STRATEGIES, ids="+".join)
def test_the_same_seed_decides_the_same(decisions, strategy):
    assert decisions(strategy, seed=3) == decisions(strategy, seed=3)
    assert len(set(decisions(strategy, seed=3))) == 6


@pytest.mark.parametrize("strategy", [["requests"], ["kv-cache"]], ids="+".join)
def test_another_seed_decides_ties_otherwise(decisions, strategy):
    assert decisions(strategy, seed=3) != decisions(strategy, seed=4)


@pytest.mark.parametrize("strategy", STRATEGIES, ids="+".join)
def test_another_history_decides_otherwise(decisions, strategy):
    assert decisions(strategy, seed=3, history=0) != decisions(strategy, seed=3, history=1)


def test_every_process_decides_the_same(decisions):
    calls = "\n".join(f"print(decisions({strategy!r}, seed=3))" for strategy in STRATEGIES)
    told = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT + calls],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).resolve().parents[2],
            check=True,
            capture_output=True,
            text=True,
            timeout=50,
        ).stdout
        for seed in ("0", "1", "4711")
    ]
    here = "".join(f"{decisions(strategy, seed=3)}\n" for strategy in STRATEGIES)
    assert told == [here] * 3
