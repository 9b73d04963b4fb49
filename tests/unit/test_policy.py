"""The wrapper's rows are TorchRL's, entry by entry, and its stamps what the outputs say."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from tensordict import (
    NonTensorData,
    TensorDict,
    is_tensor_collection,
    lazy_stack,
    set_list_to_stack,
)
from torchrl.data.llm import History
from torchrl.modules.llm import vLLMWrapper as TorchRLWrapper
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens

from tests.unit.test_columns import across_ray
from torchrl_vllm_sync import AsyncVLLM, VersionSpan, vLLMWrapper
from torchrl_vllm_sync.requests.columns import PackedResults
from torchrl_vllm_sync.requests.messages import EngineRequest, EngineResult, SampleReport
from torchrl_vllm_sync.rl import keys
from torchrl_vllm_sync.testing import make_tiny_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Response history should have one more batch dim"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
TOKENIZER = make_tiny_tokenizer()
TEXTS = ["What else is there?", "Tell me more, please.", "Hello 🦊", "Every replica serves"]


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


class CannedService(AsyncVLLM):
    """Answers each prompt with tokens, log-probabilities and reports drawn from it."""

    def __init__(self, *, lengths=(3, 9), seed=0):
        self.lengths, self.seed, self.calls = lengths, seed, []

    def release_sessions(self, session_ids):
        pass

    def generate(self, prompts, sampling_params, **kwargs):
        self.calls.append(kwargs)
        generator = np.random.default_rng(self.seed)
        is_batch = isinstance(prompts, list)
        requests = []
        for prompt in prompts if is_batch else [prompts]:
            if isinstance(prompt, str):
                prompt = {"prompt_token_ids": TOKENIZER.encode(prompt), "prompt": prompt}
            requests.append(
                EngineRequest(
                    request_id="r", prompt=prompt, sampling_params=sampling_params, timeout_s=9.0
                )
            )
        results = [self.answer(one, generator) for one in requests]
        packed = across_ray(PackedResults(results, want_prompt=False))
        outputs = [
            result.output.unread(result, request)
            for result, request in zip(packed, requests, strict=True)
        ]
        return outputs if is_batch else outputs[0]

    def answer(self, request, generator):
        from vllm.outputs import CompletionOutput, RequestOutput

        params, samples, reports = request.sampling_params, [], []
        for index in range(params.n):
            length = int(generator.integers(*self.lengths, endpoint=True))
            ids = generator.integers(3, 500, length).tolist()
            samples.append(
                CompletionOutput(
                    index,
                    "",
                    ids,
                    None,
                    flat(ids, generator) if params.logprobs is not None else None,
                    finish_reason=str(generator.choice(["stop", "length"])),
                )
            )
            cut = length // 2
            spans = (VersionSpan(3, 0, cut), VersionSpan(5, cut, length)) if cut else ()
            spans = spans or ((VersionSpan(4, 0, length),) if length else ())
            known = bool(generator.integers(2))
            reports.append(
                SampleReport(
                    spans=spans,
                    num_cached_tokens=32 if known else None,
                    queue_s=0.5 if known else None,
                    prefill_s=0.25,
                    decode_s=None,
                )
            )
        ids = request.prompt["prompt_token_ids"]
        prompt_log_probs = None
        if params.prompt_logprobs is not None:
            prompt_log_probs = flat(ids[1:], generator, first=None)
        return EngineResult(
            request_id="r",
            replica_id="1",
            output=RequestOutput("r", None, list(ids), prompt_log_probs, samples, True),
            samples=tuple(reports),
            version=6,
        )


def flat(ids, generator, **first):
    from vllm.logprobs import FlatLogprobs, Logprob

    made = FlatLogprobs()
    for one in first.values():
        made.append(one)
    for token in ids:
        value = float(np.float32(-5 * generator.random()))
        made.append({token: Logprob(value, 2), 1 + token: Logprob(-0.25, 1)})
    return made


def conversations(number):
    """Prompts of one to three messages."""
    chats = []
    for at in range(number):
        messages = [{"role": "user", "content": TEXTS[at % 4]}]
        chats.append(messages)
    return chats


def asked(mode, shape, *, lazy):
    number = int(torch.Size(shape).numel())
    texts = [TEXTS[i % 4] for i in range(number)]
    if mode == "history":
        chats = History.from_chats(conversations(number))
        data = TensorDict(history=ChatHistory(prompt=chats, batch_size=number), batch_size=number)
    elif mode == "text":
        data = TensorDict(text=Text(prompt=texts, batch_size=number), batch_size=number)
    else:
        encoded = TOKENIZER(texts, padding=True, padding_side="left", return_tensors="pt")
        tokens = Tokens(prompt=encoded["input_ids"], batch_size=number)
        data = TensorDict(tokens=tokens, batch_size=number)
    data["mine"] = torch.arange(number)
    if lazy:
        data = lazy_stack(list(data.unbind(0)))
    return data[0] if shape == () else data.reshape(shape)


def policy_of(kind, *, mode, service=None, **kwargs):
    sampling = {"max_tokens": 6, "prompt_logprobs": None, **kwargs.pop("sampling", {})}
    return kind(
        service or CannedService(),
        tokenizer=TOKENIZER,
        input_mode=mode,
        generate_kwargs=sampling,
        **{"pad_output": False, "return_log_probs": True, **kwargs},
    )


def assert_same_rows(found, wanted, path=()):
    """Types, batch sizes and values are the same, whole and row by row."""
    assert type(found) is type(wanted), path
    if is_tensor_collection(wanted) and not isinstance(wanted, NonTensorData):
        assert found.batch_size == wanted.batch_size, path
        assert set(found.keys()) == set(wanted.keys()), path
        for key in wanted.keys():  # noqa: SIM118  a TensorDict
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                entries = [entry_of(one, key) for one in (found, wanted)]
            assert_same_rows(*entries, (*path, key))
        if wanted.batch_dims:
            for at, rows in enumerate(zip(found.unbind(0), wanted.unbind(0), strict=True)):
                assert_same_rows(*rows, (*path, at))
    elif isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype, path
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=str(path))
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), path
        for at, pair in enumerate(zip(found, wanted, strict=True)):
            assert_same_rows(*pair, (*path, at))
    elif hasattr(wanted, "tolist"):
        assert found.tolist() == wanted.tolist(), path
    else:
        assert found == wanted, path


def entry_of(rows, key):
    """An entry of all rows; as a list where the rows differ in shape."""
    try:
        return rows.get(key)
    except RuntimeError:
        return rows.get(key, as_list=True)


CASES = list(itertools.product(["history", "text", "tokens"], [False, True], [None, 2]))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (5,)], ids=str)
@pytest.mark.parametrize(("mode", "pad_output", "num_samples"), CASES)
def test_rows_are_those_of_torchrl(mode, pad_output, num_samples, shape, lazy):
    settings = {"mode": mode, "pad_output": pad_output, "num_samples": num_samples}
    theirs = policy_of(TorchRLWrapper, **settings)(asked(mode, shape, lazy=lazy))
    mine = policy_of(vLLMWrapper, **settings)(asked(mode, shape, lazy=lazy))
    stamps = [keys.POLICY_VERSION, keys.MAX_POLICY_VERSION, keys.POLICY_VERSIONS]
    stamps += [keys.FINISH_REASON, keys.GENERATION]
    assert set(mine.keys()) - set(theirs.keys()) == set(stamps)
    assert_same_rows(mine.exclude(*stamps), theirs)
