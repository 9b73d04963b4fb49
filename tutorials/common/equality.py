"""Compares tokens with what they should be, tells the first difference, and records the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import common.checkpoints  # noqa: F401  makes benchmarks/ importable
from benchmarks.record import Recorder, RecordError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrl_vllm_sync import AsyncVLLM


def random_prompts(num_prompts: int, seed: int) -> list[list[int]]:
    """Prompts of twelve token ids each, which every tokenizer has."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 500, (num_prompts, 12), generator=generator).tolist()


def greedy(num_tokens: int) -> Any:
    """Says: the likeliest token each time, and no early end."""
    from vllm import SamplingParams  # reads the environment, which tutorials set in ``main``

    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def greedy_answers(
    service: AsyncVLLM, prompts: Sequence[Sequence[int]], num_tokens: int, **options: Any
) -> list[list[int]]:
    """The likeliest continuation of each prompt, ``num_tokens`` long.

    ``options`` has more arguments of ``AsyncVLLM.generate``.
    """
    outputs = service.generate(list(prompts), greedy(num_tokens), use_tqdm=False, **options)
    return [list(one.outputs[0].token_ids) for one in outputs]


@dataclass(frozen=True)
class Comparison:
    """What became of comparing the answers to several prompts.

    Attributes:
        equal: Prompts whose tokens were all as expected.
        total: Prompts compared.
        first: The first difference in words; empty if there is none.
    """

    equal: int
    total: int
    first: str

    @property
    def fraction(self) -> float:
        """Share of the prompts whose tokens were all as expected."""
        return self.equal / self.total

    @classmethod
    def of(cls, got: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> Comparison:
        """Compares token by token.

        Raises:
            ValueError: There is nothing to compare, or not as many answers as expected.
        """
        if not got or not all(got):
            raise ValueError("there are no tokens to compare")
        pairs = enumerate(zip(got, expected, strict=True))
        told = [_difference(number, list(one), list(other)) for number, (one, other) in pairs]
        differences = [one for one in told if one]
        return cls(len(got) - len(differences), len(got), differences[0] if differences else "")


def _difference(number: int, got: list[int], expected: list[int]) -> str:
    """The first difference in words; empty if there is none."""
    if got == expected:
        return ""
    place = next(
        (place for place, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b),
        min(len(got), len(expected)),
    )
    return (
        f"prompt {number}, position {place}: expected {_at(expected, place)}, got {_at(got, place)}"
    )


def _at(tokens: Sequence[int], place: int) -> str:
    return str(tokens[place]) if place < len(tokens) else "the end"


def write_record(
    name: str,
    case: str,
    comparisons: Mapping[str, Comparison],
    phases: Mapping[str, Mapping[str, float]],
    *,
    smoke: bool,
) -> str:
    """Writes a run down as benchmarks do.

    Args:
        name: Name of the record.
        case: What was run.
        comparisons: What was compared, by the system's or the setting's name.
        phases: Milliseconds by phase of each of those; may be empty.
        smoke: Write it to a temporary directory.

    Returns:
        Where it lies, or why there is none.
    """
    recorder = Recorder(name)
    for system, compared in comparisons.items():
        recorder.add(
            case=case,
            system=system,
            metric="tokens_equal",
            unit="fraction",
            samples=[compared.fraction],
            prompts=compared.total,
            first_difference=compared.first,
        )
        for phase, milliseconds in phases.get(system, {}).items():
            recorder.add(case=case, system=system, metric=phase, unit="ms", samples=[milliseconds])
    try:
        return str(recorder.write(smoke=smoke))
    except RecordError as error:
        return f"none: {error}"
