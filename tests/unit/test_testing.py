import json
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from torchrl_vllm_sync.testing import (
    Architecture,
    assert_diverse,
    greedy_tokens,
    load_tiny_model,
    make_tiny_checkpoint,
    make_tiny_tokenizer,
    token_log_probs,
)

PROMPTS = [list(range(start, start + 8)) for start in (3, 40, 200)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_tiny_model(checkpoint)


class TestTokenizer:
    def test_any_text_survives_a_round_trip(self, checkpoint):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        text = "What is 3 + 4?\n\té 漢 🙂 <|im_end|>"
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer) == 512

    def test_training_it_again_gives_the_same_tokens(self):
        assert make_tiny_tokenizer().get_vocab() == make_tiny_tokenizer().get_vocab()

    def test_special_tokens_have_their_roles(self, checkpoint):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        assert tokenizer.pad_token == "<|endoftext|>"
        assert tokenizer.eos_token == "<|im_end|>"
        assert tokenizer.pad_token not in tokenizer.chat_template
        assert len(tokenizer.encode("<|im_start|><|im_end|><|endoftext|>")) == 3

    def test_chat_template_is_chatml_and_marks_the_assistants_tokens(self, checkpoint):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        messages = [{"role": "user", "content": "3 + 4?"}, {"role": "assistant", "content": "7"}]
        text = tokenizer.apply_chat_template(
            messages[:1], tokenize=False, add_generation_prompt=True
        )
        assert text == "<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n"
        encoded = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        marked = [
            token
            for token, of_assistant in zip(
                encoded["input_ids"], encoded["assistant_masks"], strict=True
            )
            if of_assistant
        ]
        assert tokenizer.decode(marked) == "7"


class TestCheckpoint:
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("architecture", get_args(Architecture))
    def test_each_architecture_loads_whole_and_is_diverse(self, tmp_path, architecture, tied):
        path = make_tiny_checkpoint(tmp_path, architecture=architecture, tied=tied)
        stored = load_file(path / "model.safetensors")
        config = json.loads((path / "config.json").read_text())
        assert config["model_type"] == architecture
        assert ("lm_head.weight" in stored) is not tied
        assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
        model = load_tiny_model(path)
        assert not model.training
        assert sum(tensor.numel() for tensor in stored.values()) == sum(
            parameter.numel() for parameter in model.parameters()
        )
        assert_diverse([greedy_tokens(model, prompt) for prompt in PROMPTS])

    @pytest.mark.parametrize("architecture", ["qwen2_moe", "qwen3_moe"])
    def test_experts_are_stored_one_tensor_per_projection(self, tmp_path, architecture):
        path = make_tiny_checkpoint(tmp_path, architecture=architecture)
        stored = load_file(path / "model.safetensors")
        experts = "model.layers.0.mlp.experts"
        gate, up, down = (
            [stored[f"{experts}.{i}.{name}_proj.weight"] for i in range(4)]
            for name in ("gate", "up", "down")
        )
        held = load_tiny_model(path).state_dict()
        fused = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        assert torch.equal(held[f"{experts}.gate_up_proj"], fused)
        assert torch.equal(held[f"{experts}.down_proj"], torch.stack(down))

    def test_weights_depend_on_the_seed_and_on_nothing_else(self, tmp_path, checkpoint):
        state = torch.random.get_rng_state()
        again = make_tiny_checkpoint(tmp_path / "again", seed=0)
        other = make_tiny_checkpoint(tmp_path / "other", seed=1)
        assert torch.equal(torch.random.get_rng_state(), state)
        name = "model.layers.0.mlp.down_proj.weight"
        weight = load_file(checkpoint / "model.safetensors")[name]
        assert torch.equal(load_file(again / "model.safetensors")[name], weight)
        assert not torch.equal(load_file(other / "model.safetensors")[name], weight)

    def test_two_seeds_disagree_on_greedy_text(self, tmp_path, model):
        other = load_tiny_model(make_tiny_checkpoint(tmp_path, seed=1))
        assert_diverse([greedy_tokens(m, PROMPTS[0]) for m in (model, other)])

    def test_the_learnable_flavour_starts_near_the_uniform_distribution(self, tmp_path):
        model = load_tiny_model(make_tiny_checkpoint(tmp_path, diverse=False))
        assert len(model.model.layers) == 2
        uniform = -torch.log(torch.tensor(512.0))
        torch.testing.assert_close(
            token_log_probs(model, PROMPTS[0]).mean(), uniform, atol=0.5, rtol=0
        )

    def test_config_overrides_win(self, tmp_path):
        path = make_tiny_checkpoint(tmp_path, num_hidden_layers=1)
        assert json.loads((path / "config.json").read_text())["num_hidden_layers"] == 1

    def test_unknown_architecture_is_refused_by_name(self, tmp_path):
        with pytest.raises(ValueError, match=r"one of qwen2, qwen3, .*, got 'gpt'"):
            make_tiny_checkpoint(tmp_path / "new", architecture="gpt")
        assert not (tmp_path / "new").exists()


class TestOutputs:
    def test_log_probs_are_those_of_each_prefix(self, model):
        ids = PROMPTS[0]
        log_probs = token_log_probs(model, ids)
        assert log_probs.shape == (len(ids) - 1,)
        for i in (1, len(ids) - 1):
            logits = model(input_ids=torch.tensor([ids[:i]])).logits[0, -1]
            expected = logits.log_softmax(-1)[ids[i]].detach()
            torch.testing.assert_close(log_probs[i - 1], expected, atol=1e-4, rtol=0)

    def test_log_probs_notice_one_changed_tensor(self, checkpoint, model):
        changed = load_tiny_model(checkpoint)
        with torch.no_grad():
            changed.model.layers[2].mlp.down_proj.weight.zero_()
        difference = token_log_probs(changed, PROMPTS[0]) - token_log_probs(model, PROMPTS[0])
        assert difference.abs().max() > 0.1

    def test_log_probs_need_two_tokens(self, model):
        with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
            token_log_probs(model, [3])

    @pytest.mark.parametrize(
        ("outputs", "message"),
        [
            ([[1] * 32], "output 0 holds 1 distinct"),
            ([list(range(8)), list(range(8))], "two outputs are equal"),
        ],
    )
    def test_uniform_outputs_are_refused(self, outputs, message):
        with pytest.raises(AssertionError, match=message):
            assert_diverse(outputs)


def test_checkpoint_tokenizer_splits_like_the_one_it_was_made_with(tmp_path):
    text = "What is 3 + 4 = 71? They're 10% off,\n\n  naïve façade <|im_end|>"
    reloaded = AutoTokenizer.from_pretrained(make_tiny_checkpoint(tmp_path))
    assert reloaded(text)["input_ids"] == make_tiny_tokenizer()(text)["input_ids"]
