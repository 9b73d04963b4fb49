"""A worker's transfer engine that fails: what the worker says of its weights, and how it ends."""

import contextlib
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from torchrl_vllm_sync.engine import worker as worker_module
from torchrl_vllm_sync.engine.worker import SyncWorkerExtension

INFO = {"names": ["a", "b"]}


class Host(SyncWorkerExtension):
    """A vLLM worker that notes its calls, and fails in the one that ``fails_in`` names."""

    def __init__(self):
        config = SimpleNamespace(is_multimodal_model=False)
        self.vllm_config = SimpleNamespace(model_config=config)
        self.weight_transfer_engine = SimpleNamespace(
            model=None,
            model_config=None,
            parse_update_info=dict,
            reset_weight_update_target=lambda: None,
        )
        self.called, self.fails_in = [], ""

    def _call(self, name):
        self.called.append(name)
        if name == self.fails_in:
            raise KeyError(name)

    def start_weight_update(self):
        self._call("start")

    def update_weights(self, info):
        self._call("update")

    def finish_weight_update(self):
        self._call("finish")


@pytest.fixture
def host(monkeypatch):
    host = Host()
    monkeypatch.setattr(
        worker_module, "set_current_vllm_config", lambda _: contextlib.nullcontext()
    )
    monkeypatch.setattr(worker_module, "repack_cpu", lambda _: None)
    monkeypatch.setattr(
        worker_module, "finalize_layerwise_reload", lambda *_: host.called.append("finalise")
    )
    return host


def load(host):
    """The parts of a load up to the one that fails, and what the last one answered."""
    answer = host.native_start()
    if not answer["error"]:
        answer = host.native_update(INFO)
    return answer if answer["error"] else host.native_finish()


def test_a_load_in_parts(host):
    assert not load(host)["error"]
    assert host.called == ["start", "update", "finish"]


@pytest.mark.parametrize(
    ("fails_in", "untouched"), [("start", True), ("update", False), ("finish", False)]
)
def test_giving_a_load_up_that_failed_puts_the_model_together(host, fails_in, untouched):
    host.fails_in = fails_in
    answer = load(host)
    assert (answer["error"], answer["error_type"]) == (f"KeyError: '{fails_in}'", "KeyError")
    assert answer["untouched"] is untouched
    assert not host.native_abandon()["error"]
    assert host.called[-1] == "finalise"
    host.fails_in = ""
    assert not load(host)["error"]


def test_a_part_that_does_not_fit_leaves_the_weights_unless_one_has_come(host):
    host.weight_transfer_engine.parse_update_info = lambda info: {**info, "names": info["names"]}
    assert "start_weight_update comes first" in host.native_update(INFO)["error"]
    assert not host.native_start()["error"]
    for untouched in (True, False):
        assert host.native_update({})["error"] == "KeyError: 'names'"
        assert host.native_update({})["untouched"] is untouched
        assert not host.native_update(INFO)["error"]
    assert not host.native_finish()["error"]
    assert "start_weight_update comes first" in host.native_finish()["error"]


def test_another_engine_waits_for_the_end_of_an_update(host):
    host.native_start()
    for call in (host.native_use, host.native_init):
        answer = call(None)
        assert "has to wait: a weight update is open" in answer["error"]
        assert answer["error_type"] == "TransferNotReadyError"
    host.native_abandon()
    assert host.called == ["start", "finalise"]
    assert "is not initialised" in host.native_check()["error"]
