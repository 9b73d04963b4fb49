"""Snapshots through a file system beside what the memory and the file system can do at best.

Systems take turns. Sources and destinations are memory that exists already, and so are the files
that are written again; those of a first publish and of what is written anew are new each time. On
a disk every write ends with ``fsync``.

``python -m benchmarks.memmap`` takes minutes, ``--smoke`` seconds; ``--place`` names directories.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.record import Recorder, parser_of, take_turns
from torchrl_vllm_sync import ParamMeta, SnapshotReader, SnapshotWriter
from torchrl_vllm_sync.weights.snapshots.files import file_system_type, is_memory_file_system

if TYPE_CHECKING:
    from collections.abc import Callable
    from io import FileIO

NUM_TENSORS = 300
Pairs = list[tuple[str, torch.Tensor]]


def model(num_bytes: int) -> Pairs:
    """300 bfloat16 tensors: an embedding with a tenth of the bytes, and layers of unequal ones."""
    generator = torch.Generator().manual_seed(0)
    sizes = [num_bytes // 20] + [
        num_bytes * 9 // 20 // (NUM_TENSORS - 1) * (1 + i % 3) // 2 for i in range(NUM_TENSORS - 1)
    ]
    values = [torch.randint(-9, 9, (size,), generator=generator) for size in sizes]
    return [
        (f"model.layers.{i}.mlp.weight", value.to(torch.bfloat16)) for i, value in enumerate(values)
    ]


def copy_all(source: Pairs, destination: Pairs) -> None:
    """Copies every tensor's bytes into the one of the same place."""
    for (_, from_), (_, to) in zip(source, destination, strict=True):
        np.copyto(to.view(torch.uint8).numpy(), from_.view(torch.uint8).numpy())


def write_all(source: Pairs, file: FileIO) -> None:
    """Writes every tensor's bytes, one behind the other."""
    for _, tensor in source:
        content = memoryview(tensor.view(torch.uint8).numpy())
        while content:
            content = content[file.write(content) :]


class Case:
    """One place and size: the systems that run there, and their samples."""

    def __init__(self, place: Path, num_bytes: int, repetitions: int) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="benchmark-memmap-", dir=place))
        self.fsync = not is_memory_file_system(self.root)
        self.repetitions = repetitions
        self.source = model(num_bytes)
        self.metadata = [ParamMeta.of(name, tensor) for name, tensor in self.source]
        self.num_bytes = sum(tensor.nbytes for _, tensor in self.source)
        self.destination = [(name, torch.zeros_like(tensor)) for name, tensor in self.source]
        self.name = f"{file_system_type(self.root)}, {self.num_bytes / 2**20:,.0f} MiB"
        self.samples: dict[tuple[str, str], list[float]] = {}

    def measure(
        self,
        systems: dict[tuple[str, str], Callable[[], object]],
        between: Callable[[], object] = lambda: None,
    ) -> None:
        """Runs all systems in turn."""
        for key, seconds in take_turns(systems, self.repetitions, between=between).items():
            self.samples[key] = [self.num_bytes / one / 1e9 for one in seconds]

    def flush(self, path: Path) -> None:
        """``fsync`` where it protects something."""
        if self.fsync:
            with path.open("rb") as file:
                os.fsync(file.fileno())

    def publish(self, writer: SnapshotWriter) -> None:
        """Publishes the next version."""
        writer.publish(self.source, self.metadata, (writer.last_version or 0) + 1)

    def apply(self, reader: SnapshotReader) -> None:
        """Copies the newest version."""
        with reader.read() as snapshot:
            assert snapshot is not None
            copy_all(list(snapshot.tensors()), self.destination)

    def slots(self) -> None:
        """Publishing and applying with reused slots, beside memcpy and a plain rewrite."""
        path = self.root / "plain"
        plain = torch.from_file(
            str(path), shared=True, size=self.num_bytes // 2, dtype=torch.bfloat16
        )
        sizes = [tensor.numel() for _, tensor in self.source]
        parts = [("", part) for part in plain.split(sizes)]
        writer = SnapshotWriter(self.root / "slots")
        reader = SnapshotReader(self.root / "slots")
        trusting = SnapshotReader(self.root / "slots", verify=False)
        for _ in range(3):
            self.publish(writer)

        def rewrite() -> None:
            copy_all(self.source, parts)
            self.flush(path)

        def rewrite_by_pwrite() -> None:
            with path.open("r+b", buffering=0) as file:
                write_all(self.source, file)
            self.flush(path)

        self.measure(
            {
                ("memcpy", "copy"): lambda: copy_all(self.source, self.destination),
                ("plain file through a mapping", "rewrite"): rewrite,
                ("plain file by write()", "rewrite"): rewrite_by_pwrite,
                ("slots", "publish"): lambda: self.publish(writer),
                ("plain file through a mapping", "read-copy"): lambda: copy_all(
                    parts, self.destination
                ),
                ("slots, checksums verified", "apply"): lambda: self.apply(reader),
                ("slots, not verified", "apply"): lambda: self.apply(trusting),
            }
        )
        writer.close(remove=True)
        path.unlink()

    def new_slots(self) -> None:
        """Publishing into a slot that is made for it, as the first ones of a run are."""
        path, directory = self.root / "plain", self.root / "new-slots"

        def write() -> None:
            with path.open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, self.num_bytes)
                pages = mmap.mmap(
                    file.fileno(), self.num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE
                )
            mapped = torch.frombuffer(pages, dtype=torch.bfloat16)
            parts = mapped.split([tensor.numel() for _, tensor in self.source])
            copy_all(self.source, [("", part) for part in parts])
            self.flush(path)

        def write_by_pwrite() -> None:
            with path.open("wb", buffering=0) as file:
                write_all(self.source, file)
            self.flush(path)

        def publish() -> None:
            with SnapshotWriter(directory) as writer:
                self.publish(writer)

        def remove() -> None:
            path.unlink(missing_ok=True)
            shutil.rmtree(directory, ignore_errors=True)

        self.measure(
            {
                ("plain file through a mapping", "write anew"): write,
                ("plain file by write()", "write anew"): write_by_pwrite,
                ("slots", "first publish"): publish,
            },
            between=remove,
        )
        remove()


def main(argv: list[str] | None = None) -> Path:
    parser = parser_of(__doc__, "8 MiB, in seconds")
    parser.add_argument("--mib", type=int, default=1024, help="size of the weights")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--place", type=Path, action="append", help="directory; can be repeated")
    arguments = parser.parse_args(argv)
    places = arguments.place or [Path("/dev/shm"), Path.cwd()]
    recorder = Recorder("memmap")
    for place in places:
        case = Case(
            place,
            (8 if arguments.smoke else arguments.mib) << 20,
            2 if arguments.smoke else arguments.repetitions,
        )
        try:
            for group in (case.slots, case.new_slots):
                group()
        finally:
            shutil.rmtree(case.root)
        for (system, metric), samples in case.samples.items():
            recorder.add(case=case.name, system=system, metric=metric, unit="GB/s", samples=samples)
    return recorder.write(smoke=arguments.smoke, directory=arguments.out)


if __name__ == "__main__":
    main(sys.argv[1:])
