"""``benchmarks.routing_decisions`` from the command line to the record, and its sisters' doors."""

import importlib
import json

import pytest

from benchmarks import live_engines, record, routing_decisions, shapes


@pytest.fixture
def routing_live(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # which it sets when it is imported
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # likewise
    return importlib.import_module("benchmarks.routing_live")


def test_the_command_times_decisions_and_weighs_the_index(tmp_path, capsys):
    path = routing_decisions.main(["--smoke", "--out", str(tmp_path)])
    records = json.loads(path.read_text())["records"]
    timed = {(one["case"], one["metric"]) for one in records if one["unit"] == "µs"}
    cases, metrics = ("keyed", "2048-tokens"), ("decision_p50", "decision_p99")
    assert timed == {(case, metric) for case in cases for metric in metrics}
    assert all(sample > 0 for one in records for sample in one["samples"])
    assert "10000 cached blocks of 16 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("live", "option", "value", "least"),
    [
        (False, "--rounds", "0", 1),
        (False, "--decisions", "1", 2),
        (True, "--replicas", "0", 1),
        (True, "--repetitions", "-1", 1),
    ],
)
def test_the_commands_refuse(live, option, value, least, routing_live, capsys):
    main = routing_live.main if live else routing_decisions.main
    with pytest.raises(SystemExit):
        main([option, value])
    assert f"{option} must be at least {least}, got {value}" in capsys.readouterr().err


def test_a_run_without_a_commit_is_refused_before_it_starts(monkeypatch, routing_live):
    def no_commit():
        raise record.RecordError("the commit is unknown")

    monkeypatch.setattr(record, "_commit", no_commit)
    for main in (routing_decisions.main, routing_live.main):
        with pytest.raises(record.RecordError, match="the commit is unknown"):
            main([])


@pytest.mark.parametrize("shape", [None, *shapes.SHAPES])
def test_every_shape_has_a_record(shape):
    name = live_engines.record_name("routing_live", shape)
    assert record.Recorder(name).benchmark.startswith("routing_live")
    assert shape != "1.7b" or name == "routing_live_1_7b"
