"""Programs that are stopped in the middle: what they had started is gone, checkpoints too."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.engine.requests import eventually

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"
END_TIMEOUT_S = 60.0


@pytest.fixture
def directory():
    """A short one, as Ray's sockets have to lie in it; pytest's is too long."""
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield Path(name)


def started_by(process):
    """Everything below a process; by what it is, as a process id may be used again."""
    return psutil.Process(process.pid).children(recursive=True)


def with_an_engine(processes):
    """The processes, once there is a replica's actor among them."""
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if "EngineActor" in " ".join(one.cmdline()):
                return processes
    return []


def made_directories(directory):
    """Directories that a tutorial has made; Ray keeps its logs."""
    return [one.name for one in directory.iterdir() if one.is_dir() and one.name != "ray"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_an_interrupted_tutorial_leaves_nothing(directory):
    name, after = "06_fsdp_expert_parallel", "A first push"
    tutorial = subprocess.Popen(
        [sys.executable, "-u", TUTORIALS / f"{name}.py", "--smoke"],
        env=os.environ | {"TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert any(after in line for line in tutorial.stdout)
        time.sleep(2.0)  # engines are being started, or weights are on their way
        started = started_by(tutorial)
        assert len(started) > 5  # Ray's processes at the least
        assert made_directories(directory)  # which would stay if nothing removed them
        tutorial.send_signal(signal.SIGTERM)  # SIGINT may be ignored where this is run
        rest = tutorial.stdout.read()  # until nothing that writes to it is left
        assert tutorial.wait(END_TIMEOUT_S) != 0
        assert "PASS" not in rest
        _, alive = psutil.wait_procs(started, timeout=END_TIMEOUT_S)
        assert not alive, [one.cmdline() for one in alive]
    finally:
        tutorial.kill()
        tutorial.wait(END_TIMEOUT_S)
        tutorial.stdout.close()
    # An engine that is killed leaves vLLM's sockets and the file by which its workers have met.
    assert not made_directories(directory)


# The library starts Ray here; tutorials start it themselves.
PROGRAM = """
import signal, sys
from vllm import SamplingParams
from torchrl_vllm_sync import AsyncVLLM
from torchrl_vllm_sync.testing import make_tiny_checkpoint

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where this is run
    checkpoint = make_tiny_checkpoint(sys.argv[1])
    settings = {"num_cpus_per_replica": 0, "max_model_len": 2048}
    with AsyncVLLM.from_pretrained(checkpoint, **settings) as service:
        service.generate("Hello", SamplingParams(max_tokens=1))
        print("it generates", file=sys.stderr, flush=True)
        while True:
            service.generate("Hello", SamplingParams(max_tokens=1500, ignore_eos=True))
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sent", "after"),
    [
        (signal.SIGTERM, "engines ready"),
        pytest.param(signal.SIGINT, "it generates", marks=pytest.mark.long),
    ],
)
def test_an_interrupted_program_leaves_nothing_and_says_nothing_of_ray(directory, sent, after):
    (directory / "program.py").write_text(PROGRAM)
    program = subprocess.Popen(
        [sys.executable, directory / "program.py", directory / "model"],
        env=os.environ | {"TMPDIR": str(directory), "PYTHONPATH": str(TUTORIALS.parent)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said = itertools.accumulate(iter(lambda: program.stderr.read(1), ""))
        assert any(after in text for text in said)  # a bar is no line before it is full
        started = eventually(lambda: with_an_engine(started_by(program)))
        program.send_signal(sent)
        rest = program.stderr.read()
        # It exits, and is not aborted; while Ray waits, it makes of any exit one with status 1.
        assert program.wait(END_TIMEOUT_S) in (1, 128 + sent, -signal.SIGINT)
        _, alive = psutil.wait_procs(started, timeout=END_TIMEOUT_S)
        assert not alive, [one.cmdline() for one in alive]
    finally:
        program.kill()
        program.wait(END_TIMEOUT_S)
        program.stderr.close()
    if sent == signal.SIGINT:
        assert rest.splitlines()[-1] == "KeyboardInterrupt", rest
    else:
        assert not re.search(r"\bray\b|Error|Traceback|\*\*\*", rest, re.IGNORECASE), rest
