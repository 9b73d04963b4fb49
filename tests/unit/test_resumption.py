"""Answers gone on with: vLLM's own output processor makes the outputs of an unbroken run."""

import copy
import pickle
import random  # noqa: TID251  seeded below
from types import SimpleNamespace

import numpy as np
import pytest

from torchrl_vllm_sync import ReplicaState, VersionSpan
from torchrl_vllm_sync.engine.answers import (
    AdmissionGate,
    RunningRequest,
    SpanChecker,
    continued,
    tell_of_first_replica,
)
from torchrl_vllm_sync.requests.dispatch import AnswerSoFar, unsound_settings
from torchrl_vllm_sync.requests.messages import EngineRequest, EngineResult, PackedResults
from torchrl_vllm_sync.testing import make_tiny_tokenizer

PROMPT_TEXT = "Zwölf Boxkämpfer: "
NO_MASK = SimpleNamespace(token_ids=[])
ANSWER_TEXT = "jagen 🦊 über den Sylter 🦊🦊 Deich, ünd so weiter."


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


class Engine:
    """The part of vLLM that ``AsyncLLM`` keeps of answers, and what this library adds to it.

    The engine core is a script: it samples the tokens of ``answer``, wherever it is asked to begin.
    """

    def __init__(self, tokenizer, prompt, answer, version=0):
        from vllm.v1.engine.output_processor import OutputProcessor

        from torchrl_vllm_sync.engine import internals

        self.output_processor = OutputProcessor(tokenizer, log_stats=False)
        self.gate = AdmissionGate("0", ReplicaState.SERVING, version=version)
        self.prompt, self.answer, self.version = prompt, answer, version
        internals.watch_samples(self, self.gate.register)

    def run(self, request):
        """Yields the results of a request, a token each."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
        from vllm.v1.outputs import LogprobsLists, SamplingMaskLists

        params, prompt, begun = request.sampling_params, request.prompt, request.begun
        running, made = RunningRequest("e", request, self), []
        self.take = lambda _, output: made.append(output)
        self.gate.running["e"] = running
        if begun is not None:
            prompt, params = continued(prompt, params, begun)
        self.output_processor.add_request(
            EngineCoreRequest(
                request_id="e",
                external_req_id="e",
                prompt_token_ids=prompt["prompt_token_ids"],
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            ),
            None,
        )
        held = len(prompt["prompt_token_ids"])
        received = held - len(self.prompt)
        assert prompt["prompt_token_ids"] == self.prompt + self.answer[:received]
        rest = self.answer[received:][: params.max_tokens]
        for at, token in enumerate(rest):
            is_last = at == len(rest) - 1
            others = [[token, 1 + (received + at) % 5]]
            logprobs = LogprobsLists(
                np.array(others), np.array([[-0.5, -1.0 - received - at]]), np.array([1])
            )
            core = EngineCoreOutput(
                request_id="e",
                new_token_ids=[token],
                new_logprobs=logprobs if params.logprobs is not None else None,
                finish_reason=FinishReason.LENGTH if is_last else None,
                new_sampling_mask=SamplingMaskLists(np.array([token, 9])),
                # Of all that it computed anew, which at first is the prompt.
                routed_experts=np.full((1 if at else held, 2, 1), self.version),
            )
            label = "default" if self.version == 0 else str(self.version)
            made.clear()
            self.output_processor.process_outputs([core], weight_version=label)
            for output in made:
                if begun is not None:
                    tell_of_first_replica(output, begun)
                report = running.sample.report(output.outputs[0], SpanChecker("0"))
                result = EngineResult(
                    request_id=request.request_id,
                    replica_id="0",
                    output=output,
                    finished=output.finished,
                    samples=(report,),
                    version=self.version,
                )
                yield from PackedResults([result])
                if output.finished:
                    return


def make_request(prompt, **fields):
    from vllm import SamplingParams

    params = SamplingParams(**{"max_tokens": 40, "logprobs": 1, **fields})
    return EngineRequest(
        request_id="r",
        prompt={"prompt_token_ids": prompt},
        sampling_params=params,
        timeout_s=9.0,
    )


def answer_of(results, *, only_new):
    """All of an answer, from what a stream yielded."""
    outputs = [one.output.make() for one in results]
    parts = [output.outputs[0] for output in outputs]
    last = parts[-1]
    spans = [results[-1].samples[0].spans]
    if only_new:
        spans = [one.samples[0].spans for one in results]
        parts_logprobs = [entry for part in parts for entry in part.logprobs or ()]
        text, tokens = "".join(one.text for one in parts), [t for p in parts for t in p.token_ids]
    else:
        parts_logprobs, text, tokens = list(last.logprobs or ()), last.text, list(last.token_ids)
    return {
        "text": text,
        "tokens": tokens,
        "logprobs": parts_logprobs,
        "sum": last.cumulative_logprob,
        "ending": (last.finish_reason, last.stop_reason),
        "labels": [(one.version, one.start, one.end) for one in last.weight_versions],
        "versions": [one.version for part in spans for one in part],
    }


def broken_run(tokenizer, request, prompt, answer, cuts, versions=(0,)):
    """Streams, and changes the engine after each number of tokens in ``cuts``."""
    so_far, yielded = AnswerSoFar(request), []
    for at, cut in enumerate([*cuts, None]):
        engine = Engine(tokenizer, prompt, answer, versions[at % len(versions)])
        for result in engine.run(so_far.follow_up(request)):
            so_far.add(result)
            yielded.append(result)
            if cut is not None and so_far._num_tokens() >= cut:
                break
        if yielded[-1].finished:
            break
        assert not so_far.final_reason
    return yielded


SETTINGS = {
    "plain": {},
    "few": {"max_tokens": 23},
    "bare": {"logprobs": None, "detokenize": False},
    "flat": {"flat_logprobs": True},
    "special": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    "stop": {"stop": ["Sylter 🦊", "eich"]},
    "stop late": {"stop": ["Sylter", "eich"], "min_tokens": 36},
    "stop included": {"stop": ["Sylter"], "include_stop_str_in_output": True},
    "interval": {"stream_interval": 3},
}


@pytest.mark.parametrize("only_new", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", SETTINGS)
def test_outputs_are_those_of_an_unbroken_run_wherever_it_breaks(tokenizer, name, only_new):
    from vllm.sampling_params import RequestOutputKind

    prompt, answer = tokenizer.encode(PROMPT_TEXT), tokenizer.encode(ANSWER_TEXT)
    answer[5:5] = [1, 2, 1]  # special tokens
    request = make_request(prompt, **{"max_tokens": len(answer), **SETTINGS[name]})
    if only_new:
        request.sampling_params.output_kind = RequestOutputKind.DELTA
    assert not unsound_settings(request)
    wanted = answer_of(list(Engine(tokenizer, prompt, answer).run(request)), only_new=only_new)
    generator = random.Random(0)
    limit = len(wanted["tokens"])
    twice = [sorted(generator.sample(range(1, limit), 2)) for _ in range(10)]
    for cuts in [*([one] for one in range(1, limit)), *twice]:
        results = broken_run(tokenizer, copy.copy(request), prompt, answer, cuts)
        found = answer_of(results, only_new=only_new)
        found["versions"] = wanted["versions"] if not any(found["versions"]) else None
        assert found == wanted, cuts


def test_a_run_that_forgets_what_was_received_is_noticed(tokenizer, monkeypatch):
    """The twin: without ``resume`` the text and the tokens are those of the end alone."""
    from torchrl_vllm_sync.engine.internals import SampleState

    prompt, answer = tokenizer.encode(PROMPT_TEXT), tokenizer.encode(ANSWER_TEXT)
    request = make_request(prompt, max_tokens=len(answer))
    so_far = AnswerSoFar(request)
    for result in Engine(tokenizer, prompt, answer).run(request):
        so_far.add(result)
        if so_far._num_tokens() == 10:
            break
    monkeypatch.setattr(SampleState, "resume", lambda *_: None)
    engine, follow_up = Engine(tokenizer, prompt, answer), so_far.follow_up(request)
    found = answer_of(list(engine.run(follow_up)), only_new=False)
    assert found["tokens"] == answer[10:]
    assert found["text"] != ANSWER_TEXT


@pytest.mark.parametrize("only_new", [False, True])
def test_each_part_keeps_the_versions_that_sampled_it(tokenizer, only_new):
    from vllm.sampling_params import RequestOutputKind

    prompt, answer = tokenizer.encode(PROMPT_TEXT), tokenizer.encode(ANSWER_TEXT)
    request = make_request(prompt, max_tokens=len(answer))
    if only_new:
        request.sampling_params.output_kind = RequestOutputKind.DELTA
    results = broken_run(tokenizer, request, prompt, answer, [7, 20, 25], versions=(3, 5, 5, 4))
    found = answer_of(results, only_new=only_new)
    wanted = [("3", 0, 7), ("5", 7, 25), ("4", 25, len(answer))]
    assert found["labels"] == wanted
    if only_new:
        assert found["versions"] == [3] * 7 + [5] * 18 + [4] * (len(answer) - 25)
    else:
        assert results[-1].samples[0].spans == tuple(
            VersionSpan(int(version), start, end) for version, start, end in wanted
        )


@pytest.mark.parametrize("only_new", [False, True])
def test_masks_and_experts_are_of_all_tokens_or_not_there(tokenizer, only_new):
    """What one replica says of another's tokens is not what these were sampled by."""
    from vllm.sampling_params import RequestOutputKind

    prompt, answer = tokenizer.encode(PROMPT_TEXT), tokenizer.encode(ANSWER_TEXT)
    request = make_request(prompt, max_tokens=len(answer))
    if only_new:
        request.sampling_params.output_kind = RequestOutputKind.DELTA

    def samples(cuts):
        results = broken_run(tokenizer, request, prompt, answer, cuts, versions=(3, 5))
        return [one.output.make().outputs[0] for one in results]

    for cuts in ([], [7], [7, 20]):
        parts = samples(cuts)
        masks = [mask for one in parts for mask in (one.sampling_mask or NO_MASK).token_ids]
        is_known = only_new or not cuts
        assert masks == [[token, 9] for token in answer] * is_known
        experts = [one.routed_experts for one in parts]
        assert all(one is None for one in experts[:-1])
        assert (experts[-1] is None) == bool(cuts)
    assert samples([])[-1].routed_experts.shape == (len(prompt) + len(answer) - 1, 2, 1)


def test_a_stream_of_new_tokens_keeps_those_and_not_its_outputs(tokenizer):
    from vllm.sampling_params import RequestOutputKind

    answer = list(range(5, 55))
    request = make_request([5], output_kind=RequestOutputKind.DELTA, max_tokens=50, logprobs=None)
    so_far, sizes = AnswerSoFar(request), []
    for result in Engine(tokenizer, [5], answer).run(request):
        so_far.add(pickle.loads(pickle.dumps(result)))
        sizes.append(len(pickle.dumps(vars(so_far))))
    assert so_far._num_tokens() == len(sizes) == 50
    assert sizes[-2] - sizes[0] < 50 * 50


def test_an_update_sends_back_what_has_no_token_of_this_engine_yet(tokenizer):
    """Tokens of another replica do not count: keys and values of old weights were found for it."""
    prompt, answer = tokenizer.encode(PROMPT_TEXT), tokenizer.encode(ANSWER_TEXT)
    request = make_request(prompt, max_tokens=len(answer))
    so_far = AnswerSoFar(request)
    so_far.add(next(Engine(tokenizer, prompt, answer).run(request)))
    engine = Engine(tokenizer, prompt, answer)
    run = engine.run(so_far.follow_up(request))
    engine.output_processor.process_outputs = lambda *_, **__: next(iter(()))
    with pytest.raises((RuntimeError, StopIteration)):
        next(run)  # it is registered, and nothing has come
    assert not engine.gate.running["e"].has_begun
    engine = Engine(tokenizer, prompt, answer)
    next(engine.run(so_far.follow_up(request)))
    assert engine.gate.running["e"].has_begun


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, []),
        ({"temperature": 0.3, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, []),
        ({"repetition_penalty": 1.2, "logit_bias": {3: 1.0}, "allowed_token_ids": [3, 4]}, []),
        ({"stop": ["x"], "stop_token_ids": [7], "ignore_eos": True, "min_tokens": 2}, []),
        ({"prompt_logprobs": 2, "logprobs": 3, "flat_logprobs": True, "max_tokens": None}, []),
        ({"seed": 0}, ["seed"]),
        ({"n": 2}, ["n"]),
        ({"presence_penalty": 0.5}, ["presence_penalty"]),
        ({"frequency_penalty": 0.5}, ["frequency_penalty"]),
        ({"bad_words": ["x"]}, ["bad_words"]),
        ({"extra_args": {"x": 1}}, ["extra_args"]),
        ({"seed": 3, "bad_words": ["x"]}, ["bad_words", "seed"]),
    ],
)
def test_what_can_be_gone_on_with(fields, names):
    assert sorted(unsound_settings(make_request([1, 2], **fields))) == names


def test_structured_outputs_and_prompts_of_several_kinds_begin_again():
    from vllm.sampling_params import StructuredOutputsParams

    request = make_request([1], structured_outputs=StructuredOutputsParams(choice=["a"]))
    assert unsound_settings(request) == ["structured_outputs"]
    request = make_request([1])
    request.prompt.update(prompt="text", cache_salt="mine")
    assert unsound_settings(request) == []
    request.prompt.update(multi_modal_data={"image": object()})
    assert unsound_settings(request) == ["multi_modal_data"]


def test_every_setting_of_vllm_has_been_decided_on():
    """A new one is unsound until somebody has looked at it, and put it into one of both lists."""
    from vllm import SamplingParams

    from torchrl_vllm_sync.requests.dispatch import _SOUND_SETTINGS

    left_out = {
        "n",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "watermarking",
        "_watermarking_skipped",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "structured_outputs",
        "extra_args",
        "bad_words",
        "_bad_words_token_ids",
        "thinking_token_budget",
        "repetition_detection",
        "routed_experts_prompt_start",
        "trace_decode_token_ids",
    }
    assert set(SamplingParams.__struct_fields__) - _SOUND_SETTINGS <= left_out
