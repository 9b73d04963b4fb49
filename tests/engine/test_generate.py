"""Generation on real engines: every form in, vLLM's own outputs back, and no work left behind."""

import asyncio
import dataclasses
import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch

from tests.engine.requests import endless, eventually, is_idle, sampling, slowed, token_ids
from torchrl_vllm_sync import checks
from torchrl_vllm_sync.errors import (
    GenerationError,
    GenerationTimeoutError,
    InvalidPromptError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.requests import background
from torchrl_vllm_sync.requests.messages import EngineRequest
from torchrl_vllm_sync.service import requests
from torchrl_vllm_sync.testing import (
    assert_diverse,
    greedy_tokens,
    load_tiny_model,
    token_log_probs,
)

IDS = [7, 8, 9, 10, 11]
OTHER_IDS = [20, 21, 22]


@pytest.fixture(scope="module")
def trained(service, checkpoint):
    """The model that the engines hold, whatever other tests pushed."""
    model = load_tiny_model(checkpoint)
    service.push_weights(model)
    return model


@pytest.fixture(autouse=True)
def idle(service):
    """Every test, whatever it provokes, leaves nothing in flight and all replicas serving."""
    yield
    eventually(lambda: is_idle(service))
    assert [str(one.state) for one in service.load.snapshots()] == ["serving", "serving"]


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


# ---------------------------------------------------------------- forms of prompts and results


def single_forms():
    import numpy as np

    return {
        "list": IDS,
        "tuple": tuple(IDS),
        "tensor": torch.tensor(IDS),
        "array": np.array(IDS),
        "TokensPrompt": {"prompt_token_ids": IDS},
    }


@pytest.mark.parametrize("form", single_forms())
def test_one_prompt_of_token_ids_gives_one_output(service, trained, form):
    from vllm import RequestOutput

    output = service.generate(single_forms()[form], sampling(max_tokens=6))
    assert isinstance(output, RequestOutput)
    assert output.prompt_token_ids == IDS
    assert output.finished
    assert token_ids(output) == greedy_tokens(trained, IDS, max_tokens=6)


@pytest.mark.parametrize("form", ["text", "TextPrompt"])
def test_text_is_tokenised_as_the_engine_does(service, trained, tokenizer, form):
    text = "What is 3 plus 4?"
    prompt = text if form == "text" else {"prompt": text}
    output = service.generate(prompt, sampling(max_tokens=6))
    assert output.prompt == text
    assert output.prompt_token_ids == tokenizer.encode(text)
    assert token_ids(output) == greedy_tokens(trained, tokenizer.encode(text), max_tokens=6)
    decoded = tokenizer.decode(token_ids(output), skip_special_tokens=True)
    # vLLM holds back the bytes of a character that the last token leaves unfinished.
    assert output.outputs[0].text.rstrip("\ufffd") == decoded.rstrip("\ufffd")
    assert output.outputs[0].text.strip("\ufffd")


def test_a_mixed_batch_comes_back_in_its_order(service, trained, tokenizer):
    batch = [IDS, "Hello", tuple(OTHER_IDS), torch.tensor(IDS), {"prompt": "Bonjour"}]
    for given in (batch, tuple(batch)):
        outputs = service.generate(given, sampling())
        assert isinstance(outputs, list)
        wanted = [IDS, tokenizer.encode("Hello"), OTHER_IDS, IDS, tokenizer.encode("Bonjour")]
        assert [output.prompt_token_ids for output in outputs] == wanted
        assert [token_ids(output) for output in outputs] == [
            greedy_tokens(trained, ids, max_tokens=4) for ids in wanted
        ]


def test_prompt_token_ids_flat_and_nested(service):
    assert service.generate(prompt_token_ids=IDS, sampling_params=sampling()).finished
    outputs = service.generate(prompt_token_ids=[IDS, OTHER_IDS], sampling_params=sampling())
    assert [output.prompt_token_ids for output in outputs] == [IDS, OTHER_IDS]
    (output,) = service.generate(prompt_token_ids=[IDS], sampling_params=sampling())
    assert output.prompt_token_ids == IDS


def test_one_set_of_parameters_for_each_prompt(service):
    lengths = [1, 5, 3]
    outputs = service.generate(
        [IDS] * 3, [sampling(max_tokens=n, ignore_eos=True) for n in lengths]
    )
    assert [len(token_ids(output)) for output in outputs] == lengths


def test_the_callers_parameters_stay_as_they_are(service):
    params = sampling(n=2, temperature=1.0)
    before = repr(params)
    service.generate([IDS, OTHER_IDS], params)
    assert repr(params) == before
    assert service.generate(IDS).finished  # vLLM's defaults where there are none


def test_several_samples_with_their_log_probs(service, trained):
    params = sampling(n=3, temperature=1.0, seed=1, max_tokens=8, logprobs=2, ignore_eos=True)
    output = service.generate(IDS, params)
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert_diverse([list(one.token_ids) for one in output.outputs], min_distinct=3)
    for sample in output.outputs:
        ids = list(sample.token_ids)
        engine = torch.tensor(
            [entry[token].logprob for token, entry in zip(ids, sample.logprobs, strict=True)]
        )
        wanted = token_log_probs(trained, IDS + ids)[-len(ids) :]
        # float32 sums in another order: tiny models agree to about 1e-5.
        torch.testing.assert_close(engine, wanted, atol=1e-3, rtol=0)


def test_200_outputs_are_in_order_each_its_own(service, trained):
    prompts = [[5 + i, 300 - i, 7] for i in range(200)]
    outputs = service.generate(prompts, sampling(max_tokens=3, logprobs=0))
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert len({output.request_id for output in outputs}) == 200
    for i in range(0, 200, 37):
        assert token_ids(outputs[i]) == greedy_tokens(trained, prompts[i], max_tokens=3)


def test_outputs_say_where_and_under_which_version(service):
    version = service.weight_version
    outputs = service.generate([IDS] * 4 + [OTHER_IDS] * 4, sampling())
    assert {output.replica_id for output in outputs} <= {"0", "1"}
    assert {(output.min_version, output.max_version) for output in outputs} == {(version, version)}


def test_the_caller_may_choose_the_replica(service):
    for index in (0, 1):
        outputs = service.generate([IDS] * 3, sampling(), actor_index=index)
        assert {output.replica_id for output in outputs} == {str(index)}
    for wrong in (2, -1):
        with pytest.raises(IndexError, match=f"in \\[0, 2\\), got {wrong}"):
            service.generate(IDS, sampling(), actor_index=wrong)


def test_torchrl_reads_the_outputs(service):
    from torchrl.modules.llm.policies.vllm_wrapper import _RequestOutput_tc

    outputs = service.generate([IDS, OTHER_IDS], sampling(logprobs=1, prompt_logprobs=1))
    converted = _RequestOutput_tc.from_request_output(outputs)
    assert converted.shape[0] == 2
    assert converted[0].outputs.token_ids.tolist() == token_ids(outputs[0])


def test_an_error_is_raised_or_returned_in_its_place(service):
    """Sampling parameters are the engine's to judge."""
    bad = sampling(logprobs=10_000)  # more than the engine's max_logprobs
    prompts, params = [IDS, OTHER_IDS, IDS], [sampling(), bad, sampling()]
    with pytest.raises(GenerationError, match="logprobs"):
        service.generate(prompts, params)
    first, error, last = service.generate(prompts, params, return_exceptions=True)
    assert first.finished
    assert last.finished
    assert isinstance(error, GenerationError)
    with pytest.raises(GenerationError):
        service.generate(IDS, bad, return_exceptions=True)  # a single prompt's is raised


# ---------------------------------------------------------------- streams


def test_a_stream_grows_to_what_a_batch_returns(service):
    params = endless(logprobs=0)
    whole = service.generate(IDS, params, actor_index=0)
    steps = list(service.generate(IDS, params, stream=True, actor_index=0))
    assert len(steps) > 1
    lengths = [len(token_ids(step)) for step in steps]
    assert lengths == sorted(lengths)
    assert [step.finished for step in steps] == [False] * (len(steps) - 1) + [True]
    assert token_ids(steps[-1]) == token_ids(whole)


def test_replicas_look_for_garbage_rarely(service):
    asked = [one.__ray_call__.remote(lambda _: gc.get_threshold()[0]) for one in service.actors]
    assert min(ray.get(asked, timeout=60)) == checks.COLLECT_AFTER > 10 * gc.get_threshold()[0]


def test_a_stream_that_is_dropped_ends_the_engines_work(service):
    with slowed(service):
        stream = service.generate(IDS, endless(), stream=True)
        next(stream)
        assert sum(service.get_num_unfinished_requests()) == 1
        del stream
        gc.collect()
        assert sum(service.get_num_unfinished_requests()) == 0
    assert service.load.total_in_flight == 0


def test_an_asynchronous_stream_and_its_early_end(service):
    async def read_all():
        return [output async for output in service.astream(IDS, endless(), actor_index=1)]

    async def leave_early():
        async for _ in service.astream(IDS, endless()):
            break  # nobody closes it: the event loop does

    steps = asyncio.run(read_all())
    assert steps[-1].finished
    assert {step.replica_id for step in steps} == {"1"}
    asyncio.run(leave_early())
    eventually(lambda: is_idle(service))


def test_a_caller_that_lags_gets_new_tokens_put_together(service):
    from vllm.sampling_params import RequestOutputKind

    params = endless(output_kind=RequestOutputKind.DELTA)

    async def lag():
        steps = []
        async for one in service.astream(IDS, params, actor_index=0):
            steps.append(one)
            if len(steps) == 1:  # the loop stands still until the engine has sampled all
                eventually(lambda: set(service.get_num_unfinished_requests()) == {0})
        return steps

    steps = asyncio.run(lag())
    assert len(steps) <= 5
    whole = service.generate(IDS, endless(), actor_index=0)
    assert [one for step in steps for one in token_ids(step)] == token_ids(whole)
    spans = [span for step in steps for some in step.version_spans for span in some]
    assert sum(one.end - one.start for one in spans) == len(token_ids(whole))


def test_a_stream_has_one_prompt_and_its_time_limit(service):
    with pytest.raises(InvalidPromptError, match="exactly 1 prompt, got 2"):
        service.generate([IDS, IDS], sampling(), stream=True)
    with pytest.raises(GenerationTimeoutError, match="did not finish within"):
        list(service.generate(IDS, endless(), stream=True, timeout_seconds=0.05))


# ---------------------------------------------------------------- cancelling and time limits


async def cancel_after_start(service, prompts):
    task = asyncio.create_task(service.agenerate(prompts, endless()))
    await asyncio.to_thread(
        eventually, lambda: sum(service.get_num_unfinished_requests()) == len(prompts)
    )
    assert service.load.total_in_flight == len(prompts)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert service.load.total_in_flight == 0
    # Cancelling waits until the engines have dropped the work.
    return await asyncio.to_thread(service.get_num_unfinished_requests)


def test_cancelling_ends_the_engines_work(service):
    with slowed(service):
        assert asyncio.run(cancel_after_start(service, [IDS] * 8 + [OTHER_IDS] * 8)) == [0, 0]


def test_cancelled_before_anything_arrived(service):
    """The order in which Ray delivers a call and its abort is not fixed."""

    async def cancel_at_once(delay_s):
        task = asyncio.create_task(service.agenerate([IDS] * 16, endless()))
        await asyncio.sleep(delay_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with slowed(service):
        for i in range(20):
            asyncio.run(cancel_at_once(i / 1000))
        assert service.load.total_in_flight == 0
        # Far sooner than 20 x 16 x 250 tokens would take: 64 at a time, a minute.
        eventually(lambda: is_idle(service), timeout_s=20)


def test_an_abort_that_overtakes_its_request_keeps_it_out(service):
    import ray

    actor = service.actors[0]
    assert ray.get(actor.abort.remote(["overtaken"])) == 0
    request = EngineRequest(
        request_id="overtaken",
        prompt={"prompt_token_ids": IDS},
        sampling_params=endless(),
        timeout_s=60.0,
    )
    method = actor.run_batch.options(num_returns="streaming")
    for wanted in ("its caller gave it up", None):  # remembered until it has arrived
        (ref,) = method.remote([request])
        (result,) = ray.get(ref)
        assert result.error is None if wanted is None else wanted in str(result.error)


def test_a_time_limit_ends_the_engines_work_and_keeps_the_siblings(service):
    params = [endless(), sampling(max_tokens=1), endless()]
    with slowed(service):
        outputs = service.generate(
            [IDS, OTHER_IDS, IDS], params, timeout_seconds=4.0, return_exceptions=True
        )
    assert outputs[1].finished
    assert isinstance(outputs[0], GenerationTimeoutError)
    assert sum(service.get_num_unfinished_requests()) == 0
    with pytest.raises(TimeoutError):  # the standard error too
        service.generate(IDS, endless(), timeout_seconds=0.05)


def test_an_interrupt_ends_the_engines_work(service, monkeypatch):
    schedule = asyncio.run_coroutine_threadsafe

    class Interrupted:
        def __init__(self, future):
            self.cancel = future.cancel

        def result(self):
            eventually(lambda: sum(service.get_num_unfinished_requests()) == 6)
            raise KeyboardInterrupt

    monkeypatch.setattr(
        background.asyncio,
        "run_coroutine_threadsafe",
        lambda coroutine, loop: Interrupted(schedule(coroutine, loop)),
    )
    with slowed(service), pytest.raises(KeyboardInterrupt):
        service.generate([IDS] * 6, endless())
    monkeypatch.undo()
    assert is_idle(service)


# ---------------------------------------------------------------- who may call, and what it costs


def test_threads_generate_side_by_side(service):
    prompts = [[30 + i, 40 + i] for i in range(24)]
    wanted = [token_ids(output) for output in service.generate(prompts, sampling())]
    with ThreadPoolExecutor(12) as pool:
        outputs = list(pool.map(lambda ids: service.generate(ids, sampling()), prompts))
    assert [token_ids(output) for output in outputs] == wanted


async def test_generate_inside_a_running_loop(service):
    output = service.generate(IDS, sampling())
    assert token_ids(output) == token_ids(await service.agenerate(IDS, sampling()))


def test_many_coroutines_generate_side_by_side(service):
    async def all_at_once():
        return await asyncio.gather(
            *(service.agenerate([50 + i, 51], sampling()) for i in range(64))
        )

    outputs = asyncio.run(all_at_once())
    assert [output.prompt_token_ids[0] for output in outputs] == list(range(50, 114))


def test_one_call_a_replica_and_batch(service, monkeypatch):
    calls = []

    class Counting:
        def __init__(self, actor, index):
            self._actor, self._index = actor, index

        def __getattr__(self, name):
            calls.append((name, self._index))
            return getattr(self._actor, name)

    dispatcher = service.requests._dispatcher
    replicas = dispatcher._replicas()
    counted = [
        dataclasses.replace(one, actor=Counting(one.actor, index))
        for index, one in enumerate(replicas)
    ]
    monkeypatch.setattr(dispatcher, "_replicas", lambda: counted)
    service.generate([[i, i + 1] for i in range(5, 105)], sampling(max_tokens=1))
    assert sorted(calls) == [("run_batch", 0), ("run_batch", 1)]


@pytest.mark.parametrize(
    ("num", "use_tqdm", "shown"), [(32, True, 1), (31, True, 0), (32, False, 0)]
)
def test_a_progress_bar_for_large_batches(service, monkeypatch, capfd, num, use_tqdm, shown):
    monkeypatch.setattr(requests, "PROGRESS_DELAY_S", 0.0)
    service.generate([IDS] * num, sampling(max_tokens=1), use_tqdm=use_tqdm)
    error = capfd.readouterr().err
    assert ("Processed prompts" in error) == bool(shown)
    assert (f"{num}/{num}" in error) == bool(shown)


def test_the_first_text_does_not_block_the_event_loop(service, monkeypatch):
    """The tokenizer comes from a replica; meanwhile other coroutines go on."""
    ours = service.requests
    fetch, gate = ours.fetch, threading.Event()

    def slow_fetch(method):
        gate.wait(20)
        return fetch(method)

    monkeypatch.setattr(ours, "_tokenizer", None)
    monkeypatch.setattr(ours, "fetch", slow_fetch)

    async def run():
        task = asyncio.create_task(service.agenerate("Hello", sampling()))
        await asyncio.sleep(0.05)
        gate.set()
        return await task

    assert asyncio.run(run()).finished


# ---------------------------------------------------------------- bad input

BAD_INPUT = {
    "empty text": (lambda: {"prompts": ""}, "must not be empty"),
    "empty ids": (lambda: {"prompt_token_ids": []}, "at least one prompt"),
    "empty batch": (lambda: {"prompts": []}, "at least one prompt"),
    "empty in batch": (lambda: {"prompts": [IDS, ""]}, r"prompts\[1\] must not be empty"),
    "nothing": (dict, "got None for both"),
    "both forms": (lambda: {"prompts": "a", "prompt_token_ids": IDS}, "got both"),
    "too long": (lambda: {"prompts": [5] * 256}, "max_model_len=256"),
    "not in vocabulary": (lambda: {"prompts": [5, 512]}, "vocab_size=512, got 512 at token 1"),
    "negative id": (lambda: {"prompts": [5, -1]}, "got -1 at token 1"),
    "wrong type": (lambda: {"prompts": 3.5}, "got float"),
    "wrong key": (lambda: {"prompts": {"promt": "a"}}, "promt"),
    "params count": (
        lambda: {"prompts": [IDS], "sampling_params": [sampling()] * 2},
        "one entry for each of the 1 prompts",
    ),
    "params type": (lambda: {"prompts": IDS, "sampling_params": {"n": 1}}, "SamplingParams"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_refused_before_anything_is_sent(service, name):
    arguments, message = BAD_INPUT[name]
    for call in (
        lambda **kwargs: service.generate(**kwargs),
        lambda **kwargs: asyncio.run(service.agenerate(**kwargs)),
    ):
        with pytest.raises(InvalidPromptError, match=message):
            call(**arguments())
    assert is_idle(service)


@pytest.mark.parametrize("name", ["prompt_adapter_request", "guided_options_request"])
def test_what_vllm_no_longer_has_is_refused_by_name(service, name):
    assert service.generate(IDS, sampling(), **{name: None}).finished
    with pytest.raises(UnsupportedArgumentError, match=f"{name} must be None"):
        service.generate(IDS, sampling(), **{name: object()})


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), "1"])
def test_a_time_limit_must_be_positive(service, seconds):
    with pytest.raises(UnsupportedArgumentError, match="timeout_seconds"):
        service.generate(IDS, sampling(), timeout_seconds=seconds)


def test_an_actor_refuses_bad_ids_by_itself(service):
    """An id outside the embedding table would end the engine."""
    import ray

    with pytest.raises(InvalidPromptError, match="vocab_size=512"):
        ray.get(service.actors[0].generate.remote([5, 600], sampling()))
    assert ray.get(service.actors[0].generate.remote(IDS, sampling())).finished
