"""Sampling that a loss cannot correct for is refused by name, and masks say what was removed."""

import logging
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import set_list_to_stack
from torchrl.data.llm import History
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies import ChatHistory

from tests.unit.test_policy import TOKENIZER, CannedService, asked, policy_of, retold, swap
from torchrl_vllm_sync import TrainerPolicy, vLLMWrapper
from torchrl_vllm_sync.errors import (
    RowLayoutError,
    TokenizerMismatchError,
    UncorrectableSamplingError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.rl import rows as keys
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:Response history should have one more batch dim"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
]
RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
# TorchRL's wrapper does not hand these on; they can be set all the same.
PASSED_OVER = {"min_p", "min_tokens", "bad_words", "allowed_token_ids", "logit_bias"}
PASSED_OVER |= {"watermarking"}
MARKED = {"engine": {"watermark_config": {"key": 1}}}
COOL = SimpleNamespace(temperature=0.7)
MASKED = {"return_sampling_mask": True}


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny_model(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


class MaskedService(CannedService):
    """Answers whose log-probabilities list what could be sampled: some tokens, equally likely."""

    def __init__(self, mode=PROCESSED, *, listed=1.0, **engine):
        super().__init__()
        given = {"logprobs_mode": mode, **engine}
        self.engine_args = SimpleNamespace(**vars(CannedService.engine_args) | given)
        self.listed = listed

    def answer(self, request, generator):
        from vllm.logprobs import FlatLogprobs

        made, width = super().answer(request, generator), request.sampling_params.logprobs
        for sample in made.output.outputs if (width or 0) > 1 else ():
            sample.logprobs = FlatLogprobs()
            for token in sample.token_ids:
                num = int(generator.integers(1, request.sampling_params.top_k or width))
                others = generator.choice([*{*range(500)} - {token}], width - 1, replace=False)
                at = int(generator.integers(num))
                ids = [*others[:at], token, *others[at:]]
                values = [math.log(self.listed / num)] * num + [-math.inf] * (width - num)
                ids, values = [token, *map(int, ids)], [values[at], *values]
                sample.logprobs.append_fast(ids, values, iter(range(99)), [None] * 99)
        return made


def sample_with(sampling, mode=PROCESSED, **settings):
    service = MaskedService(mode, **settings.pop("engine", {}))
    given = {"temperature": 1.0, **sampling}
    own = {name: given.pop(name) for name in PASSED_OVER & given.keys()}
    policy = policy_of(vLLMWrapper, mode="history", service=service, sampling=given, **settings)
    for name, value in own.items():
        setattr(policy.sampling_params, name, value)
    return policy(asked("history", (3,), lazy=True)), policy


# Sampling, mode, settings of the wrapper, and the setting that is refused with what is to be done.
RIGHT = [
    ({}, RAW, {}),
    ({}, PROCESSED, {}),
    ({"top_p": 1.0, "min_p": 0.0, "logit_bias": None, "bad_words": []}, RAW, {}),
    ({"seed": 3, "stop_token_ids": [5], "ignore_eos": True, "n": 2}, RAW, {}),
    ({"temperature": 0.7}, PROCESSED, {"trainer": COOL}),
    ({"temperature": 0.0, "presence_penalty": 0.5, "top_p": 0.5}, RAW, {}),
    ({"temperature": 0.7, "top_p": 0.5, "presence_penalty": 1}, RAW, {"return_log_probs": False}),
    ({"top_k": 9, "top_p": 0.9, "min_p": 0.1, "min_tokens": 2}, PROCESSED, MASKED),
    ({"watermarking": True}, RAW, {}),  # without a key
    ({"watermarking": False}, RAW, MARKED),
]
WRONG = [
    ({"temperature": 0.7}, RAW, {}, "temperature", "TrainerPolicy(temperature=0.7)"),
    ({"temperature": 0.7}, PROCESSED, {}, "temperature", "TrainerPolicy(temperature=0.7)"),
    ({"temperature": 0.7}, RAW, {"trainer": COOL}, "temperature", "with logprobs_mode='proc"),
    ({}, PROCESSED, {"trainer": COOL}, "temperature", "the loss computes at 0.7"),
    ({"top_p": 0.9}, RAW, {}, "top_p", "with logprobs_mode='processed_logprobs', pass return_"),
    ({"top_p": 0.9}, PROCESSED, {}, "top_p", "leave it out, or pass return_sampling_mask=True"),
    ({"top_k": 9}, PROCESSED, {}, "top_k", "return_sampling_mask=True"),
    ({"min_p": 0.1}, PROCESSED, {}, "min_p", "return_sampling_mask=True"),
    ({"min_tokens": 3}, PROCESSED, {}, "min_tokens", "return_sampling_mask=True"),
    ({"bad_words": ["no"]}, PROCESSED, {}, "bad_words", "return_sampling_mask=True"),
    ({"allowed_token_ids": [4]}, PROCESSED, {}, "allowed_token_ids", "return_sampling_mask"),
    ({"presence_penalty": 0.5}, PROCESSED, {}, "presence_penalty", "no loss can tell"),
    ({"frequency_penalty": 0.5}, RAW, {}, "frequency_penalty", "no loss can tell"),
    ({"repetition_penalty": 1.1}, PROCESSED, {}, "repetition_penalty", "no loss can tell"),
    ({"logit_bias": {4: 2.0}}, PROCESSED, {}, "logit_bias", "no loss can tell"),
    ({"top_k": 9, "logit_bias": {4: 2.0}}, PROCESSED, MASKED, "logit_bias", "no loss can tell"),
    ({"top_k": 9}, PROCESSED, MASKED | {"trainer": SimpleNamespace()}, "top_k", "TrainerPolicy"),
    ({}, "processed_logits", {}, "logprobs_mode", "no log-probabilities"),
    ({}, RAW, {"engine": {"logits_processors": ["mine"]}}, "logits_processors", "leave it out"),
    ({}, RAW, MARKED, "watermarking", "set watermarking=False"),
    ({"top_k": 9}, PROCESSED, MASKED | MARKED, "watermarking", "set watermarking=False"),
]


def test_a_watermark_has_all_samples_of_a_prompt_begin_alike():
    """Why it is refused: vLLM's draws nothing."""
    from vllm.v1.watermarking import GumbelWatermarker

    logits, prompt = torch.randn(1, 500).expand(64, 500), torch.tensor([[1, 2, 3, 4]])
    drawn = GumbelWatermarker(key=1).sample(logits, prompt.expand(64, 4)).token_ids
    assert len(drawn.unique()) == 1
    assert len(torch.multinomial(logits[0].softmax(-1), 64).unique()) > 1


@pytest.mark.parametrize(("sampling", "mode", "settings"), RIGHT)
def test_what_a_loss_can_take_is_sampled(sampling, mode, settings):
    rows, _ = sample_with(sampling, mode, **settings)
    assert len(rows) == 3
    assert keys.UNCORRECTED not in rows[0].reshape(-1)[0].keys(include_nested=True)


@pytest.mark.parametrize(("sampling", "mode", "settings", "name", "remedy"), WRONG)
def test_what_it_cannot_is_refused_by_name_or_noted(sampling, mode, settings, name, remedy, caplog):
    with pytest.raises(UncorrectableSamplingError) as refused:
        sample_with(sampling, mode, **settings)
    assert [*refused.value.settings] == [name]
    assert remedy in str(refused.value)
    assert f"allow=('{name}',)" in str(refused.value)
    assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)
    with caplog.at_level(logging.WARNING, "torchrl_vllm_sync"):
        rows, policy = sample_with(sampling, mode, allow=(name,), **settings)
        policy(asked("history", (3,), lazy=True))
    assert all(name in row[keys.UNCORRECTED] for row in rows.unbind(0))
    assert [name in one.getMessage() for one in caplog.records] == [True]


def test_all_that_is_wrong_is_named_together():
    with pytest.raises(UncorrectableSamplingError) as refused:
        sample_with({"temperature": 0.7, "top_p": 0.9, "presence_penalty": 1}, allow=["top_p"])
    assert [*refused.value.settings] == ["temperature", "presence_penalty"]
    with pytest.raises(UnsupportedArgumentError, match=r"'top_p'.*got \['topp'\]"):
        sample_with({}, allow=["topp"])


def test_parameters_of_a_call_are_judged_too():
    _, policy = sample_with({})
    with pytest.raises(UncorrectableSamplingError, match=r"top_p=0\.5"):
        policy(asked("history", (3,), lazy=True), top_p=0.5, logprobs=0)


def trainer_of(model, **settings):
    given = {"tokenizer": TOKENIZER, "input_mode": "history", "generate": False} | settings
    return TransformersWrapper(model, return_log_probs=True, **given)


def test_a_trainer_that_reads_chats_must_read_the_same(model):
    sample_with({}, trainer=trainer_of(model))
    template = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
    with pytest.raises(UncorrectableSamplingError, match=r"chat_template=.*makes 'ab' of it"):
        sample_with({}, trainer=trainer_of(model, chat_template=template))
    sample_with({}, trainer=trainer_of(model, chat_template=template, input_mode="tokens"))
    short = trainer_of(model, tokenizer_kwargs={"truncation": True, "max_length": 9})
    with pytest.raises(UncorrectableSamplingError, match="truncation=True"):
        sample_with({}, trainer=short)
    with pytest.raises(TokenizerMismatchError, match="the trainer's"):
        sample_with({}, trainer=trainer_of(model, tokenizer=retold(swap)))


def test_a_policy_does_not_take_its_trainer_along(model):
    _, policy = sample_with({"temperature": 0.7}, trainer=TrainerPolicy(model, temperature=0.7))
    assert not [*policy.parameters()]
    twin = policy.get_new_version(generate_kwargs={"temperature": 0.7})
    twin(asked("history", (3,), lazy=True))
    assert pickle.loads(pickle.dumps(policy.trainer)).temperature == 0.7


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_masks_hold_what_the_engine_listed(mode, read, pad_output):
    service, sampling = MaskedService(), {"top_k": 9, "top_p": 0.9}
    generate = service.generate

    def generate_and_read(*args, **kwargs):
        made = generate(*args, **kwargs)
        assert not read or [one.outputs[0].logprobs[:1] for one in made]
        return made

    service.generate = generate_and_read
    settings = MASKED | {"sampling": sampling, "service": service, "pad_output": pad_output}
    policy = policy_of(vLLMWrapper, mode=mode, **settings)
    rows = policy(asked(mode, (4,), lazy=True))
    for row, output in zip(rows.unbind(0), service.outputs, strict=True):
        mask, (sample,) = row[keys.SAMPLING_MASK], output.outputs
        assert mask.dtype == torch.int32
        assert mask.shape == (*row["tokens", "response"].shape, 17)
        assert len(sample.logprobs[0]) >= 17
        for ids, token, entries in zip(mask, sample.token_ids, sample.logprobs, strict=False):
            wanted = {one for one, its in entries.items() if np.isfinite(its.logprob)}
            assert {*ids.tolist()} - {keys.NO_TOKEN} == wanted
            assert token in wanted
        assert (mask[len(sample.token_ids) :] == keys.NO_TOKEN).all()


def test_greedy_rows_have_masks_that_remove_nothing():
    rows, _ = sample_with({"temperature": 0.0, "top_p": 0.9}, **MASKED)
    assert all((row[keys.SAMPLING_MASK] == keys.NO_TOKEN).all() for row in rows.unbind(0))


def test_masks_that_are_not_whole_are_refused():
    with pytest.raises(RowLayoutError, match=r"row 0, token 0: the 17 likeliest .* 0\.9800 of"):
        sample_with({"top_k": 9}, engine={"listed": 0.98}, **MASKED)


@pytest.mark.parametrize(
    ("sampling", "engine", "message"),
    [
        ({"top_p": 0.9}, {}, "needs top_k above 0"),
        ({"top_k": 9}, {"mode": RAW}, "needs engines launched with logprobs_mode='processed"),
        ({"top_k": 9}, {"max_logprobs": 16}, "needs engines launched with max_logprobs=17"),
    ],
)
def test_masks_that_engines_cannot_give_are_not_asked_for(sampling, engine, message):
    with pytest.raises(UnsupportedArgumentError, match=message):
        sample_with(sampling, engine.pop("mode", PROCESSED), engine=engine, **MASKED)


# ---------------------------------------------------------------- routed experts


class RoutedService(MaskedService):
    """Answers with what vLLM says of its experts: of all tokens but the last, prompt and answer."""

    missing = 0

    def __init__(self, **engine):
        super().__init__(enable_return_routed_experts=True, **engine)

    def answer(self, request, generator):
        made = super().answer(request, generator)
        for sample in made.output.outputs:
            num = len(request.prompt["prompt_token_ids"]) + len(sample.token_ids) - 1
            shape = num - self.missing, 3, 2
            sample.routed_experts = generator.integers(0, 200, shape).astype(np.uint8)
        return made


@pytest.mark.parametrize("pad_output", [True, False])
@pytest.mark.parametrize("mode", ["history", "tokens"])
def test_experts_stand_at_the_tokens_that_they_computed(mode, pad_output):
    service = RoutedService()
    policy = policy_of(vLLMWrapper, mode=mode, service=service, pad_output=pad_output)
    rows = policy(asked(mode, (4,), lazy=True))
    for row, output in zip(rows.unbind(0), service.outputs, strict=True):
        assert_routed(row, output)


def test_they_do_in_dense_rows():
    service = RoutedService()
    policy = policy_of(vLLMWrapper, mode="history", service=service)
    chats = [[{"role": "user", "content": text}] for text in ("Hello", "Tell me more, please")]
    rows = policy.answer_chats(chats, [0, 0, 1])
    for row, output in zip(rows.unbind(0), service.outputs, strict=True):
        assert_routed(row, output)


def test_a_turn_has_the_experts_and_masks_of_its_own_tokens():
    service = RoutedService()
    settings = {"service": service, "sampling": {"top_k": 9}, **MASKED}
    policy = policy_of(vLLMWrapper, mode="history", **settings)
    rows = policy(asked("history", (3,), lazy=True))
    chats = [one.tolist(tolist_first=True) for one in rows["history"].full.unbind(0)]
    chats = [[{name: one[name] for name in ("role", "content")} for one in chat] for chat in chats]
    again = History.from_chats([[*chat, {"role": "user", "content": "And?"}] for chat in chats])
    service.seed = 1
    next_rows = rows.clone(False)  # with all that the last turn had
    next_rows["history"] = ChatHistory(prompt=again, batch_size=3)
    next_rows = policy(next_rows)
    for row, before, output in zip(*map(list, (next_rows, rows, service.outputs)), strict=True):
        assert len(row["tokens", "full"]) > len(before["tokens", "full"])
        assert int(row["turns", "kept"]) == len(before["tokens", "full"])
        assert_routed(row, output)
        (sample,) = output.outputs
        for mask, entries in zip(row[keys.SAMPLING_MASK], sample.logprobs, strict=True):
            listed = {one for one, its in entries.items() if np.isfinite(its.logprob)}
            assert {*mask.tolist()} - {keys.NO_TOKEN} == listed


def assert_routed(row, output):
    experts, tokens = row[keys.ROUTED_EXPERTS], row["tokens", "full"]
    assert experts.dtype == torch.int16
    assert experts.shape == (*tokens.shape, 3, 2)
    mask = row["masks", "all_attention_mask"]
    there = experts[mask]
    assert there[:-1].tolist() == output.outputs[0].routed_experts.tolist()
    assert (there[-1] == keys.NO_EXPERT).all()
    assert (experts[~mask] == keys.NO_EXPERT).all()


def test_experts_of_fewer_tokens_are_refused():
    service = RoutedService()
    service.missing = 1
    with pytest.raises(RowLayoutError, match=r"routed_experts.*row 0: \d+ for \d+ tokens"):
        policy_of(vLLMWrapper, mode="history", service=service)(asked("history", (2,), lazy=True))
