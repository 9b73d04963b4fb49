"""The trainer's half of GRPO: a model, TorchRL's loss on it, and optimizer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torchrl.objectives.llm.grpo import GRPOLoss
from transformers import AutoModelForCausalLM

from torchrl_vllm_sync import TrainerPolicy

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from tensordict import TensorDictBase


class Learner:
    """A model in evaluation mode, since dropout would make it another one than the engines'.

    Attributes:
        model: In float32, on ``args.device``.
    """

    def __init__(self, args: argparse.Namespace, checkpoint: str) -> None:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self.model = model.eval().to(args.device)
        policy = TrainerPolicy(self.model)  # computes answers' log-probabilities and no others
        self._loss = GRPOLoss(policy, entropy_coeff=0.0, masking_strategy="sft", device=args.device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self._device = args.device

    def loss(self, batch: TensorDictBase) -> Any:
        """TorchRL's GRPO loss of some rows, which also has their effective sample size."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self._device.type == "cuda"):
            return self._loss(batch.to(self._device))

    def step(self, batches: Iterable[TensorDictBase], num_rows: int) -> float:
        """One optimizer step on several passes; returns the smallest effective sample size."""
        ess = []
        for batch in batches:
            loss = self.loss(batch)
            ess.append(float(loss.ESS))
            (loss.mean(reduce=True) * (len(batch) / num_rows)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return min(ess)
