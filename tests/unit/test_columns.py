import copy
import importlib.util
import pickle
import random  # noqa: TID251 - seeded random.Random only
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
import pytest
import torch

from torchrl_vllm_sync.requests.messages import (
    EngineRequest,
    EngineResult,
    PackedResults,
    PlainOutput,
    as_dicts,
    sampled_log_probs,
    samples_of,
)

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings(
    # Importing vLLM 0.32 on torch 2.11 and later.
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)

PLAIN = (bool, int, str, bytes, type(None), type)
NAN_WITH_PAYLOAD = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]
ODD_FLOATS = (
    *map(float, ("-inf", "inf", "nan", "-0.0", "0", "0.1", "1e300", "5e-324")),
    NAN_WITH_PAYLOAD,
)
ODD_TEXTS = ("", " the", "\x00", "Ġ猫", "\ud83d", "\N{GRINNING FACE}")


def assert_same(left, right, path="output"):
    """The two graphs agree in every type, value, bit of a float and order of a dict."""
    assert type(left) is type(right), f"{path}: {type(left)} and {type(right)}"
    if isinstance(left, PLAIN):
        assert left == right, f"{path}: {left!r} and {right!r}"
    elif isinstance(left, float):
        assert struct.pack("<d", left) == struct.pack("<d", right), f"{path}: {left}, {right}"
    elif isinstance(left, dict):
        assert_same(list(left), list(right), f"{path} keys")
        for key, value in left.items():
            assert_same(value, right[key], f"{path}[{key!r}]")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), f"{path}: lengths {len(left)} and {len(right)}"
        for position, (a, b) in enumerate(zip(left, right, strict=True)):
            assert_same(a, b, f"{path}[{position}]")
    elif isinstance(left, (np.ndarray, torch.Tensor)):
        a, b = np.asarray(left), np.asarray(right)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), path
    elif hasattr(left, "__dict__"):
        assert_same(vars(left), vars(right), path)
    else:
        assert left == right, f"{path}: {left!r} and {right!r}"


def across_ray(value):
    """Pickles as Ray does: arrays come back as read-only views."""
    buffers = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


def pack_output(output):
    result = EngineResult(request_id="request", replica_id="0", output=output, version=3)
    return PackedResults([result])


def unpacked(packed):
    """Its only result, whose output is in columns."""
    (result,) = packed
    return result


def with_prompt(row, output):
    """An output that is made of its row, with the prompt, which does not travel."""
    own = {"prompt": output.prompt, "prompt_token_ids": output.prompt_token_ids}
    return row.outputs.make(row.at, **own)


def round_trip(output):
    return with_prompt(unpacked(across_ray(pack_output(output))).output, output)


class OutputMaker:
    """Random outputs of vLLM's own classes, odd in every attribute that can be."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def maybe(self, make):
        return make() if self.random.random() < 0.5 else None

    def ids(self, length):
        return [self.random.randrange(151_000) for _ in range(length)]

    def logprob(self, *, odd):
        from vllm.logprobs import Logprob

        if odd:
            return Logprob(
                self.random.choice(ODD_FLOATS),
                self.random.choice([None, 1, 2**40, 2**70]),
                self.random.choice([None, *ODD_TEXTS]),
            )
        return Logprob(float(np.float32(-10 * self.random.random())), self.random.randrange(1, 300))

    def positions(self, token_ids, *, odd=False):
        """As vLLM has it: the sampled token first, then those ranked 1, 2, ..."""
        counts = [self.random.randrange(4) for _ in token_ids]
        return [
            {key: self.logprob(odd=odd) for key in [token_id, *self.ids(count)]}
            for token_id, count in zip(token_ids, counts, strict=True)
        ]

    def container(self, positions):
        from vllm.logprobs import FlatLogprobs

        if self.random.random() < 0.7:
            return positions
        flat = FlatLogprobs()
        flat.extend(positions)
        return flat

    def lora(self):
        from vllm.lora.request import LoRARequest

        return LoRARequest("adapter", 1, "/tmp/adapter")

    def completion(self, index, lora):
        from vllm.outputs import CompletionOutput

        ids = self.ids(self.random.randrange(40))
        odd = self.random.random() < 0.5
        completion = CompletionOutput(
            index=index,
            text=self.random.choice(ODD_TEXTS),
            token_ids=tuple(ids) if self.random.random() < 0.1 else ids,
            cumulative_logprob=self.random.choice([None, *ODD_FLOATS]),
            logprobs=self.maybe(lambda: self.container(self.positions(ids, odd=odd))),
            finish_reason=self.random.choice([None, "stop", "length", "abort"]),
            stop_reason=self.random.choice([None, 7, "###"]),
            lora_request=lora,
            routed_experts=self.maybe(lambda: np.arange(12, dtype=np.int16).reshape(2, 3, 2)),
        )
        if self.random.random() < 0.5:
            completion.weight_versions = self.spans(len(ids))
        completion.of_a_newer_vllm = {"nested": [1, None, (2.0, "x")]}
        return completion

    def spans(self, length):
        from vllm import outputs

        if hasattr(outputs, "WeightVersionSpan"):  # from vLLM 0.32 on
            return [outputs.WeightVersionSpan("3", 0, 1), outputs.WeightVersionSpan("4", 1, length)]
        return None

    def output(self):
        from vllm.outputs import RequestOutput
        from vllm.v1.metrics.stats import RequestStateStats

        ids, lora = self.ids(self.random.randrange(1, 40)), self.maybe(self.lora)
        odd = self.random.random() < 0.5
        prompt_logprobs = [None, *self.positions(ids[1:], odd=odd)]
        output = RequestOutput(
            request_id=f"request-{self.random.random()}",
            prompt=self.random.choice([None, *ODD_TEXTS]),
            prompt_token_ids=self.random.choice([ids, ids, None]),
            prompt_logprobs=self.maybe(lambda: self.container(prompt_logprobs)),
            outputs=[self.completion(i, lora) for i in range(self.random.randrange(4))],
            finished=self.random.random() < 0.5,
            metrics=self.maybe(lambda: RequestStateStats(num_generation_tokens=3)),
            lora_request=lora,
            encoder_prompt=self.maybe(lambda: "encode"),
            encoder_prompt_token_ids=self.maybe(lambda: self.ids(3)),
            num_cached_tokens=self.random.choice([None, 0, 16]),
            kv_transfer_params=self.maybe(lambda: {"blocks": [1, 2], "host": "a"}),
        )
        output.of_a_newer_vllm = self.random.choice(
            [np.arange(3), [1.5, 2.5], [1, 2.5], [], [True, 2], [np.int64(3)], [{}], [{1: None}]]
        )
        return output

    def training_output(self, *, num_prompt=6, num_tokens=5, n=1):
        """What a rollout with vLLMWrapper's default parameters returns."""
        from vllm.outputs import CompletionOutput, RequestOutput

        prompt, samples = self.ids(num_prompt), [self.ids(num_tokens) for _ in range(n)]
        return RequestOutput(
            "request",
            None,
            prompt,
            [None, *self.positions(prompt[1:])],
            [
                CompletionOutput(i, "", ids, -1.5, self.positions(ids), finish_reason="stop")
                for i, ids in enumerate(samples)
            ],
            finished=True,
            num_cached_tokens=0,
        )


@pytest.mark.parametrize("seed", range(20))
def test_round_trip_returns_the_same_graph(seed):
    maker = OutputMaker(seed)
    for _ in range(20):
        output = maker.output()
        assert_same(round_trip(output), output)


def test_packing_leaves_the_output_as_it_was():
    for seed in range(20):
        output = OutputMaker(seed).output()
        pack_output(output)
        assert_same(output, OutputMaker(seed).output())


@pytest.mark.parametrize(
    "positions",
    [
        [],
        [None],
        [None, None],
        [{}],
        [None, {}],
        [{5: (-1.0, None, None)}],
        [None, {7: (-1.0, 1, None), 3: (float("-inf"), 2, "a")}, {}, None],
        [{1: (-0.5, 1, None)}, {1: (0, 1, None)}],
        [{2**70: (-0.5, 1, None)}],
        [{True: (-0.5, 1, None)}, {np.int64(2): (np.float64(1), np.int32(1), None)}],
    ],
)
@pytest.mark.parametrize("flat", [False, True])
def test_log_probs_of_any_form_return(positions, flat):
    from vllm.logprobs import FlatLogprobs, Logprob

    output = OutputMaker(0).training_output()
    built = [p and {i: Logprob(*entry) for i, entry in p.items()} for p in positions]
    if flat:
        container = FlatLogprobs()
        container.extend(built)
        built = container
    output.prompt_logprobs = output.outputs[0].logprobs = built

    assert_same(round_trip(output), output)


@pytest.mark.parametrize("value", ODD_FLOATS, ids=repr)
def test_a_log_prob_returns_bit_by_bit(value):
    output = OutputMaker(0).training_output()
    for entries in output.outputs[0].logprobs:
        for entry in entries.values():
            entry.logprob = value

    assert_same(round_trip(output), output)


def test_entries_that_are_not_plain_log_probs_travel_as_they_are():
    output = OutputMaker(0).training_output()
    output.outputs[0].logprobs = [{5: {"logprob": -1.0}}]
    output.prompt_logprobs = [None, {5: -1.0}]

    assert_same(round_trip(output), output)


def test_every_field_of_the_installed_completion_returns():
    output = OutputMaker(0).training_output()
    for field in fields(output.outputs[0]):
        setattr(output.outputs[0], field.name, [field.name, 1])

    assert_same(round_trip(output), output)


def test_a_shared_lora_request_stays_shared():
    maker = OutputMaker(0)
    output = maker.training_output(n=2)
    output.lora_request = output.outputs[0].lora_request = output.outputs[1].lora_request = (
        maker.lora()
    )
    rebuilt = round_trip(output)

    assert rebuilt.lora_request is rebuilt.outputs[0].lora_request
    assert rebuilt.lora_request is rebuilt.outputs[1].lora_request


def test_arrays_arrive_writable():
    output = OutputMaker(0).training_output()
    output.outputs[0].routed_experts = np.arange(4)

    assert round_trip(output).outputs[0].routed_experts.flags.writeable


def make_request(prompt, **sampling):
    from vllm import SamplingParams

    params = SamplingParams(**sampling)
    return EngineRequest(request_id="r", prompt=prompt, sampling_params=params, timeout_s=9.0)


def test_a_prompt_that_the_caller_holds_does_not_travel():
    output = OutputMaker(0).training_output()
    output.prompt_logprobs, output.prompt = None, "the text"
    ids = tuple(output.prompt_token_ids)
    result = unpacked(across_ray(pack_output(output)))
    bare = result.output.make()
    assert (bare.prompt, bare.prompt_token_ids) == (None, None)
    request = make_request({"prompt_token_ids": ids, "prompt": "the text"})
    assert_same(unmarked(result.output.unread(result, request)), output)


# ---------------------------------------------------------------- outputs that are made when read

MARKS = ("replica_id", "version_spans", "sample_reports", "min_version", "max_version")


def unmarked(output):
    """An output that was read, with what vLLM has of it alone, in its order."""
    from vllm.outputs import CompletionOutput, RequestOutput

    for one in output.outputs:
        assert one.logprobs or not one.logprobs  # read
        assert type(one) is CompletionOutput
        # What is read late comes last.
        names = dict.fromkeys([*(field.name for field in fields(one)), *vars(one)])
        one.__dict__ = {name: vars(one)[name] for name in names}
    assert type(output) is RequestOutput
    for name in MARKS:
        delattr(output, name)
    return output


def flat_output(seed=0, **shape):
    """An output as engines make it here, and the one that vLLM makes for those who have not asked.

    The first token of a prompt has no log-probability.
    """
    from vllm.logprobs import FlatLogprobs

    output, wanted = (OutputMaker(seed).training_output(**shape) for _ in range(2))
    for holder in (output, *output.outputs):
        name = "prompt_logprobs" if holder is output else "logprobs"
        flat = FlatLogprobs()
        flat.extend(getattr(holder, name))
        setattr(holder, name, flat)
    return output, wanted


def unread(output, *, request=None):
    result = unpacked(across_ray(pack_output(output)))
    request = request or make_request({"prompt_token_ids": output.prompt_token_ids})
    return result.output.unread(result, request)


LOOKS = {
    "an attribute": lambda output: output.logprobs if hasattr(output, "index") else output.outputs,
    "repr": repr,
    "vars": vars,
    "pickle": pickle.dumps,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "equality": lambda output: output == output,
    "hash": hash,
    "a missing attribute": lambda output: hasattr(output, "no_such_thing"),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("n", [1, 3])
def test_whoever_looks_at_an_output_finds_vllms_own(look, n):
    output, wanted = flat_output(n=n)
    made = unread(output)
    LOOKS[look](made)
    assert type(made) is type(output)
    for completion in made.outputs:
        LOOKS[look](completion) if look != "hash" else completion.logprobs
    for completion, one in zip(made.outputs, wanted.outputs, strict=True):
        assert completion == one
        assert type(completion.logprobs) is list
        assert one == completion
    assert_same(unmarked(made), wanted)


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_outputs_of_streams_are_vllms_own_and_the_callers_alone(n, is_flat):
    output, wanted = flat_output(n=n)
    plain, kept = PlainOutput(output), pickle.dumps(output)
    (result,) = pack_output(output)
    prompt = {"prompt_token_ids": output.prompt_token_ids, "prompt": "the text"}
    asked = {"flat_logprobs": True, "logprobs": 1} if is_flat else {}
    made = plain.unread(result, make_request(prompt, **asked))
    assert [[*one] for one in plain.answers] == [[*one.token_ids] for one in wanted.outputs]
    if is_flat:
        wanted = pickle.loads(kept)
    wanted.prompt = "the text"
    assert made.replica_id == "0"
    assert_same(unmarked(copy.deepcopy(made)), wanted)
    made.prompt_token_ids.append(1)
    for one in made.outputs:
        one.token_ids.append(1)
        one.logprobs = None
    assert pickle.dumps(output) == kept


def test_copies_of_an_unread_output_are_read():
    output, wanted = flat_output()
    for made in (unread(output) for _ in range(3)):
        for twin in (copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            assert [one.logprobs for one in twin.outputs] == [wanted.outputs[0].logprobs]
            assert type(twin) is type(output)


def test_what_is_set_before_the_first_look_stays():
    made = unread(flat_output()[0])
    made.finished = "mine"
    made.outputs[0].logprobs = "mine, too"
    assert (made.finished, made.outputs[0].logprobs) == ("mine", "mine, too")
    assert made.request_id == "request"


def test_log_probs_are_made_when_they_are_looked_at():
    made = unread(flat_output()[0])
    (completion,) = made.outputs
    assert list(completion.token_ids)
    assert hasattr(type(completion), "_kind")  # not read yet
    assert completion.logprobs
    assert not hasattr(type(completion), "_kind")


def test_who_asked_for_flat_log_probs_gets_them():
    output, _ = flat_output()
    request = make_request(
        {"prompt_token_ids": output.prompt_token_ids}, flat_logprobs=True, logprobs=1
    )
    made = unread(output, request=request)
    assert made.outputs[0].logprobs == output.outputs[0].logprobs
    assert made.prompt_logprobs == output.prompt_logprobs


def test_many_threads_may_look_at_once():
    output, wanted = flat_output(num_tokens=300)
    for _ in range(20):
        made = unread(output)
        with ThreadPoolExecutor(8) as pool:
            read = list(pool.map(lambda _, made=made: made.outputs[0].logprobs, range(8)))
        assert all(one == wanted.outputs[0].logprobs for one in read)


def test_a_thread_that_finds_an_output_read_meanwhile_gets_what_it_looks_for():
    made = unread(flat_output()[0])
    late = type(made).__getattr__  # where a thread is that has found nothing under a name
    assert made.outputs
    assert late(made, "request_id") == made.request_id


def test_a_thread_that_reads_an_output_while_another_is_done_with_it_finds_the_same():
    output, wanted = flat_output()
    made = unread(output)
    attributes = type(made)._attributes.__get__(made)

    def in_between(rest=attributes["_rest"]):
        attributes["_rest"] = rest
        assert made.request_id == "request"  # as the other thread reads it
        assert type(made) is type(output)
        return rest()

    attributes["_rest"] = in_between
    assert made.outputs
    assert made.outputs[0].logprobs == wanted.outputs[0].logprobs
    assert_same(unmarked(made), wanted)


def test_results_of_a_batch_come_back_in_their_order_errors_among_them():
    maker = OutputMaker(3)
    outputs = [maker.output() for _ in range(9)]
    results = [
        EngineResult(
            request_id=f"{at}",
            replica_id="0",
            output=None if at % 4 == 1 else output,
            error=ValueError(at) if at % 4 == 1 else None,
        )
        for at, output in enumerate(outputs)
    ]
    back = list(across_ray(PackedResults(results)))
    assert [one.request_id for one in back] == [f"{at}" for at in range(9)]
    assert [str(one.error) for one in back if one.error] == ["1", "5"]
    for at, one in enumerate(back):
        if one.error is None:
            assert_same(with_prompt(one.output, outputs[at]), outputs[at])


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_log_probs_of_the_sampled_tokens_are_read_without_unpacking(n, is_read):
    output, wanted = flat_output(n=n)
    for found, one in zip(unread(output).outputs, wanted.outputs, strict=True):
        assert not is_read or found.logprobs
        sampled = [
            entries[token].logprob
            for token, entries in zip(one.token_ids, one.logprobs, strict=True)
        ]
        assert list(sampled_log_probs(found)) == sampled
        assert hasattr(type(found), "_kind") is not is_read


def test_log_probs_that_some_have_not_asked_for_are_none():
    outputs = [flat_output(seed)[0] for seed in range(3)]
    outputs[1].outputs[0].logprobs = None
    results = [
        EngineResult(request_id="r", replica_id="0", output=one, version=1) for one in outputs
    ]
    request = make_request({"prompt_token_ids": [1]})
    samples = [
        one.output.unread(one, request).outputs[0] for one in across_ray(PackedResults(results))
    ]
    assert [len(sampled_log_probs(one)) for one in samples] == [5, 0, 5]
    assert [one.logprobs is None for one in samples] == [False, True, False]


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_samples_are_looked_at_without_reading_their_output(seed, is_read):
    output, wanted = flat_output(seed, n=1 + seed % 3)
    wanted.outputs[0].routed_experts = output.outputs[0].routed_experts = np.arange(4)
    if seed == 5:
        wanted.outputs[0].logprobs = output.outputs[0].logprobs = None
    found = unread(output)
    assert found.finished  # which reads nothing else
    assert not is_read or found.request_id
    samples, marks = samples_of(found)
    assert (marks["replica_id"], marks["min_version"], marks["max_version"]) == ("0", 3, 3)
    assert len(samples) == len(wanted.outputs)
    for one, other in zip(samples, wanted.outputs, strict=True):
        assert [*one.token_ids] == other.token_ids
        assert one.finish_reason == other.finish_reason
        assert np.array_equal(one.routed_experts, other.routed_experts)
        assert [*sampled_log_probs(one)] == [*sampled_log_probs(other)]
        assert not hasattr(one, "no_such_thing")
    assert hasattr(type(found), "_kind") is not is_read


@pytest.mark.parametrize("seed", range(20))
def test_answers_are_read_without_unpacking(seed):
    output = OutputMaker(seed).output()
    answers = unpacked(across_ray(pack_output(output))).output.answers
    assert [list(answer) for answer in answers] == [list(one.token_ids) for one in output.outputs]


def test_one_row_can_be_made_twice_without_sharing():
    output, wanted = flat_output()
    row = unpacked(pack_output(output)).output
    first, second = (with_prompt(row, wanted) for _ in range(2))
    first.outputs[0].token_ids.append(1)
    first.outputs[0].logprobs.append({})
    second.outputs[0].logprobs = as_dicts(second.outputs[0].logprobs)
    second.prompt_logprobs = as_dicts(second.prompt_logprobs)
    assert_same(second, wanted)


def test_a_packed_output_is_less_than_two_thirds_of_the_pickled_object():
    output, _ = flat_output(num_prompt=600, num_tokens=500)
    packed = pack_output(output)

    assert 3 * len(pickle.dumps(packed, protocol=5)) < 2 * len(pickle.dumps(output, protocol=5))


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        ([1], [np.int64(1)], "int64"),
        ([0.5], [np.float32(0.5)], "float32"),
        ([0.0], [-0.0], "-0.0"),
        ([1], [True], "bool"),
        ([1], (1,), "tuple"),
        ({1: 2, 3: 4}, {3: 4, 1: 2}, "keys"),
        ([1], [1, 2], "lengths"),
        (np.ones(2, np.int16), np.ones(2, np.int32), "output"),
    ],
)
def test_the_comparison_above_notices(left, right, message):
    with pytest.raises(AssertionError, match=message):
        assert_same(left, right)


def test_the_comparison_above_notices_a_changed_log_prob():
    output, other = OutputMaker(0).training_output(), OutputMaker(0).training_output()
    entries = other.outputs[0].logprobs[3]
    next(iter(entries.values())).logprob -= 1e-7

    with pytest.raises(AssertionError, match=r"\['logprobs'\]\[3\]"):
        assert_same(output, other)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_torchrl_converts_the_rebuilt_output_to_the_same_tensors(seed, n):
    from torchrl.modules.llm.policies.vllm_wrapper import _RequestOutput_tc

    output = OutputMaker(seed).training_output(n=n)
    rebuilt = round_trip(output)

    expected, got = map(_RequestOutput_tc.from_request_output, (output, rebuilt))
    assert expected.outputs.logprobs.shape == ((5,) if n == 1 else (n, 5))
    assert_same(got.to_dict(), expected.to_dict())

    expected, got = (_RequestOutput_tc.from_request_output([o, o]) for o in (output, rebuilt))
    assert_same(got.to_dict(), expected.to_dict())
