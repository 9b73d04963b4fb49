"""Replicas, transports and clients that pushes can be tried on without engines."""

from types import SimpleNamespace

import torch

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.replica import EngineDescription, EngineReport
from torchrl_vllm_sync.weights.p2p.memory import MappedMemory, new_memory
from torchrl_vllm_sync.weights.push import deliver, errors_of
from torchrl_vllm_sync.weights.source import MappingSource
from torchrl_vllm_sync.weights.transport import Members, Push, Standing

CPU = torch.device("cpu")
SERVING = Standing(state=ReplicaState.SERVING)


def members_of(client):
    """All that are there, as a push begins with them."""
    members = Members(client)
    members.choose()
    return members


def open_transport(transport, client, source=None):
    """Opens it for all replicas of ``client``; returns them."""
    members = members_of(client)
    transport.open(members, source)
    return members


def send(transport, client, source, version, *, timeout_s=20, **options):
    """Opens a transport and sends through it; returns what every replica answered."""
    members = open_transport(transport, client, source)
    push = Push(source=source, version=version, timeout_s=timeout_s, **options)
    replicas = deliver(transport, members, push)
    return SimpleNamespace(
        replicas=replicas,
        failures=errors_of(replicas),
        num_bytes=sum(meta.num_bytes for meta in source.metadata()),
        phases=push.times.seconds,
    )


def mapped_memory(num_bytes, owner=None, *, where=CPU, device=CPU):
    """Memory somewhere, as a trainer on ``device`` has a worker's."""
    memory = new_memory(num_bytes, where)
    mapped = MappedMemory(num_bytes, device, memory.export(), owner)
    memory.close()
    return mapped


class OneRoom(MappingSource):
    """A source that yields all its tensors in the same memory, one after the other."""

    views = None

    def __iter__(self):
        room = torch.empty(max(one.numel() for one in self.tensors.values()), dtype=torch.bfloat16)
        for name, tensor in self.tensors.items():
            one = room[: tensor.numel()].view(tensor.shape)
            yield name, one.copy_(tensor)


class Answered:
    """Calls that have ended."""

    def __init__(self, answers):
        self._answers = answers

    def failures(self):
        failed = self._answers.items()
        return {name: one for name, one in failed if isinstance(one, BaseException)}

    def answers(self, deadline_s):
        return self._answers


def description(**facts):
    """What an engine says of itself."""
    return EngineDescription(
        replica_id="0",
        node_ip="192.0.2.1",
        pid=1,
        max_model_len=16,
        vocab_size=8,
        block_size=16,
        num_kv_blocks=4,
        vllm_version="0.32.0",
        **facts,
    )


class DescribingClient:
    """Answers ``describe`` with ``answers``, one for each replica, and refuses everything else."""

    service_name, rendezvous = "fake", ("127.0.0.1", None)

    def __init__(self, *answers):
        self.described = 0
        self._answers = {str(index): one for index, one in enumerate(answers)}
        self.known = {}

    def standings(self):
        return {name: self.known.get(name, SERVING) for name in self._answers}

    def start_calls(self, method, calls, **kwargs):
        assert method == "describe"
        self.described += 1
        return Answered({name: self._answers[name] for name in calls})


class Replicas:
    """Answers for two replicas: what they hold, and who was held back at which version."""

    service_name = "fake"

    def __init__(self, **held):
        self.held, self.states, self.held_back, self.calls = held, {}, [], []
        self.known, self.left_behind, self.answer = {}, {}, {}
        self.turns, self.refusals, self.stopped = [], {}, set()

    def standings(self):
        return {name: self.known.get(name, SERVING) for name in self.held}

    def refresh_members(self):
        pass

    def look_for_members(self):
        return self.refresh_members

    def note_left_behind(self, version, replica_ids):
        self.left_behind |= dict.fromkeys(replica_ids, version)

    def start_calls(self, method, calls, **kwargs):
        if method in ("begin_push", "keep_push", "end_push"):
            self.turns += [(method, *sorted(calls))] if calls else []
            return Answered({name: self.refusals.get(name, True) for name in calls})
        if method == "probe_workers":
            silence = TimeoutError("no answer")
            return Answered({name: silence if name in self.stopped else None for name in calls})
        if calls:
            self.calls.append(method)
        if method == "hold_back":
            self.held_back += [(name, *args) for name, args in calls.items()]
        self.answer = {
            name: EngineReport(
                replica_id=name,
                state=self.states.get(name, ReplicaState.SERVING),
                weight_version=self.held[name],
            )
            for name in calls
        }
        return self

    def answers(self, deadline_s):
        return self.answer


class Transport:
    """Sends to :class:`Replicas`, failing where it is told."""

    name, run_id, last_version, is_collective = "fake", "run", 0, False

    def __init__(self, replicas):
        self.replicas, self.failing, self.sent, self.closed = replicas, set(), [], 0
        self.silent, self.limits, self.facts, self.opened_for = set(), [], {}, []

    def open(self, members, source=None):
        self.opened_for.append(source)

    def send(self, members, push):
        self.sent.append(push.version)
        self.limits.append(push.timeout_s)
        return {name: self.answer(name, push.version) for name in self.replicas.held}

    def answer(self, name, version):
        if name in self.failing:
            self.replicas.states[name] = ReplicaState.STALE
            self.replicas.stopped |= self.silent & {name}
            return (TimeoutError if name in self.silent else OSError)("injected")
        self.replicas.states[name] = ReplicaState.SERVING
        self.replicas.held[name] = version
        return {"version": version, **self.facts}

    def close(self):
        self.closed += 1
