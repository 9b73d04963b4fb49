"""How far engines are that start: each notes its stages in a file, and a line on stderr tells."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

FILE_VARIABLE = "TORCHRL_VLLM_SYNC_STAGES"


def note_stage(stage: str) -> None:
    """Notes what this engine does now, if a launch on this machine still shows it."""
    if path := os.environ.get(FILE_VARIABLE):
        # The file is gone, another user's, or on a full disk: the engine starts all the same.
        with contextlib.suppress(OSError), Path(path).open("a") as file:
            file.write(f"{stage}\n")


class LaunchProgress:
    """What a launch is doing: one line on a terminal, elsewhere a line for each change."""

    def __init__(self, service_name: str, replica_ids: Sequence[str]) -> None:
        self._service_name, self._told, self._began = service_name, "", time.monotonic()
        self._directory = tempfile.TemporaryDirectory(prefix="torchrl_vllm_sync-")
        self._files = {one: Path(self._directory.name, one) for one in replica_ids}
        self._console = Console(stderr=True, force_jupyter=False, highlight=False, soft_wrap=True)
        self._line = self._console.status("")

    def __enter__(self) -> Self:
        self._line.start()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._line.stop()
        self._directory.cleanup()
        if error is None and self._console.is_terminal:
            self._print()  # what was shown is wiped out

    def environment(self, replica_id: str) -> dict[str, str]:
        """What an engine's processes need to note their stages."""
        return {FILE_VARIABLE: str(self._files[replica_id])}

    def tell(self, what: str) -> None:
        is_new, self._told = what != self._told, what
        self._line.update(self._text())
        if is_new and not self._console.is_terminal:
            self._print()

    def tell_stages(self, ready: Collection[str]) -> None:
        """Tells how many engines are at which stage; those that are ready are given."""
        stages = Counter(
            "ready" if replica_id in ready else _last_line(file) or "starting"
            for replica_id, file in self._files.items()
        )
        engines = "1 engine" if len(self._files) == 1 else f"{len(self._files)} engines"
        self.tell(f"{engines}: {', '.join(f'{num} {stage}' for stage, num in stages.items())}")

    def _print(self) -> None:
        """Prints a line; once stderr takes none, the launch goes on without."""
        try:
            self._console.print(self._text())
        except (OSError, ValueError, SystemExit):  # full, closed, or a broken pipe, as rich has it
            self._console.quiet = True

    def _text(self) -> str:
        seconds = time.monotonic() - self._began
        return f"AsyncVLLM {self._service_name}: {self._told} ({seconds:.0f} s)"


def _last_line(file: Path) -> str:
    return file.read_text().rstrip("\n").rpartition("\n")[2] if file.exists() else ""
