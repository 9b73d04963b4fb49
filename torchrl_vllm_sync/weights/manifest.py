"""The manifest: the small file that names the current version, its place and its checksums."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import xxhash

from torchrl_vllm_sync.checks import shown
from torchrl_vllm_sync.errors import SnapshotError, WeightMismatchError
from torchrl_vllm_sync.weights.data_file import DataLayout
from torchrl_vllm_sync.weights.metadata import ParamMeta, from_json, metadata_digest, to_json
from torchrl_vllm_sync.weights.private_files import open_file, replace_file, require_length
from torchrl_vllm_sync.weights.storage import field

if TYPE_CHECKING:
    from pathlib import Path

CURRENT = "CURRENT"
_MAGIC = "torchrl_vllm_sync-manifest"
_FORMAT = 2
_HEADER_BYTES = 256
# Some 400,000 parameters.
_MAX_BYTES = 64 << 20
_NUMBER = re.compile("[0-9]{1,19}")
# What the stores call their folders, which lie directly in the snapshot directory.
_FOLDERS = {"slots": re.compile("slot-[0-9]+-[0-9]+"), "versions": re.compile("v[0-9]+")}


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
        """One header line with the length of the JSON body and a checksum of all, then the body."""
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
        head = f"{_MAGIC} {_FORMAT} {self.run_id} {self.epoch} {self.version} {len(body)}"
        return f"{head} {_checksum(head, body)}\n".encode() + body


def write_manifest(directory: Path, manifest: Manifest, *, fsync: bool) -> None:
    """Makes ``manifest`` the current one, in one step."""
    replace_file(directory / CURRENT, manifest.encode(), fsync=fsync)


class ManifestFile:
    """Reads ``CURRENT``, and parses it only when its header line has changed.

    The header holds a checksum of all, so that an equal header means an equal manifest; inode
    and mtime would not do, since both can repeat within one tick of the kernel's clock.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / CURRENT
        self._header: bytes | None = None
        self._manifest: Manifest | None = None

    def read(self) -> Manifest | None:
        """The current manifest; None when nothing has been published.

        Raises:
            OSError: The file cannot be read.
            SnapshotError: The file is truncated or corrupted, or others can have written it.
        """
        try:
            handle = open_file(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        with os.fdopen(handle, "rb", buffering=0) as file:
            content = file.read(_HEADER_BYTES)
            header, newline, _ = content.partition(b"\n")
            if newline and header == self._header:
                return self._manifest
            require_length(handle, self.path, _MAX_BYTES)
            content += file.read()
        manifest = decode(content, self.path, self._manifest)
        self._header, self._manifest = header, manifest
        return manifest


def decode(content: bytes, path: Path, known: Manifest | None = None) -> Manifest:
    """Parses and checks a manifest.

    Args:
        content: All of the file.
        path: The file, for messages.
        known: One that was checked before; if it describes the same tensors, this spares a second
            look at their layout.

    Raises:
        SnapshotError: Names ``path`` and what is wrong: header, format, length, checksum, fields,
            or a layout that no writer makes.
    """
    header, newline, body = content.partition(b"\n")
    head, _, checksum = header.decode(errors="replace").rpartition(" ")
    fields = head.split(" ")
    if not newline or len(fields) != 6 or fields[0] != _MAGIC:
        raise SnapshotError(f"{path}: truncated or not a manifest: it begins {content[:40]!r}")
    _, number, run_id, epoch, version, length = fields
    if number != str(_FORMAT):
        raise SnapshotError(f"{path}: manifest format must be {_FORMAT}, got {shown(number)}")
    if length != str(len(body)):
        raise SnapshotError(f"{path}: truncated: {len(body)} of {shown(length)} bytes")
    if _checksum(head, body) != checksum:
        raise SnapshotError(f"{path}: corrupted: checksum is not {shown(checksum)}")
    if not _is_int64(epoch) or not _is_int64(version):
        raise SnapshotError(f"{path}: corrupted: epoch {shown(epoch)}, version {shown(version)}")
    try:
        record = json.loads(body)
        metadata = tuple(from_json(_list(record, "metadata", path)))
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{path}: corrupted: {error}") from error
    layout, folder = field(record, "layout", str, path), field(record, "path", str, path)
    if layout not in _FOLDERS or not _FOLDERS[layout].fullmatch(folder):
        raise SnapshotError(
            f"{path}: corrupted: {shown(folder)} is no folder of layout {shown(layout)}"
        )
    manifest = Manifest(
        run_id=run_id,
        epoch=int(epoch),
        version=int(version),
        layout=layout,
        path=folder,
        num_bytes=field(record, "num_bytes", int, path),
        trailer_checksum=_unsigned(record.get("trailer_checksum"), path),
        metadata=metadata,
        offsets=tuple(_list(record, "offsets", path)),
        checksums=_checksums(record, path),
    )
    if manifest.checksums is not None and len(manifest.checksums) != len(metadata):
        raise SnapshotError(f"{path}: corrupted: parameters and checksums differ in number")
    _check_layout(manifest, path, known)
    return manifest


def _check_layout(manifest: Manifest, path: Path, known: Manifest | None) -> None:
    """Refuses any place and description of the tensors but the one that a writer gives them."""
    if known is not None and known.metadata == manifest.metadata:
        layout: DataLayout | Manifest = known
    else:
        try:
            layout = DataLayout.of(manifest.metadata)
        except WeightMismatchError as error:
            raise SnapshotError(f"{path}: corrupted: {error}") from error
    for name in ("num_bytes", "offsets", "trailer_checksum"):
        if getattr(manifest, name) != getattr(layout, name):
            raise SnapshotError(f"{path}: corrupted: {name} do not belong to these parameters")


def _is_int64(number: str) -> bool:
    return _NUMBER.fullmatch(number) is not None and int(number) < 1 << 63


def _list(record: object, name: str, path: Path) -> list[Any]:
    value = record.get(name) if isinstance(record, dict) else None
    if not isinstance(value, list):
        raise SnapshotError(f"{path}: corrupted: {name} must be a list, got {shown(value)}")
    return value


def _checksums(record: dict[str, Any], path: Path) -> tuple[int, ...] | None:
    if record.get("checksums", ()) is None:
        return None
    return tuple(_unsigned(one, path) for one in _list(record, "checksums", path))


def _unsigned(value: object, path: Path) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise SnapshotError(f"{path}: corrupted: {shown(value)} is no checksum")
    return value


def _checksum(head: str, body: bytes) -> str:
    state = xxhash.xxh3_64(head.encode())
    state.update(b"\n")
    state.update(body)
    return state.hexdigest()
