"""The dashboard's history in a file: written, gone on with, thinned out and shown again."""

import itertools
import json
import os
from pathlib import Path

import pytest

from tests.fakes.observe import NOON, Moving, push, replica, status
from torchrl_vllm_sync import cli
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.observe.page import MAX_SAMPLES, Dashboard, History, _sample_of, read_history


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.jsonl"


def fill(history, num, first=0, **more):
    """Adds moments that are a second apart."""
    for i in range(first, first + num):
        told = status(replica("0"), time=NOON + i, **more)
        logged = {"numbers": {"reward": float(i)}, "histograms": {}}
        history.add(_sample_of(told, told, logged), told.as_dict())


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_holds_each_sample_and_now_and_then_the_status(path):
    history = History(path)
    fill(history, 62)
    fill(history, 3, first=62, pushes=(push(13, NOON + 62),))
    history.close()
    history.close()
    lines = written(path)
    assert [one["sample"]["time"] for one in lines[:-1]] == [NOON + i for i in range(65)]
    with_status = [i for i, one in enumerate(lines) if "status" in one]
    assert with_status == [0, 60, 65]  # first, after a minute, at the end
    assert lines[-1].keys() == {"status"}
    told, samples = read_history(path)
    assert told["time"] == NOON + 64
    assert told["pushes"][0]["version"] == 13
    assert samples == [one["sample"] for one in lines[:-1]]


def test_the_next_run_goes_on_with_it_behind_the_last_whole_line(path):
    first = History(path)
    fill(first, 3)
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"sample": {"ti')
    second = History(path)
    assert [one["time"] for one in second.samples] == [NOON, NOON + 1, NOON + 2]
    assert path.read_bytes() == whole
    fill(second, 1, first=100)
    second.close()
    assert [one["time"] for one in read_history(path)[1]] == [NOON, NOON + 1, NOON + 2, NOON + 100]


def test_a_file_that_is_being_written_is_another_dashboards_but_may_be_read(path):
    history = History(path)
    fill(history, 2)
    with pytest.raises(UnsupportedArgumentError, match="another dashboard writes to it"):
        History(path)
    assert len(read_history(path)[1]) == 2
    history.close()


def test_a_long_file_is_thinned_out_and_loses_no_push_and_nothing_that_was_logged(path):
    history, before = History(path), None
    for i in range(3 * MAX_SAMPLES):
        told = status(replica("0"), time=NOON + i, pushes=(push(i // 7, NOON + i // 7 * 7),))
        logged = {"numbers": {f"{i % 5}": 1.0}, "histograms": {}}
        history.add(_sample_of(told, before, logged), told.as_dict())
        before = told
    assert len(history.samples) == MAX_SAMPLES
    history.close()
    samples = read_history(path)[1]
    assert MAX_SAMPLES / 2 <= len(samples) <= MAX_SAMPLES
    steps = {b["time"] - a["time"] for a, b in itertools.pairwise(samples)}
    assert steps == {4.0}
    versions = [one["version"] for sample in samples for one in sample["pushes"]]
    assert versions == list(range(3 * MAX_SAMPLES // 7 + 1))
    assert {len(one["numbers"]) for one in samples} == {4}


def test_a_full_disk_ends_the_file_and_not_the_dashboard(path, caplog):
    history = History(path)
    fill(history, 1)

    history._file.close()
    with Path("/dev/full").open("ab") as full:
        history._file = full
        fill(history, 3, first=1)
        assert full.closed
    history.close()
    assert caplog.messages == ["the dashboard's history ends: [Errno 28] No space left on device"]
    assert len(history.samples) == 4


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "no JSON",
        "\x00",
        "5",
        '{"sample": {}}',
        '{"sample": {"time": "now"}}',
        '{"sample": 5}',
        '{"status": []}',
        '{"status": {"time": "x"}}',
        "{}",
        "[" * 100_000,
    ],
)
def test_what_is_no_history_is_refused_and_left_as_it_was(path, text):
    text += "\n"
    path.write_text(text)
    for use in (History, read_history):
        with pytest.raises(UnsupportedArgumentError, match=r"run\.jsonl"):
            use(path)
    assert path.read_text() == text


@pytest.mark.parametrize("text", ['{"hidden_size": 64}', "\x00", '{"sample"}'])
def test_a_file_that_ends_within_a_line_of_something_else_is_not_cut_off(path, text):
    path.write_text(text)
    for use in (History, read_history):
        with pytest.raises(UnsupportedArgumentError, match="does not begin like a sample"):
            use(path)
    assert path.read_text() == text


@pytest.mark.parametrize("text", ['{"sa', '{"sample": {', '{"status": '])
def test_a_file_in_which_no_line_was_ended_is_begun_anew(path, text):
    path.write_text(text)
    History(path).close()
    assert path.read_bytes() == b""


def test_a_place_where_no_file_can_be_is_refused(path, tmp_path):
    for use in (History, read_history):
        for bad in (tmp_path, tmp_path / "none" / "run.jsonl"):
            with pytest.raises(UnsupportedArgumentError, match="history must be a file"):
                use(bad)
    os.mkfifo(tmp_path / "pipe")
    for bad in (tmp_path / "pipe", "/dev/null", 5, "a\0b"):
        with pytest.raises(UnsupportedArgumentError, match="history must be a file to write"):
            History(bad)
    with pytest.raises(UnsupportedArgumentError, match="history must be a file to read"):
        read_history(tmp_path / ("a" * 254))
    path.touch()
    with pytest.raises(UnsupportedArgumentError, match="holds no history of a dashboard yet"):
        read_history(path)


# ---------------------------------------------------------------- the dashboard, and the command


def test_a_dashboard_writes_and_another_shows_it(path):
    history = History(path)
    fill(history, 5)
    history.close()
    with Dashboard(Moving(), history=path) as board:
        assert [one["time"] for one in board.history(0)["samples"]][:5] == [
            NOON + i for i in range(5)
        ]
        assert board.history(0)["is_live"]
    num_lines = len(written(path))
    with Dashboard(None, history=path) as board:
        told = board.history(0)
        assert told["status"] == board.status()
    assert not told["is_live"]
    assert len(told["samples"]) == sum("sample" in one for one in written(path))
    assert len(written(path)) == num_lines  # it was only read


def test_a_dashboard_needs_something_to_show():
    with pytest.raises(UnsupportedArgumentError, match="look must be a function unless there is"):
        Dashboard(None)


def test_a_dashboard_that_cannot_listen_lets_go_of_its_file(path):
    with pytest.raises(UnsupportedArgumentError, match="free to listen on"):
        Dashboard(status, host="192.0.2.1", history=path)
    History(path).close()


def test_the_command_shows_a_file_until_it_is_interrupted(path, monkeypatch, capsys):
    history = History(path)
    fill(history, 1)
    history.close()

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.time, "sleep", interrupt)
    assert cli.main(["dashboard", str(path)]) == 0
    assert "is shown at http://127.0.0.1:" in " ".join(capsys.readouterr().out.split())


def test_the_command_says_that_there_is_no_such_file(tmp_path, capsys):
    assert cli.main(["dashboard", str(tmp_path / "none")]) == 1
    assert "history must be a file to read" in capsys.readouterr().err
