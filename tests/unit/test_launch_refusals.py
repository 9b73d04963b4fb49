"""What a launch and its service refuse, how Ray is started, and how replicas end."""

import signal
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from tests.fakes.service import member, replicas_of, service_of
from torchrl_vllm_sync import AsyncVLLM, ReplicaState
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.service import launch as launch_module
from torchrl_vllm_sync.service import service as service_module
from torchrl_vllm_sync.service.replicas import Membership, ServiceSettings, ensure_ray


@pytest.mark.parametrize("model", ["/no/such/model", "./model", "~/model"])
def test_a_checkpoint_that_is_not_there_is_refused_before_ray_starts(model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    with pytest.raises(UnsupportedArgumentError, match=f"there is none at {model}"):
        AsyncVLLM.from_pretrained(model)


@pytest.mark.parametrize("nodes", [["a"], ["a", "b"]])
def test_a_checkpoint_that_no_node_can_have_is_refused_where_ray_runs(nodes, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    listed = [{"NodeID": one, "Alive": True} for one in nodes] + [{"NodeID": "c", "Alive": False}]
    monkeypatch.setattr(ray, "nodes", lambda: listed)
    here = SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    tried = RuntimeError("placed")  # another node may have it
    monkeypatch.setattr(launch_module, "spread", Mock(side_effect=tried))
    kind = UnsupportedArgumentError if len(nodes) == 1 else RuntimeError
    args = SimpleNamespace(model="/no/such/model")
    settings: Any = SimpleNamespace(engine_args=args, claims=None, detached=False)
    with pytest.raises(kind, match="there is none at /no" if len(nodes) == 1 else "placed"):
        launch_module.launch_replicas(settings, ["0"])


@pytest.mark.parametrize(
    ("name", "value"), [("seed", None), ("seed", -1), ("tensor_parallel_size", 0)]
)
def test_a_number_that_no_engine_can_have_is_refused(name, value, monkeypatch, tmp_path):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    with pytest.raises(UnsupportedArgumentError, match=f"{name} must be"):
        AsyncVLLM.from_pretrained(tmp_path, **{name: value})


def test_engines_that_do_not_fit_beside_the_trainer_are_refused_before_ray_starts(
    monkeypatch, tmp_path
):
    from vllm import AsyncEngineArgs

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("Ray was started"))
    monkeypatch.setattr(service_module, "on_cpu", lambda: False)
    monkeypatch.setattr(service_module, "gpu_bytes", lambda: 80 * 10**9)

    def serve(share, trainer_gb, colocate=True, **given):
        own = AsyncEngineArgs(str(tmp_path), gpu_memory_utilization=share, **given)
        AsyncVLLM(own, colocate=colocate, trainer_memory_bytes=trainer_gb * 10**9)

    serve(0.5, 40)
    both = r"a GPU of 80.00 GB together, got 40.00 GB for the engine \(gpu_memory_utilization=0.5\)"
    with pytest.raises(UnsupportedArgumentError, match=f"{both} and 41.00 GB for the trainer"):
        serve(0.5, 41)
    with pytest.raises(UnsupportedArgumentError, match=r"got 60.00 GB for the engine"):
        serve(0.5, 40, kv_cache_memory_bytes=60 * 10**9)
    with pytest.raises(UnsupportedArgumentError, match="is for colocate=True"):
        serve(0.5, 40, colocate=False)


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
    assert ("AsyncVLLM rollouts: engines ready" in capsys.readouterr().err) == verbose


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


@pytest.mark.parametrize("num_replicas", [0, 1.5, float("inf"), "2"])
def test_a_number_of_replicas_that_cannot_be_is_refused(num_replicas):
    with pytest.raises(UnsupportedArgumentError, match="num_replicas must be"):
        AsyncVLLM(None, num_replicas)


@pytest.mark.parametrize(
    ("num_replicas", "timeout_s", "culprit"),
    [(None, float("inf"), "timeout_s"), (None, "5", "timeout_s"), ("2", 0, "num_replicas")],
)
def test_what_cannot_be_waited_for_is_refused(num_replicas, timeout_s, culprit):
    service = service_of(replicas_of([member("0")]))
    service.load.mark("0", ReplicaState.SERVING)
    service.wait_until_serving(1, timeout_s=0)
    with pytest.raises(UnsupportedArgumentError, match=f"{culprit} must be"):
        service.wait_until_serving(num_replicas, timeout_s=timeout_s)


def test_replicas_end_though_the_user_does_not_wait_for_them(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    ended = []
    monkeypatch.setattr(launch_module.ray, "wait", interrupt)
    monkeypatch.setattr(launch_module.ray, "kill", ended.append)
    actors = [SimpleNamespace(close=SimpleNamespace(remote=object)) for _ in "01"]
    with pytest.raises(KeyboardInterrupt):
        launch_module.close_members([member(str(at), one) for at, one in enumerate(actors)])
    assert ended == actors


def test_a_service_that_cannot_be_supervised_from_here_is_not_attached_to(monkeypatch):
    settings = ServiceSettings(name="rollouts", engine_args=None)
    monkeypatch.setattr(service_module, "find_service", lambda _: (settings, Membership()))
    monkeypatch.setattr(service_module, "_rebuild", lambda *_: pytest.fail("it was attached to"))
    with pytest.raises(UnsupportedArgumentError, match="supervise must be False"):
        service_module.attach("rollouts", supervise=True)
