"""Who was silent is left out until it answers a question that nobody waits for."""

import pytest

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import ReplicaUnavailableError, SilentEngineError
from torchrl_vllm_sync.weights.transport import Members, Standing

SILENCE = TimeoutError("no answer within 0 s")


class Client:
    """Replicas whose answer to every question so far, and to those to come, is ``answer``."""

    def __init__(self):
        self.known = {"a": Standing(state=ReplicaState.SERVING, incarnation="1")}
        self.answer, self.probes, self.deadlines = SILENCE, 0, []

    def standings(self):
        return self.known

    def start_calls(self, method, calls, **kwargs):
        assert (method, calls) == ("probe_workers", {"a": ()})
        self.probes += 1
        return self

    def answers(self, deadline_s):
        self.deadlines.append(deadline_s)
        return {"a": self.answer}


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def silent(client):
    silent = Members(client)
    silent.note_silent({"a": TimeoutError("it slept"), "gone": TimeoutError("it was removed")})
    return silent


def test_it_is_asked_once_and_nobody_waits_for_the_answer(client, silent):
    for _ in range(3):
        silent.look()
        assert silent.silent == {"a": "it slept"}
    assert client.probes == 1
    assert set(client.deadlines) == {0.0}
    client.answer = None
    silent.look()
    assert silent.silent == {}


def test_an_actor_that_lives_and_whose_engine_does_not_answer_is_asked_again(client, silent):
    client.answer = SilentEngineError("a sign of life took longer than 60 s")
    silent.look()
    assert (silent.silent, client.probes) == ({"a": "it slept"}, 2)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"a": Standing(state=ReplicaState.SERVING, incarnation="2")},
        {"a": Standing(state=ReplicaState.FAILED, incarnation="1")},
    ],
    ids=["removed", "restarted", "failed"],
)
def test_what_is_another_actor_or_dead_is_not_silent_any_more(client, silent, change):
    client.known = change
    silent.look()
    assert silent.silent == {}


def test_an_actor_that_died_since_is_no_longer_silent_but_dead(client, silent):
    client.answer = ReplicaUnavailableError("a", ReplicaState.FAILED, "it died")
    silent.look()
    assert silent.silent == {}
