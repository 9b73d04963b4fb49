"""Deaths of actors that are told when others have taken their places."""

from types import SimpleNamespace

import pytest

from tests.fakes.service import member, replicas_of
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import ReplicaUnavailableError
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync.service import replicas as replicas_module
from torchrl_vllm_sync.service.fleet import Fleet


class Actor:
    def __init__(self):
        self.report = SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: None))


class Calls:
    """Calls that never end; keeps whom to tell of deaths."""

    def __init__(self, refs, on_death):
        Calls.on_death = staticmethod(on_death)

    def answers(self, deadline_s):
        return {}


@pytest.mark.parametrize("of", ["service", "fleet"])
def test_only_the_actor_that_was_called_counts_as_failed(monkeypatch, of):
    monkeypatch.setattr(replicas_module, "ReplicaCalls", Calls)
    first = member("0", Actor())
    load = LoadTracker(["0"], state=ReplicaState.SERVING)
    replicas = replicas_of([first], load=load)
    if of == "service":
        replicas.start_calls("report", {"0": ()})
    else:
        Fleet(replicas, Calls)._call([first], "report")
    death = ReplicaUnavailableError("0", ReplicaState.FAILED, "its actor died")
    replicas.suspend("0")
    Calls.on_death(death)
    assert load.snapshot("0").state is ReplicaState.SERVING
    replicas.put(member("0", Actor()))
    Calls.on_death(death)
    assert load.snapshot("0").state is ReplicaState.SERVING
    replicas.put(first)
    Calls.on_death(death)
    assert load.snapshot("0").state is ReplicaState.FAILED
