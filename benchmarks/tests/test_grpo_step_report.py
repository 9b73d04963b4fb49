"""Pictures of where a step's time goes."""

import json

from benchmarks import grpo_step_report, record
from benchmarks.grpo_step_report import draw, parts
from benchmarks.grpo_systems import SYSTEMS

RUN = {
    "hardware": "h200x2",
    "records": [
        {"case": "a", "system": "ours", "metric": metric, "samples": samples}
        for metric, samples in {
            "generate": [1.0, 3.0, 2.0],
            "rows": [0.1],
            "reward": [0.2],
            "optimizer": [0.5],
            "push": [0.25],
            "other": [0.125],
            "collect": [9.0],  # sums of others
            "step": [3.175],
        }.items()
    ],
}


def test_parts_add_up_to_the_step():
    found = parts(RUN)["ours"]
    assert list(found.values()) == [2.0, 0.30000000000000004, 0.5, 0.25, 0.0, 0.125]
    assert sum(found.values()) == 3.175


def test_engines_that_are_put_to_sleep_take_the_time_of_pushes():
    records = [
        RUN["records"][0] | {"metric": metric, "samples": [seconds]}
        for metric, seconds in {"step": 7.0, "push": 1.0, "sleep": 2.0, "wake": 4.0}.items()
    ]
    assert parts({"records": records})["ours"]["push, sleep, wake"] == 7.0


def test_systems_without_a_step_have_no_bar():
    assert parts({"records": RUN["records"][:-1]}) == {}


def test_every_system_has_a_name():
    names = {getattr(one, "name", key) for key, one in SYSTEMS.items()}
    assert names == set(grpo_step_report.SYSTEMS)


def test_pictures_lie_beside_their_records(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    (tmp_path / "grpo_step_a.json").write_text(json.dumps(RUN))
    assert grpo_step_report.main() == 0
    assert (tmp_path / "grpo_step_a.png").read_bytes().startswith(b"\x89PNG")
    draw(RUN, tmp_path / "other.png")
