"""Which policy version sampled which tokens of a response."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from torchrl_vllm_sync.checks import shown
from torchrl_vllm_sync.errors import UnsupportedArgumentError, VersionSpanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# What the int64 stamps on rows can hold.
MAX_VERSION = 2**63 - 1


class VersionSpan(NamedTuple):
    """Tokens ``[start, end)`` of a response were sampled by ``version``.

    The spans of a response are in order, leave no gaps, and neighbours differ in version; an empty
    response has none. Version 0 is what the engine was launched with.
    """

    version: int
    start: int
    end: int


def spans_from_starts(
    starts: Iterable[tuple[int, int]], num_tokens: int
) -> tuple[VersionSpan, ...]:
    """Builds spans from where each version began, without empty ones, equal neighbours merged."""
    spans, known = list[VersionSpan](), list(starts)
    if num_tokens and not known:
        raise VersionSpanError(f"{num_tokens} tokens must have a version, got none")
    if any(later < earlier for (_, earlier), (_, later) in pairwise(known)):
        raise VersionSpanError(f"versions must begin one after the other, got {known}")
    if len(known) == 1 and num_tokens:
        return (VersionSpan(known[0][0], 0, num_tokens),)
    begin = 0
    for (version, _), (_, limit) in pairwise([*known, (0, num_tokens)]):
        end = min(limit, num_tokens)
        if end == begin:
            continue
        if spans and spans[-1].version == version:
            spans[-1] = spans[-1]._replace(end=end)
        else:
            spans.append(VersionSpan(version, begin, end))
        begin = end
    return tuple(spans)


def slice_spans(spans: Sequence[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """Returns the spans of tokens ``[start, end)``, counted from ``start``."""
    return tuple(
        VersionSpan(one.version, max(one.start, start) - start, min(one.end, end) - start)
        for one in spans
        if max(one.start, start) < min(one.end, end)
    )


def check_version(name: str, version: object) -> None:
    """Refuses what is no policy version."""
    if type(version) is bool or not isinstance(version, int) or not 0 <= version <= MAX_VERSION:
        raise UnsupportedArgumentError(
            f"{name} must be a policy version, an integer from 0 on below 2**63, "
            f"got {shown(version)}"
        )


def expand_spans(spans: Iterable[VersionSpan]) -> list[int]:
    """Returns the version of each token, in order.

    Args:
        spans: Spans of one response.
    """
    return [one.version for one in spans for _ in range(one.end - one.start)]


def min_version(spans: Iterable[VersionSpan], *, default: int) -> int:
    """Returns the oldest version, or ``default`` where no token was sampled.

    Args:
        spans, default: Spans of one response, and the version of one without tokens.
    """
    return min((one.version for one in spans), default=default)


def max_version(spans: Iterable[VersionSpan], *, default: int) -> int:
    """Returns the newest version, or ``default`` where no token was sampled.

    Args:
        spans, default: Spans of one response, and the version of one without tokens.
    """
    return max((one.version for one in spans), default=default)
