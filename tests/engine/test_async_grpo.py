"""The asynchronous tutorial on a service: with bound 0 it is the synchronous one."""

import importlib.util
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
from tensordict import set_list_to_stack
from torchrl.collectors.llm import LLMCollector

from torchrl_vllm_sync.rl import grpo
from torchrl_vllm_sync.rl.tasks import make_env
from torchrl_vllm_sync.testing import make_tiny_tokenizer

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
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
    """The tutorial as a module."""
    sys.path.insert(0, str(TUTORIALS))
    spec = importlib.util.spec_from_file_location("grpo_async", TUTORIALS / "02_grpo_async.py")
    module = sys.modules["grpo_async"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(TUTORIALS))
        del sys.modules["grpo_async"]
        set_list_to_stack(False).set()


def trained(tutorial, service, checkpoint, model, *settings):
    """Runs the tutorial's loop on a service that holds the trainer's weights."""
    service.push_weights(model)
    args = tutorial.parse_args([*SIZE, *settings])
    run = tutorial.claims.AsyncRun()
    for _ in tutorial.train(args, service, make_tiny_tokenizer(), str(checkpoint), run):
        pass
    return args, run


def queries_of_the_synchronous_program(args, service, steps):
    """Prompts of each batch of TorchRL's collector in this process."""
    tokenizer, task = make_tiny_tokenizer(), grpo.load_task(args.config)
    size = {"num_envs": args.batch_size, "repeats": args.group_size}
    collector = LLMCollector(
        make_env(tokenizer, *task, **size),
        policy=grpo.make_policy(args.config, service, tokenizer),
        dialog_turns_per_batch=args.batch_size,
        total_dialog_turns=-1,
    )
    found = [list(batch.reshape(-1)["query"]) for batch in islice(collector, steps)]
    collector.shutdown()
    return found


@pytest.mark.parametrize("staleness", [0, 2])
def test_the_prompts_are_the_synchronous_programs_and_rows_no_older(
    tutorial, service, checkpoint, model, staleness
):
    settings = ["--staleness", str(staleness), "--steps", "5"]
    args, run = trained(tutorial, service, checkpoint, model, *settings)
    assert tutorial.claims.async_shortcomings(run, args) == []
    wanted = queries_of_the_synchronous_program(args, service, 5)
    assert [Counter(one) for one in run.queries] == [Counter(one) for one in wanted]
    assert len({frozenset(one) for one in run.queries}) > 1
    assert [one.max_staleness for one in run.steps] == [min(at, staleness) for at in range(5)]
    versions = [one.version for one in run.steps]
    assert versions == list(range(versions[0], versions[0] + 5))


def test_a_negative_bound_is_refused(tutorial, capsys):
    with pytest.raises(SystemExit):
        tutorial.parse_args(["--staleness", "-1"])
    assert "--staleness must be at least 0" in capsys.readouterr().err
