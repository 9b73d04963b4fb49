"""The README's program runs as it stands, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from tests.warm import warm_python

README = Path(__file__).resolve().parents[2] / "README.md"

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def test_the_readmes_program_learns_from_the_weights_it_pushed(tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "program.py").write_text(code)
    done = subprocess.run(
        [warm_python(), "program.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "RAY_AUTH_MODE": "disabled",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(README.parent), *sys.path])),
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    steps = re.findall(r"^version (\d+) reward (\S+) ESS (\S+)$", done.stdout, re.MULTILINE)
    assert [int(version) for version, _, _ in steps] == [*range(1, 31)]
    assert all(float(ess) == pytest.approx(1, abs=1e-3) for _, _, ess in steps)
    rewards = [float(reward) for _, reward, _ in steps]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.2
