"""A kill matrix that is interrupted tells what it has found, and does not pass for a whole one."""

import json

import pytest

from tests.chaos import matrix
from tests.chaos.arena import Verdict


class Arena:
    """Every cell passes, but the run is interrupted in the last one."""

    interrupts = True

    def __init__(self, directory, num_replicas, *, engines):
        self.engines, self.num_run = engines, 0

    def run(self, cell):
        self.num_run += 1
        if self.interrupts and self.num_run == 4:
            raise KeyboardInterrupt
        return Verdict(cell, noticed_s=1.0, pushed_s=2.0, repaired_s=3.0, push="version 1 on 0,1")

    def close(self):
        """There is nothing to end."""


@pytest.mark.parametrize(("interrupts", "status", "found"), [(True, 1, 3), (False, 0, 4)])
def test_what_was_found_before_an_interrupt_is_kept(
    monkeypatch, tmp_path, capsys, interrupts, status, found
):
    monkeypatch.setattr(matrix, "Arena", Arena)
    monkeypatch.setattr(Arena, "interrupts", interrupts)
    cells = ["--cells", "kill-*-idle-p2p", "--output", str(tmp_path)]
    assert matrix.main(cells) == status
    assert ("interrupted after 3 of 4 cells" in capsys.readouterr().out) == interrupts
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("chaos_p2p_")
    records = json.loads(path.read_text())["records"]
    assert len({one["case"] for one in records}) == found
