"""Conversations of several turns whose answers are sampled in ways that no tokenizer encodes.

``python -m tests.fakes.dialogs --turns 10000 [--smollm2 FOLDER]`` counts drifts by template.
"""

import argparse
import json
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
from tensordict import TensorDict, lazy_stack, set_list_to_stack
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory
from transformers import AddedToken, AutoTokenizer

from torchrl_vllm_sync import AsyncVLLM, VersionSpan, vLLMWrapper
from torchrl_vllm_sync.testing import make_tiny_tokenizer

# What the templates of these models do, as far as turns go.
QWEN25 = """\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + message.content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# Thinking is shown of answers to the last question only, and in one form.
QWEN3 = """\
{%- set seen = namespace(question=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set seen.question = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
{%- elif message.role == 'assistant' and '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > seen.question -%}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- content -}}
{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
QWEN3_QUIET = (
    QWEN3.removesuffix("{%- endif -%}\n") + "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}\n"
)
LLAMA3 = """\
{{- '<|begin_of_text|>' -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' -}}
{{- message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""
_LLAMA3_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def _qwen():
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(one, special=False) for one in ("<think>", "</think>")])
    return tokenizer


def _llama():
    tokenizer = make_tiny_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": _LLAMA3_TOKENS, "eos_token": "<|eot_id|>"}
    )
    return tokenizer


# Each with its tokenizer, what ends an answer, and the roles before which it rewrites the answer.
MODELS = {
    "qwen2.5": (_qwen, QWEN25, "<|im_end|>", ()),
    "qwen3": (_qwen, QWEN3, "<|im_end|>", ("user",)),
    "qwen3 without thinking": (_qwen, QWEN3_QUIET, "<|im_end|>", ("user", "tool")),
    "llama 3": (_llama, LLAMA3, "<|eot_id|>", ()),
}


def smollm2(folder):
    """The real tokenizer and template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda: tokenizer, tokenizer.chat_template, "<|im_end|>", ()


class Sampler(AsyncVLLM):
    """Answers with text in pieces of its own choice, or with any tokens; notes the prompts."""

    engine_args = SimpleNamespace(
        skip_tokenizer_init=True, logprobs_mode="processed_logprobs", logits_processors=None
    )

    def __init__(self, tokenizer, end, *, thinks, seed=0, canonical=False):
        self.tokenizer, self.end, self.thinks, self.canonical = tokenizer, end, thinks, canonical
        self.generator = np.random.default_rng(seed)
        self.prompts = []

    def release_sessions(self, session_ids):
        pass

    def generate(self, prompts=None, sampling_params=None, *, prompt_token_ids=None, **_):
        # TorchRL's wrapper sends a list of TokensPrompt
        given = prompts if prompt_token_ids is None else prompt_token_ids
        ids = [one["prompt_token_ids"] if isinstance(one, dict) else one for one in given]
        self.prompts = ids
        return [self._output(one) for one in ids]

    def _output(self, prompt):
        from vllm.outputs import CompletionOutput, RequestOutput

        ids, reason = self._sample()
        sample = CompletionOutput(0, "", ids, None, None, finish_reason=reason)
        output = RequestOutput("r", None, list(prompt), None, [sample], True)
        spans = (VersionSpan(1, 0, len(ids)),) if ids else ()
        output.sample_reports = [
            SimpleNamespace(
                spans=spans, num_cached_tokens=None, queue_s=None, prefill_s=None, decode_s=None
            )
        ]
        output.replica_id, output.min_version, output.max_version = "0", 1, 1
        return output

    def _sample(self):
        draw, encode = self.generator, self._encode
        if self.canonical:
            return [*encode(f"It is {draw.integers(1000)}, they say."), *encode(self.end)], "stop"
        pieces = [
            "  ",
            "\n\n",
            " \n",
            "tokenization",
            "1234567",
            "'s",
            "é",
            "e\u0301",
            "🦊",
            "...",
            "'",
        ]
        pieces += [
            "helpful assistant",
            "\t",
            "<tool>",
            "a" * 5,
            "\u00a0",
            "User:",
            "x_y",
            "\r\n",
            "北京",
        ]
        text = "".join(draw.choice(pieces, draw.integers(0, 9)))
        ids = self._cut(f"<think>\n{self._thought()}\n</think>\n\nWell") if self.thinks else []
        ids += self._cut(text)
        if draw.random() < 0.2:  # halves of characters, as an untrained model samples
            ids += draw.integers(260, 500, draw.integers(1, 5)).tolist()
        if draw.random() < 0.7:
            return [*ids, *encode(self.end)], "stop"
        return ids, "length"

    def _thought(self):
        return f"hm{'.' * self.generator.integers(9)} {self.generator.integers(10**6)}, so"

    def _cut(self, text):
        """A text's tokens, encoded in pieces; tags stay whole."""
        ids = []
        while text:
            tag = next((one for one in ("<think>", "</think>") if text.startswith(one)), "")
            limit = next(
                (at for at in range(1, len(text)) if text.startswith(("<think>", "</think>"), at)),
                9,
            )
            size = len(tag) or min(int(self.generator.integers(1, 9)), limit)
            ids += self._encode(text[:size])
            text = text[size:]
        return ids

    def _encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)


def policy_for(model, *, seed=0, canonical=False, pad_output=False):
    """A policy over a sampler, which is returned, too."""
    make, template, end, _ = model
    thinks = "</think>" in template and template != QWEN3_QUIET
    service = Sampler(make(), end, thinks=thinks, seed=seed, canonical=canonical)
    policy = vLLMWrapper(
        service,
        tokenizer=service.tokenizer,
        input_mode="history",
        chat_template=template,
        pad_output=pad_output,
        return_log_probs=False,
    )
    return policy, service


def converse(model, *, rows=16, turns=6, seed=0, carry=True, **options):
    """Yields the turns of conversations after the first: row, row before, role, what was read."""
    policy, service = policy_for(model, seed=seed, **options)
    draw = np.random.default_rng(seed + 1)
    questions = [f"What is {one}?" for one in draw.integers(10**6, size=rows)]
    chats = [[{"role": "user", "content": one}] for one in questions]
    role, last = "user", None
    for _ in range(turns):
        is_going_on = last is not None and carry
        data = last.clone(False) if is_going_on else lazy_stack([TensorDict() for _ in chats])
        history = History.from_chats(chats)
        data["history"] = ChatHistory(prompt=history, batch_size=rows)
        row = policy(data)
        before = [] if last is None else last.unbind(0)
        for at, one in enumerate(before):
            yield SimpleNamespace(row=row[at], before=one, role=role, sent=service.prompts[at])
        role, last = str(draw.choice(["user", "tool"])), row
        say = {"role": role, "content": f"And {draw.integers(10**4)}? "}
        fulls = [one.tolist(tolist_first=True) for one in row["history"].full.unbind(0)]
        chats = [[*({k: one[k] for k in ("role", "content")} for one in c), say] for c in fulls]


def unpadded(row):
    """The tokens of a row: of its prompt, and of its answer."""
    full, mask = row["tokens", "full"], row["masks", "all_attention_mask"]
    sampled = row["masks", "all_assistant_mask"][mask]
    return full[mask][~sampled].tolist(), full[mask][sampled].tolist()


def count(model, turns, **options):
    """Of so many turns: those that went on exactly, that forked, drifted, or said so wrongly."""
    found, seed, rewriting = Counter(), 0, model[3]
    while found["turns"] < turns:
        for one in converse(model, seed=seed, **options):
            if found["turns"] == turns:
                break
            earlier = [id_ for part in unpadded(one.before) for id_ in part]
            prompt, _ = unpadded(one.row)
            kept = int(one.row["turns", "kept"])
            forked = bool(one.row["turns", "forked"])
            begins = prompt[: len(earlier)] == earlier
            found["turns"] += 1
            found["exact"] += begins and kept == len(earlier)
            found["forked"] += forked
            found["forks that the template made"] += one.role in rewriting
            found["drifts"] += not begins and not forked
            found["wrong"] += forked != (one.role in rewriting) or prompt != one.sent
        seed += 1
    return {name: int(value) for name, value in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--smollm2", help="a checkpoint of SmolLM2-135M-Instruct")
    args = parser.parse_args()
    models = MODELS | ({"smollm2": smollm2(args.smollm2)} if args.smollm2 else {})
    with set_list_to_stack(True):
        for name, model in models.items():
            found = {name: count(model, args.turns)}
            found[f"{name}, encoded anew"] = count(model, args.turns // 10, carry=False)
            sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
