"""A run that another process goes on with, over new engines, is the same to the last bit."""

import argparse
import contextlib

import pytest
import torch
from tensordict import set_list_to_stack

from benchmarks.grpo_systems import options_of
from benchmarks.kill_in_run import ALIKE, CASE, TRAINING, Compared, differences
from tests.engine.rollouts import QUIET
from torchrl_vllm_sync import AsyncVLLM, Pacer, RolloutCollector, RunState
from torchrl_vllm_sync.errors import PacingError, UnsupportedArgumentError
from torchrl_vllm_sync.rl import run_state
from torchrl_vllm_sync.testing import make_tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), *QUIET]


def launch(checkpoint):
    """An engine that computes a row alike whatever it did before, with weights as they are sent."""
    return AsyncVLLM.from_pretrained(
        str(checkpoint),
        num_replicas=1,
        num_cpus_per_replica=0,
        verbose=False,
        worker_extension_cls="tests.engine.plain_worker.PlainWorker",
        **options_of(checkpoint, CASE.rows) | ALIKE,
    )


@contextlib.contextmanager
def program(checkpoint, service, seed):
    """A run from the beginning, and what saves it."""
    torch.manual_seed(seed)
    arguments = argparse.Namespace(**TRAINING, checkpoint=checkpoint, seed=0)
    with contextlib.closing(Compared(arguments, service, seeded=True)) as setup:
        learner, system = setup.bench.learner, setup.system
        parts = {"collector": system.collecting, "buffer": system.buffer}
        yield setup, RunState(learner.model, learner.optimizer, updater=system.updater, **parts)


@pytest.mark.usefixtures("cluster")
def test_a_run_over_new_engines_goes_on_to_the_last_bit(tmp_path, monkeypatch):
    checkpoint, other = (
        make_tiny_checkpoint(tmp_path / str(seed), seed=seed, diverse=False) for seed in range(2)
    )
    saves = tmp_path / "run"
    with set_list_to_stack(True):
        with launch(checkpoint) as service:
            with program(checkpoint, service, 0) as (whole, _):
                for _ in range(3):
                    whole.step()
            with program(checkpoint, service, 0) as (stopped, run):
                stopped.step()
                run.save(saves)
                version = service.weight_version
        with launch(other) as service:
            with program(other, service, 1) as (resumed, run):
                assert run.load(saves) == 0
                report = resumed.bench.updater.last_report
                assert (report.version, service.weight_version) == (version, version)
                assert report.phases["audit_s"] > 0
                resumed._began_at = stopped._began_at
                resumed.step()
                assert "audit_s" not in resumed.bench.updater.last_report.phases
                resumed.step()
            assert [*differences(whole.batches[:1], stopped.batches)] == []
            assert [*differences(whole.batches[1:], resumed.batches)] == []
            assert service.weight_version == version + 2
            for owner, name in (
                (run_state, "_set_random_states"),
                (RolloutCollector, "load_state_dict"),
            ):
                with monkeypatch.context() as patched, program(other, service, 1) as (less, run):
                    patched.setattr(owner, name, lambda *_: None)
                    if owner is RolloutCollector:
                        patched.setattr(Pacer, "load_state_dict", lambda *_: None)
                    run.load(saves)
                    less.step()
                assert "batch 0: tokens of row" in str(
                    [*differences(whole.batches[1:2], less.batches)]
                )


@pytest.mark.usefixtures("cluster")
def test_a_pacer_in_an_actor_is_gone_on_with():
    pacer, other = Pacer(1, 4, shared=True), Pacer(1, 4, shared=True)
    pacer._call("join", "a collector", 4)
    for _ in range(2):
        pacer._call("admit", "a collector")
    pacer._call("deliver", "a collector", 0)
    pacer.trained(4)
    state = pacer.state_dict()
    assert state["returned"] == [(1, (4, 5, 6, 7))]
    other.load_state_dict(state)
    other._call("join", "another", 4)
    numbers = [other._call("admit", "another").number for _ in range(2)]
    assert numbers == [1, 2]
    assert other._call("admit", "another") is None
    with pytest.raises(PacingError, match="before rows are admitted"):
        other.load_state_dict(state)
    with pytest.raises(UnsupportedArgumentError, match="max_staleness is 0, where it was 1"):
        Pacer(0, 4, shared=True).load_state_dict(state)
