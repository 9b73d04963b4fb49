"""Builds wheel and sdist: ``python tools/dist.py ADDRESS [DIRECTORY]``, by default into ``dist/``.

Links and images of the README are relative, as a repository wants them. A package index shows the
README by itself, so that in the packages they begin with the address of the released files.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "torchrl_vllm_sync"
# Before the target of a link or an image, if it is neither an address nor a heading of the page.
RELATIVE = re.compile(r"(?<=\]\()(?![a-z]+://|#)")


def main(address: str, directory: str) -> None:
    """Builds a copy, since building leaves files behind."""
    if not re.fullmatch(r"https://\S*[^/\s]", address):
        sys.exit(f"ADDRESS must begin with https:// and not end with a slash, got {address!r}")
    with tempfile.TemporaryDirectory() as copy:
        for name in ("pyproject.toml", "LICENSE"):
            shutil.copy(ROOT / name, copy)
        readme = RELATIVE.sub(f"{address}/", (ROOT / "README.md").read_text())
        Path(copy, "README.md").write_text(readme)
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / PACKAGE, Path(copy, PACKAGE), ignore=ignored)
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, copy]
        subprocess.run(build, check=True, timeout=300)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("address")
    arguments.add_argument("directory", nargs="?", default=str(ROOT / "dist"))
    main(**vars(arguments.parse_args()))
