"""A trainer in a process of its own: attaches to a service by name and pushes what it is told.

Commands and answers are lines of JSON, on standard input and output. A version's weights depend on
its number alone, so that whoever knows the number knows the weights.
"""

import json
import sys
import time

from tests.chaos.cells import UNPAUSED
from tests.engine.checks import perturbed
from tests.engine.faults import hold
from tests.engine.trainers import broadcast
from torchrl_vllm_sync import MemmapTransport, P2PTransport
from torchrl_vllm_sync.testing import load_tiny_model
from torchrl_vllm_sync.weights.source import MappingSource


def model_of(version, checkpoint):
    """The model of one version; 0 is what the engines were launched with."""
    model = load_tiny_model(checkpoint)
    return perturbed(model, seed=version) if version else model


class HeldTensors(MappingSource):
    """Weights whose reader is held up before tensor ``at``, or at the ``"end"``."""

    def __init__(self, tensors, at, path):
        super().__init__(tensors)
        self._at, self._path = at, path

    def views(self):
        return None

    def __iter__(self):
        for index, item in enumerate(super().__iter__()):
            self._reached(index)
            yield item
        self._reached("end")

    def _reached(self, point):
        if point == self._at:
            self._at = None
            hold(self._path)


class Trainer:
    """Pushes on command."""

    def __init__(self, checkpoint, directory):
        self._checkpoint, self._directory = checkpoint, directory
        self._service = None
        self._transports = {}

    def attach(self, name):
        from torchrl_vllm_sync import attach

        self._service = attach(name)
        return {"weight_version": self._service.weight_version}

    def push(self, version, transport, timeout_s, at=None, path=""):
        from torchrl_vllm_sync.errors import SyncError

        model = model_of(version, self._checkpoint)
        weights = model if at is None else HeldTensors(model.state_dict(), at, path)
        begin = time.monotonic()
        try:
            report = self._service.push_weights(
                weights,
                version=version,
                transport=self._transport(transport),
                timeout_s=timeout_s,
                clear_cache=transport not in UNPAUSED,
                strict=False,
            )
        except SyncError as error:
            outcome = {"error": f"{type(error).__name__}: {error}"}
        else:
            outcome = {
                "version": report.version,
                "holders": [one.replica_id for one in report.replicas if not one.error],
                "paused": [one.replica_id for one in report.replicas if one.pause_s],
                "left_behind": report.left_behind,
            }
        return {**outcome, "seconds": time.monotonic() - begin}

    def _transport(self, name):
        """One of each kind for all pushes; a predecessor's directory is taken over."""
        if name not in self._transports:
            makers = {
                "broadcast": lambda: broadcast(),
                "memmap": lambda: MemmapTransport(self._directory, takeover=True),
                "p2p": P2PTransport,
                "swapped": lambda: broadcast(),
            }
            self._transports[name] = makers[name]()
        return self._transports[name]


def main(checkpoint, directory):
    out, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not mix with answers
    trainer = Trainer(checkpoint, directory)

    def say(answer):
        out.write(json.dumps(answer) + "\n")
        out.flush()

    say({"ready": True})
    for line in sys.stdin:
        command = json.loads(line)
        say(getattr(trainer, command.pop("do"))(**command))


if __name__ == "__main__":
    main(*sys.argv[1:])
