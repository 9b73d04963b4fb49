"""What a step of a real engine costs: the simulation's cost model, fitted to measured steps."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.routing_sim.costs import EngineCosts

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CalibrationError", "Fit", "Limits", "Measurement", "fit", "prefill", "without_free"]

_TERMS = (
    "base_step_s",
    "per_sequence_s",
    "per_context_token_s",
    "prefill_tokens_per_s",
    "per_prefill_context_s2",
)

_ROUNDS = 50
# Errors below this share are as good as none.
_LEAST_ERROR = 0.01


class CalibrationError(ValueError):
    """The measurements do not say what a step costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one step took, or several steps together.

    Attributes:
        kind: What was done, such as ``"decode"``; residuals are told apart by it.
        seconds: Of all these steps.
        steps: How many.
        decoding: Requests that computed one token, summed over the steps.
        context: Tokens before each of these, summed.
        prefill_tokens: Prompt tokens computed.
        prefill_pairs: For each of these the tokens before it, summed.
    """

    kind: str
    seconds: float
    steps: int = 1
    decoding: float = 0.0
    context: float = 0.0
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0

    def amounts(self) -> tuple[float, ...]:
        """How much of each term of the model the steps have."""
        return (
            self.steps,
            self.decoding,
            self.context,
            self.prefill_tokens,
            self.prefill_pairs,
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine was launched with.

    Attributes:
        token_budget: vLLM's ``max_num_batched_tokens``.
        max_num_seqs: vLLM's.
        num_kv_blocks: KV-cache blocks.
        block_size: Tokens in a block.
    """

    token_budget: int
    max_num_seqs: int
    num_kv_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Fit:
    """The model and how well it describes what it was made from.

    Attributes:
        costs: The model.
        residuals: By kind of measurement: for each the model's seconds over the measured ones,
            minus 1, in the order of the measurements.
    """

    costs: EngineCosts
    residuals: dict[str, list[float]]

    @property
    def mean_error(self) -> float:
        """Mean of the residuals' absolute values, each kind with the same weight."""
        kinds = [float(np.mean(np.abs(one))) for one in self.residuals.values()]
        return sum(kinds) / len(kinds)


def prefill(kind: str, seconds: float, num_tokens: int, token_budget: int) -> Measurement:
    """A prompt that was computed alone, in chunks of the token budget."""
    return Measurement(
        kind=kind,
        seconds=seconds,
        steps=-(-num_tokens // token_budget),
        prefill_tokens=num_tokens,
        prefill_pairs=num_tokens * (num_tokens - 1) / 2,
    )


def without_free(measurements: Sequence[Measurement], free_tokens: int) -> list[Measurement]:
    """The same if the first ``free_tokens`` prompt tokens of each step cost nothing.

    A GPU that reads all weights in every step has time for some tokens beside. The cost model does
    not know that; fitted to these measurements it tells by its residuals how much it misses.
    """
    return [
        dataclasses.replace(
            one, prefill_tokens=max(one.prefill_tokens - free_tokens * one.steps, 0)
        )
        for one in measurements
    ]


def fit(measurements: Sequence[Measurement], limits: Limits, origin: str = "") -> Fit:
    """Fits the cost model with the least sum of absolute relative errors, no term below zero.

    Absolute errors, not squares: a step that something disturbed must not bend the model. Found by
    least squares again and again, each measurement weighted by its last error.

    There are five terms, so that the best solution without negative ones is found by trying each
    choice of terms; an empty step and a prompt token cost something in each. Each kind of
    measurement has the same weight.

    Args:
        measurements: Steps of several batch sizes, context lengths and prompt lengths.
        limits: What the engine was launched with.
        origin: Where the numbers are from.

    Raises:
        CalibrationError: There are too few measurements, or they leave the cost of an empty step
            or the rate of prompts undetermined.
    """
    if len(measurements) < len(_TERMS):
        raise CalibrationError(
            f"measurements must be at least {len(_TERMS)}, got {len(measurements)}"
        )
    seconds = np.array([one.seconds for one in measurements])
    if not (seconds > 0).all():
        raise CalibrationError(f"every measurement must take time, got {seconds.tolist()}")
    kinds = [one.kind for one in measurements]
    weight = np.array([kinds.count(kind) ** -0.5 for kind in kinds])
    rows = np.array([one.amounts() for one in measurements]) / seconds[:, None]
    terms, trust = np.zeros(len(_TERMS)), weight
    for _ in range(_ROUNDS):
        terms = _not_negative(rows * trust[:, None], trust, needed={0, 3})
        trust = weight / np.sqrt(np.maximum(np.abs(rows @ terms - 1), _LEAST_ERROR))
    residuals: dict[str, list[float]] = {}
    for kind, predicted in zip(kinds, rows @ terms, strict=True):
        residuals.setdefault(kind, []).append(float(predicted) - 1)
    costs = EngineCosts(
        base_step_s=float(terms[0]),
        per_sequence_s=float(terms[1]),
        per_context_token_s=float(terms[2]),
        prefill_tokens_per_s=1 / float(terms[3]),
        per_prefill_context_s2=float(terms[4]),
        token_budget=limits.token_budget,
        max_num_seqs=limits.max_num_seqs,
        num_kv_blocks=limits.num_kv_blocks,
        block_size=limits.block_size,
        origin=origin,
    )
    return Fit(costs, residuals)


def _not_negative(rows: np.ndarray, wanted: np.ndarray, needed: set[int]) -> np.ndarray:
    """Solves ``rows @ x = wanted`` by least squares with no term below 0, and ``needed`` above.

    Raises:
        CalibrationError: No choice of terms does.
    """
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = rows / scale
    best, least = None, np.inf
    for size in range(len(needed), rows.shape[1] + 1):
        for chosen in itertools.combinations(range(rows.shape[1]), size):
            if not needed <= set(chosen):
                continue
            some, *_ = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)
            error = float(np.sum((scaled[:, chosen] @ some - wanted) ** 2))
            if (some > 0).all() and error < least:
                least = error
                best = np.zeros(rows.shape[1])
                best[list(chosen)] = some
    if best is None:
        raise CalibrationError("the cost of a step or of a prompt token is left undetermined")
    return best / scale
