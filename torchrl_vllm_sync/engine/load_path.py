"""How a push gets into a worker's model: by the load plan, or by vLLM's layerwise reload."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from torchrl_vllm_sync.engine.load_plan import PlanNotPossibleError, record_load_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.config import VllmConfig

    from torchrl_vllm_sync.engine.load_plan import BoundBucket, LoadPlan
    from torchrl_vllm_sync.weights.buckets import BucketLayout
    from torchrl_vllm_sync.weights.metadata import ParamMeta

__all__ = ["PlannedLoad", "choose_plan", "why_not_a_plan"]


class PlannedLoad:
    """A load plan, ready for both ways of receiving.

    Args:
        plan: The plan.

    Attributes:
        plan: As given.
        whole_targets: Where each tensor is received straight into; ``None`` if buckets are needed.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan
        self.whole_targets = plan.whole_targets()
        self._lacks_constants = True
        self._bound: list[BoundBucket] = []
        self._bound_to: tuple[int, ...] = ()

    def buckets(self, layout: BucketLayout, buffers: Sequence[torch.Tensor]) -> list[BoundBucket]:
        """Returns the copies out of each bucket; worked out once for the same buffers."""
        pointers = tuple(buffer.data_ptr() for buffer in buffers)
        if self._bound_to != pointers:
            self._bound, self._bound_to = self.plan.bind(layout, buffers), pointers
        return self._bound

    def fill_constants(self) -> None:
        """Sets what loaders set and no push holds, such as padding; does nothing the second time.

        A model that was launched with dummy weights has never had it.
        """
        if self._lacks_constants:
            self.plan.fill_constants()
            self._lacks_constants = False


def why_not_a_plan(vllm_config: VllmConfig) -> str:
    """Says what of an engine's configuration rules a load plan out; empty if nothing does.

    Each changes weights after ``load_weights``, or puts them elsewhere than it says.
    """
    config: Any = vllm_config
    reasons = {
        "vLLM's CPU backend repacks weights after loading": current_platform.is_cpu(),
        f"the model is quantised ({config.model_config.quantization})": (
            config.model_config.quantization is not None or config.quant_config is not None
        ),
        "LoRA wraps the model's layers": config.lora_config is not None,
        "expert-parallel load balancing moves experts": config.parallel_config.enable_eplb,
        "latent attention (MLA) derives weights after loading": config.model_config.use_mla,
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)


def choose_plan(
    model: torch.nn.Module, vllm_config: VllmConfig, metadata: Sequence[ParamMeta]
) -> tuple[PlannedLoad | None, str]:
    """Records a load plan for ``model``, or says why there is none.

    Args:
        model: The worker's model; nothing of it changes.
        vllm_config: Its configuration.
        metadata: Every tensor of a push.

    Returns:
        The plan and an empty reason, or ``None`` and the reason.
    """
    if reason := why_not_a_plan(vllm_config):
        return None, reason
    try:
        with set_current_vllm_config(vllm_config):
            return PlannedLoad(record_load_plan(model, metadata)), ""
    except PlanNotPossibleError as error:
        return None, str(error)
