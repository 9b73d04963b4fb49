"""What a launch says of itself, what it refuses before Ray starts, and how it starts Ray."""

import contextlib
import io
import signal

import pytest
import ray

from torchrl_vllm_sync import AsyncVLLM
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.service import launch as module
from torchrl_vllm_sync.service.launch import LaunchProgress
from torchrl_vllm_sync.service.replicas import ensure_ray


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def err(monkeypatch):
    """Stands in for stderr; seconds stand still."""
    monkeypatch.setattr(module.time, "monotonic", lambda: 5.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def replaced(by):
        monkeypatch.setattr("sys.stderr", by)
        return by

    return replaced


def launched():
    with LaunchProgress("rollouts") as progress:
        progress.tell("starting Ray")
        progress.tell("0 of 2 engines ready, 2 starting")
        progress.tell("0 of 2 engines ready, 2 starting")  # nothing is new
        progress.tell("2 of 2 engines ready, 0 starting")


def test_elsewhere_there_is_a_line_for_each_change(err):
    told = err(io.StringIO())
    launched()
    assert told.getvalue().splitlines() == [
        "AsyncVLLM rollouts: starting Ray (0 s)",
        "AsyncVLLM rollouts: 0 of 2 engines ready, 2 starting (0 s)",
        "AsyncVLLM rollouts: 2 of 2 engines ready, 0 starting (0 s)",
    ]


def test_on_a_terminal_one_line_is_rewritten_and_the_last_one_stays(err):
    told = err(Terminal())
    launched()
    shown = told.getvalue()
    assert "\x1b[2K" in shown  # erases the line
    assert shown.endswith("AsyncVLLM rollouts: 2 of 2 engines ready, 0 starting (0 s)\n")
    assert shown.count("\n") <= 3


def test_what_failed_is_not_told_to_be_ready(err):
    told = err(Terminal())
    with contextlib.suppress(KeyError), LaunchProgress("rollouts") as progress:
        progress.tell("1 of 1 engines ready")
        raise KeyError
    assert not told.getvalue().endswith("ready (0 s)\n")


def closed():
    file = io.StringIO()
    file.close()
    return file


class Refusing(io.StringIO):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def write(self, _):
        raise self.error


@pytest.mark.parametrize(
    "stderr",
    [closed, lambda: Refusing(OSError()), lambda: Refusing(BrokenPipeError()), lambda: None],
)
def test_a_launch_goes_on_where_nothing_can_be_told(err, stderr):
    err(stderr())
    launched()


@pytest.mark.parametrize("model", ["/no/such/model", "./model", "~/model"])
def test_a_checkpoint_that_is_not_there_is_refused_before_ray_starts(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    with pytest.raises(UnsupportedArgumentError, match=f"there is none at {model}"):
        AsyncVLLM.from_pretrained(model)


@pytest.mark.parametrize("verbose", [True, False])
def test_the_launch_says_what_it_does_unless_told_not_to(verbose, monkeypatch, tmp_path, capsys):
    class StartedError(Exception):
        pass

    def init(**_):
        raise StartedError

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(StartedError):
        AsyncVLLM.from_pretrained(tmp_path, name="rollouts", verbose=verbose)
    assert capsys.readouterr().err.startswith("AsyncVLLM rollouts: starting Ray") == verbose


@pytest.fixture
def given(monkeypatch):
    """What Ray is started with; like the real one it takes SIGTERM over."""
    options = {}

    def init(**given):
        options.update(given)
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_LOG_TO_DRIVER", raising=False)
    yield options
    signal.signal(signal.SIGTERM, before)


def test_sigterm_does_what_the_program_wants_or_leaves_its_with_blocks(given):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ensure_ray("local")
    with pytest.raises(SystemExit, match=f"^{128 + signal.SIGTERM}$"):
        signal.raise_signal(signal.SIGTERM)
    for wanted in (signal.SIG_IGN, lambda number, frame: None):
        signal.signal(signal.SIGTERM, wanted)
        ensure_ray("local")
        assert signal.getsignal(signal.SIGTERM) is wanted


def test_what_engines_print_is_shown_to_those_who_ask_for_it(given, monkeypatch):
    ensure_ray("local")
    assert (given["address"], given["log_to_driver"]) == ("local", False)
    monkeypatch.setenv("RAY_LOG_TO_DRIVER", "1")
    ensure_ray("local")
    assert given["log_to_driver"] is None  # Ray reads the variable
