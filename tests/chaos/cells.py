"""The cells of the kill matrix: who is hit, by what, at which point of a push, by which way."""

import itertools
from dataclasses import dataclass

SIGNALS = ("kill", "stop")
VICTIMS = ("actor", "core", "worker", "trainer")
PHASES = (
    "idle",
    "generating",
    "before-start",
    "mid-bucket",
    "last-bucket",
    "apply",
    "commit",
    "resume",
)


@dataclass(frozen=True, slots=True)
class Engines:
    """What a cell needs of engines.

    Attributes:
        worker: Their workers' class.
        transport: What brings them up to date before the first cell.
        stage_weights: Whether they have spare memory.
    """

    worker: str
    transport: str
    stage_weights: bool = False


# They reload, in whose middle they can be hit.
RELOADING = Engines("tests.engine.faults.FaultyWorker", "memmap")
# They compute with their parameters as they are, in which they are written to.
WRITABLE = Engines("tests.engine.plain_worker.PlainWorker", "p2p", stage_weights=True)
PLAIN = Engines("tests.engine.plain_worker.PlainWorker", "swapped")
# What is "swapped" is broadcast, and received between two steps of an engine that is not paused.
ENGINES = {"broadcast": RELOADING, "memmap": RELOADING, "p2p": WRITABLE, "swapped": PLAIN}
TRANSPORTS = tuple(ENGINES)
# While these push, engines step on, and requests keep their keys.
UNPAUSED = ("p2p", "swapped")


@dataclass(frozen=True, slots=True)
class Point:
    """Where a push is held up when its victim is hit.

    Attributes:
        where: ``trainer``, ``actor`` or ``worker``: whose code waits there.
        at: The point, as ``HeldTensors``, ``HeldActor.hold_at`` or ``FaultyWorker`` names it.
    """

    where: str
    at: int | str


# Of the 50 tensors of the model.
MIDDLE = 20

# What the phases mean. A broadcast is received straight into the model: its last bucket and its
# first copy into place lie in one load. A stored version is written, checked, and then loaded. What
# is written into spare memory is swapped in, while the engine steps: nothing is ever half in place.
# What is "swapped" otherwise is, between two steps.
POINTS = {
    # The replicas were asked, and nothing has begun.
    ("broadcast", "before-start"): Point("actor", "asked"),
    ("memmap", "before-start"): Point("actor", "asked"),
    ("p2p", "before-start"): Point("actor", "asked"),
    ("swapped", "before-start"): Point("actor", "asked"),
    # Some tensors are on the other side, or in the file, and some are not.
    ("broadcast", "mid-bucket"): Point("worker", MIDDLE),
    ("memmap", "mid-bucket"): Point("trainer", MIDDLE),
    ("p2p", "mid-bucket"): Point("trainer", MIDDLE),
    ("swapped", "mid-bucket"): Point("worker", MIDDLE),
    # All of them are, and nobody has said so.
    ("broadcast", "last-bucket"): Point("worker", "end"),
    ("memmap", "last-bucket"): Point("actor", "apply"),
    ("p2p", "last-bucket"): Point("worker", "ready"),
    ("swapped", "last-bucket"): Point("worker", "end"),
    # The model holds a mixture; or the next weights, and the worker has not said so.
    ("broadcast", "apply"): Point("worker", "repack"),
    ("memmap", "apply"): Point("worker", MIDDLE),
    ("p2p", "apply"): Point("worker", "end"),
    ("swapped", "apply"): Point("worker", "received"),
    # The weights are in, and the engine does not know of which version they are.
    ("broadcast", "commit"): Point("actor", "label"),
    ("memmap", "commit"): Point("actor", "label"),
    ("p2p", "commit"): Point("actor", "label"),
    ("swapped", "commit"): Point("actor", "label"),
    # It does, and is still paused, or lets no request enter.
    ("broadcast", "resume"): Point("actor", "resume"),
    ("memmap", "resume"): Point("actor", "resume"),
    ("p2p", "resume"): Point("actor", "resume"),
    ("swapped", "resume"): Point("actor", "resume"),
}
# A trainer is hit in its own code where that is at work: here all is written, and not announced.
TRAINER_POINTS = {
    ("memmap", "last-bucket"): Point("trainer", "end"),
    ("p2p", "last-bucket"): Point("trainer", "end"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the matrix."""

    signal: str
    victim: str
    phase: str
    transport: str

    def __str__(self) -> str:
        return f"{self.signal}-{self.victim}-{self.phase}-{self.transport}"

    @classmethod
    def named(cls, name: str) -> "Cell":
        """The cell that prints as ``name``."""
        signal, victim, rest = name.split("-", 2)
        phase, _, transport = rest.rpartition("-")
        return cls(signal, victim, phase, transport)

    @property
    def is_during_push(self) -> bool:
        return self.phase not in ("idle", "generating")

    @property
    def engines(self) -> Engines:
        return ENGINES[self.transport]

    @property
    def point(self) -> Point:
        key = self.transport, self.phase
        own = TRAINER_POINTS if self.victim == "trainer" else {}
        return own.get(key, POINTS[key])


def all_cells() -> list[Cell]:
    """Every cell; none is left out, as workers are processes of their own."""
    return list(itertools.starmap(Cell, itertools.product(SIGNALS, VICTIMS, PHASES, TRANSPORTS)))
