"""How a push gets into a worker's model: by the load plan, or by vLLM's layerwise reload."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from torchrl_vllm_sync.engine.load_plan import LoadPlan, PlanNotPossibleError, record_load_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from vllm.config import VllmConfig

    from torchrl_vllm_sync.engine.load_plan import BoundBucket
    from torchrl_vllm_sync.engine.staging import StagingArea
    from torchrl_vllm_sync.weights.buckets import BucketLayout

__all__ = ["LoadPath", "choose_path", "why_not_a_plan"]


@dataclass(frozen=True, slots=True)
class LoadPath:
    """One worker's way for all coming pushes.

    Attributes:
        plan: The load plan; ``None`` where pushes take the layerwise reload.
        reason: Why there is no plan; empty when there is one.
        buckets: The plan's copies out of each bucket into the parameters.
        staged_buckets: The same into spare memory; empty when there is none.
    """

    plan: LoadPlan | None = None
    reason: str = ""
    buckets: list[BoundBucket] = field(default_factory=list)
    staged_buckets: list[BoundBucket] = field(default_factory=list)

    @classmethod
    def undecided(cls) -> LoadPath:
        """Before the first push."""
        return cls(reason="no push was prepared yet")

    @classmethod
    def layerwise(cls, reason: str) -> LoadPath:
        """VLLM's layerwise reload, and why."""
        return cls(reason=reason)

    @property
    def name(self) -> str:
        """``"plan"`` or ``"layerwise"``, as reports have it."""
        return "layerwise" if self.plan is None else "plan"

    @property
    def num_copies(self) -> int:
        """Copies of one push, after merging neighbours; 0 without a plan."""
        return sum(bucket.num_copies for bucket in self.buckets)


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


def choose_path(
    model: torch.nn.Module,
    vllm_config: VllmConfig,
    layout: BucketLayout,
    buffers: Sequence[torch.Tensor],
    staging: StagingArea | None,
) -> LoadPath:
    """Records a load plan for ``model``, or says why it cannot be had.

    Args:
        model: The worker's model; nothing of it changes.
        vllm_config: Its configuration.
        layout: The buckets of a push.
        buffers: What they are received into.
        staging: Spare memory; ``None`` if the engine has none.
    """
    if reason := why_not_a_plan(vllm_config):
        return LoadPath.layerwise(reason)
    try:
        with set_current_vllm_config(vllm_config):
            plan = record_load_plan(model, layout.metadata)
        buckets = plan.bind(layout, buffers)
        staged = [] if staging is None else staging.stand_in(plan).bind(layout, buffers)
    except PlanNotPossibleError as error:
        return LoadPath.layerwise(str(error))
    return LoadPath(plan, "", buckets, staged)
