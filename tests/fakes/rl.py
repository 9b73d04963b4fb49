"""Rows with the entries that the wrapper stamps, made by hand, ragged or padded."""

import torch
from tensordict import LazyStackedTensorDict, NonTensorStack, TensorDict

from torchrl_vllm_sync.rl import rows as keys

PAD = 0


def stamped_rows(
    *responses,
    padded=False,
    prompts=None,
    reasons=None,
    cached=None,
    queue_time=None,
    decode_time=None,
):
    """One row for each response, which is the list of its tokens' versions."""
    number = len(responses)
    prompts = prompts or [3] * number
    reasons = reasons or ["stop"] * number
    figures = {
        keys.NUM_CACHED_TOKENS: torch.tensor(cached or [keys.UNKNOWN_COUNT] * number),
        keys.QUEUE_TIME: torch.tensor(queue_time or [float("nan")] * number),
        keys.PREFILL_TIME: torch.full((number,), 0.25),
        keys.DECODE_TIME: torch.tensor(decode_time or [float("nan")] * number),
        keys.POLICY_VERSION: torch.tensor([min(one, default=0) for one in responses]),
        keys.MAX_POLICY_VERSION: torch.tensor([max(one, default=0) for one in responses]),
        "advantage": torch.ones(number, 1, 1),
        "number": torch.arange(number),
    }
    rows = [
        row(versions, prompt, reason) | {key: value[i] for key, value in figures.items()}
        for i, (versions, prompt, reason) in enumerate(
            zip(responses, prompts, reasons, strict=True)
        )
    ]
    if not padded:
        return LazyStackedTensorDict(*[TensorDict(one) for one in rows], stack_dim=0)
    longest = max(map(len, responses)), max(prompts)
    dense = {
        ("tokens", "response"): pad(rows, ("tokens", "response"), right=longest[0]),
        ("tokens", "prompt"): pad(rows, ("tokens", "prompt"), left=longest[1]),
        keys.RESPONSE_VERSIONS: pad(
            rows, keys.RESPONSE_VERSIONS, right=longest[0], value=keys.NO_VERSION
        ),
    }
    dense["masks", "all_attention_mask"] = (
        torch.cat([dense["tokens", "prompt"], dense["tokens", "response"]], -1) != PAD
    )
    out = TensorDict(dense | figures, batch_size=number)
    return out.set(keys.FINISH_REASON, NonTensorStack(*reasons))


def row(versions, prompt, reason):
    """The ragged entries of one row."""
    return {
        ("tokens", "prompt"): torch.arange(1, prompt + 1),
        ("tokens", "response"): torch.arange(1, len(versions) + 1),
        ("masks", "all_attention_mask"): torch.ones(prompt + len(versions), dtype=torch.bool),
        keys.RESPONSE_VERSIONS: torch.tensor(versions, dtype=torch.int64),
        keys.FINISH_REASON: reason,
    }


def pad(rows, key, *, left=0, right=0, value=PAD):
    """One entry of all rows, padded to a width on one side."""
    width = left or right
    values = [one[key] for one in rows]
    fill = [torch.full((width - len(one),), value, dtype=one.dtype) for one in values]
    pairs = zip(fill, values, strict=True)
    return torch.stack([torch.cat(pair if left else pair[::-1]) for pair in pairs])


class Service:
    """What transforms need of a service."""

    def __init__(self, weight_version=0):
        self.weight_version = weight_version
