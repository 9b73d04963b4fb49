"""Takes the pictures of ``tutorials/images`` that show a status, of a service that runs for them.

Two replicas of a tiny random model on the CPU answer requests for two minutes, take weights every
six seconds, and one of them is killed on the way. Needs chromium and Pillow.
Usage: ``python -m tools.status_images``.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import ray
import torch
from PIL import Image
from rich.console import Console

from torchrl_vllm_sync import AsyncVLLM, DashboardLogger, ServiceStatus
from torchrl_vllm_sync.observe.views import status_view
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

IMAGES = Path(__file__).resolve().parent.parent / "tutorials" / "images"
RUNS_S = 120.0
KILLED_AFTER_S = 105.0
PUSH_EVERY_S = 6.0
BROWSER = ("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")


@contextlib.contextmanager
def busy(service: AsyncVLLM, logger: DashboardLogger) -> Iterator[None]:
    """Has requests run, in waves: prompts that share their beginnings, answers of any length."""
    from vllm import SamplingParams

    ended = threading.Event()

    def ask() -> None:
        generator = torch.Generator().manual_seed(0)
        shared = torch.randint(5, 500, (300,), generator=generator).tolist()
        while not ended.is_set():
            own = torch.randint(5, 500, (48, 20), generator=generator).tolist()
            lengths = torch.randint(20, 400, (48,), generator=generator).tolist()
            sampling = [SamplingParams(max_tokens=one, ignore_eos=True) for one in lengths]
            began = time.monotonic()
            outputs = service.generate([shared + one for one in own], sampling, use_tqdm=False)
            logger.log_scalar("seconds of a wave of 48 requests", time.monotonic() - began)
            logger.log_histogram(
                "tokens of an answer", [len(one.outputs[0].token_ids) for one in outputs]
            )

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for one in asking:
        one.start()
    try:
        yield
    finally:
        ended.set()
        for one in asking:
            one.join(timeout=120)


def draw_terminal(status: ServiceStatus, path: Path) -> None:
    """Draws what the command shows."""
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(status_view(status, console.width))
    drawn = console.export_svg(title=f"torchrl-vllm-sync status {status.name}")
    # rich names a font on another site; whoever has none of that name sees their own.
    drawn = re.sub(r"@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL)
    path.write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n")


def draw_page(url: str, path: Path) -> None:
    """Draws the page, in few colors so that the file is small."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder, "shot.png")
        options = (f"--screenshot={shot}", "--window-size=1240,1330", "--virtual-time-budget=3000")
        subprocess.run([*BROWSER, *options, url], check=True, capture_output=True, timeout=60)
        Image.open(shot).convert("RGB").quantize(256).save(path, optimize=True)


def main() -> None:
    """Runs the service and takes both pictures near its end."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        # The page shows the checkpoint's name. Replicas begin where Ray is started.
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
        checkpoint = make_tiny_checkpoint("tiny-model", seed=0)
        model = load_tiny_model(checkpoint)
        service = AsyncVLLM.from_pretrained(
            str(checkpoint),
            num_replicas=2,
            name="rollouts",
            num_cpus_per_replica=0,
            max_num_seqs=32,
            verbose=False,
        )
        with service, service.dashboard() as board, busy(service, DashboardLogger(board)):
            began, killed = time.monotonic(), False
            while (passed := time.monotonic() - began) < RUNS_S:
                if passed > KILLED_AFTER_S and not killed:
                    psutil.Process(ray.get(service.actors[1].describe.remote()).pid).kill()
                    killed = True
                service.push_weights(model)
                time.sleep(PUSH_EVERY_S)
            draw_terminal(service.status(), IMAGES / "status_terminal.svg")
            draw_page(board.url, IMAGES / "dashboard.png")
    ray.shutdown()


if __name__ == "__main__":
    main()
