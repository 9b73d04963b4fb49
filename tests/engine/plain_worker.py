"""A worker on a CPU that computes with its parameters as they are, as one on a GPU does."""

import pickle

import vllm._custom_ops as ops
from vllm.config import VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler

from tests.engine.faults import FaultyWorker

ops._supports_onednn = False  # whose packed copies nobody can read; this is a process of its own


class PlainWorker(FaultyWorker):
    """``packs``: it says what other workers on a CPU say. ``damages``: what it takes is altered."""

    packs, damages = False, False

    def sync_peer_fault(self, **faults):
        vars(self).update(faults)
        ops._supports_onednn = self.packs

    def sync_change(self, name, how, rank=None):
        """Alters one of the model's tensors in place, as a pickled function does."""
        model = self._sync_model()
        named = (*model.named_buffers(), *model.named_parameters())
        tensors = {name: one.data for name, one in named}
        if rank in (None, self._sync_receiver().rank_in_replica):
            pickle.loads(how)(tensors[name], tensors)

    def sync_peer_take(self, index, sources):
        answer = super().sync_peer_take(index, sources)
        if self.damages:
            next(iter(self._sync_model().parameters())).view(-1)[0] += 1
        return answer


class QueueingScheduler(Scheduler):
    """One of an engine core that has given out a second step before it sees the first one's tokens.

    As with asynchronous scheduling, which vLLM turns off on CPUs. Steps are so small that a few
    requests make two of them.
    """

    def __init__(self, *args, **kwargs):
        VllmConfig.max_concurrent_batches = property(lambda _: 2)  # in the process of a core
        super().__init__(*args, **kwargs)
        self.max_num_scheduled_tokens = 8
