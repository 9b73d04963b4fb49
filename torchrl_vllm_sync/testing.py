"""Tiny random checkpoints, made on the spot, and the checks that tests of weight transfer need.

Nothing is downloaded, and neither vLLM nor Ray is imported.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

__all__ = [
    "Architecture",
    "assert_diverse",
    "greedy_tokens",
    "load_tiny_model",
    "make_tiny_checkpoint",
    "make_tiny_tokenizer",
    "token_log_probs",
]

Architecture = Literal["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"]

# 256 bytes, three special tokens, and as many merges as fit.
VOCAB_SIZE = 512

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


def make_tiny_checkpoint(
    directory: str | os.PathLike[str],
    *,
    architecture: Architecture = "qwen2",
    tied: bool = True,
    seed: int = 0,
    diverse: bool = True,
    **config_overrides: Any,
) -> Path:
    """Writes a random float32 causal language model and its tokenizer to ``directory``.

    The head size is 32, the smallest that vLLM's CPU attention supports. Experts are written one
    tensor per projection and expert, as published checkpoints have them.

    Args:
        directory: Created if absent; files of an earlier checkpoint are replaced.
        architecture: A dense or a mixture-of-experts model.
        tied: Whether the output head shares the embedding's weights.
        seed: Of the weights. The tokenizer does not depend on it.
        diverse: 4 layers and a wide spread, so that greedy outputs differ and a wrong weight shows.
            Otherwise 2 layers near the uniform distribution, which learn within seconds.
        **config_overrides: Fields of the transformers config, such as ``num_hidden_layers=1``.

    Returns:
        ``directory``.

    Raises:
        ValueError: ``architecture`` is not one of those above.

    Example:
        >>> path = make_tiny_checkpoint(tmp_path / "moe", architecture="qwen3_moe", seed=1)
        >>> model = load_tiny_model(path)
    """
    if architecture not in (known := get_args(Architecture)):
        names = ", ".join(known)
        raise ValueError(f"architecture must be one of {names}, got {architecture!r}")
    directory = Path(directory)
    tokenizer = make_tiny_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4 if diverse else 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        # By the usual 0.02 nearly every greedy token of so small a model is the same one.
        "initializer_range": 0.25 if diverse else 0.02,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if architecture.startswith("qwen3"):
        fields["head_dim"] = 32
    if architecture.endswith("_moe"):
        fields |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    if architecture == "qwen2_moe":
        fields["shared_expert_intermediate_size"] = 64
    config = AutoConfig.for_model(architecture, **(fields | config_overrides))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if diverse:
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def load_tiny_model(checkpoint: str | os.PathLike[str]) -> PreTrainedModel:
    """Returns a model as the trainer would hold it: float32 on the CPU, in evaluation mode.

    Args:
        checkpoint: Its directory.
    """
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the tokenizer of the tiny checkpoints: 512 tokens, the special ones first.

    ``<|endoftext|>`` pads; ``<|im_end|>`` ends a turn and a sequence. Any text can be encoded.
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
    digits = itertools.product(range(10), range(10), _SENTENCES)
    corpus = (text.format(a=a, b=b, sum=a + b, product=a * b) for a, b, text in digits)
    tokenizer.train_from_iterator(corpus, trainer=trainer)
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


@torch.no_grad()
def token_log_probs(model: PreTrainedModel, token_ids: Sequence[int] | Tensor) -> Tensor:
    """Returns the log-probability of each token after the first, as vLLM's ``prompt_logprobs``.

    Args:
        model: A causal language model, in evaluation mode.
        token_ids: One sequence of at least two tokens.

    Raises:
        ValueError: There are fewer than two tokens.
    """
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=model.device).reshape(1, -1)
    if ids.shape[1] < 2:
        raise ValueError(f"token_ids must hold at least 2 tokens, got {ids.shape[1]}")
    log_probs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    return log_probs.gather(-1, ids[0, 1:, None])[:, 0].cpu()


@torch.no_grad()
def greedy_tokens(
    model: PreTrainedModel, token_ids: Sequence[int], *, max_tokens: int = 32
) -> list[int]:
    """Returns the most likely continuation; no token ends it early.

    Args:
        model, token_ids: A causal language model, and the prompt.
        max_tokens: How many tokens to append.
    """
    ids = list(token_ids)
    for _ in range(max_tokens):
        inputs = torch.tensor([ids], device=model.device)
        ids.append(int(model(input_ids=inputs, use_cache=False).logits[0, -1].argmax()))
    return ids[len(token_ids) :]


def assert_diverse(outputs: Sequence[Sequence[int]], *, min_distinct: int = 6) -> None:
    """Refuses outputs so uniform that two models might agree on them by chance.

    Args:
        outputs: Token ids of several outputs.
        min_distinct: Distinct tokens that each must hold.

    Raises:
        AssertionError: Two outputs are equal, or one repeats too few tokens.
    """
    for i, output in enumerate(outputs):
        if (num := len(set(output))) < min_distinct:
            too_few = f"{num} distinct tokens, fewer than {min_distinct}"
            raise AssertionError(f"output {i} holds {too_few}: {list(output)}")
    if len({tuple(output) for output in outputs}) < len(outputs):
        raise AssertionError("two outputs are equal")
