"""The marker: the file that makes a directory ours, and says whose run it belongs to."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from torchrl_vllm_sync.checks import shown
from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.weights.lease import READERS
from torchrl_vllm_sync.weights.private_files import TEMPORARY_PREFIX, list_folder
from torchrl_vllm_sync.weights.storage import field, read_json, write_json
from torchrl_vllm_sync.weights.writer_lock import COMMIT, EPOCH, LOCK

if TYPE_CHECKING:
    from pathlib import Path

LayoutName = Literal["slots", "versions"]
LAYOUTS = ("slots", "versions")
MARKER = "SNAPSHOTS.json"
# An empty file in a directory that nobody named: it is to go with the process that made it.
TEMPORARY = "TEMPORARY"
_MARKER_FORMAT = 1
# What a writer may have made before it died and before the marker was there.
_BEFORE_MARKER = frozenset({LOCK, COMMIT, EPOCH, READERS, TEMPORARY})


@dataclass(frozen=True, slots=True)
class Marker:
    """What a snapshot directory says of itself.

    Attributes:
        run_id: The training run; versions are comparable only within one.
        layout: ``"slots"`` or ``"versions"``.
        format: Number of the on-disk format.
    """

    run_id: str
    layout: str
    format: int = _MARKER_FORMAT

    @classmethod
    def read(cls, directory: Path) -> Marker | None:
        """The directory's marker; None if it is new: absent, empty, or barely begun.

        Raises:
            SnapshotError: The directory holds something else, or another format, or others can
                write into it.
            OSError: The directory cannot be read, for instance because it is a file.
        """
        path = directory / MARKER
        try:
            record = read_json(path)
        except FileNotFoundError:
            try:
                names = list_folder(directory)
            except FileNotFoundError:
                return None
            foreign = [
                name
                for name in names
                if name not in _BEFORE_MARKER and not name.startswith(TEMPORARY_PREFIX)
            ]
            if foreign and MARKER not in foreign:
                raise SnapshotError(
                    f"{directory}: holds other files ({', '.join(foreign[:5])}) and no {MARKER}; "
                    "name a new or empty directory"
                ) from None
            return None
        found = field(record, "format", int, path)
        if found != _MARKER_FORMAT:
            raise SnapshotError(f"{path}: format must be {_MARKER_FORMAT}, got {found}")
        layout = field(record, "layout", str, path)
        if layout not in LAYOUTS:
            raise SnapshotError(f"{path}: corrupted: there is no layout {shown(layout)}")
        return cls(field(record, "run_id", str, path), layout)

    def write(self, directory: Path, *, fsync: bool) -> None:
        """Makes ``directory`` ours."""
        write_json(directory / MARKER, asdict(self), fsync=fsync)


def new_run_id() -> str:
    """A run id that no other run has."""
    return uuid.uuid4().hex
