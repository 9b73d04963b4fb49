"""Scripts of requests for a real router and its description to run, and what either chose.

A script says what happens in which order: a request is sent, one ends, a session ends, time goes
by. Prompts are sequences of whole blocks, each a number of its own, so that a router that works on
characters sees the same prefixes as one that works on tokens: a block is one character there, and
``BLOCK_SIZE`` equal tokens here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from benchmarks.routing_sim.interface import SimRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.routing_sim.policies.in_flight import CountingPolicy

__all__ = ["BLOCK_SIZE", "End", "EndSession", "Leave", "Script", "Send", "Step", "Wait", "decide"]

BLOCK_SIZE = 64
"""Tokens in a block of a script."""

_FIRST_CHARACTER = 0x4E00


@dataclass(frozen=True, slots=True)
class Send:
    """A request is sent.

    Attributes:
        base: Position among the script's requests of an earlier one, or -1.
        shared: Blocks that its prompt has in common with that one's.
        fresh: New blocks that follow.
        session: Its session, or -1.
        group: Its group, or -1.
    """

    base: int
    shared: int
    fresh: int
    session: int = -1
    group: int = -1


@dataclass(frozen=True, slots=True)
class End:
    """The request of this position is answered."""

    request: int


@dataclass(frozen=True, slots=True)
class EndSession:
    """A session sends no more requests."""

    session: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Time goes by."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Leave:
    """A replica leaves; none of its requests is in flight."""

    replica: int


Step: TypeAlias = "Send | End | EndSession | Wait | Leave"

_KINDS: dict[str, type[Send | End | EndSession | Wait | Leave]] = {
    "s": Send,
    "e": End,
    "x": EndSession,
    "w": Wait,
    "l": Leave,
}


@dataclass(slots=True)
class Script:
    """Steps, and the prompts of their requests.

    Attributes:
        steps: What happens, in order.
        prompts: Blocks of each request's prompt.
    """

    steps: list[Step] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    _next_block: int = 0

    def add(self, step: Step) -> None:
        """Appends a step."""
        self.steps.append(step)
        if isinstance(step, Send):
            shared = self.prompts[step.base][: step.shared] if step.base >= 0 else []
            if len(shared) < (step.shared if step.base >= 0 else 0):
                raise ValueError(f"request {step.base} has fewer than {step.shared} blocks")
            fresh = range(self._next_block, self._next_block + step.fresh)
            self._next_block += step.fresh
            self.prompts.append([*shared, *fresh])

    def sends(self) -> Iterator[Send]:
        """The requests, in order."""
        return (step for step in self.steps if isinstance(step, Send))

    def tokens(self, request: int) -> np.ndarray:
        """A prompt as tokens: int32 of shape ``(num_blocks * BLOCK_SIZE,)``."""
        return np.repeat(np.asarray(self.prompts[request], np.int32) + 1, BLOCK_SIZE)

    def text(self, request: int, *, words: bool = False) -> str:
        """A prompt as text: one character of three bytes for each block.

        Args:
            request: Position of the request.
            words: A block is eight times a number of six digits instead. Different blocks then
                begin alike, so that prompts part in the middle of a block.
        """
        if words:
            return "".join(f"{block:06d} " * 8 for block in self.prompts[request])
        return "".join(chr(_FIRST_CHARACTER + block) for block in self.prompts[request])

    def sim_request(self, request: int, send: Send) -> SimRequest:
        """A request as a policy sees it."""
        return SimRequest(request, self.tokens(request), send.session, send.group)

    def to_json(self) -> list[list[Any]]:
        """The steps as short lists."""
        return [
            [kind, *(getattr(step, name) for name in step.__dataclass_fields__)]
            for step in self.steps
            for kind, cls in _KINDS.items()
            if type(step) is cls
        ]

    @classmethod
    def from_json(cls, steps: list[list[Any]]) -> Script:
        """The inverse of :meth:`to_json`."""
        script = cls()
        for kind, *values in steps:
            script.add(_KINDS[kind](*values))
        return script


class FollowedTies:
    """Among replicas that a rule does not tell apart, the one that a real router chose.

    Args:
        in_step: Every request goes where the real router sent it, whatever the rule says.

    Attributes:
        wanted: The real router's choice for the next request.
        followed: Choices among several that were decided this way.
        proposed: What the rule has chosen, where it says so before it acts on it.
    """

    def __init__(self, *, in_step: bool = False) -> None:
        self._in_step = in_step
        self.wanted = -1
        self.followed = 0
        self.proposed: list[int] = []

    def one_of(self, replica_ids: Sequence[int]) -> int:
        """The wanted one if it is among these, otherwise the first."""
        if len(replica_ids) > 1 and self.wanted in replica_ids:
            self.followed += 1
            return self.wanted
        return replica_ids[0]

    def pair_of(self, replica_ids: Sequence[int]) -> list[int]:
        """The wanted one alone, as lots might have it."""
        return [self.one_of(replica_ids)]

    def settle(self, replica_id: int) -> int:
        """The rule's choice, or in step the real router's."""
        self.proposed.append(replica_id)
        return self.wanted if self._in_step else replica_id


def decide(
    script: Script,
    policy: CountingPolicy,
    *,
    real: Sequence[int] | None = None,
    in_step: bool = False,
    step_s: float = 1e-3,
) -> list[int]:
    """What a policy chooses for the requests of a script.

    Args:
        script: What happens.
        policy: A policy of its own for this script.
        real: A real router's choices, which decide where the policy would draw lots.
        in_step: After each choice the policy goes on as if it had chosen as the real router, so
            that one disagreement does not lead to the next (``CacheAware`` only).
        step_s: Seconds that every step takes, besides waiting.
    """
    now, choices = 0.0, []
    requests: list[SimRequest] = []
    ties = FollowedTies(in_step=in_step)
    if real is not None:
        policy.ties = ties
    for step in script.steps:
        now += step_s
        match step:
            case Send():
                request = len(requests)
                requests.append(script.sim_request(request, step))
                ties.wanted = real[request] if real is not None else -1
                choices.append(policy.choose(requests[-1], now))
            case End(request):
                policy.finish(requests[request], choices[request], None, now)
            case EndSession(session):
                policy.end_session(session, now)
            case Leave(replica):
                left = [one for one in policy.in_flight.counts if one != replica]
                policy.set_replicas(left, now)
            case Wait(seconds):
                now += seconds
    return ties.proposed if in_step else choices
