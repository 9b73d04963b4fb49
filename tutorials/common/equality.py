"""Compares tokens with what they should be, records the run, and says PASS or FAIL."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import common.checkpoints  # noqa: F401  makes benchmarks/ importable
from benchmarks.record import Recorder, RecordError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrl_vllm_sync import AsyncVLLM, PushReport


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
    """The likeliest continuation of each prompt; ``options`` are ``AsyncVLLM.generate``'s."""
    outputs = service.generate(list(prompts), greedy(num_tokens), use_tqdm=False, **options)
    return [list(one.outputs[0].token_ids) for one in outputs]


@dataclass(frozen=True)
class Comparison:
    """What became of comparing the answers to several prompts."""

    equal: int  # prompts whose tokens were all as expected
    total: int
    first: str  # the first difference in words; empty if there is none

    @property
    def fraction(self) -> float:
        """Share of the prompts whose tokens were all as expected."""
        return self.equal / self.total

    @classmethod
    def of(cls, got: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> Comparison:
        """Compares token by token."""
        if not got or not all(got):
            raise ValueError("there are no tokens to compare")
        pairs = [*zip(got, expected, strict=True)]
        differences = (
            f"prompt {number}, position {place}: expected {right}, got {token}"
            for number, pair in enumerate(pairs)
            for place, (token, right) in enumerate(
                itertools.zip_longest(*pair, fillvalue="the end")
            )
            if token != right
        )
        equal = sum(list(one) == list(other) for one, other in pairs)
        return cls(equal, len(pairs), next(differences, ""))


def compare(
    answers: Mapping[str, Sequence[list[int]]], expected: Sequence[list[int]]
) -> dict[str, Comparison]:
    """Compares what was answered when with what is right, and prints how each answer begins.

    Where several replicas answered, their answers follow one another.
    """
    for number in range(len(expected)):
        shown = [f"{when} {' '.join(map(str, one[number][:5]))}" for when, one in answers.items()]
        print(f"  prompt {number:2}: {' … | '.join(shown)} …")
    found = {
        when: Comparison.of(one, [*expected] * (len(one) // len(expected)))
        for when, one in answers.items()
    }
    for when, one in found.items():
        print(f"{when}: {one.equal} of {one.total} answers equal to the checkpoint's")
    kinds = len({token for one in expected for token in one})  # few would prove little
    print(f"The compared tokens are of {kinds} kinds")
    return found


def conclude(
    name: str,
    case: str,
    comparisons: Mapping[str, Comparison],
    reports: Mapping[str, PushReport],
    *,
    smoke: bool,
    failure: str = "",
) -> bool:
    """Writes a run down as benchmarks do, and prints PASS or FAIL of the first push's comparison.

    Comparisons, and the pushes of those that had one, are by the name of a system or setting.
    """
    recorder = Recorder(name)
    phases: dict[str, dict[str, float]] = {}  # milliseconds, also of the first engine
    for system, report in reports.items():
        engine = {f"engine: {name}": one for name, one in report.replicas[0].phases.items()}
        of_push = report.phases | engine | {"push_s": report.seconds}
        phases[system] = {k[:-2]: 1e3 * one for k, one in of_push.items() if k.endswith("_s")}
    for system, compared in comparisons.items():
        of: dict[str, Any] = {"case": case, "system": system}
        more = {"prompts": compared.total, "first_difference": compared.first}
        equal = {"metric": "tokens_equal", "samples": [compared.fraction]}
        recorder.add(**of, unit="fraction", **equal, **more)
        for phase, spent in phases.get(system, {}).items():
            recorder.add(**of, metric=phase, unit="ms", samples=[spent])
    for system, report in reports.items():
        print(f"{system}, by {report.transport}:")
        print("  " + ", ".join(f"{phase} {one:.1f} ms" for phase, one in phases[system].items()))
    try:
        print(f"Record: {recorder.write(smoke=smoke)}")
    except RecordError as error:
        print(f"Record: none: {error}")
    claimed = next(iter(reports))
    if failure := comparisons[claimed].first or failure:
        print(f"FAIL {failure}")
        return False
    fraction, push_ms = comparisons[claimed].fraction, phases[claimed]["push"]
    print(f"PASS tokens_equal {fraction:.3f} push_ms {push_ms:.1f}")
    return True
