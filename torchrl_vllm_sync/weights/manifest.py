"""The manifest: the small file that names the current version, its place and its checksums."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import xxhash

from torchrl_vllm_sync.errors import SnapshotError
from torchrl_vllm_sync.weights.metadata import ParamMeta, from_json, metadata_digest, to_json
from torchrl_vllm_sync.weights.storage import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

CURRENT = "CURRENT"
_MAGIC = "torchrl_vllm_sync-manifest"
_FORMAT = 1
_HEADER_BYTES = 256


@dataclass(frozen=True)
class Manifest:
    """One published version.

    Attributes:
        run_id: Run that wrote it; versions are comparable only within one run.
        epoch: Writer's epoch; a higher one fences the lower ones.
        version: Policy version.
        layout: ``"slots"`` or ``"versions"``.
        path: Folder of the data, relative to the snapshot directory.
        num_bytes: Length of the data file.
        trailer_checksum: xxh3-64 of the data file's own description of itself.
        metadata: Every parameter in order.
        offsets: Where each parameter begins in the data file, in bytes.
        checksums: xxh3-64 of each parameter's bytes; None when the writer took none.
    """

    run_id: str
    epoch: int
    version: int
    layout: str
    path: str
    num_bytes: int
    trailer_checksum: int
    metadata: tuple[ParamMeta, ...]
    offsets: tuple[int, ...]
    checksums: tuple[int, ...] | None

    @cached_property
    def digest(self) -> str:
        """Digest of names, dtypes and shapes, as ``metadata_digest`` gives it."""
        return metadata_digest(self.metadata)

    def encode(self) -> bytes:
        """One header line with length and checksum of the JSON body, then the body."""
        record: dict[str, Any] = {
            "layout": self.layout,
            "path": self.path,
            "num_bytes": self.num_bytes,
            "trailer_checksum": self.trailer_checksum,
            "metadata": to_json(self.metadata),
            "offsets": self.offsets,
            "checksums": self.checksums,
        }
        body = json.dumps(record, separators=(",", ":")).encode()
        header = (
            f"{_MAGIC} {_FORMAT} {self.run_id} {self.epoch} {self.version} "
            f"{len(body)} {xxhash.xxh3_64_hexdigest(body)}\n"
        )
        return header.encode() + body


def write_manifest(directory: Path, manifest: Manifest, *, fsync: bool) -> None:
    """Makes ``manifest`` the current one, in one step."""
    write_atomically(directory / CURRENT, manifest.encode(), fsync=fsync)


class ManifestFile:
    """Reads ``CURRENT``, and parses it only when its header line has changed.

    The header holds the body's checksum, so that an equal header means an equal manifest; inode
    and mtime would not do, since both can repeat within one tick of the kernel's clock.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / CURRENT
        self._header: bytes | None = None
        self._manifest: Manifest | None = None

    def read(self) -> Manifest | None:
        """The current manifest; None when nothing has been published.

        Raises:
            SnapshotError: The file is truncated or corrupted.
        """
        try:
            with self.path.open("rb", buffering=0) as file:
                content = file.read(_HEADER_BYTES)
                header, newline, _ = content.partition(b"\n")
                if newline and header == self._header:
                    return self._manifest
                content += file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        manifest = decode(content, self.path)
        self._header, self._manifest = header, manifest
        return manifest


def decode(content: bytes, path: Path) -> Manifest:
    """Parses and checks a manifest.

    Raises:
        SnapshotError: Names ``path`` and what is wrong: header, format, length, checksum or fields.
    """
    header, newline, body = content.partition(b"\n")
    fields = header.decode(errors="replace").split(" ")
    if not newline or len(fields) != 7 or fields[0] != _MAGIC:
        raise SnapshotError(f"{path}: truncated or not a manifest: it begins {content[:40]!r}")
    if fields[1] != str(_FORMAT):
        raise SnapshotError(f"{path}: manifest format must be {_FORMAT}, got {fields[1]}")
    _, _, run_id, epoch, version, length, checksum = fields
    if length != str(len(body)):
        raise SnapshotError(f"{path}: truncated: {len(body)} of {length} bytes")
    if xxhash.xxh3_64_hexdigest(body) != checksum:
        raise SnapshotError(f"{path}: corrupted: checksum is not {checksum}")
    try:
        record = json.loads(body)
        checksums = record["checksums"]
        manifest = Manifest(
            run_id=run_id,
            epoch=int(epoch),
            version=int(version),
            layout=record["layout"],
            path=record["path"],
            num_bytes=record["num_bytes"],
            trailer_checksum=record["trailer_checksum"],
            metadata=tuple(from_json(record["metadata"])),
            offsets=tuple(record["offsets"]),
            checksums=None if checksums is None else tuple(checksums),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"{path}: corrupted: {error!r}") from error
    counts = {len(manifest.metadata), len(manifest.offsets), len(checksums or manifest.metadata)}
    if len(counts) != 1:
        raise SnapshotError(
            f"{path}: corrupted: parameters, offsets and checksums differ in number"
        )
    return manifest
