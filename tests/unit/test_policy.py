"""The wrapper's rows are TorchRL's, entry by entry, and its stamps what the outputs say."""

import itertools
import json
import pickle
import warnings
from types import SimpleNamespace

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
from tokenizers import Tokenizer
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.data.llm import History
from torchrl.modules.llm import vLLMWrapper as TorchRLWrapper
from torchrl.modules.llm.policies import ChatHistory, Text, Tokens

from tests.unit.test_columns import across_ray
from torchrl_vllm_sync import AsyncVLLM, VersionSpan, expand_spans, vLLMWrapper
from torchrl_vllm_sync.errors import TokenizerMismatchError, UnsupportedArgumentError
from torchrl_vllm_sync.requests.messages import (
    EngineRequest,
    EngineResult,
    PackedResults,
    SampleReport,
)
from torchrl_vllm_sync.rl import rows as keys
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

    engine_args = SimpleNamespace(
        skip_tokenizer_init=False,
        tokenizer=None,
        model="a model",
        logprobs_mode="processed_logprobs",
        max_logprobs=256,
        logits_processors=None,
    )
    requests = SimpleNamespace(tokenizer=lambda: TOKENIZER)

    def __init__(self, *, lengths=(3, 9), seed=0):
        self.lengths, self.seed = lengths, seed

    def release_sessions(self, session_ids):
        pass

    def generate(self, prompts, sampling_params, **kwargs):
        generator = np.random.default_rng(self.seed)
        is_batch = isinstance(prompts, list)
        requests = []
        many = isinstance(sampling_params, list)
        for at, prompt in enumerate(prompts if is_batch else [prompts]):
            params = sampling_params[at] if many else sampling_params
            if isinstance(prompt, str):
                prompt = {"prompt_token_ids": TOKENIZER.encode(prompt), "prompt": prompt}
            requests.append(
                EngineRequest(request_id="r", prompt=prompt, sampling_params=params, timeout_s=9.0)
            )
        results = [self.answer(one, generator) for one in requests]
        packed = across_ray(PackedResults(results))
        outputs = [
            result.output.unread(result, request)
            for result, request in zip(packed, requests, strict=True)
        ]
        self.outputs = outputs
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
    """A message each."""
    return [[{"role": "user", "content": TEXTS[at % 4]}] for at in range(number)]


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
    defaults = {"tokenizer": TOKENIZER, "pad_output": False, "return_log_probs": True}
    return kind(
        service or CannedService(),
        input_mode=mode,
        generate_kwargs=sampling,
        **{**defaults, **kwargs},
    )


def assert_same_rows(found, wanted, path=()):
    """Types, batch sizes and values are the same, whole and row by row."""
    assert type(found) is type(wanted), path
    if is_tensor_collection(wanted) and not isinstance(wanted, NonTensorData):
        assert found.batch_size == wanted.batch_size, path
        assert set(found.keys()) == set(wanted.keys()), (path, *wanted.keys())
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


STAMPS = [
    keys.POLICY_VERSION,
    keys.MAX_POLICY_VERSION,
    keys.POLICY_VERSIONS,
    keys.FINISH_REASON,
    keys.GENERATION,
    keys.TURNS,
]


def assert_rows_are_torchrls(make_rows, *, lengths=(3, 9), **settings):
    theirs, mine = (
        policy_of(kind, service=CannedService(lengths=lengths), **settings)(make_rows())
        for kind in (TorchRLWrapper, vLLMWrapper)
    )
    has_turns = settings["mode"] == "history" and not settings.get("prefer_tokens")
    stamped = {*STAMPS} if has_turns else {*STAMPS} - {keys.TURNS}
    assert set(mine.keys()) - set(theirs.keys()) == stamped
    assert_same_rows(mine.exclude(*STAMPS), theirs)
    return mine


CASES = list(itertools.product(["history", "text", "tokens"], [False, True], [None, 2]))


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (5,)], ids=str)
@pytest.mark.parametrize(("mode", "pad_output", "num_samples"), CASES)
def test_rows_are_those_of_torchrl(mode, pad_output, num_samples, shape, lazy):
    assert_rows_are_torchrls(
        lambda: asked(mode, shape, lazy=lazy),
        mode=mode,
        pad_output=pad_output,
        num_samples=num_samples,
    )


SETTINGS = {
    "without log-probs": {"return_log_probs": False},
    "of the prompt, too": {"sampling": {"prompt_logprobs": 1}},
    "new rows": {"inplace": False},
    "rows of their own": {"inplace": "empty"},
    "TorchRL's template": {"chat_template_name": "qwen"},
    "the tokenizer's template": {"chat_template": TOKENIZER.chat_template},
    "answers without tokens": {"lengths": (0, 2)},
    "nothing but the end": {"lengths": (0, 0)},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_so_they_are_with_every_setting(mode, pad_output, setting):
    if mode != "text" and pad_output and setting == "of the prompt, too":
        pytest.skip("TorchRL pads these on the other side than their tokens: see the next test")
    settings = {"mode": mode, "pad_output": pad_output, **SETTINGS[setting]}
    assert_rows_are_torchrls(lambda: asked(mode, (4,), lazy=True), **settings)


@pytest.mark.parametrize("mode", ["history", "tokens"])
def test_log_probs_of_prompts_stand_with_their_tokens_where_rows_are_padded(mode):
    settings = {"mode": mode, "sampling": {"prompt_logprobs": 1}}
    padded, ragged = (
        policy_of(vLLMWrapper, pad_output=is_padded, **settings)(asked(mode, (4,), lazy=True))
        for is_padded in (True, False)
    )
    wanted = ragged.get(("log_probs", "prompt"), as_list=True)
    assert len({*map(len, wanted)}) > 1
    for found, one in zip(padded["log_probs", "prompt"], wanted, strict=True):
        assert torch.equal(found[-len(one) :], one)


@pytest.mark.parametrize("pad_output", [False, True])
def test_so_they_are_in_the_second_turn(pad_output):
    def second():
        first = policy_of(TorchRLWrapper, mode="history", pad_output=pad_output)
        full = first(asked("history", (3,), lazy=True))["history"].full
        asks = History(role="user", content="And then?", batch_size=(3, 1))
        chats = lazy_stack(
            [
                one.extend(two, dim=-1)
                for one, two in zip(full.unbind(0), asks.unbind(0), strict=True)
            ]
        )
        return TensorDict(history=ChatHistory(prompt=chats, batch_size=3), batch_size=3)

    assert_rows_are_torchrls(second, mode="history", pad_output=pad_output)


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("name", ["prompt", "full"])
def test_so_they_are_where_tokens_are_preferred(pad_output, name):
    def tokenised():
        rows = asked("history", (3,), lazy=True)
        tokens = torch.randint(3, 500, (3, 7), generator=torch.Generator().manual_seed(0))
        rows.set(("tokens", name), tokens)
        return rows

    assert_rows_are_torchrls(tokenised, mode="history", pad_output=pad_output, prefer_tokens=True)


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("name", ["prompt", "full"])
def test_preferred_tokens_may_be_of_unequal_lengths(pad_output, name):
    """As TorchRL's ``IncrementalTokenizer`` gives them; its own wrapper refuses these."""
    tokens = [torch.arange(3, 3 + length) for length in (4, 7, 5)]
    rows = asked("history", (3,), lazy=True)
    rows["tokens"] = lazy_stack([TensorDict({name: one}) for one in tokens])
    policy = policy_of(vLLMWrapper, mode="history", pad_output=pad_output, prefer_tokens=True)
    found = policy(rows).get(("tokens", "prompt"), as_list=True)
    assert [one[one != policy.padding_value].tolist() for one in found] == [
        one.tolist() for one in tokens
    ]


class Seeded(CannedService):
    """Notes the seeds of rows, which are answered alike."""

    def generate(self, prompts, sampling_params, **kwargs):
        assert isinstance(prompts, list)
        assert len({*map(id, sampling_params)}) == len(sampling_params) == len(prompts)
        self.seeds = [one.seed for one in sampling_params]
        return super().generate(prompts, sampling_params, **kwargs)


@pytest.mark.parametrize("num_samples", [None, 2])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_each_row_has_a_seed_of_its_own(mode, num_samples):
    def policy(seed):
        sampling = {"seed": seed}
        return policy_of(vLLMWrapper, mode=mode, sampling=sampling, num_samples=num_samples)

    def seeds(policy, calls=2):
        policy.model, found = Seeded(), []
        for _ in range(calls):
            policy(asked(mode, (4,), lazy=True))
            found += policy.model.seeds
        return found

    first, other = seeds(used := policy(7)), seeds(policy(8))
    assert len({*first, *other}) == 16
    assert all(0 <= one < 2**62 for one in first)
    assert seeds(policy(7)) == first
    assert not {*first} & {*seeds(used)}  # it counts on
    used.model = None
    assert seeds(pickle.loads(pickle.dumps(used))) == first


def test_without_a_seed_all_rows_have_the_same_parameters():
    policy, given = policy_of(vLLMWrapper, mode="tokens"), []
    generate = policy.model.generate
    policy.model.generate = lambda prompts, sampling_params, **kwargs: (
        given.append(sampling_params) or generate(prompts, sampling_params, **kwargs)
    )
    policy(asked("tokens", (4,), lazy=True))
    assert given == [policy.sampling_params]
    with pytest.raises(UnsupportedArgumentError, match="seed must be at least 0"):
        policy_of(vLLMWrapper, mode="tokens", sampling={"seed": -1})


@pytest.mark.parametrize("num_samples", [None, 2])
@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("mode", ["history", "text", "tokens"])
def test_stamps_say_what_the_outputs_say(mode, pad_output, num_samples):
    service = CannedService()
    policy = policy_of(
        vLLMWrapper, mode=mode, service=service, pad_output=pad_output, num_samples=num_samples
    )
    rows = policy(asked(mode, (4,), lazy=True)).reshape(-1)
    outputs = service.outputs
    reports = [one for output in outputs for one in output.sample_reports]
    samples = [one for output in outputs for one in output.outputs]
    assert len(rows) == len(samples) == 4 * (num_samples or 1)
    for row, sample, report in zip(rows.unbind(0), samples, reports, strict=True):
        versions = row[keys.RESPONSE_VERSIONS]
        assert versions.dtype == torch.int64
        assert versions.shape == row["tokens", "response"].shape
        known = versions[versions != keys.NO_VERSION].tolist()
        assert known == expand_spans(report.spans)
        assert int(row[keys.POLICY_VERSION]) == min(known)
        assert int(row[keys.MAX_POLICY_VERSION]) == max(known)
        if mode == "text":
            assert keys.FULL_VERSIONS not in row.keys(include_nested=True)
        else:
            full = row[keys.FULL_VERSIONS]
            assert full.shape == row["tokens", "full"].shape
            assert full.tolist()[-len(versions) :] == versions.tolist()
            assert set(full.tolist()[: -len(versions)]) == {keys.NO_VERSION}
        assert row[keys.FINISH_REASON] == sample.finish_reason
        assert row[keys.REPLICA_ID] == "1"
        cached = keys.UNKNOWN_COUNT if report.num_cached_tokens is None else 32
        assert int(row[keys.NUM_CACHED_TOKENS]) == cached
        assert row[keys.PREFILL_TIME] == 0.25
        assert row[keys.QUEUE_TIME].isnan() == (report.queue_s is None)
        assert row[keys.DECODE_TIME].isnan()


def buffered(rows):
    buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=4)
    buffer.extend(rows)
    return buffer[:]


USES = {
    "clone": lambda rows: rows.clone(),
    "pickle": lambda rows: pickle.loads(pickle.dumps(rows)),
    "cat": lambda rows: torch.cat([rows, rows]),
    "apply": lambda rows: rows.select("tokens", "text").apply(lambda one: one + 1),
    "chat template": lambda rows: rows["history"].full.apply_chat_template(tokenizer=TOKENIZER),
    "next turn": lambda rows: rows["history"].full.append(
        History(role="user", content="x", batch_size=(4,)), inplace=False
    ),
    "replay buffer": buffered,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("pad_output", [False, True])
def test_rows_can_be_used_as_torchrls(pad_output, use):
    theirs, mine = (
        USES[use](
            policy_of(kind, mode="history", pad_output=pad_output)(
                asked("history", (4,), lazy=True)
            ).exclude(*STAMPS)
        )
        for kind in (TorchRLWrapper, vLLMWrapper)
    )
    assert_same_rows(mine, theirs)


def test_ragged_rows_have_memory_of_their_own():
    """Whoever keeps or sends one row does not keep the batch."""
    rows = policy_of(vLLMWrapper, mode="tokens")(asked("tokens", (4,), lazy=True))
    for row in rows.unbind(0):
        for entry in row.exclude("mine").values(include_nested=True, leaves_only=True):
            if isinstance(entry, torch.Tensor):
                assert entry.untyped_storage().nbytes() == entry.nbytes


@pytest.mark.parametrize("kind", [TorchRLWrapper, vLLMWrapper])
@pytest.mark.parametrize(
    ("mode", "error", "message"),
    [
        ("history", ValueError, "Expected"),
        ("text", ValueError, "Expected"),
        ("tokens", ValueError, "Expected"),
    ],
)
def test_rows_without_a_prompt_are_refused_alike(kind, mode, error, message):
    rows = lazy_stack([TensorDict(mine=torch.ones(1)) for _ in range(2)])
    with pytest.raises(error, match=message):
        policy_of(kind, mode=mode)(rows)


def test_a_changed_row_is_noticed():
    """The twin of all above."""
    mine = policy_of(vLLMWrapper, mode="tokens")(asked("tokens", (3,), lazy=True))
    other = mine.clone()
    other[1]["log_probs", "response"][0] += 1e-6
    with pytest.raises(AssertionError, match="log_probs"):
        assert_same_rows(other, mine)
    with pytest.raises(AssertionError, match="masks"):
        assert_same_rows(mine.exclude("masks"), mine)


# ---------------------------------------------------------------- another tokenizer


def retold(change):
    """The tokenizer, its parts changed."""
    parts = json.loads(TOKENIZER.backend_tokenizer.to_str())
    change(parts)
    made = TOKENIZER.__class__(tokenizer_object=Tokenizer.from_str(json.dumps(parts)))
    made.chat_template, made.pad_token = TOKENIZER.chat_template, TOKENIZER.pad_token
    return made


def swap(parts):
    vocabulary = parts["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def forget_merges(parts):
    del parts["model"]["merges"][-40:]


def add_token(parts):
    parts["added_tokens"].append({**parts["added_tokens"][0], "id": 512, "content": "<new>"})


A, B = TOKENIZER.convert_tokens_to_ids(["a", "b"])
OTHERS = {
    "other ids": (swap, f"'a' is {B} there and {A} here, as one of 2 tokens"),
    "other merges": (forget_merges, r"the same text is \["),
}


class Counted:
    """The engines' tokenizer, and how often it was asked for."""

    def __init__(self, one):
        self.one, self.calls = one, 0

    def tokenizer(self):
        self.calls += 1
        return self.one


@pytest.mark.parametrize("mode", ["history", "text"])
@pytest.mark.parametrize("other", OTHERS)
def test_another_tokenizer_than_the_engines_is_refused_by_name(other, mode):
    change, message = OTHERS[other]
    tokenizer = retold(change)
    tokenizer.name_or_path = "another model"
    assert len(tokenizer) == len(TOKENIZER)
    policy = policy_of(vLLMWrapper, mode=mode, tokenizer=tokenizer)
    for _ in range(2):
        with pytest.raises(TokenizerMismatchError, match=f"'another model'.*'a model': {message}"):
            policy(asked(mode, (2,), lazy=True))
    assert not hasattr(policy.model, "outputs")


def test_the_engines_tokenizer_is_looked_at_once():
    service = CannedService()
    service.requests = Counted(retold(lambda parts: None))
    policy = policy_of(vLLMWrapper, mode="history", service=service)
    for _ in range(3):
        policy(asked("history", (2,), lazy=True))
    assert service.requests.calls == 1


@pytest.mark.parametrize("why", ["token ids", "no tokenizer", "more tokens"])
def test_what_cannot_be_wrong_is_not_refused(why):
    service = CannedService()
    service.requests = Counted(TOKENIZER)
    tokenizer = retold(add_token if why == "more tokens" else swap)
    if why == "no tokenizer":
        service.engine_args = SimpleNamespace(
            **vars(CannedService.engine_args) | {"skip_tokenizer_init": True}
        )
    mode = "tokens" if why == "token ids" else "history"
    policy = policy_of(vLLMWrapper, mode=mode, service=service, tokenizer=tokenizer)
    policy(asked(mode, (2,), lazy=True))
    assert service.requests.calls == (why == "more tokens")
