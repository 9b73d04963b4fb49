"""Deaths of actors that are told when others have taken their places."""

from types import SimpleNamespace

import pytest

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import ReplicaUnavailableError
from torchrl_vllm_sync.replica import Member, Replica
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync.service import fleet, replicas
from torchrl_vllm_sync.service.fleet import Fleet
from torchrl_vllm_sync.service.replicas import Membership, ServiceReplicas


def member(actor):
    return Member(replica=Replica("0", actor), description=None)


class Actor:
    def __init__(self):
        self.report = SimpleNamespace(remote=lambda: None)


class Calls:
    """Calls that never end; keeps whom to tell of deaths."""

    def __init__(self, refs, on_death):
        Calls.on_death = staticmethod(on_death)

    def answers(self, deadline_s):
        return {}


@pytest.mark.parametrize("of", ["service", "fleet"])
def test_only_the_actor_that_was_called_counts_as_failed(monkeypatch, of):
    monkeypatch.setattr(replicas, "ReplicaCalls", Calls)
    monkeypatch.setattr(fleet, "ReplicaCalls", Calls)
    first = member(Actor())
    membership, load = Membership([first]), LoadTracker(["0"], state=ReplicaState.SERVING)
    if of == "service":
        service = ServiceReplicas()
        service.name, service.load, service._membership = "s", load, membership
        service.start_calls("report", {"0": ()})
    else:
        Fleet("s", None, membership, load, object, None)._call([first], "report")
    death = ReplicaUnavailableError("0", ReplicaState.FAILED, "its actor died")
    membership.suspend("0")
    Calls.on_death(death)
    assert load.snapshot("0").state is ReplicaState.SERVING
    membership.put(member(Actor()))
    Calls.on_death(death)
    assert load.snapshot("0").state is ReplicaState.SERVING
    membership.put(first)
    Calls.on_death(death)
    assert load.snapshot("0").state is ReplicaState.FAILED
