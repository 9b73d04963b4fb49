"""``benchmarks.routing`` from the command line to the report."""

import json
import math

import pytest

from benchmarks import routing, routing_report
from benchmarks.routing_sim.engine import COSTS
from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.simulate import UNITS, simulate
from benchmarks.routing_sim.traces import TRACES


def run(tmp_path, *argv):
    assert routing.main([*argv, "--smoke", "--workers", "1", "--out", str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").glob("routing_*.json")
    return path


def test_the_command_records_every_number_once_a_seed(tmp_path, capsys):
    path = run(
        tmp_path,
        *("--traces", "grpo", "agents"),
        *("--policies", "round-robin", "lmetric"),
    )
    samples = routing_report.read(path)
    cases = ["grpo", "agents"]
    assert routing_report.cases_of(samples) == cases
    assert routing_report.systems_of(samples) == ["round-robin", "lmetric"]
    for case in cases:
        for system in routing_report.systems_of(samples):
            for metric in UNITS:
                assert len(samples[case, system, metric]) == routing.SMOKE_SEEDS
    again = simulate(TRACES["grpo"](1, True), COSTS, POLICIES["lmetric"], 1).metrics
    assert samples["grpo", "lmetric", "makespan"][1] == pytest.approx(again["makespan"], 1e-5)
    assert "lmetric" in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_processes_give_the_same_numbers_as_one():
    tasks = [("agents", policy, 1, True) for policy in ("round-robin", "lmetric")]
    assert routing.run_all(tasks, 1) == routing.run_all(tasks, 2)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--workers", "-1"], "--workers must be at least 1, got -1"),
        (["--traces", "none"], "invalid choice: 'none'"),
        (["--policies", "best"], "invalid choice: 'best'"),
    ],
)
def test_the_command_refuses(argv, message, capsys):
    with pytest.raises(SystemExit):
        routing.main(argv)
    assert message in capsys.readouterr().err


# the report


def made_up(**makespans):
    samples = {}
    for system, cases in makespans.items():
        for case, values in cases.items():
            for metric in UNITS:
                samples[case, system, metric] = [1.0] * len(values)
            samples[case, system, "makespan"] = values
    return samples


SAMPLES = made_up(
    ours={"one": [9.0, 18.0, 27.3], "two": [22.0, 44.0, 67.0]},
    steady={"one": [10.0, 20.0, 30.0], "two": [30.0, 60.0, 90.0]},
    other={"one": [20.0, 40.0, 60.0], "two": [20.0, 40.0, 60.0]},
)


def test_differences_are_paired():
    # the seeds differ by far more than the policies do
    percent, error = routing_report.paired([9.0, 18.0, 27.3], [10.0, 20.0, 30.0])
    assert percent == pytest.approx(-29 / 3)
    assert error == pytest.approx(1 / 3)
    assert routing_report.paired([2.0], [1.0]) == (100.0, math.inf)


@pytest.mark.parametrize(
    ("percent", "error", "expected"),
    [(3.0, 1.0, "loss"), (-3.0, 1.0, "win"), (2.0, 1.0, "even"), (-50.0, math.inf, "even")],
)
def test_wins_and_losses_count_beyond_two_errors(percent, error, expected):
    assert routing_report.verdict(percent, error) == expected


def test_the_report_says_losses_as_plainly_as_wins():
    lines = routing_report.table(SAMPLES).splitlines()
    assert lines[0] == "| trace | ours | hits | p99 turn | to steady | to other |"
    assert lines[2] == ("| one | 18.1 s | 100.0% | 1.0 s | -9.7 % (0.3) win | -54.8 % (0.2) win |")
    assert lines[3].endswith("| -26.3 % (0.4) win | +10.6 % (0.6) loss |")


def test_the_report_draws_beside_the_record_and_only_of_its_own(tmp_path, capsys):
    path = run(tmp_path, "--traces", "grpo", "--policies", "round-robin", "lmetric")
    other = path.with_name("routing_live_cpu2.json")
    other.write_text(json.dumps({"benchmark": "routing_live", "records": []}))
    assert routing_report.recorded(path.parent) == [path]
    with pytest.raises(ValueError, match="is a record of 'routing_live', not of 'routing'"):
        routing_report.read(other)
    assert routing_report.main([str(path)]) == 0
    assert path.name in capsys.readouterr().out  # no table: ours is not in it
    picture = path.with_name(f"{path.stem}_ratios.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 150_000


def test_the_report_says_which_run_it_is_of(tmp_path, capsys):
    path = run(tmp_path, "--traces", "grpo", "--policies", "ours")
    capsys.readouterr()
    assert routing_report.main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith(f"{routing.SMOKE_SEEDS} seeds, SMOKE: small traces that mean little")


def test_the_report_says_that_there_is_no_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(routing_report, "RESULTS", tmp_path)
    assert routing_report.main([]) == 1
    assert "no record of benchmarks.routing in" in capsys.readouterr().out


def test_the_record_of_real_engines_is_drawn(tmp_path):
    (path,) = sorted(routing_report.RESULTS.glob("routing_live_*.json"))
    routing_report.draw_live(json.loads(path.read_text()), tmp_path / "live.png")
    assert (tmp_path / "live.png").read_bytes().startswith(b"\x89PNG")
