"""The gate of a replica: who passes, waits, is turned away or ended in each state."""

import asyncio
import contextlib
import dataclasses
import itertools
import pickle
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

from tests.fakes.engine import quiet_engine
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.engine.answers import (
    TURN_S,
    AdmissionGate,
    Answers,
    Batch,
    RunningRequest,
    _put_together,
)
from torchrl_vllm_sync.engine.updates import Updates
from torchrl_vllm_sync.errors import (
    GenerationError,
    GenerationTimeoutError,
    InvalidPromptError,
    ReplicaUnavailableError,
)
from torchrl_vllm_sync.requests.messages import (
    EngineRequest,
    EngineResult,
    SampleReport,
    framed,
    received,
    spans_from_starts,
)

ENDING = (ReplicaState.STALE, ReplicaState.FAILED, ReplicaState.CLOSED)


@pytest.fixture
async def gate():
    return AdmissionGate("0", ReplicaState.SERVING)


class Owner:
    """Of a request that has passed the gate and is being worked on."""

    def __init__(self, gate):
        self.refused = []
        gate.running["e"] = RunningRequest("e", request(), self)

    def take(self, running, output):
        assert isinstance(output, ReplicaUnavailableError)
        self.refused.append(running.engine_id)


async def test_a_draining_replica_turns_new_requests_away_and_waiting_ones_too(gate):
    gate.set(ReplicaState.UPDATING)
    waiting = asyncio.create_task(gate.enter())
    later = asyncio.create_task(gate.enter(min_version=7))
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.set(ReplicaState.DRAINING, "it leaves")
    for refused in (waiting, later, gate.enter()):
        with pytest.raises(ReplicaUnavailableError, match="0 is draining: it leaves") as caught:
            await refused
        assert caught.value.state is ReplicaState.DRAINING


@pytest.mark.parametrize("state", list(ReplicaState))
async def test_those_inside_are_ended_in_states_without_whole_weights_only(gate, state):
    owner = Owner(gate)
    gate.set(state)
    assert owner.refused == ["e"] * (state in ENDING)


class Engine:
    """Takes requests, which end as the test says; the rest of vLLM's ``AsyncLLM`` is not there."""

    def __init__(self, gate, *, is_encoder_decoder=False):
        model = SimpleNamespace(is_encoder_decoder=is_encoder_decoder)
        self.vllm_config = SimpleNamespace(model_config=model)
        self.gate, self.asked, self.aborted = gate, {}, []

    async def add_request(self, engine_id, prompt, params, *, lora_request):
        self.asked[engine_id] = prompt, params
        self.gate.running[engine_id].sample = SimpleNamespace(
            report=lambda completion, checker: SampleReport(), has_begun=False
        )

    async def abort(self, engine_ids):
        self.aborted += engine_ids

    def put(self, engine_id, *, finish_reason="stop", error=None, token_ids=(7,)):
        completion = SimpleNamespace(
            index=0, finish_reason=finish_reason, token_ids=token_ids, logprobs=None
        )
        output = SimpleNamespace(outputs=[completion], finished=finish_reason is not None)
        self.gate.running[engine_id].put(error or output)


@pytest.fixture
async def engine(gate):
    return Engine(gate)


@pytest.fixture
async def answers(gate, engine):
    answers = Answers("0", gate)
    answers.begin(engine, SimpleNamespace(salt="v1", version=0))
    yield answers
    answers.close()


def request(request_id="r", *, kind="FINAL_ONLY", n=1, **fields):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return EngineRequest(
        request_id=request_id,
        prompt=fields.pop("prompt", {"prompt_token_ids": [5, 6]}),
        timeout_s=fields.pop("timeout_s", 9.0),
        sampling_params=SamplingParams(n=n, output_kind=RequestOutputKind[kind]),
        **fields,
    )


async def inside():
    """Lets what was started enter, which takes the batch, its task and each request a turn."""
    for _ in range(30):
        await asyncio.sleep(0)


def started(answers, *requests):
    """Results by request, of a batch."""

    async def run():
        async with contextlib.aclosing(Batch(answers, requests).run()) as ends:
            return {one.request_id: one async for results in ends for one in results}

    return asyncio.create_task(run())


@pytest.mark.parametrize(
    ("prompt", "is_encoder_decoder", "salt", "is_rendered"),
    [
        ({"prompt_token_ids": [5, 6]}, False, "v1", True),
        ({"prompt_token_ids": [5], "prompt": "text", "cache_salt": "own"}, False, "v1:own", True),
        ({"prompt_token_ids": [5, 6], "multi_modal_data": {}}, False, "v1", False),
        ({"prompt_token_ids": [5, 6]}, True, "v1", False),
    ],
)
async def test_an_engine_gets_token_ids_ready_made_and_parameters_that_it_need_not_copy(
    gate, prompt, is_encoder_decoder, salt, is_rendered
):
    engine, answers = Engine(gate, is_encoder_decoder=is_encoder_decoder), Answers("0", gate)
    answers.begin(engine, SimpleNamespace(salt="v1"))
    task = started(answers, request(prompt=prompt))
    await inside()
    ((given, params),) = engine.asked.values()
    kind = {"type": "token"} if is_rendered else {}
    assert given == {**prompt, **kind, "cache_salt": salt}
    assert params.clone().skip_clone
    engine.put("r~1")
    await task


async def test_what_was_aborted_is_turned_away_until_it_is_sent_again(answers, engine):
    assert await answers.abort([request().abort_id]) == 0
    task = started(answers, dataclasses.replace(request(), attempt=1))
    refused = (await started(answers, request()))["r"]
    assert isinstance(refused.error, GenerationError)
    assert "its caller gave it up" in str(refused.error)
    engine.put("r~1~1")
    assert (await task)["r"].error is None
    assert [*engine.asked] == ["r~1~1"]


async def test_requests_of_a_batch_have_no_task_each(answers, engine):
    before = len(asyncio.all_tasks())
    task = started(answers, *(request(f"r{i}") for i in range(20)))
    await inside()
    assert len(engine.asked) == 20
    assert len(asyncio.all_tasks()) == before + 1
    for engine_id in engine.asked:
        engine.put(engine_id)
    assert [one.output.request_id for one in (await task).values()] == [f"r{i}" for i in range(20)]


async def test_others_run_while_a_batch_enters(answers, engine):
    add, each_s = engine.add_request, TURN_S / 3

    async def slow(*args, **kwargs):
        time.sleep(each_s)  # noqa: ASYNC251  as vLLM, which reads a request meanwhile
        await add(*args, **kwargs)

    engine.add_request = slow
    task, entered = started(answers, *(request(f"r{i}") for i in range(20))), [0]
    while entered[-1] < 20:
        await asyncio.sleep(0)
        entered.append(len(engine.asked))
    assert max(after - before for before, after in pairwise(entered)) <= 3
    for engine_id in engine.asked:
        engine.put(engine_id)
    await task


async def test_a_request_that_waits_at_the_gate_keeps_none_back(answers, engine):
    task = started(answers, request("late", min_version=3), request("now"))
    await inside()
    assert [*engine.asked] == ["now~1"]
    engine.put("now~1")
    answers.gate.switch(3)
    answers.gate.set(ReplicaState.SERVING)
    await asyncio.sleep(0.01)
    engine.put("late~2")
    assert [one.error for one in (await task).values()] == [None, None]


@pytest.mark.parametrize("reason", ["abort", "stop"])
async def test_what_an_update_sends_back_enters_again(answers, engine, reason):
    """Also if it was quicker than the call that ends it, and was begun on keys of old weights."""
    task = started(answers, request())
    await inside()
    answers.gate.set(ReplicaState.UPDATING)
    answers.gate.running["r~1"].restart = True
    engine.put("r~1", finish_reason=None)
    engine.put("r~1", finish_reason=reason)
    await asyncio.sleep(0.01)
    assert [*engine.asked] == ["r~1"]
    answers.gate.set(ReplicaState.SERVING)
    await asyncio.sleep(0.01)
    engine.put("r~2")
    assert (await task)["r"].output.outputs[0].finish_reason == "stop"


@pytest.fixture
async def prepared(engine):
    """Set, it ends what vLLM does with images before it knows a request; ``abort`` is vLLM's."""
    add, prepared = engine.add_request, asyncio.Event()

    async def slow(engine_id, *args, **kwargs):
        await prepared.wait()
        await add(engine_id, *args, **kwargs)

    async def abort(engine_ids):
        engine.aborted += engine_ids
        for one in engine.gate.running.keys() & set(engine_ids):
            engine.put(one, finish_reason="abort")

    engine.add_request, engine.abort = slow, abort
    return prepared


IMAGES = {"prompt_token_ids": [5], "multi_modal_data": {}}


async def test_an_update_does_not_wait_for_what_vllm_is_preparing(answers, engine, prepared):
    updates = Updates(quiet_engine(), answers.gate)
    updates._engine.abort = engine.abort
    task = started(answers, request(prompt=IMAGES))
    await inside()
    async with asyncio.timeout(5), updates.paused(5.0) as pause:
        answers._updates.salt = "v2"  # the new weights are in
        await updates.commit(pause, 2, None, None)
    prepared.set()
    await inside()
    assert [given["cache_salt"] for given, _ in engine.asked.values()] == ["v1", "v2"]
    engine.put("r~2")
    assert (await task)["r"].output.outputs[0].finish_reason == "stop"
    assert (pause.num_restarted, pause.num_kept) == (1, 0)


async def test_who_gives_up_does_not_wait_for_what_vllm_is_preparing(answers, engine, prepared):
    task = started(answers, request(prompt=IMAGES))
    await inside()
    async with asyncio.timeout(5):
        assert await answers.abort([request().abort_id]) == 0
    prepared.set()
    assert (await task)["r"].output.outputs[0].finish_reason == "abort"
    assert engine.aborted == ["r~1"]


async def test_one_failure_is_one_requests_and_its_work_in_the_engine_ends(answers, engine):
    add = engine.add_request

    async def failing(engine_id, *args, **kwargs):
        if engine_id.startswith("bad"):
            raise ValueError("no such thing")
        await add(engine_id, *args, **kwargs)

    async def abort(engine_ids):
        engine.aborted += engine_ids
        if "late~2" in engine_ids:
            engine.put("good~3")

    engine.add_request, engine.abort = failing, abort
    task = started(answers, request("bad"), request("late", timeout_s=0.02), request("good"))
    await inside()
    results = await task
    assert "ValueError: no such thing" in str(results["bad"].error)
    assert isinstance(results["late"].error, GenerationTimeoutError)
    assert results["good"].error is None
    assert engine.aborted == ["bad~1", "late~2"]
    assert answers.gate.running == {}


@pytest.mark.parametrize("prompt", [{"prompt_token_ids": [5]}, {"multi_modal_data": {}}])
async def test_one_that_the_engine_does_not_take_up_ends_in_time_and_keeps_no_result(
    answers, engine, prompt
):
    add = engine.add_request

    async def hanging(engine_id, *args, **kwargs):
        if engine_id.startswith("hangs"):
            await asyncio.Event().wait()
        await add(engine_id, *args, **kwargs)

    engine.add_request = hanging
    hangs, later = request("hangs", prompt=prompt, timeout_s=1.0), request("later", timeout_s=1.0)
    task = started(answers, request("first"), hangs, later)
    await inside()
    engine.put("first~1")
    is_held_up = "multi_modal_data" not in prompt  # vLLM takes up token ids in no time
    assert any(one.startswith("later") for one in engine.asked) is not is_held_up
    results = await asyncio.wait_for(task, 9)
    assert results["first"].error is None
    assert isinstance(results["hangs"].error, GenerationTimeoutError)
    assert isinstance(results["later"].error, GenerationTimeoutError)
    assert answers.gate.running == {}


async def test_an_engine_that_dies_before_it_is_told_what_to_end_loses_no_result(answers, engine):
    from vllm.v1.engine.exceptions import EngineDeadError

    async def abort(engine_ids):
        raise EngineDeadError

    engine.abort = abort
    task = started(answers, request("a", timeout_s=0.2), request("b"))
    await inside()
    engine.put("b~2", error=EngineDeadError())
    assert [one.error is not None for one in (await task).values()] == [True, True]


async def test_an_output_that_cannot_be_taken_fails_its_request_and_not_vllm(answers, engine):
    task = started(answers, request())
    await inside()
    engine.gate.running["r~1"].sample.report = None
    engine.put("r~1")
    assert "TypeError" in str((await task)["r"].error)


async def test_a_dead_engine_ends_all_that_is_inside(answers, engine):
    from vllm.v1.engine.exceptions import EngineDeadError

    task = started(answers, request("a"), request("b"))
    await inside()
    engine.put("a~1", error=EngineDeadError())
    results = await task
    assert [one.error.state for one in results.values()] == [ReplicaState.FAILED] * 2
    assert answers.gate.state is ReplicaState.FAILED


async def test_the_answer_of_a_request_inside_outlives_the_draining(answers):
    task = started(answers, request())
    await inside()
    answers.gate.set(ReplicaState.DRAINING)
    await asyncio.sleep(0.01)
    assert not task.done()
    refused = (await started(answers, request()))["r"]
    assert refused.error.state is ReplicaState.DRAINING
    answers.gate.set(ReplicaState.CLOSED)  # what is left at its end is told
    ended = (await task)["r"]
    assert ended.error.state is ReplicaState.CLOSED


async def test_a_caller_that_cancels_has_nothing_left_in_the_engine(answers, engine):
    task = started(answers, request())
    await inside()
    answers.gate.set(ReplicaState.DRAINING)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborted == ["r~1"]
    assert answers.gate.running == {}


async def test_torchrls_call_of_one_replica_needs_no_tokenizer_for_ids(answers, engine):
    from vllm import SamplingParams

    about = {"skip_tokenizer_init": True, "max_model_len": 9, "get_vocab_size": lambda: 9}
    vars(engine.vllm_config.model_config).update(about)
    with pytest.raises(InvalidPromptError, match="no tokenizer to encode it: pass token ids"):
        await answers.generate("text")
    torchrls = {"use_tqdm": False, "timeout_seconds": None}
    params = SamplingParams(flat_logprobs=True)
    task = asyncio.create_task(answers.generate([5, 6], params, **torchrls))
    await inside()
    engine.put(*engine.asked)
    assert (await task).outputs[0].token_ids == (7,)


async def test_a_reader_that_falls_behind_gets_the_newest_output_that_holds_all(answers, engine):
    """Two samples: one takes three steps, the last of them after a step was read, one two."""
    growing = []

    def put(engine_id, finish_reason=None):
        growing.append(len(growing))
        engine.put(engine_id, finish_reason=finish_reason, token_ids=growing)

    async with caller(answers) as (ask, told):
        ask(request(kind="CUMULATIVE", n=2))
        await until(lambda: len(answers.gate.running) == 2)
        for one in ("r~1", "r~2", "r~1"):
            put(one)
        read = [step for _, step in await told()]
        put("r~1", "stop")
        put("r~2", "stop")
        while not read[-1].finished:
            read += [step for _, step in await told()]
    assert [one.finished for one in read] == [False, False, False, True]
    samples = [one.output.make().outputs[0] for one in read]
    found = [(one.index, one.token_ids) for one in samples]
    assert found == [(1, [0, 1]), (0, [0, 1, 2]), (0, [0, 1, 2, 3]), (1, [0, 1, 2, 3, 4])]


def delta(token_ids, versions, finish_reason=None):
    """A step of new tokens, each of which has a log-probability, as vLLM makes it."""
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    logprobs = FlatLogprobs()
    for one in token_ids:
        logprobs.append_fast([one], [-float(one)], itertools.count(1), [f"<{one}>"])
    text = "".join(f"<{one}>" for one in token_ids)
    completion = CompletionOutput(0, text, token_ids, -1.0, logprobs, finish_reason=finish_reason)
    is_last = finish_reason is not None
    output = RequestOutput("r", None, [1], None, [completion], finished=is_last)
    spans = spans_from_starts([(one, at) for at, one in enumerate(versions)], len(token_ids))
    return EngineResult(
        request_id="r",
        replica_id="0",
        output=output,
        finished=is_last,
        samples=(SampleReport(spans=spans, decode_s=float(len(token_ids))),),
        version=versions[-1],
    )


def test_new_tokens_that_nobody_has_read_are_put_together():
    known = delta([5, 6], [1, 1])
    for step in (delta([7], [1]), delta([8], [2]), delta([9, 10], [2, 3], "stop")):
        known = _put_together(known, step)
    (completion,), (report,) = known.output.outputs, known.samples
    assert completion.token_ids == [5, 6, 7, 8, 9, 10]
    assert completion.text == "<5><6><7><8><9><10>"
    assert completion.logprobs == delta([5, 6, 7, 8, 9, 10], [1] * 6).output.outputs[0].logprobs
    assert [tuple(one) for one in report.spans] == [(1, 0, 3), (2, 3, 5), (3, 5, 6)]
    assert (known.finished, known.output.finished, completion.finish_reason) == (True, True, "stop")
    assert (known.version, report.decode_s) == (3, 2.0)


@contextlib.asynccontextmanager
async def caller(answers):
    """What sends requests over a connection, and what reads what comes on it."""
    host, port, key = await answers.streams_at()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(key)

    def ask(*requests):
        writer.write(framed(pickle.dumps([*requests])))

    async def told(within_s=10, *, more=True):
        async with asyncio.timeout(within_s):
            names, steps = await received(reader)
        for step in steps:
            if step.output is not None:
                assert step.output.output.prompt_token_ids is None
        if more:
            ask()
        return list(zip(names, steps, strict=True))

    try:
        yield ask, told
    finally:
        writer.close()
        await writer.wait_closed()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  fakes tell nobody
            await asyncio.sleep(0)


async def test_streams_of_a_caller_are_sent_together(answers, engine):
    running = answers.gate.running
    async with caller(answers) as (ask, told), caller(answers) as (ask_too, told_too):
        ask(request("a"), request("b"))
        await until(lambda: len(running) == 2)
        ask_too(request("d"))
        await until(lambda: len(running) == 3)
        ask(request("c"))
        await until(lambda: len(running) == 4)
        engine.put("d~3")
        engine.put("a~1")
        engine.put("b~2", error=ValueError("of its own"))
        (one, step), (other, failed) = await told()
        assert (one, other, step.error, type(failed.error)) == ("a", "b", None, GenerationError)
        engine.put("c~4")
        ((name, step),) = await told()
        assert (name, step.finished) == ("c", True)
        assert [name for name, _ in await told_too()] == ["d"]


async def test_what_a_caller_that_is_gone_asked_for_ends(answers, engine):
    async with caller(answers) as (ask, _):
        ask(request("b", kind="CUMULATIVE"))
        await until(lambda: "b~1" in answers.gate.running)
        async with caller(answers) as (ask_too, _):
            ask_too(request("a", kind="CUMULATIVE"))
            await until(lambda: "a~2" in answers.gate.running)
        await until(lambda: engine.aborted)
        assert engine.aborted == ["a~2"]
    await until(lambda: len(engine.aborted) == 2)


async def test_what_a_caller_asked_for_that_takes_nothing_more_ends(monkeypatch, answers, engine):
    monkeypatch.setattr("torchrl_vllm_sync.engine.answers.TAKEN_TIMEOUT_S", 0.5, raising=False)
    async with caller(answers) as (ask, told):
        ask(request("a"), request("b"))
        await until(lambda: len(answers.gate.running) == 2)
        await asyncio.sleep(1.0)  # nothing was sent that it could take
        engine.put("a~1")
        await told(more=False)
        with pytest.raises(asyncio.IncompleteReadError):  # the connection was closed
            await told()
    assert engine.aborted == ["b~2"]


@pytest.mark.parametrize("said", [b"", b"a wrong key of thirty-two letters"[:32]])
async def test_nothing_is_taken_from_who_does_not_say_the_key(monkeypatch, answers, said):
    monkeypatch.setattr("torchrl_vllm_sync.engine.answers.KEY_TIMEOUT_S", 0.1)
    host, port, key = await answers.streams_at()
    assert len(said) in (0, len(key))
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(said + framed(pickle.dumps([request("a")])) * bool(said))
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()
    assert not answers.gate.running


async def test_callers_come_after_one_that_failed_or_was_given_up(monkeypatch, answers):
    start_server, starting = asyncio.start_server, asyncio.Event()

    async def fail(*_):
        raise OSError("too many open files")

    async def wait(*address):
        starting.set()
        await asyncio.sleep(0.1)
        return await start_server(*address)

    monkeypatch.setattr(asyncio, "start_server", fail)
    with pytest.raises(OSError, match="too many"):
        await answers.streams_at()
    answers.close()
    monkeypatch.setattr(asyncio, "start_server", wait)
    given_up = asyncio.create_task(answers.streams_at())
    await starting.wait()
    given_up.cancel()
    first, second = await asyncio.gather(answers.streams_at(), answers.streams_at())
    assert first == second
    async with caller(answers) as (ask, _):
        ask(request("a"))
        await until(lambda: answers.gate.running)


@pytest.mark.parametrize("kind", ["DELTA", "CUMULATIVE"])
async def test_only_new_tokens_are_put_together(monkeypatch, answers, engine, kind):
    def put_together(former, step):
        together.append([one.output.outputs[0].token_ids for one in (former, step)])
        return step

    together = []
    monkeypatch.setattr("torchrl_vllm_sync.engine.answers._put_together", put_together)
    async with caller(answers) as (ask, told):
        ask(request("a", kind=kind), request("b", kind=kind))
        await until(lambda: len(answers.gate.running) == 2)
        for name, token in (("a~1", 1), ("b~2", 2), ("a~1", 3)):
            engine.put(name, finish_reason=None, token_ids=[token])
        (_, of_b), (name, of_a) = await told()
    assert (name, of_b.output.make().outputs[0].token_ids) == ("a", [2])
    assert of_a.output.make().outputs[0].token_ids == [3]
    assert together == ([[[1], [3]]] if kind == "DELTA" else [])


async def test_what_has_come_is_sent_once_the_last_was_taken(answers, engine):
    """And so put together for a caller that lags, not kept in front of it."""
    async with caller(answers) as (ask, told):
        ask(request("a", kind="CUMULATIVE"))
        await until(lambda: answers.gate.running)
        for token in (1, 2, 3):
            engine.put("a~1", finish_reason=None, token_ids=[token])
            await inside()
        ((_, first),) = await told(more=False)
        with pytest.raises(TimeoutError):
            await told(0.1)
        ask()
        ((_, last),) = await told()
    assert [one.output.make().outputs[0].token_ids for one in (first, last)] == [[1], [3]]
