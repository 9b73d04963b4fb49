"""Log-probabilities that travel packed are those that vLLM would have sent."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from torchrl_vllm_sync.engine.internals import (
    leave_sent_buffers_alone,
    pack,
    unpack,
    unpack_on_arrival,
)


class Tokenizer:
    """Names tokens by their ids."""

    def convert_ids_to_tokens(self, ids, skip_special_tokens=False):
        return [f"<{one}>" for one in ids]

    def decode(self, ids):
        return "".join(f"<{one}>" for one in ids)


def step(lengths, width=1):
    """Outputs of one step: ``None`` is a request without log-probabilities."""
    rng = np.random.default_rng(0)
    num = sum(one or 0 for one in lengths)
    whole = LogprobsLists(
        rng.integers(0, 500, (num, width)).astype(np.int32),
        rng.standard_normal((num, width)).astype(np.float32),
        rng.integers(1, 500, num).astype(np.int32),
    )
    outputs, row = [], 0
    for at, length in enumerate(lengths):
        found = None if length is None else whole.slice_request(row, length)
        row += length or 0
        tokens = [] if found is None else found.logprob_token_ids[:, 0].tolist()
        outputs.append(EngineCoreOutput(str(at), tokens, new_logprobs=found))
    return outputs


def samples(lengths, width, make=FlatLogprobs, tokenizer=None):
    return {
        str(at): SimpleNamespace(
            logprobs_processor=LogprobsProcessor(
                tokenizer=tokenizer,
                logprobs=None if length is None else make(),
                prompt_logprobs=None,
                cumulative_logprob=None if length is None else 0.0,
                num_logprobs=None if length is None else width - 1,
                num_prompt_logprobs=None,
            )
        )
        for at, length in enumerate(lengths)
    }


def sent(outputs):
    frames = MsgpackEncoder().encode(EngineCoreOutputs(outputs=outputs))
    return MsgpackDecoder(EngineCoreOutputs).decode(frames).outputs


def taken(outputs, of):
    for one in outputs:
        if one.request_id in of:
            of[one.request_id].logprobs_processor.update_from_output(one)
    return {
        name: (one.logprobs_processor.logprobs, one.logprobs_processor.cumulative_logprob)
        for name, one in of.items()
    }


@pytest.mark.parametrize("make", [FlatLogprobs, list])
@pytest.mark.parametrize("tokenizer", [None, Tokenizer()])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    "lengths", [[1], [1] * 300, [None, 1, None, 2, 1, None], [None, None], [0, 3, 1], []]
)
def test_each_sample_gets_what_vllm_would_have_given_it(lengths, width, tokenizer, make):
    plain = taken(sent(step(lengths, width)), samples(lengths, width, make, tokenizer))
    outputs = step(lengths, width)
    pack(outputs)
    assert sum(one.new_logprobs is not None for one in outputs) == any(
        one is not None for one in lengths
    )
    arrived, of = sent(outputs), samples(lengths, width, make, tokenizer)
    unpack(arrived, of)
    assert taken(arrived, of) == plain


def test_nothing_is_lost_when_the_first_sample_was_aborted_meanwhile():
    lengths = [1, 2, 1]
    plain = taken(sent(step(lengths)), samples(lengths, 1))
    outputs, of = step(lengths), samples(lengths, 1)
    pack(outputs)
    arrived = sent(outputs)
    del of["0"], plain["0"]
    unpack(arrived, of)
    assert taken(arrived, of) == plain


def test_what_vllm_sends_by_itself_is_left_alone():
    outputs, of = step([1, 1]), samples([1, 1], 1)
    wanted = [one.new_logprobs for one in outputs]
    unpack(outputs, of)
    assert [one.new_logprobs for one in outputs] == wanted


async def test_others_run_between_outputs_that_lie_ready():
    ready = asyncio.Queue()
    engine = SimpleNamespace(
        engine_core=SimpleNamespace(get_output_async=ready.get),
        output_processor=SimpleNamespace(request_states={}),
    )
    unpack_on_arrival(engine)
    turns = []

    async def read():
        for _ in range(4):
            ready.put_nowait(EngineCoreOutputs())
        for _ in range(4):
            await engine.engine_core.get_output_async()
            turns.append("reader")

    async def other():
        for _ in range(4):
            turns.append("other")
            await asyncio.sleep(0)

    await asyncio.gather(read(), other())
    assert turns == ["other", "reader"] * 4


@pytest.mark.parametrize("is_old", [True, False])
def test_what_is_being_sent_is_not_written_over_by_a_vllm_that_would(monkeypatch, is_old):
    monkeypatch.setattr(MsgpackEncoder, "encode_into", MsgpackEncoder.encode_into)
    if is_old:
        monkeypatch.delattr(EngineCoreProc, "_send_msg_tracking_payload")
    leave_sent_buffers_alone()
    outputs = EngineCoreOutputs(outputs=step([70, None, 3]))
    pack(outputs.outputs)
    sent = MsgpackEncoder().encode_into(outputs, buffer := bytearray())
    assert len(sent) > 1
    assert bool(buffer) is not is_old
    found = MsgpackDecoder(EngineCoreOutputs).decode(sent).outputs
    assert [one.new_token_ids for one in found] == [one.new_token_ids for one in outputs.outputs]
