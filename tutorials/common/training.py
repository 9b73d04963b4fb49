"""The trainer's half of GRPO: a model, TorchRL's loss on it, and optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torchrl.objectives.llm.grpo import GRPOLoss
from transformers import AutoModelForCausalLM

from torchrl_vllm_sync import TrainerPolicy

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable

    from tensordict import TensorDictBase


def on_device(device: torch.device, loss: GRPOLoss) -> Callable[[TensorDictBase], Any]:
    """Returns the loss of rows that are moved to a device; on GPUs it is computed in bfloat16."""
    loss = loss.to(device)

    def compute(rows: TensorDictBase) -> Any:
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            return loss(rows.to(device))

    return compute


class Learner:
    """A trainer's model, loss and optimizer, as ``01_grpo_sync.py`` has them.

    Attributes:
        model: In float32, on ``args.device``.
    """

    def __init__(self, args: argparse.Namespace, checkpoint: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.model = model.eval().to(args.device)
        loss = GRPOLoss(TrainerPolicy(self.model), entropy_coeff=0.0, masking_strategy="sft")
        self._loss = on_device(args.device, loss)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)

    def step(self, batches: Iterable[TensorDictBase], num_rows: int) -> float:
        """One optimizer step on several passes; returns the smallest effective sample size."""
        ess = []
        for batch in batches:
            loss = self._loss(batch)
            ess.append(float(loss.ESS))
            (loss.mean(reduce=True) * (len(batch) / num_rows)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return min(ess)
