"""HEAD: what a folder of stored weights holds, written before its data are touched and after."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from torchrl_vllm_sync.weights.storage import field, read_json, write_json

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
            OSError: HEAD cannot be read.
            SnapshotError: HEAD is damaged, or others can have written it.
        """
        path = folder / HEAD
        try:
            record = read_json(path)
        except FileNotFoundError:
            return None
        return cls(
            field(record, "run_id", str, path),
            field(record, "epoch", int, path),
            field(record, "version", int, path),
            field(record, "digest", str, path),
            field(record, "complete", bool, path),
        )
