"""A worker on a CPU that keeps experts as they are loaded, which its kernels compute wrong with."""

from vllm.model_executor.layers.fused_moe.experts import cpu_moe

from tests.engine.plain_worker import PlainWorker

cpu_moe.cpu_prepack_moe_weight = lambda weight, _: weight  # this is a process of its own


class PlainExpertsWorker(PlainWorker):
    """Of nothing that is sampled."""
