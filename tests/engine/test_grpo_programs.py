"""Programs of the shape of TorchRL's GRPO scripts, run as their users run them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.checks import TOLERANCE
from tests.warm import warm_python

PROGRAMS = Path(__file__).resolve().parents[1] / "programs"
TIMEOUT_S = 560
STEPS, PASSES = 3, 8  # of each step

pytestmark = [pytest.mark.timeout(TIMEOUT_S + 40), pytest.mark.slow]


def run(program, checkpoint, *options):
    """Runs a program in a process of its own, with a Ray cluster of its own, and reads its line."""
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "LIST_TO_STACK": "1",
        "PYTHONPATH": os.pathsep.join([str(PROGRAMS), *filter(None, sys.path)]),
    }
    try:
        done = subprocess.run(
            [warm_python(), PROGRAMS / program, checkpoint, "--steps", str(STEPS), *options],
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = b"\n".join(filter(None, (late.stdout, late.stderr))).decode(errors="replace")
        pytest.fail(f"{program} had not ended after {TIMEOUT_S} s:\n{said[-6000:]}")
    assert done.returncode == 0, done.stderr[-6000:]
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def assert_weights_arrived(result, *, pushes, passes=PASSES):
    """The engines compute what the trainer does, and everybody counts the same pushes."""
    assert len(result["metrics"]) == STEPS * passes
    assert max(result["differences"]) < TOLERANCE
    assert result["pushes"] == pushes
    assert result["service_version"] == pushes
    assert set(result["collector_versions"]) == {pushes}


def assert_fresh(result):
    """Each batch was sampled by the weights that the trainer had: nothing to correct.

    TorchRL's script makes the optimizer step before the batch's last pass.
    """
    for at, one in enumerate(result["metrics"]):
        if at % PASSES != PASSES - 1:
            assert one["ESS"] == pytest.approx(1, abs=1e-3)
            assert one["clip_fraction"] == 0
        assert one["sampled_by"] == [at // PASSES + 1] == [one["policy_version"]]
        assert one["batch_policy_age"] == one["staleness_max"] == 0


def test_the_synchronous_program(checkpoint):
    result = run("grpo_sync_shape.py", checkpoint)
    assert_weights_arrived(result, pushes=STEPS + 1)
    assert_fresh(result)


@pytest.mark.long
def test_a_synchronous_program_that_does_not_push_is_caught(checkpoint):
    """The twin: the same program, whose checks must fail once the engines keep old weights."""
    result = run("grpo_sync_shape.py", checkpoint, "--skip-pushes", "--replicas", "1")
    assert result["pushes"] == result["service_version"] == 1
    with pytest.raises(AssertionError):
        assert_weights_arrived(result, pushes=1)
    with pytest.raises(AssertionError):
        assert_fresh(result)
    assert min(result["differences"]) > 100 * TOLERANCE
    assert result["metrics"][0]["ESS"] == pytest.approx(1, abs=1e-3)
    assert result["metrics"][-1]["ESS"] < 0.99


@pytest.mark.long
def test_the_asynchronous_program(checkpoint):
    """Collectors sample all the while; with adapters, as TorchRL's configuration has it.

    Each pass waits for two collectors that never rest, so a step has fewer of them here.
    """
    options = ("--lora", "--replicas", "1", "--passes", "3")
    result = run("grpo_async_shape.py", checkpoint, *options)
    assert_weights_arrived(result, pushes=STEPS + 1, passes=3)
    for one in result["metrics"]:
        assert 1 <= min(one["sampled_by"]) <= max(one["sampled_by"]) <= STEPS + 1
        assert one["write_count"] >= one["rows"]
