"""A replica that is killed costs a training run nothing; ``make chaos-curve`` is the long form."""

import argparse

import pytest
import torch
from tensordict import set_list_to_stack

from benchmarks.kill_in_run import ALIKE, BEGUN_AGAIN, TRAINING, differences, launch, run
from tests.engine.rollouts import QUIET
from torchrl_vllm_sync.testing import make_tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), *QUIET]


@pytest.mark.usefixtures("cluster")
def test_a_run_with_a_kill_is_the_undisturbed_one_to_the_last_bit(tmp_path):
    checkpoint = make_tiny_checkpoint(tmp_path, seed=0, diverse=False)
    how = {"checkpoint": checkpoint, "seed": 0, "pause_s": 0, "steps": 3}
    arguments = argparse.Namespace(**TRAINING | how)
    with set_list_to_stack(True), launch(checkpoint, 0, **ALIKE) as service:
        _, wanted = run(service, arguments, seeded=True, killed=False)
        found, batches = run(service, arguments, seeded=True, killed=True)
        arguments.steps = 1
        _, unseeded = run(service, arguments, seeded=False, killed=False)
    assert found[BEGUN_AGAIN, "rows"][0][1] >= 1  # begun again on the other replica
    assert [*differences(wanted, batches)] == []
    assert len(batches) == 3
    # What the comparison above notices: rows sampled anew, one that is lost, and one bit.
    assert next(differences(wanted[:1], unseeded)).startswith("batch 0: tokens of")
    lost = [{name: values[:-1] for name, values in one.items()} for one in batches]
    assert "batch 2: reward of [16, 1, 1] and of [15, 1, 1]" in differences(wanted, lost)
    batches[1]["loss"].view(torch.int32)[0] ^= 1
    assert [*differences(wanted, batches)] == ["batch 1: loss of row 0"]
