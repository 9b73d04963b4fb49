"""Whether a loss can take what engines sample for what it is: settings, templates, tokenizers.

A loss divides the trainer's probability of a token by the engine's: right if both are of what the
token was sampled from. ``tutorials/guides/sampling.md`` has a table of when they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torchrl.data.llm import History
from transformers import PreTrainedTokenizerBase

from torchrl_vllm_sync.errors import TokenizerMismatchError, UnsupportedArgumentError

# What vLLM takes for greedy sampling (``vllm/v1/sample/sampler.py``).
_GREEDY = 1e-5
# vLLM's settings that only remove tokens, and those that weigh them otherwise.
_REMOVE = ("top_p", "top_k", "min_p", "min_tokens", "bad_words", "allowed_token_ids")
_REMOVE += ("structured_outputs",)
_WEIGH = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
_WEIGH += ("thinking_token_budget", "trace_decode_token_ids", "logits_processors")
_OTHERS = ("temperature", "logprobs_mode", "truncation", "chat_template", "watermarking")
SETTINGS = frozenset((*_REMOVE, *_WEIGH, *_OTHERS))
# Tokens as likely as the last of top-k stay in too: so many more are looked for.
_TIES = 8
_PROCESSED = "processed_logprobs"
# A setting's value, and what to do about it.
Findings = dict[str, tuple[Any, str]]


@dataclass(frozen=True, slots=True)
class Trainer:
    """What is known of the trainer that a policy's rows go to."""

    temperature: float
    replays_sampling_masks: bool
    findings: Findings  # of its texts and chats

    @classmethod
    def of(cls, policy: Any, trainer: Any) -> Trainer:
        """What a policy is told of its trainer."""
        if isinstance(trainer, cls):
            return trainer
        replays = getattr(trainer, "replays_sampling_masks", False)
        return cls(getattr(trainer, "temperature", 1.0), replays, _judge_prompts(policy, trainer))


def is_greedy(params: Any) -> bool:
    """Whether vLLM takes the likeliest token."""
    return params.temperature < _GREEDY


def mask_width(top_k: int) -> int:
    """How many of the likeliest tokens hold all that can be sampled."""
    return top_k + _TIES


def check_allowed(allow: Collection[str]) -> None:
    """Refuses what is no name of a setting."""
    if isinstance(allow, str) or not SETTINGS.issuperset(allow):
        raise UnsupportedArgumentError(f"allow must name some of {sorted(SETTINGS)}, got {allow!r}")


def check_mask(params: Any, engine: Any) -> None:
    """Refuses to ask for sampling masks that the engines would not give."""
    width = mask_width(params.top_k)
    needs = {
        "top_k above 0, which bounds its width": params.top_k > 0,
        f"engines launched with logprobs_mode={_PROCESSED!r}": engine.logprobs_mode == _PROCESSED,
        f"engines launched with max_logprobs={width} or more": not 0 <= engine.max_logprobs < width,
    }
    if missing := [need for need, is_met in needs.items() if not is_met]:
        raise UnsupportedArgumentError(f"return_sampling_mask needs {'; '.join(missing)}")


def judge_sampling(params: Any, engine: Any, trainer: Trainer | None, has_mask: bool) -> Findings:
    """What makes log-probabilities of an engine of these arguments others than the trainer's."""
    if is_greedy(params):
        return {}
    trainer = trainer or Trainer(1.0, True, {})  # at temperature 1, which does replay masks
    default, found = type(params)(), {**trainer.findings}
    launch = f"launch the engines with logprobs_mode={_PROCESSED!r}"
    is_processed = engine.logprobs_mode == _PROCESSED
    if engine.logprobs_mode not in (_PROCESSED, "raw_logprobs"):
        found["logprobs_mode"] = engine.logprobs_mode, f"these are no log-probabilities: {launch}"
    mine, its = params.temperature, trainer.temperature
    if mine != its:
        remedy = f"the loss computes at {its}: sample so, or train with TrainerPolicy(temperature="
        found["temperature"] = mine, f"{remedy}{mine}) and name it as trainer="
    elif mine != 1 and not is_processed:
        found["temperature"] = mine, f"{launch}: raw ones are from before the temperature"
    replays = trainer.replays_sampling_masks
    if not (is_processed and has_mask and replays):
        steps = [] if is_processed else [launch]
        steps += [] if has_mask else ["pass return_sampling_mask=True and a top_k"]
        steps += [] if replays else ["have TrainerPolicy score, named as trainer="]
        remedy = f"leave it out, or {', '.join(steps)}"
        found |= _changed(_REMOVE, params, default, remedy)
    remedy = "leave it out: no loss can tell what it did"
    found |= _changed(_WEIGH, params, default, remedy)
    if value := getattr(engine, "logits_processors", None):
        found["logits_processors"] = value, remedy
    if getattr(engine, "watermark_config", None) and params.watermarking is not False:
        told = "set watermarking=False: a key and the tokens before decide what would be drawn"
        found["watermarking"] = params.watermarking, told
    if value := getattr(params, "truncate_prompt_tokens", None):  # up to vLLM 0.31
        found["truncation"] = value, "leave it out: rows would hold prompts that engines never read"
    return found


def _changed(names: Collection[str], params: Any, default: Any, remedy: str) -> Findings:
    """Those of ``names`` that are set; empty collections, and -1 for top-k, set nothing."""
    found = Findings()
    for name in names:
        value = getattr(params, name, None)
        if value not in (None, -1, [], {}, getattr(default, name, None)):
            found[name] = value, remedy
    return found


def _judge_prompts(policy: Any, trainer: Any) -> Findings:
    """What has a trainer that reads texts or chats see other tokens than the policy's prompts."""
    found = Findings()
    if getattr(trainer, "input_mode", "tokens") == "tokens" or policy.tokenizer is None:
        return found
    names = f"the policy's {named(policy.tokenizer)}", f"the trainer's {named(trainer.tokenizer)}"
    check_tokenizers(policy.tokenizer, trainer.tokenizer, names)
    if value := trainer.tokenizer_kwargs.get("truncation"):
        found["truncation"] = value, "the trainer would score shorter prompts: leave it out"
    if "history" in (trainer.input_mode, policy.input_mode):
        mine, its = (_shown(one) for one in (policy, trainer))
        if mine != its:
            remedy = f"the trainer's makes {its!r} of it: give both the same, or score tokens"
            found["chat_template"] = mine, remedy
    return found


def _shown(wrapper: Any) -> str:
    """A short conversation as a wrapper's template shows it."""
    names = "tokenizer", "chat_template", "chat_template_name"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    template: Any = {"add_generation_prompt": False, **{n: getattr(wrapper, n) for n in names}}
    made: Any = History.from_chats([chat]).apply_chat_template(**template)
    return made if isinstance(made, str) else made[0]


# Tokens of an engine's tokenizer whose text a policy's must encode alike.
_PROBED_TOKENS = 4096


def named(tokenizer: Any) -> str:
    """A tokenizer in messages."""
    return f"{type(tokenizer).__name__} {tokenizer.name_or_path!r}"


def check_tokenizers(one: Any, other: Any, names: tuple[str, str]) -> None:
    """Refuses a tokenizer that has not all tokens of another, or encodes otherwise."""
    if one is other:
        return
    if isinstance(other, PreTrainedTokenizerBase):  # vLLM's own spell tokens in other ways
        known = one.get_vocab()
        wrong = {at: token for token, at in other.get_vocab().items() if known.get(token) != at}
        if wrong:
            at, token = min(wrong.items())
            told = f"{token!r} is {known.get(token)} there and {at} here, as one of {len(wrong)}"
            raise TokenizerMismatchError(*names, f"{told} tokens")
    some = range(0, len(other), -(-len(other) // _PROBED_TOKENS))
    text = other.decode([*some], skip_special_tokens=True)
    mine, its = (each.encode(text, add_special_tokens=False) for each in (one, other))
    if mine != its:
        pairs = enumerate(itertools.zip_longest(mine, its))
        at = next(at for at, (my, its_own) in pairs if my != its_own)
        told = f"the same text is {mine[at : at + 5]} there and {its[at : at + 5]} here"
        raise TokenizerMismatchError(*names, f"{told}, after {at} tokens")
