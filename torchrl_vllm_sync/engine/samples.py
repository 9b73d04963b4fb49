"""Version spans of each sample inside one engine: counted here, and checked against vLLM's own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.engine.internals import UNLABELLED
from torchrl_vllm_sync.requests import SampleReport
from torchrl_vllm_sync.versions import slice_spans, spans_from_starts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.outputs import CompletionOutput

    from torchrl_vllm_sync.engine.internals import SampleState
    from torchrl_vllm_sync.requests import BegunAnswer
    from torchrl_vllm_sync.versions import VersionSpan

__all__ = ["SampleVersions", "SpanChecker", "versions_of_labels"]

logger = logging.getLogger(__name__)


class SampleVersions:
    """Which versions sampled one sample, counted at each switch.

    Attributes:
        state: What vLLM knows of the sample.

    Args:
        state: The sample.
        version: Version that its first token will be sampled by, unless a switch comes before.
        begun: What another replica sampled before that.
    """

    __slots__ = ("_begun", "_delivered", "_starts", "state")

    def __init__(self, state: SampleState, version: int, begun: BegunAnswer | None = None) -> None:
        self.state, self._begun = state, begun
        self._delivered = len(begun.token_ids) if begun else 0
        former = begun.spans if begun else ()
        self._starts = [(one.version, one.start) for one in former] + [(version, self._delivered)]

    @property
    def has_begun(self) -> bool:
        """Whether a token was sampled here, or it ended without one."""
        received = len(self._begun.token_ids) if self._begun else 0
        return self.state.num_tokens > received or self.state.is_finished

    def switch(self, version: int) -> None:
        """Notes that ``version`` samples whatever comes behind the tokens of now."""
        self._starts.append((version, self.state.num_tokens))

    def spans(self, num_tokens: int) -> tuple[VersionSpan, ...]:
        """Returns the spans of the first ``num_tokens`` tokens."""
        return spans_from_starts(self._starts, num_tokens)

    def report(self, completion: CompletionOutput, checker: SpanChecker) -> SampleReport:
        """Returns what goes with an output of the sample, which is the next one of it.

        Args:
            completion: The output.
            checker: Compares the spans with vLLM's own, where the sample has finished.
        """
        start = self._delivered if self.state.yields_only_new else 0
        end = self._delivered = start + len(completion.token_ids)
        spans = self.spans(end)
        if completion.finish_reason is not None:
            labelled = internals.label_spans(completion)
            spans = checker.agreed(self.state.engine_id, spans, labelled, end)
        if self._begun is not None:
            # Seconds of decoding are unknown, since some were lost on the way.
            return SampleReport(
                spans=slice_spans(spans, start, end),
                num_cached_tokens=self._begun.num_cached_tokens,
                queue_s=self._begun.queue_s,
                prefill_s=self._begun.prefill_s,
            )
        return SampleReport(
            spans=slice_spans(spans, start, end),
            num_cached_tokens=self.state.num_cached_tokens,
            queue_s=self.state.queue_s,
            prefill_s=self.state.prefill_s,
            decode_s=self.state.decode_s,
        )


class SpanChecker:
    """Compares counted spans with those that vLLM reports itself.

    vLLM counts in the process that samples, so that its spans are the ones that are given out where
    the two disagree; that is logged as an error and counted. Spans with a label that is no policy
    version, such as a user gives to ``finish_weight_update``, cannot be compared.

    Attributes:
        num_disagreements: Samples on which the two disagreed.

    Args:
        replica_id: Named in the log.
    """

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self.num_disagreements = 0

    def agreed(
        self,
        request_id: str,
        counted: tuple[VersionSpan, ...],
        labelled: Sequence[tuple[str, int, int]] | None,
        num_tokens: int,
    ) -> tuple[VersionSpan, ...]:
        """Returns the spans of a finished sample.

        Args:
            request_id: Named in the log.
            counted: Those counted here.
            labelled: vLLM's ``(label, start, end)``; ``None`` where it reports none.
            num_tokens: Length of the response.
        """
        theirs = versions_of_labels(labelled, num_tokens)
        if theirs is None or theirs == counted:
            return counted
        self.num_disagreements += 1
        logger.error(
            "replica %s, request %s: version spans counted as %s, by vLLM as %s; vLLM's are used",
            self._replica_id,
            request_id,
            [tuple(one) for one in counted],
            [tuple(one) for one in theirs],
        )
        return theirs


def versions_of_labels(
    labelled: Sequence[tuple[str, int, int]] | None, num_tokens: int
) -> tuple[VersionSpan, ...] | None:
    """Makes version spans of vLLM's labelled ones.

    Args:
        labelled: ``(label, start, end)`` in order, or ``None``. ``"default"`` is version 0.
        num_tokens: Length of the response.

    Returns:
        The spans; ``None`` where there are no labels, or one of them is no version.
    """
    if labelled is None:
        return None
    try:
        starts = [(0 if one == UNLABELLED else int(one), start) for one, start, _ in labelled]
    except ValueError:
        return None
    return spans_from_starts(starts, num_tokens)
