"""The table of the guide "Benchmarks" is the records'."""

from pathlib import Path

from benchmarks.record import runs_of
from benchmarks.weight_sync import AROUND_MS
from benchmarks.weight_sync_report import pauses, table, tokens

RECORDS = [*runs_of("weight_sync").values()]
GUIDE = Path(__file__).resolve().parents[2] / "tutorials" / "guides" / "measured.md"
RUN = {
    "hardware": "h200x2",
    "records": [
        {"case": "8b-1", "system": "raw-nccl", "metric": "whole", "samples": [40.0, 44.0, 50.0]},
        {"case": "8b-1", "system": "broadcast", "metric": "whole_pause", "samples": [55.0]},
        {
            "case": "8b-1, 32 running",
            "system": "broadcast",
            "metric": "longest gap",
            "samples": [70.0],
        },
        *(
            {
                "case": "8b-1, 32 running",
                "system": "broadcast-staged",
                "metric": f"throughput {when}",
                "samples": samples,
            }
            for when, samples in {
                "undisturbed": [2500.0, 2510.0, 2400.0],
                "while weights arrive": [2000.0, 2200.0, 2100.0],
            }.items()
        ),
    ],
}


def test_the_guide_shows_the_table_of_the_records():
    made = GUIDE.read_text().split("<!-- made by: make sync-table -->\n")[1].split("<!-- end")[0]
    assert made == table(RECORDS)


def test_medians_and_blanks():
    assert table([RUN]).splitlines()[-1] == (
        "| 8b-1 | 44.0 |  | 55.0 |  |  |  | 70.0 |  |  |  | 84 % |  |"
    )


def test_the_pauses_are_drawn(tmp_path):
    pauses(RECORDS, tmp_path / "pauses.png")
    assert (tmp_path / "pauses.png").read_bytes().startswith(b"\x89PNG")


def test_tokens_around_a_push_are_drawn_where_they_were_noted(tmp_path):
    tokens(RUN, tmp_path / "tokens.png")
    assert not (tmp_path / "tokens.png").exists()
    noted = {"metric": "tokens around a push", "samples": [5000.0] * len(AROUND_MS)}
    systems = [{**noted, "system": one, "case": "8b-1"} for one in ("p2p", "torchrl")]
    tokens({**RUN, "records": systems}, tmp_path / "tokens.png")
    assert (tmp_path / "tokens.png").read_bytes().startswith(b"\x89PNG")
