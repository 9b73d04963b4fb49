"""The auditor of the kill matrix, and everything that it must notice. No engine is started."""

from types import SimpleNamespace

import pytest

from tests.chaos.audit import Auditor
from tests.chaos.traffic import ANSWER_TOKENS, PROMPT_TOKENS, Asked
from tests.chaos.trainer import model_of
from torchrl_vllm_sync import VersionSpan
from torchrl_vllm_sync.errors import NoReplicaAvailableError
from torchrl_vllm_sync.testing import greedy_tokens, make_tiny_checkpoint, token_log_probs

PROMPT = list(range(5, 5 + PROMPT_TOKENS))
SWITCH = 9


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=0)


@pytest.fixture(scope="module")
def auditor(checkpoint):
    return Auditor(checkpoint)


@pytest.fixture
def output(checkpoint):
    """What an engine answers that changes from version 1 to 2 after ``SWITCH`` tokens."""
    older, newer = model_of(1, checkpoint), model_of(2, checkpoint)
    tokens = greedy_tokens(older, PROMPT, max_tokens=SWITCH)
    tokens += greedy_tokens(newer, PROMPT + tokens, max_tokens=ANSWER_TOKENS - SWITCH)
    by_version = [token_log_probs(one, PROMPT + tokens)[-ANSWER_TOKENS:] for one in (older, newer)]
    found = [*by_version[0][:SWITCH], *by_version[1][SWITCH:]]
    logprobs = [
        {token: SimpleNamespace(logprob=float(value))}
        for token, value in zip(tokens, found, strict=True)
    ]
    return SimpleNamespace(
        replica_id="0",
        prompt_token_ids=PROMPT,
        outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)],
        version_spans=((VersionSpan(1, 0, SWITCH), VersionSpan(2, SWITCH, ANSWER_TOKENS)),),
        min_version=1,
    )


def asked(*answers, floor=1, prompt=PROMPT):
    one = Asked("single", prompt, floor, began_at=100.0)
    for answer in answers:
        one.take(answer)
    one.ended_at = 101.0
    return [one]


def check(auditor, asked, sent=(0, 1, 2), outages=()):
    return auditor.check(asked, set(sent), outages)


def test_a_true_answer_passes(auditor, output):
    assert check(auditor, asked(output)) == (1, 0)


def test_no_answer_and_two(auditor, output):
    for answers in ((), (output, output), (output, NoReplicaAvailableError("none"))):
        with pytest.raises(AssertionError, match="answered"):
            check(auditor, asked(*answers))


def test_an_error_is_allowed_while_no_replica_serves(auditor, output):
    error = NoReplicaAvailableError("none")
    assert check(auditor, asked(error), outages=[(90.0, 99.0)]) == (0, 1)
    for outages in ([], [(80.0, 90.0)], [(110.0, 120.0)]):
        with pytest.raises(AssertionError, match="replicas served, and it ended in NoReplica"):
            check(auditor, asked(error), outages=outages)


def test_the_answer_to_another_prompt(auditor, output):
    with pytest.raises(AssertionError, match="another's answer"):
        check(auditor, asked(output, prompt=[9, *PROMPT[1:]]))


def test_a_version_that_nobody_sent(auditor, output):
    with pytest.raises(AssertionError, match="unknown version"):
        check(auditor, asked(output), sent=(0, 1))


def test_an_older_version_than_was_committed(auditor, output):
    with pytest.raises(AssertionError, match="under version 1 after version 2 was committed"):
        check(auditor, asked(output, floor=2))


@pytest.mark.parametrize("switch", [SWITCH - 1, SWITCH + 1])
def test_a_token_under_the_label_of_another_version(auditor, output, switch):
    output.version_spans = ((VersionSpan(1, 0, switch), VersionSpan(2, switch, ANSWER_TOKENS)),)
    with pytest.raises(AssertionError, match="off the model of version"):
        check(auditor, asked(output))
