"""A byte-level BPE tokenizer of 512 tokens with a ChatML template, trained on the spot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

if TYPE_CHECKING:
    from collections.abc import Iterator


VOCAB_SIZE = 512
"""256 bytes, three special tokens, and as many merges as fit."""

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# {% generation %} lets TorchRL tell the assistant's tokens from the rest.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_SENTENCES = (
    "What is {a} + {b}? The answer is {sum}, because {a} and {b} make {sum} together.",
    "system: You are a helpful assistant. user: Please add {a} to {b}. assistant: {sum}",
    "Every replica holds one whole version of the policy, and every reader sees version {sum}.",
    "If {a} prompts wait while {b} are being sampled, then {sum} requests are in flight.",
    "She wrote number {a} on the left, {b} on the right, and their product, {product}, below.",
    "A trainer pushes new weights to several engines after step {a}; rewards should rise by {b}%.",
    "def multiply(x={a}, y={b}): return x * y  # equals {product}, as nobody questions",
    "Quick brown foxes jumped over {a} lazy dogs during the night, {b} minutes for each jump.",
)


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the tokenizer of the tiny checkpoints, always the same one.

    ``<|endoftext|>`` pads and is not part of the chat template; ``<|im_end|>`` ends a turn and is
    the end-of-sequence token. Any text can be encoded and decoded back.

    Returns:
        A tokenizer of exactly :data:`VOCAB_SIZE` tokens, the special ones first.
    """
    tokenizer = Tokenizer(models.BPE())
    # Split as Qwen2Tokenizer does: AutoTokenizer takes that class for the checkpoints' model type.
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer=trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _corpus() -> Iterator[str]:
    for a in range(10):
        for b in range(10):
            for sentence in _SENTENCES:
                yield sentence.format(a=a, b=b, sum=a + b, product=a * b)
