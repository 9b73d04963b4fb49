"""Draws the pictures of ``tutorials/images`` that show a status, with figures made up for them.

Needs chromium and Pillow. Usage: ``python -m tools.status_images``.
"""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console

from tests.unit.status_scenes import Moving, troubled
from torchrl_vllm_sync.dashboard import Dashboard, _sample_of
from torchrl_vllm_sync.status_terminal import status_view

IMAGES = Path(__file__).resolve().parent.parent / "tutorials" / "images"
NUM_SAMPLES = 190
BROWSER = ("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")


def draw_terminal(path: Path) -> None:
    """Draws what the command shows."""
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(status_view(troubled()))
    drawn = console.export_svg(title="torchrl-vllm-sync status rollouts")
    # rich names a font on another site; whoever has none of that name sees their own.
    drawn = re.sub(r"@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL)
    path.write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n")


def draw_dashboard(path: Path) -> None:
    """Draws the page, in few colors so that the file is small."""
    look = Moving(troubled, past_s=NUM_SAMPLES + 10)
    with Dashboard(look) as board, tempfile.TemporaryDirectory() as folder:
        board._samples.extend(_sample_of(look()) for _ in range(NUM_SAMPLES))
        shot = Path(folder, "shot.png")
        options = (f"--screenshot={shot}", "--window-size=1240,850", "--virtual-time-budget=3000")
        subprocess.run([*BROWSER, *options, board.url], check=True, capture_output=True)
        Image.open(shot).convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    draw_terminal(IMAGES / "status_terminal.svg")
    draw_dashboard(IMAGES / "dashboard.png")
