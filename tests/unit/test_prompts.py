import pickle
import re
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from torchrl_vllm_sync.errors import InvalidPromptError, UnsupportedArgumentError
from torchrl_vllm_sync.requests.prompts import as_requests, check_sampling_params
from torchrl_vllm_sync.service.requests import Requests

pytestmark = pytest.mark.filterwarnings(
    # Importing vLLM 0.32 on torch 2.11 and later.
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)

IDS = (5, 6, 7)


def encode(text):
    return [ord(letter) for letter in text]


def read(*args, **kwargs):
    return as_requests(*args, **{"encode": encode, "max_model_len": 8, **kwargs})


def tokens_prompt(ids, text=None, extras=()):
    """vLLM's ``TokensPrompt``."""
    return {"prompt_token_ids": list(ids), **dict(extras), **({"prompt": text} if text else {})}


@dataclass
class FakeSamplingParams:
    n: int = 1
    max_tokens: int | None = 16


ONE_PROMPT = {
    "list": (list(IDS), tokens_prompt(IDS)),
    "tuple": (IDS, tokens_prompt(IDS)),
    "one id": ([5], tokens_prompt((5,))),
    "numpy ids in a list": ([np.int64(5), np.uint8(6), 7], tokens_prompt(IDS)),
    "int64 tensor": (torch.tensor(IDS), tokens_prompt(IDS)),
    "uint8 tensor": (torch.tensor(IDS, dtype=torch.uint8), tokens_prompt(IDS)),
    "int32 array": (np.array(IDS, np.int32), tokens_prompt(IDS)),
    "uint16 array": (np.array(IDS, np.uint16), tokens_prompt(IDS)),
    "array that is a view": (np.arange(12)[5:8], tokens_prompt(IDS)),
}
ONE_PROMPT_BEYOND_IDS = {
    "text": ("ab", tokens_prompt((97, 98), "ab")),
    "TextPrompt": ({"prompt": "ab"}, tokens_prompt((97, 98), "ab")),
    "TokensPrompt": ({"prompt_token_ids": [5, 6, 7]}, tokens_prompt(IDS)),
    "TokensPrompt of a tensor": ({"prompt_token_ids": torch.tensor(IDS)}, tokens_prompt(IDS)),
    "TokensPrompt with its text": (
        {"prompt_token_ids": [5, 6, 7], "prompt": "ab"},
        tokens_prompt(IDS, "ab"),
    ),
    "TokensPrompt with extras": (
        {"prompt_token_ids": IDS, "cache_salt": "s", "multi_modal_data": {"image": "i"}},
        tokens_prompt(IDS, None, {"cache_salt": "s", "multi_modal_data": {"image": "i"}}),
    ),
    "None stands for absent": (
        {"prompt_token_ids": IDS, "prompt": None, "multi_modal_data": None},
        tokens_prompt(IDS),
    ),
}


@pytest.mark.parametrize("form", [*ONE_PROMPT, *ONE_PROMPT_BEYOND_IDS])
def test_one_prompt_alone_and_as_a_batch_of_one(form):
    prompt, record = {**ONE_PROMPT, **ONE_PROMPT_BEYOND_IDS}[form]

    assert read(prompt) == ([record], False)
    assert read([prompt]) == ([record], True)
    assert read((prompt,)) == ([record], True)


@pytest.mark.parametrize("form", ONE_PROMPT)
def test_prompt_token_ids_flat_is_one_prompt_and_nested_is_a_batch(form):
    ids, record = ONE_PROMPT[form]

    assert read(prompt_token_ids=ids) == ([record], False)
    assert read(prompt_token_ids=[ids]) == ([record], True)
    assert read(None, [ids, ids]) == ([record, record], True)


def test_a_batch_may_mix_every_form_and_keeps_its_order():
    forms = {**ONE_PROMPT, **ONE_PROMPT_BEYOND_IDS}.values()

    assert read([prompt for prompt, _ in forms]) == ([record for _, record in forms], True)


@pytest.mark.parametrize("form", [*ONE_PROMPT, *ONE_PROMPT_BEYOND_IDS])
def test_ids_are_plain_integers_and_records_survive_pickling(form):
    (record,) = read({**ONE_PROMPT, **ONE_PROMPT_BEYOND_IDS}[form][0])[0]

    assert set(map(type, record["prompt_token_ids"])) == {int}
    assert pickle.loads(pickle.dumps(record)) == record


def test_a_record_does_not_follow_the_list_it_was_read_from():
    ids = [5, 6, 7]
    (record,) = read(ids)[0]
    ids[0] = 99

    assert record["prompt_token_ids"] == list(IDS)


def test_a_tokens_prompt_is_what_was_given():
    prompt = {"prompt_token_ids": [5, 6, 7], "prompt": "ab", "cache_salt": "s"}

    assert read(prompt)[0][0] == prompt
    assert read([5, 6, 7])[0][0] == {"prompt_token_ids": [5, 6, 7]}


BAD_PROMPTS = {
    "empty text": ("", " must not be empty, got ''"),
    "empty array": (np.array([], np.int64), " must have at least 1 token, got 0"),
    "empty ids in a dict": (
        {"prompt_token_ids": []},
        "['prompt_token_ids'] must have at least 1 token, got 0",
    ),
    "bool": (True, " must be text, token ids, or a dict with 'prompt' or"),
    "float": (1.5, " must be text, token ids, or a dict"),
    "bytes": (b"ab", "got bytes b'ab'"),
    "set": ({5}, "got set {5}"),
    "generator": ((i for i in IDS), "got generator"),
    "negative id": (
        [5, -1],
        " must have ids of at least 0 and below 2**31, got -1 at token 1",
    ),
    "id beyond 32 bits": ([2**31], "got 2147483648 at token 0"),
    "bool id": ([5, True], " must have integer ids, got bool True at token 1"),
    "bool ids": ([True, False], "got bool True at token 0"),
    "float id": ([1.0, 2.0], "got float 1.0 at token 0"),
    "text among ids": ([5, "a"], "got str 'a' at token 1"),
    "None among ids": ([5, None], "got NoneType None at token 1"),
    "float tensor": (torch.ones(2), " must have an integer dtype, got torch.float32"),
    "bool tensor": (torch.ones(2, dtype=torch.bool), "got torch.bool"),
    "float array": (np.ones(2), "got float64"),
    "array of text": (np.array(["a"]), " must have an integer dtype, got <U1"),
    "padded batch as tensor": (torch.ones(2, 3).long(), " must have 1 dimension, got shape (2, 3)"),
    "scalar array": (np.array(5), "got shape ()"),
    "as long as the context": (list(range(8)), " must have fewer tokens than max_model_len=8"),
    "longer, as text": ("abcdefghi", "max_model_len=8, so that one more fits, got 9"),
    "empty dict": ({}, " must have 'prompt' or 'prompt_token_ids', got []"),
    "extras alone": ({"cache_salt": "s"}, "got ['cache_salt']"),
    "unknown key": ({"prompt_token_ids": IDS, "promt": "a"}, "got ['promt']"),
    "embeddings": ({"prompt_embeds": torch.ones(2, 2)}, "got ['prompt_embeds']"),
    "text under ids": ({"prompt_token_ids": "ab"}, " must be token ids, got str 'ab'"),
    "ids under text": ({"prompt": [5]}, "['prompt'] must be text, got list [5]"),
    "salt": ({"prompt": "a", "cache_salt": 3}, "['cache_salt'] must be text, got int 3"),
    "long value": (b"x" * 1000, "xxx..."),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_by_place_rule_and_value(case):
    prompt, message = BAD_PROMPTS[case]

    with pytest.raises(InvalidPromptError, match=f"prompts.*{re.escape(message)}") as alone:
        read(prompt)
    assert len(str(alone.value)) < 250

    if case != "generator":  # exhausted by its first reading, and refused either way
        with pytest.raises(InvalidPromptError, match=rf"prompts\[1\].*{re.escape(message)}"):
            read(["ok", prompt, "ok"])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((None, None), "got None for both"),
        (("a", [5]), "got both"),
        (([], None), "prompts must hold at least one prompt, got []"),
        (((), None), "prompts must hold at least one prompt, got ()"),
        ((None, []), "prompt_token_ids must hold at least one prompt, got []"),
        ((None, [[]]), "prompt_token_ids[0] must have at least 1 token"),
        ((["a", None], None), "prompts[1] must be text"),
        (([[5], 6], None), "prompts[1] must be text, token ids"),
        (([[[5], [6]]], None), "prompts[0] must have integer ids, got list [5] at token 0"),
        ((None, "ab"), "prompt_token_ids must be token ids, got str 'ab'"),
        ((None, ["ab"]), "prompt_token_ids[0] must be token ids, got str 'ab'"),
        ((None, [{"prompt_token_ids": [5]}]), "prompt_token_ids[0] must be token ids, got dict"),
        ((None, [[5], list(range(9))]), "prompt_token_ids[1] must have fewer tokens"),
    ],
)
def test_a_bad_call_is_refused(args, message):
    with pytest.raises(InvalidPromptError, match=re.escape(message)):
        read(*args)


def test_text_without_an_encoder_is_refused_and_asks_for_ids():
    with pytest.raises(InvalidPromptError, match=r"prompts\[1\] is text .* pass token ids"):
        read([[5], "ab"], encode=None)
    given = {"prompt": "ab", "prompt_token_ids": [5]}
    assert read(given, encode=None)[0] == [tokens_prompt((5,), "ab")]


def test_a_service_refuses_text_without_a_tokenizer_and_adapters_for_each_prompt():
    settings = SimpleNamespace(
        request_timeout_s=9.0, engine_args=SimpleNamespace(skip_tokenizer_init=True)
    )
    members = [SimpleNamespace(description=SimpleNamespace(max_model_len=8, vocab_size=300))]
    replicas = SimpleNamespace(
        settings=settings,
        require=lambda: SimpleNamespace(members=members),
        answering=None,
        load=None,
    )
    requests = Requests(replicas, None, lambda: False)
    assert requests.prepare(IDS, None, None).requests[0].prompt == tokens_prompt(IDS)
    with pytest.raises(InvalidPromptError, match=r"prompts is text .* pass token ids"):
        requests.prepare("ab", None, None)
    with pytest.raises(UnsupportedArgumentError, match=r"LoRARequest, for all prompts, got \['a'"):
        requests.prepare([IDS, IDS], None, None, ["a", "b"])


def test_what_the_encoder_returns_is_checked_too():
    with pytest.raises(InvalidPromptError, match=r"encode\(prompts\) must be token ids, got dict"):
        read("ab", encode=lambda text: {"input_ids": [5]})
    with pytest.raises(InvalidPromptError, match=r"encode\(prompts\) must have at least 1 token"):
        read("ab", encode=lambda text: [])


def test_limits_at_their_edges():
    assert len(read(list(range(7)))[0][0]["prompt_token_ids"]) == 7
    assert len(read(list(range(100)), max_model_len=None)[0][0]["prompt_token_ids"]) == 100
    assert read([2**31 - 1])[0] == [tokens_prompt((2**31 - 1,))]
    assert read([9], vocab_size=10)[0] == [tokens_prompt((9,))]
    with pytest.raises(InvalidPromptError, match="below vocab_size=10, got 10 at token 1"):
        read([9, 10], vocab_size=10)


def test_sampling_params_are_paired_with_prompts():
    first, second = FakeSamplingParams(), FakeSamplingParams(n=2)

    assert check_sampling_params(None, 2) == [None, None]
    assert check_sampling_params(first, 2) == [first, first]
    assert check_sampling_params([first, second], 2) == [first, second]
    assert check_sampling_params((first,), 1) == [first]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([FakeSamplingParams()], "one entry for each of the 2 prompts, got 1"),
        ([], "one entry for each of the 2 prompts, got 0"),
        ({"n": 1}, "sampling_params must be a SamplingParams, got dict {'n': 1}"),
        (
            [FakeSamplingParams(), None],
            r"sampling_params[1] must be a SamplingParams, got NoneType",
        ),
    ],
)
def test_sampling_params_that_do_not_fit_are_refused(given, message):
    with pytest.raises(InvalidPromptError, match=re.escape(message)):
        check_sampling_params(given, 2)


def test_the_installed_vllm_agrees():
    inputs = pytest.importorskip("vllm.inputs")
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=4)
    assert check_sampling_params(params, 1) == [params]
    for key in inputs.TokensPrompt.__annotations__.keys() - {"prompt", "prompt_token_ids"}:
        prompt = {"prompt_token_ids": [5], key: "value"}
        assert read(prompt)[0][0] == prompt
