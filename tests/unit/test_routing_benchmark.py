"""``benchmarks.routing`` from the command line to the report, and public traces."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import routing, routing_report
from benchmarks.routing_sim.costs import PRESETS, costs_named
from benchmarks.routing_sim.decisions import DECISION_CASES, decision_times
from benchmarks.routing_sim.mooncake import HASHED_TOKENS, read_mooncake
from benchmarks.routing_sim.policies import POLICIES
from benchmarks.routing_sim.results import UNITS
from benchmarks.routing_sim.simulate import Prepared, simulate
from benchmarks.routing_sim.traces import TRACES, make_trace

LINES = [
    {"timestamp": 27_000, "input_length": 1200, "output_length": 20, "hash_ids": [7, 8, 9]},
    {"timestamp": 27_500, "input_length": 1300, "output_length": 30, "hash_ids": [7, 8, 10]},
    {"timestamp": 29_000, "input_length": 500, "output_length": 5, "hash_ids": [11]},
    {"timestamp": 30_000, "input_length": 1024, "output_length": 1, "hash_ids": [7, 8]},
]


@pytest.fixture
def public_trace(tmp_path):
    path = tmp_path / "public.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def run(tmp_path, *argv):
    assert routing.main([*argv, "--smoke", "--workers", "1", "--out", str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").glob("routing_*.json")
    return path


def test_the_command_records_every_number_once_a_seed(tmp_path, public_trace, capsys):
    path = run(
        tmp_path,
        *("--traces", "grpo", "agents"),
        *("--policies", "round-robin", "verl-sticky"),
        *("--mooncake", str(public_trace), "--mooncake-requests", "2"),
    )
    samples = routing_report.read(path)
    cases = ["grpo", "agents", "public"]
    assert routing_report.cases_of(samples) == cases
    assert routing_report.systems_of(samples) == ["round-robin", "verl-sticky"]
    for case in cases:
        for system in routing_report.systems_of(samples):
            for metric in UNITS:
                assert len(samples[case, system, metric]) == routing.SMOKE_SEEDS
    for case in DECISION_CASES:
        assert samples[case, "round-robin", "decision_p50"][0] > 0
    prepared = Prepared(make_trace("grpo", 1, smoke=True), costs_named("fitted-8b-h200"))
    again = simulate(prepared, POLICIES["verl-sticky"], 1).metrics
    assert samples["grpo", "verl-sticky", "makespan"][1] == pytest.approx(again["makespan"], 1e-5)
    assert "verl-sticky" in capsys.readouterr().out


def test_processes_give_the_same_numbers_as_one(tmp_path):
    tasks = [
        routing.Task(
            "agents", seed, ("round-robin", "lmetric"), "round-figures-8b-h200", True, None, 1
        )
        for seed in range(2)
    ]
    alone, spread = routing.run_all(tasks, 1), routing.run_all(tasks, 2)
    for one in (alone, spread):
        for numbers in one:
            for metrics in numbers.values():
                del metrics["decision_p50"], metrics["decision_p99"]  # by the real clock
    assert alone == spread


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--workers", "-1"], "--workers must be at least 1, got -1"),
        (["--traces"], "there is no trace to run"),
        (["--policies", "best"], "invalid choice: 'best'"),
    ],
)
def test_the_command_refuses(argv, message, capsys):
    with pytest.raises(SystemExit):
        routing.main(argv)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", TRACES)
def test_traces_are_named_as_they_are_listed(name):
    small, whole = make_trace(name, 0, smoke=True), make_trace(name, 0)
    assert small.name == whole.name == name
    assert small.num_replicas == 3
    assert whole.num_replicas == 8
    assert len(small.sessions) < len(whole.sessions) / 10


@pytest.mark.parametrize("kind", ["updates", "async", "churn"])
@pytest.mark.parametrize("smoke", [True, False])
def test_what_befalls_a_trace_happens_before_its_end(kind, smoke):
    name = "agents-churn" if kind == "churn" else f"grpo-{kind}"
    with_it, without = (
        simulate(
            Prepared(make_trace(one, 0, smoke=smoke), costs_named("fitted-8b-h200")),
            POLICIES["least-requests"],
        )
        for one in (name, name.removesuffix(f"-{kind}"))
    )
    assert not np.array_equal(with_it.finished_s, without.finished_s)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"trace must be one of grpo, .*, got 'none'"):
        make_trace("none", 0)
    with pytest.raises(ValueError, match=r"costs must be one of fitted-8b-h200, .*, got 'none'"):
        costs_named("none")
    with pytest.raises(ValueError, match="case must be one of keyed, 2048-tokens, got 'none'"):
        decision_times(POLICIES["round-robin"], "none", 1000)
    with pytest.raises(ValueError, match="count must be at least 1000, got 10"):
        decision_times(POLICIES["round-robin"], "keyed", 10)


def test_every_preset_says_where_it_is_from():
    assert all(preset.origin for preset in PRESETS.values())


# public traces


def test_a_public_trace_keeps_lengths_times_and_common_blocks(public_trace):
    scenario = read_mooncake(public_trace, num_replicas=2, speed=2.0)
    assert [session.arrival_s for session in scenario.sessions] == [0.0, 0.25, 1.0, 1.5]
    turns = [session.turns[0] for session in scenario.sessions]
    assert [turn.prompt_len for turn in turns] == [1200, 1300, 500, 1024]
    assert [turn.output_len for turn in turns] == [20, 30, 5, 1]
    first, second, third, fourth = (session.tokens for session in scenario.sessions)
    shared = 2 * HASHED_TOKENS
    assert np.array_equal(first[:shared], second[:shared])
    assert np.array_equal(first[:shared], fourth[:shared])
    assert not np.array_equal(first[shared:1200], second[shared:1200])
    assert not np.array_equal(first[:500], third[:500])
    result = simulate(Prepared(scenario, PRESETS["roofline-8b-h200"]), POLICIES["round-robin"])
    # both replicas serve two; only the fourth finds the second's blocks, all but its last one
    assert result.metrics["hit_rate"] == pytest.approx(1008 / (1200 + 1300 + 500 + 1024))
    assert result.output_tokens == 56


def test_a_public_trace_can_be_taken_in_parts(public_trace):
    scenario = read_mooncake(public_trace, first=1, count=2)
    assert [session.turns[0].prompt_len for session in scenario.sessions] == [1300, 500]
    assert [session.arrival_s for session in scenario.sessions] == [0.0, 1.5]
    with pytest.raises(ValueError, match="has no requests from number 4 on"):
        read_mooncake(public_trace, first=4)
    with pytest.raises(ValueError, match=r"speed must be greater than 0, got 0\.0"):
        read_mooncake(public_trace, speed=0.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        (json.dumps({"timestamp": 1, "input_length": 5}), "has no output_length, hash_ids"),
        (json.dumps(LINES[0] | {"output_length": 0}), "must be at least 1, got 1200 and 0"),
        (
            json.dumps(LINES[0] | {"hash_ids": [1]}),
            "1200 tokens are 3 blocks of 512, hash_ids has 1",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + line)
    with pytest.raises(ValueError, match=message):
        read_mooncake(path)


# the report


def made_up(**makespans):
    samples = {}
    for system, cases in makespans.items():
        for case, values in cases.items():
            for metric in UNITS:
                samples[case, system, metric] = [1.0] * len(values)
            samples[case, system, "makespan"] = values
        for case in DECISION_CASES:
            samples[case, system, "decision_p50"] = [2.0, 3.0, 40.0]
            samples[case, system, "decision_p99"] = [20.0, 30.0, 400.0]
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
    lines = routing_report.ours_against_best(SAMPLES).splitlines()
    assert lines[2].startswith("| one | steady | 20.0 s | 18.1 s | -9.7 % (0.3) | **win** |")
    assert lines[3].startswith("| two | other | 40.0 s | 44.3 s | +10.6 % (0.6) | **loss** |")
    matrix = routing_report.matrix(SAMPLES).splitlines()[2:]
    rows = dict(line[2:].split(" | ", 1) for line in matrix)
    assert rows["steady"] == "0 | +50.0 % (0.0) loss | 1.50 (two) |"
    assert rows["ours"].endswith("| 1.11 (two) |")
    assert rows["other"] == "+100.0 % (0.0) loss | 0 | 2.21 (one) |"
    assert "| ours | 3 µs | 30 µs | 3 µs | 30 µs |" in routing_report.decisions(SAMPLES)


def test_the_report_draws_beside_the_record_and_only_of_its_own(tmp_path, capsys):
    path = run(tmp_path, "--traces", "grpo", "--policies", "round-robin", "verl-sticky")
    other = path.with_name("routing_live_cpu2.json")
    other.write_text(json.dumps({"benchmark": "routing_live", "records": []}))
    assert routing_report.recorded(path.parent) == [path]
    with pytest.raises(ValueError, match="is a record of 'routing_live', not of 'routing'"):
        routing_report.read(other)
    assert routing_report.main([str(path)]) == 0
    assert "| round-robin |" in capsys.readouterr().out
    for kind in ("ratios", "balance"):
        picture = path.with_name(f"{path.stem}_{kind}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) < 150_000


def test_the_report_says_which_run_it_is_of(tmp_path, capsys):
    path = run(tmp_path, "--traces", "grpo", "--policies", "ours")
    capsys.readouterr()
    assert routing_report.main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith(f"{routing.SMOKE_SEEDS} seeds, SMOKE: small traces that mean little")
    assert "| ours | 0 | 1.00 (grpo) |" in lines  # nobody else to compare with
    run_again = json.loads(path.read_text())
    assert {one["costs"] for one in run_again["records"] if one["case"] == "grpo"} == {
        "fitted-8b-h200"
    }


def test_the_report_says_that_there_is_no_record(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(routing_report, "RESULTS", tmp_path)
    assert routing_report.main([]) == 1
    assert "no record of benchmarks.routing in" in capsys.readouterr().out


def test_no_trace_beats_its_bound_and_one_request_meets_it():
    costs = replace(PRESETS["round-figures-8b-h200"], per_context_token_s=1e-8, per_sequence_s=1e-5)
    scenario = make_trace("grpo", 0, smoke=True)
    alone = replace(scenario, sessions=scenario.sessions[:1], concurrency=1)
    result = simulate(Prepared(alone, costs), POLICIES["round-robin"])
    assert result.metrics["bound_ratio"] == pytest.approx(1.0)
    for name in TRACES:
        prepared = Prepared(make_trace(name, 2, smoke=True), costs)
        for policy in ("least-requests", "lmetric"):
            assert simulate(prepared, POLICIES[policy], 2).metrics["bound_ratio"] >= 1
