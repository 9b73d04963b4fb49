"""Trainers that broadcast: in this process, and in others that tests can kill."""

import os

import ray

from tests.engine.checks import perturbed
from torchrl_vllm_sync.testing import load_tiny_model
from torchrl_vllm_sync.weights.broadcast_transport import BroadcastTransport
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


@ray.remote(num_cpus=0)
class Trainer:
    """A trainer in a process of its own."""

    def __init__(self, service, checkpoint, **options):
        self._model = load_tiny_model(checkpoint)
        self._service = service
        self._service.use_transport(broadcast(**options))

    def pid(self):
        return os.getpid()

    def push(self, seed, **options):
        return self._service.push_weights(perturbed(self._model, seed=seed), **options).version
