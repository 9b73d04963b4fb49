"""Trainers that broadcast: in this process, and in others that tests can kill."""

import os
import time

import ray

from tests.engine.checks import perturbed
from torchrl_vllm_sync import BroadcastTransport, MemmapTransport, attach
from torchrl_vllm_sync.errors import PushUnderWayError
from torchrl_vllm_sync.testing import load_tiny_model
from torchrl_vllm_sync.weights.source import MappingSource

# So small that a push of the tiny models is some fifty buckets, and wide tensors take several.
BUCKET_BYTES = 2**14


def broadcast(**options):
    return BroadcastTransport(**{"bucket_bytes": BUCKET_BYTES, "join_timeout_s": 30, **options})


class Breaking(MappingSource):
    """A source that raises in the middle."""

    def __init__(self, weights, error, at=20):
        super().__init__(weights)
        self._error, self._at = error, at

    def views(self):
        return None

    def __iter__(self):
        for index, item in enumerate(super().__iter__()):
            if index == self._at:
                raise self._error
            yield item


@ray.remote(num_cpus=0, max_concurrency=2)
class Rival:
    """A trainer in a process of its own that pushes whenever no other does."""

    def __init__(self, service_name, checkpoint, transport):
        self._checkpoint, self._service = checkpoint, attach(service_name)
        self._refusals = []
        self._service.use_transport(
            {"broadcast": broadcast, "memmap": MemmapTransport}[transport]()
        )

    def pid(self):
        return os.getpid()

    def push_all(self, seeds):
        """Pushes a model for each seed, again and again when it is refused.

        Returns the version of each seed, and of each refusal the seconds it took and the pid it
        named.
        """
        versions = {}
        for seed in seeds:
            model = perturbed(load_tiny_model(self._checkpoint), seed=seed)
            while seed not in versions:
                begin = time.monotonic()
                try:
                    versions[seed] = self._service.push_weights(model).version
                except PushUnderWayError as error:
                    self._refusals.append((time.monotonic() - begin, error.pid))
                    time.sleep(0.02)
        return versions, self._refusals

    def num_refused(self):
        """How often it was refused so far; other calls may be under way."""
        return len(self._refusals)


@ray.remote(num_cpus=0)
class Trainer:
    """A trainer in a process of its own."""

    def __init__(self, service, checkpoint, memmap=False, transport=None, **options):
        self._model = load_tiny_model(checkpoint)
        self._service = service
        usual = MemmapTransport() if memmap else broadcast(**options)
        self._service.use_transport(transport or usual)

    def pid(self):
        return os.getpid()

    def push(self, seed, **options):
        return self._service.push_weights(perturbed(self._model, seed=seed), **options).version

    def push_to_some(self, seed):
        """Returns the reason of each replica that was left behind."""
        return self._service.push_weights(perturbed(self._model, seed=seed)).left_behind

    def sleep(self):
        self._service.sleep(2, "keep")
