"""The asynchronous tutorial on a service: order of prompts, ages and drops by its settings."""

import importlib.util
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import ray.cloudpickle
from tensordict import set_list_to_stack
from torchrl.collectors.llm import LLMCollector

from torchrl_vllm_sync.testing import make_tiny_tokenizer

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
ROWS = 8  # of a batch: two prompts with four answers each
SIZE = ["--group-size", "4", "--groups", "2"]

# TorchRL 0.14's own, about its collectors and its wrapper's output.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Response history should have one more batch dim"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:The env passed to LLMCollector is missing transforms"),
]


@pytest.fixture(scope="module")
def tutorial():
    """The tutorial as a module, which actors are sent rather than told to import."""
    sys.path.insert(0, str(TUTORIALS))
    spec = importlib.util.spec_from_file_location("grpo_async", TUTORIALS / "02_grpo_async.py")
    module = sys.modules["grpo_async"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        sent = [module, sys.modules["common"]]
        for one in sent:
            ray.cloudpickle.register_pickle_by_value(one)
        yield module
        for one in sent:
            ray.cloudpickle.unregister_pickle_by_value(one)
    finally:
        sys.path.remove(str(TUTORIALS))
        del sys.modules["grpo_async"]
        set_list_to_stack(False).set()


def trained(tutorial, service, checkpoint, model, *settings):
    """Runs the tutorial's loop on a service that holds the trainer's weights."""
    service.push_weights(model)
    args = tutorial.parse_args([*SIZE, *settings])
    run = tutorial.Run()
    for _ in tutorial.train(args, service, make_tiny_tokenizer(), str(checkpoint), run):
        pass
    return args, run


@pytest.fixture
def full_buffer_first(tutorial, monkeypatch):
    """Has the trainer begin only when generation has run ahead as far as it may: three batches."""
    take = tutorial.Intake.take

    def patient(self, number):
        deadline = time.monotonic() + 120
        while not self.taken and len(self.buffer) < 3 * ROWS:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return take(self, number)

    monkeypatch.setattr(tutorial.Intake, "take", patient)


def queries_of_the_synchronous_program(tutorial, args, service, steps):
    """Prompts of each batch of TorchRL's collector in this process."""
    tokenizer = make_tiny_tokenizer()
    collector = LLMCollector(
        tutorial.make_env(args, tokenizer, tutorial.prompts(args.dataset, args.seed)),
        policy=tutorial.make_policy(args, service, tokenizer),
        dialog_turns_per_batch=args.batch_size,
        total_dialog_turns=-1,
    )
    found = [list(batch.reshape(-1)["query"]) for batch in islice(collector, steps)]
    collector.shutdown()
    return found


def test_with_bound_0_the_program_is_the_synchronous_one(tutorial, service, checkpoint, model):
    args, run = trained(tutorial, service, checkpoint, model, "--staleness", "0", "--steps", "5")
    assert tutorial.unaccounted(run, args) == []
    wanted = queries_of_the_synchronous_program(tutorial, args, service, 5)
    assert [Counter(one) for one in run.queries] == [Counter(one) for one in wanted]
    assert len({frozenset(one) for one in run.queries}) > 1
    assert [one.max_staleness for one in run.steps] == [0] * 5
    assert run.num_dropped == 0
    versions = [one.version for one in run.steps]
    assert versions == list(range(versions[0], versions[0] + 5))


@pytest.mark.usefixtures("full_buffer_first")
def test_what_ran_ahead_of_the_bound_is_dropped(tutorial, service, checkpoint, model):
    settings = ["--staleness", "0", "--ahead", "2", "--steps", "3"]
    args, run = trained(tutorial, service, checkpoint, model, *settings)
    assert tutorial.unaccounted(run, args) == []
    # Three batches of one version: the first step trains one and makes the others too old.
    assert [one.dropped for one in run.steps][:2] == [0, 2 * ROWS]
    assert [one.max_staleness for one in run.steps] == [0] * 3
    # With these settings nobody promises the synchronous program, and it is not.
    assert any("dropped" in one for one in tutorial.unlike_the_synchronous_program(run, args))


@pytest.mark.usefixtures("full_buffer_first")
def test_what_ran_ahead_of_the_bound_counts_less(tutorial, service, checkpoint, model):
    settings = ["--staleness", "1", "--ahead", "2", "--steps", "3", "--stale", "reweight"]
    args, run = trained(tutorial, service, checkpoint, model, *settings)
    assert tutorial.unaccounted(run, args) == []
    assert run.num_dropped == 0
    assert run.steps[0].staleness == 0
    assert run.steps[1].staleness > 0
    assert max(one.max_staleness for one in run.steps) <= 2


def test_a_collector_that_died_ends_the_loop(tutorial, service, checkpoint, model, monkeypatch):
    monkeypatch.setattr(tutorial, "LOOK_S", 0.5)
    service.push_weights(model)
    args = tutorial.parse_args([*SIZE, "--steps", "1000", "--collectors", "1"])
    made, make = [], tutorial.make_collectors
    monkeypatch.setattr(tutorial, "make_collectors", lambda *a: made.extend(make(*a)) or made)
    run = tutorial.Run()
    steps = tutorial.train(args, service, make_tiny_tokenizer(), str(checkpoint), run)
    next(steps)
    ray.kill(made[0]._collector)
    with pytest.raises((tutorial.CollectorStoppedError, ray.exceptions.RayActorError)):
        list(steps)
    assert 1 <= len(run.steps) <= 1 + args.ahead + 1


@pytest.mark.parametrize(
    "settings", [["--staleness", "-1"], ["--ahead", "-1"], ["--collectors", "0"]], ids=str
)
def test_settings_out_of_range_are_refused(tutorial, settings, capsys):
    with pytest.raises(SystemExit):
        tutorial.parse_args(settings)
    assert f"{settings[0]} must be at least" in capsys.readouterr().err
