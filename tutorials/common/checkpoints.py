"""Checkpoints with random weights, in the shapes of published models: nothing is downloaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the installed package

from benchmarks.shapes import SHAPES, save_shape  # noqa: E402


def make_checkpoint(
    shape: str, directory: Path, *, seed: int, dtype: torch.dtype, device: torch.device
) -> Path:
    """Writes a random model, of which no two seeds agree, with a small tokenizer."""
    target = save_shape(shape, directory / f"seed-{seed}", dtype=str(dtype).removeprefix("torch."))
    config: Any = AutoConfig.from_pretrained(target)
    torch.manual_seed(seed)
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval().save_pretrained(target)
    return target


def load_trainer(checkpoint: str | Path, *, dtype: torch.dtype, device: torch.device) -> Any:
    """Loads a checkpoint as a trainer would hold it."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device).eval()


MOE_SHAPES = sorted(name for name, one in SHAPES.items() if one["model_type"].endswith("_moe"))
