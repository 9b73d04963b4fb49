"""A check of version spans that tests make of every answer."""

from torchrl_vllm_sync.errors import VersionSpanError
from torchrl_vllm_sync.requests.messages import spans_from_starts


def check_spans(spans, num_tokens):
    """Refuses spans that do not cover a response exactly, neighbours of different versions."""
    starts = [(one.version, one.start) for one in spans]
    if tuple(spans) != spans_from_starts(starts, num_tokens):
        raise VersionSpanError(f"spans must cover {num_tokens} tokens one by one, got {spans}")
