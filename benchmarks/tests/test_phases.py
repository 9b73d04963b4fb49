"""Phases add up and belong to the innermost."""

import threading
from types import SimpleNamespace

import pytest

from benchmarks import phases
from benchmarks.phases import Clock


@pytest.fixture
def clock(monkeypatch):
    """A clock whose time passes by ``clock.now.append(...)`` alone."""
    now = [0.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: sum(now))
    clock = Clock()
    clock.now = now
    return clock


def test_a_moment_belongs_to_the_innermost_phase_and_all_add_up(clock):
    with clock.phase("step"):
        clock.now.append(1)
        with clock.phase("policy"):
            clock.now.append(2)
            with clock.phase("generate"):
                clock.now.append(4)
            clock.now.append(8)
        clock.now.append(16)
    clock.now.append(32)  # nobody's
    assert clock.take() == {"step": 17, "policy": 10, "generate": 4}
    assert clock.take() == {}


def test_what_a_caller_does_after_a_wrapped_call_has_a_name_of_its_own(clock):
    def pass_time(seconds):
        clock.now.append(seconds)
        return seconds

    service = SimpleNamespace(generate=pass_time)
    clock.wrap(service, "generate", "generate", then="rows")
    assert service.generate(1) == 1  # called by nobody who is timed
    with clock.phase("encode"):
        clock.now.append(2)
        service.generate(4)
        clock.now.append(8)
    assert clock.take() == {"encode": 2, "generate": 5, "rows": 8}


def test_calls_of_other_threads_change_no_phase(clock):
    run = clock.timed(lambda: None, "generate", then="rows")
    with clock.phase("wait"):
        other = threading.Thread(target=run)
        other.start()
        other.join(timeout=10)
        clock.now.append(3)
    assert clock.take() == {"wait": 3}


def test_a_phase_ends_where_its_call_fails(clock):
    def fail():
        clock.now.append(1)
        raise ValueError

    run = clock.timed(fail, "failing")
    with clock.phase("step"):
        with pytest.raises(ValueError):  # noqa: PT011
            run()
        clock.now.append(2)
    assert clock.take() == {"step": 2, "failing": 1}
