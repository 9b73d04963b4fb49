"""What a router counts itself: the requests that it has sent and has not seen end, by replica."""

# ruff: noqa: ARG002  every policy has the arguments of the interface

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.routing_sim.interface import EngineFigures, SimRequest

__all__ = ["CountingPolicy", "InFlight", "RandomTies", "Ties"]


class InFlight:
    """Requests in flight by replica, in the order in which replicas were named.

    An end counts once, and only for the replica as it was when the request began: whoever leaves
    and comes back starts from zero.

    Args:
        replica_ids: Replicas at the start.
    """

    def __init__(self, replica_ids: Sequence[int]) -> None:
        self.counts = dict.fromkeys(replica_ids, 0)
        self._running: set[tuple[int, int]] = set()

    def begin(self, request_id: int, replica_id: int) -> None:
        """A request was sent."""
        self._running.add((request_id, replica_id))
        self.counts[replica_id] += 1

    def end(self, request_id: int, replica_id: int) -> bool:
        """A request has ended; False if it does not count any more."""
        if (request_id, replica_id) not in self._running:
            return False
        self._running.remove((request_id, replica_id))
        self.counts[replica_id] -= 1
        return True

    def set_replicas(self, replica_ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Takes the new set; returns the ids that joined and those that left."""
        kept = set(replica_ids)
        left = [replica_id for replica_id in self.counts if replica_id not in kept]
        joined = [replica_id for replica_id in replica_ids if replica_id not in self.counts]
        if left:
            self._running = {entry for entry in self._running if entry[1] in kept}
        self.counts = {replica_id: self.counts.get(replica_id, 0) for replica_id in replica_ids}
        return joined, left

    def fewest(self) -> list[int]:
        """The replicas with the fewest requests, in order."""
        least = min(self.counts.values())
        return [replica_id for replica_id, count in self.counts.items() if count == least]


class Ties(Protocol):
    """Chooses among replicas that a rule does not tell apart."""

    def one_of(self, replica_ids: Sequence[int]) -> int:
        """One of these, of which there is at least one."""
        ...

    def pair_of(self, replica_ids: Sequence[int]) -> list[int]:
        """Two different ones of these; the only one if there are no two."""
        ...

    def settle(self, replica_id: int) -> int:
        """The replica that gets the request, of which the rule has chosen this one."""
        ...


class RandomTies:
    """Chooses among replicas that a rule does not tell apart, each as likely as the others.

    Args:
        seed: Of the choices.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def one_of(self, replica_ids: Sequence[int]) -> int:
        """One of these, of which there is at least one."""
        if len(replica_ids) == 1:
            return replica_ids[0]
        return replica_ids[int(self._random.integers(len(replica_ids)))]

    def pair_of(self, replica_ids: Sequence[int]) -> list[int]:
        """Two different ones of these, in random order; the only one if there are no two."""
        if len(replica_ids) == 1:
            return list(replica_ids)
        return [replica_ids[index] for index in self._random.permutation(len(replica_ids))[:2]]

    def settle(self, replica_id: int) -> int:
        """The rule's choice."""
        return replica_id


class CountingPolicy:
    """A router that counts its requests in flight; each subclass says what it does with that.

    Args:
        replica_ids: Replicas at the start.
        seed: Of choices among equals.

    Attributes:
        in_flight: The requests in flight.
        ties: What chooses among equals; to be replaced where a real router's choices are followed.
    """

    def __init__(self, replica_ids: Sequence[int], seed: int) -> None:
        if not replica_ids:
            raise ValueError("a router needs at least one replica")
        self.in_flight = InFlight(replica_ids)
        self.ties: Ties = RandomTies(seed)

    def choose(self, request: SimRequest, now: float) -> int:
        """Id of the replica for a request; the request counts from here on."""
        replica_id = self.pick(request, now)
        self.in_flight.begin(request.request_id, replica_id)
        return replica_id

    def pick(self, request: SimRequest, now: float) -> int:
        """Id of the replica for a request."""
        raise NotImplementedError

    def finish(
        self, request: SimRequest, replica_id: int, output: np.ndarray | None, now: float
    ) -> None:
        """A request has ended."""
        self.in_flight.end(request.request_id, replica_id)

    def end_session(self, session_id: int, now: float) -> None:
        """A session sends no more requests."""

    def report(self, replica_id: int, figures: EngineFigures, asked_at: float, now: float) -> None:
        """An engine's figures, which none of these routers reads."""

    def set_replicas(self, replica_ids: Sequence[int], now: float) -> None:
        """Replicas have joined or left."""
        if not replica_ids:
            raise ValueError("a router needs at least one replica")
        joined, left = self.in_flight.set_replicas(replica_ids)
        self.replicas_changed(joined, left, now)

    def replicas_changed(self, joined: list[int], left: list[int], now: float) -> None:
        """For routers that remember more of a replica than its requests."""
