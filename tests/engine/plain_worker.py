"""A worker on a CPU that computes with its parameters as they are, as one on a GPU does."""

from unittest import mock

import vllm._custom_ops as ops

from tests.engine.faults import FaultyWorker

ops._supports_onednn = False  # whose packed copies nobody can read; this is a process of its own


class PlainWorker(FaultyWorker):
    """``packs``: it says what other workers on a CPU say. ``damages``: what it takes is altered."""

    packs, damages = False, False

    def sync_peer_fault(self, **faults):
        vars(self).update(faults)

    def _sync_uncopyable(self, gives):
        with mock.patch.object(ops, "_supports_onednn", self.packs):
            return super()._sync_uncopyable(gives)

    def sync_peer_take(self, index, sources):
        answer = super().sync_peer_take(index, sources)
        if self.damages:
            next(iter(self._sync_model().parameters())).view(-1)[0] += 1
        return answer
