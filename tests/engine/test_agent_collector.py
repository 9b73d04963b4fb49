"""Agents that only know an address: their batches are those of the collectors."""

import itertools
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import openai
import psutil
import pytest
import torch
from tensordict import is_non_tensor, set_list_to_stack
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement
from torchrl.objectives.llm.grpo import GRPOLoss

from tests.engine.checks import perturbed
from tests.engine.requests import eventually, sampling
from tests.engine.rollouts import QUIET, TEXTS
from tests.engine.test_health import is_running
from tests.engine.test_rollouts import GROUP, ROWS, make_collector
from torchrl_vllm_sync import (
    AgentCollector,
    GroupAdvantage,
    RolloutStorage,
    TrainerPolicy,
    WeightUpdater,
)
from torchrl_vllm_sync.errors import (
    AgentError,
    UncorrectableSamplingError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.rl.policy import _Seeds
from torchrl_vllm_sync.testing import load_tiny_model

pytestmark = QUIET
SAMPLING = {"max_completion_tokens": 12, "temperature": 1.0}
# Asks once, without any import of ours, and rewards itself.
SCRIPT = """
import json, os, sys, urllib.request
problem, key = json.load(sys.stdin), os.environ["OPENAI_API_KEY"]
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
def post(path, body):
    address = os.environ["OPENAI_BASE_URL"] + path
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
chat = [{"role": "user", "content": problem["query"]}]
post("/chat/completions", {"model": sys.argv[1], "messages": chat, "max_completion_tokens": 12})
if sys.argv[2] == "http":
    post("/sessions/" + key + "/reward", {"reward": 0.5})
    print("done")
elif sys.argv[2] == "line":
    print("thinking")
    print(2.5)
elif sys.argv[2] == "leaves":
    import subprocess
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
"""


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


@pytest.fixture
def name(service):
    return service.engine_args.model


@pytest.fixture(scope="module")
def has_collected(service):
    """The threads that stay are there."""
    with set_list_to_stack(True):
        [*collect(service, asks_once(service.engine_args.model))]


def problems(**columns):
    for at in itertools.count():
        for text in TEXTS:
            yield {"query": [f"{text} {at}"]} | {key: [make(at)] for key, make in columns.items()}


def ask(base_url, key, chat, **fields):
    with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        answer = client.chat.completions.create(messages=chat, **{**SAMPLING, **fields})
    return answer.choices[0].message.content


def asks_once(name, **fields):
    def agent(base_url, key, problem):
        chat = [{"role": "user", "content": problem["query"]}]
        return float(len(ask(base_url, key, chat, model=name, **fields)))

    return agent


def collect(service, agent, num_rows=ROWS, loader=None, **settings):
    settings = {"num_samples": GROUP, "total_dialog_turns": num_rows, **settings}
    loader = problems() if loader is None else loader
    collector = AgentCollector(service, agent, loader, dialog_turns_per_batch=ROWS, **settings)
    try:
        yield from collector
    finally:
        collector.shutdown()


def asks_with_seeds(name, seed):
    """The ``n``-th run has the seed that a policy's ``n``-th row has, and ``n`` for its reward."""
    seeds = enumerate(one.seed for one in _Seeds().of(sampling(seed=seed), ROWS))

    def agent(base_url, key, problem):
        at, own = next(seeds)
        asks_once(name, seed=own)(base_url, key, problem)
        return at

    return agent


@pytest.mark.slow
def test_an_agent_s_rows_are_those_of_the_collector(service, name):
    """For the same prompts and seeds, token by token, column by column."""

    def numbers(prompts, answers):
        return range(len(answers))

    (wanted,) = make_collector(service, numbers, sampling={"seed": 7}, total_dialog_turns=ROWS)
    (found,) = collect(service, asks_with_seeds(name, 7), concurrency=1)
    both = [{*one.keys(True, True)} for one in (wanted, found)]
    mine, its = ({key if isinstance(key, tuple) else (key,) for key in one} for one in both)
    assert {key for key in its ^ mine if "history" not in key} == set()
    for key in sorted(mine & its):
        first, second = wanted.get(key), found.get(key)
        if is_non_tensor(first) or not isinstance(first, torch.Tensor):
            if key[-1] != "replica_id" and key[0] != "history" and "padded" not in key:
                assert [*first] == [*second], key
        elif key[0] != "generation" and key[-1] not in ("terminated", "truncated"):
            assert first.shape == second.shape, key
            assert torch.allclose(first, second, rtol=1e-4, atol=1e-4, equal_nan=True), key
    assert len({str(one) for one in wanted["tokens", "response"].tolist()}) == ROWS
    # The twin: with other seeds they are others.
    (other,) = collect(service, asks_with_seeds(name, 8), concurrency=1)
    width = min(one["tokens", "response"].shape[-1] for one in (other, wanted))
    same = other["tokens", "response"][:, :width] == wanted["tokens", "response"][:, :width]
    assert not same.all(-1).any()


@pytest.mark.parametrize("way", ["http", "line"])
@pytest.mark.slow
def test_a_command_is_an_agent_that_knows_an_address(service, name, way):
    (rows,) = collect(service, [sys.executable, "-c", SCRIPT, name, way])
    wanted = 0.5 if way == "http" else 2.5
    assert rows["next", "reward"].flatten().tolist() == [wanted] * ROWS
    queries = [*rows["query"]]
    assert queries == [queries[at - at % GROUP] for at in range(ROWS)]
    assert len({*queries}) == ROWS // GROUP


@pytest.mark.slow
def test_what_a_command_leaves_running_ends_with_it(service, name):
    """Though it has the command's output open, and the command has ended well."""
    agent = [sys.executable, "-c", SCRIPT, name, "leaves"]
    (rows,) = collect(service, agent, timeout_s=60, max_attempts=1)
    pids = {int(one) for one in rows["next", "reward"].flatten()}
    assert len(pids) == ROWS
    eventually(lambda: not any(map(is_running, pids)))


@pytest.mark.slow
def test_commands_that_run_end_with_their_collector(service):
    settings = {"dialog_turns_per_batch": ROWS, "timeout_s": 60, "max_attempts": 1}
    collector = AgentCollector(service, ["sleep", "600"], problems(), **settings)

    def commands():
        return [one for one in psutil.Process().children() if one.name() == "sleep"]

    with ThreadPoolExecutor() as pool:
        batch = pool.submit(next, iter(collector))
        eventually(lambda: len(commands()) == ROWS)
        collector.shutdown()
        assert isinstance(batch.exception(timeout=30), CancelledError)
    assert commands() == []


@pytest.mark.slow
def test_an_agent_is_trained_through_its_address(service, name, checkpoint):
    model = perturbed(load_tiny_model(checkpoint), seed=5)
    updater = WeightUpdater(service, source=model)
    updater.push_weights()
    loss_fn = GRPOLoss(TrainerPolicy(model), entropy_coeff=0.0, masking_strategy="sft")
    buffer = ReplayBuffer(
        storage=RolloutStorage(ROWS),
        sampler=SamplerWithoutReplacement(),
        transform=GroupAdvantage(GROUP),
        batch_size=ROWS,
    )
    for _ in collect(service, asks_once(name), replay_buffer=buffer):
        loss = loss_fn(buffer[:])
        assert float(loss.ESS) > 0.9999  # what was sampled is what the trainer computes
        loss.loss_objective.backward()
    assert any(one.grad.abs().max() > 0 for one in model.parameters())


def asks_twice(name):
    """Rewrites its question, so that its second prompt does not begin with its first turn."""

    def agent(base_url, key, problem):
        (asked,) = chat = [{"role": "user", "content": problem["query"]}]
        answer = ask(base_url, key, chat, model=name)
        again = {"role": "user", "content": f"In short: {asked['content']}"}
        chat = [again, {"role": "assistant", "content": answer}, {"role": "user", "content": "So?"}]
        return float(len(ask(base_url, key, chat, model=name)))

    return agent


@pytest.mark.slow
def test_the_rows_of_a_run_that_forks_are_trained_on_together(service, name, checkpoint):
    """Twice as many as there are runs, beside each other, with one reward and advantage."""
    service.push_weights(model := load_tiny_model(checkpoint))
    numbered, trained = problems(number=lambda at: at), TrainerPolicy(model)
    settings = {"num_rows": 4 * ROWS, "loader": numbered, "max_staleness": 1}
    batches = [*collect(service, asks_twice(name), **settings)]
    assert [len(rows) for rows in batches] == [2 * ROWS] * 2
    for rows in batches:
        pairs = rows.view(ROWS, 2)
        assert (pairs["turns", "forked"] == torch.tensor([False, True])).all()
        assert (pairs["next", "done"].flatten(1) == torch.tensor([False, True])).all()
        rewards = pairs["next", "reward"].flatten(1)
        assert (rewards[:, 0] == rewards[:, 1]).all()
        queries = [*rows["query"]]
        assert queries == [queries[at - at % (2 * GROUP)] for at in range(2 * ROWS)]
        assert [*rows["number"]] == [int(one.split()[-1]) for one in queries]
        scored = GroupAdvantage(GROUP).inv(rows)
        advantages = scored["advantage"].view(ROWS // GROUP, GROUP, 2)
        assert (advantages[..., 0] == advantages[..., 1]).all()
        assert advantages.sum(1).abs().max() < 1e-4 < advantages.abs().max()
        loss = GRPOLoss(trained, entropy_coeff=0.0, masking_strategy="sft")(scored)
        assert float(loss.ESS) > 0.9999


def fails_at_first(name):
    tried = set()

    def agent(base_url, key, problem):
        reward = asks_once(name)(base_url, key, problem)
        if problem["query"] not in tried:
            tried.add(problem["query"])
            raise OSError("not now")
        return reward + 1

    return agent


@pytest.mark.slow
def test_a_run_that_fails_is_made_anew_and_leaves_nothing(service, name):
    (rows,) = collect(service, fails_at_first(name))
    assert len(rows) == ROWS
    assert (rows["next", "reward"] > 0).all()


def times_out(*_):
    raise TimeoutError("its tool is slow")


FAULTY = {
    "raises": (lambda *_: 1 / 0, "ZeroDivisionError"),
    "asks for nothing": (lambda *_: 1.0, "nothing was asked for"),
    "hangs": (lambda *_: time.sleep(3), "more than 1 s"),
    "times out by itself": (times_out, "TimeoutError: its tool is slow"),
    "fails": ([sys.executable, "-c", "import sys; sys.exit('no idea')"], "exit status 1: no idea"),
    "hangs as a command": ([sys.executable, "-c", "import time; time.sleep(600)"], "more than 1 s"),
}


@pytest.mark.parametrize("way", FAULTY)
@pytest.mark.slow
@pytest.mark.usefixtures("has_collected")
def test_an_agent_that_fails_is_told_of_with_its_problem(service, way):
    agent, why = FAULTY[way]
    timeout_s = 30 if way == "fails" else 1  # a command takes a while to begin
    before = threading.active_count()
    with pytest.raises(AgentError, match=f"query.*attempt 2.*{why}") as told:
        [*collect(service, agent, timeout_s=timeout_s, max_attempts=2)]
    assert any(told.value.problem["query"].startswith(text) for text in TEXTS)
    assert len(told.value.reasons) == 2
    children = [" ".join(one.cmdline()) for one in psutil.Process().children()]
    assert not any("time.sleep(600)" in one for one in children)
    eventually(lambda: threading.active_count() <= before)


@pytest.mark.parametrize(
    ("reward", "why"),
    [(float("nan"), "RewardError: .*finite number, got nan"), (None, "no reward")],
)
@pytest.mark.slow
def test_a_run_without_a_finite_reward_has_failed(service, name, reward, why):
    def agent(base_url, key, problem):
        asks_once(name)(base_url, key, problem)
        return reward

    for one in (agent, *([sys.executable, "-c", SCRIPT, name, ""] for _ in range(reward is None))):
        with pytest.raises(AgentError, match=f"query.*attempt 2: {why}") as told:
            [*collect(service, one, max_attempts=2)]
        assert len(told.value.reasons) == 2


@pytest.mark.slow
def test_what_the_loss_cannot_correct_is_refused(service, name):
    with pytest.raises(UncorrectableSamplingError, match=r"temperature=0\.5"):
        [*collect(service, asks_once(name, temperature=0.5))]
    for given in ({"num_samples": 0}, {"concurrency": 0}, {"timeout_s": -1}, {"keep": len}):
        with pytest.raises(UnsupportedArgumentError, match=next(iter(given))):
            [*collect(service, asks_once(name), **given)]
