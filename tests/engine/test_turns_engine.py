"""Two turns on real engines: what the second one reads begins with what the first one sampled."""

import pytest
import torch
from tensordict import set_list_to_stack

from tests.engine.rollouts import QUIET, TOKENIZER
from tests.engine.test_sessions_engine import make_env
from torchrl_vllm_sync import vLLMWrapper
from torchrl_vllm_sync.testing import token_log_probs

pytestmark = QUIET
ROWS = 6


class Reader(vLLMWrapper):
    """Notes what engines say they have read; without ``carry`` rows forget their earlier turns."""

    carry, read = True, ()

    def forward(self, tensordict, **kwargs):
        if not self.carry:
            tensordict = tensordict.exclude("turns")
        return super().forward(tensordict, **kwargs)

    def _call_generate(self, *args, **kwargs):
        outputs = super()._call_generate(*args, **kwargs)
        self.read = [*self.read, [list(one.prompt_token_ids) for one in outputs]]
        return outputs


def two_turns(service, *, carry):
    """Of each conversation: its two rows, and what the engine has read for the second."""
    policy = Reader(
        service,
        tokenizer=TOKENIZER,
        input_mode="history",
        chat_template=TOKENIZER.chat_template,
        generate_kwargs={"max_tokens": 12, "temperature": 1.0},
        pad_output=False,
        return_log_probs=True,
    )
    policy.carry = carry
    with set_list_to_stack(True):
        rows = make_env(ROWS).rollout(2, policy)
    return [
        (*one.unbind(0), read) for one, read in zip(rows.unbind(0), policy.read[1], strict=True)
    ]


def distance(model, ids, first):
    """How far the trainer's log-probabilities of the first turn's answer are from the engine's."""
    begin, size = len(first["tokens", "prompt"]), len(first["tokens", "response"])
    scored = token_log_probs(model, ids)[begin - 1 : begin - 1 + size]
    return float((scored - first["log_probs", "response"]).abs().max())


def test_the_second_turn_begins_with_what_the_first_one_sampled(service, model):
    for first, second, read in two_turns(service, carry=True):
        before = first["tokens", "full"].tolist()
        assert read == second["tokens", "prompt"].tolist()
        assert read[: len(before)] == before
        assert int(second["turns", "kept"]) == len(before)
        assert not second["turns", "forked"]
        assert distance(model, second["tokens", "full"].tolist(), first) < 1e-3
        sampled = second["masks", "all_assistant_mask"]
        assert torch.equal(second["tokens", "full"][sampled], second["tokens", "response"])


def test_encoded_anew_it_does_not(service, model):
    """What the test above would say of another library."""
    drifted = [
        distance(model, second["tokens", "full"].tolist(), first)
        for first, second, read in two_turns(service, carry=False)
        if read[: len(first["tokens", "full"])] != first["tokens", "full"].tolist()
        and len(second["tokens", "full"]) >= len(first["tokens", "full"])
    ]
    assert drifted
    assert max(drifted) > 0.1


@pytest.fixture(autouse=True)
def fresh(service):
    service.create_load_balancer()
