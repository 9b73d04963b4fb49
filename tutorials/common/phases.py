"""A push's times, as the tutorials print and record them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchrl_vllm_sync import PushReport


def milliseconds(report: PushReport) -> dict[str, float]:
    """A push's phases on the trainer's side and the first engine's, and the whole."""
    engine = {f"engine: {name}": one for name, one in report.replicas[0].phases.items()}
    seconds = {name: one for name, one in (report.phases | engine).items() if name.endswith("_s")}
    return {
        name.removesuffix("_s"): 1e3 * one
        for name, one in (seconds | {"push_s": report.seconds}).items()
    }
