"""HEAD: what a folder of stored weights holds, written before its data are touched and after."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.weights.storage import read_json, write_json

if TYPE_CHECKING:
    from pathlib import Path

HEAD = "HEAD"


@dataclass(frozen=True, slots=True)
class Head:
    """State of one folder.

    Attributes:
        run_id: Run of the writer.
        epoch: Epoch of the writer.
        version: Version that the folder holds, or is about to hold.
        digest: ``metadata_digest`` of the parameters that the data file is laid out for.
        complete: False from before the first byte of ``version`` until after the last.
    """

    run_id: str
    epoch: int
    version: int
    digest: str
    complete: bool

    def write(self, folder: Path, *, fsync: bool) -> None:
        """Replaces the folder's HEAD atomically."""
        write_json(folder / HEAD, asdict(self), fsync=fsync)

    @classmethod
    def read(cls, folder: Path) -> Head | None:
        """The folder's HEAD; None if it has none, or is gone.

        Raises:
            SnapshotError: HEAD is damaged.
        """
        try:
            record = read_json(folder / HEAD)
        except FileNotFoundError:
            return None
        try:
            return cls(
                str(record["run_id"]),
                int(record["epoch"]),
                int(record["version"]),
                str(record["digest"]),
                bool(record["complete"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"{folder / HEAD}: corrupted: {error!r}") from error
