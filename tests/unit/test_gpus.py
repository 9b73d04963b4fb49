"""NVML's polls are averaged within their window, of the GPUs that the process may use."""

import logging
import time
from types import SimpleNamespace

import pytest

from torchrl_vllm_sync.rl.statistics import GPUUse


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    """Three GPUs, of which the second is busy for 3/4 of the time and the third always."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fake = SimpleNamespace(
        NVMLError=NVMLError,
        closed=[],
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: fake.closed.append(True),
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID={"GPU-b": 1}.__getitem__,
        nvmlDeviceGetUtilizationRates=lambda at: SimpleNamespace(gpu=[0, 75, 100][at]),
    )
    monkeypatch.setattr("vllm.third_party.pynvml", fake)
    return fake


def first_shares(use):
    begin, deadline = time.perf_counter(), time.monotonic() + 10
    while (shares := use.between(begin, time.perf_counter())) is None:
        assert time.monotonic() < deadline, "NVML was not polled"
        time.sleep(0.01)
    return shares


@pytest.mark.parametrize(
    ("visible", "wanted"),
    [(None, [0.0, 0.75, 1.0]), ("2,1", [1.0, 0.75]), (" GPU-b", [0.75])],
)
def test_every_gpu_has_the_mean_of_its_polls_within_the_window(monkeypatch, nvml, visible, wanted):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with GPUUse() as use:
        begin = time.perf_counter()
        assert first_shares(use) == wanted
        assert use.between(begin - 2, begin - 1) is None
    assert nvml.closed == [True]


def test_means_are_of_all_polls_in_the_window():
    use = GPUUse()
    use._polls.extend((float(at), [at / 4, 1.0]) for at in range(5))
    assert use.between(1.0, 3.0) == [0.5, 1.0]
    assert use.between(0.0, 0.5) == [0.0, 1.0]
    assert use.between(5.0, 9.0) is None


def end_of(nvml, use):
    """Waits until the thread, which has nothing to poll, is over."""
    with use:
        use._thread.join(10)
        assert not use._thread.is_alive()
    return use.between(0.0, time.perf_counter())


def test_without_nvml_or_gpus_nothing_is_known(monkeypatch, nvml, caplog):
    def fail(*_):
        raise NVMLError("not there")

    with monkeypatch.context() as at:
        at.setenv("CUDA_VISIBLE_DEVICES", "")
        assert end_of(nvml, GPUUse()) is None
    with monkeypatch.context() as at, caplog.at_level(logging.WARNING):
        at.setattr(nvml, "nvmlDeviceGetUtilizationRates", fail)  # as of a MIG slice
        assert end_of(nvml, GPUUse()) is None
        assert "GPU use is not known: not there" in caplog.text
    assert nvml.closed == [True, True]
    monkeypatch.setattr(nvml, "nvmlInit", fail)
    assert end_of(nvml, GPUUse()) is None
    assert nvml.closed == [True, True]
