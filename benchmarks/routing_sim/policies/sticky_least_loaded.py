"""vllm-project/router's ``sticky_least_loaded`` policy."""

# ruff: noqa: ARG002  every policy has the arguments of the interface

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from benchmarks.routing_sim.policies.in_flight import CountingPolicy
from benchmarks.routing_sim.policies.ring_hash import default_address, mcrouter_hash, request_key

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from benchmarks.routing_sim.interface import Cluster, SimRequest

__all__ = ["StickyLeastLoaded"]


class StickyLeastLoaded(CountingPolicy):
    """A new session goes to the replica with the fewest sessions, and stays until it is finished.

    Source: vllm-project/router, ``src/policies/sticky_least_loaded.rs`` at 335c57e, and the choices
    of the wheel vllm-router 0.1.17 (``benchmarks.routing_peers``). Of replicas with equally many
    sessions the one is taken whose address, hashed with the key, is highest. A session ends when
    the client says so, and is forgotten two hours after its last request; this is looked after once
    a minute. A request without a session goes where a new session would go and is not counted; here
    a digest of its tokens is hashed then, where the real router hashes its text.

    The key is the session, else the group. Nobody ends a group in the traces, so a group counts as
    finished when none of its requests is in flight any more, as a client that knows its groups
    would tell the router.

    Args:
        cluster: What is known of the engines.
        seed: Unused.
        expiration_s: Seconds after which a session that sends nothing is forgotten.
        address: The address that is hashed for a replica.
        key: The key of a request.
    """

    def __init__(
        self,
        cluster: Cluster,
        seed: int,
        *,
        expiration_s: float = 7200,
        address: Callable[[int], str] = default_address,
        key: Callable[[int, int], str | None] = request_key,
    ) -> None:
        super().__init__(cluster.replica_ids, seed)
        self._expiration_s = expiration_s
        self._address = address
        self._key = key
        self._pins: dict[str, tuple[int, float]] = {}
        self._group_requests: dict[str, int] = {}
        self._last_sweep = 0.0
        self.sessions = dict.fromkeys(cluster.replica_ids, 0)

    def pick(self, request: SimRequest, now: float) -> int:
        """The session's replica, or the one with the fewest sessions."""
        self._sweep(now)
        key = self._key(request.session_id, request.group_id)
        if key is None:
            # The real router hashes the whole body; a digest spreads requests alike, and fast.
            return self._least(hashlib.blake2b(request.tokens.data, digest_size=16).hexdigest())
        pin = self._pins.get(key)
        if pin is None or pin[0] not in self.sessions:
            replica_id = self._least(key)
            self.sessions[replica_id] += 1
        else:
            replica_id = pin[0]
        self._pins[key] = replica_id, now
        if request.session_id == -1:
            self._group_requests[key] = self._group_requests.get(key, 0) + 1
        return replica_id

    def _least(self, key: str) -> int:
        fewest = min(self.sessions.values())
        candidates = [one for one, count in self.sessions.items() if count == fewest]
        if len(candidates) == 1:
            return candidates[0]
        return max(candidates, key=lambda one: mcrouter_hash(f"{key}:{self._address(one)}"))

    def _sweep(self, now: float) -> None:
        if now - self._last_sweep < 60:
            return
        self._last_sweep = now
        for key in [k for k, (_, at) in self._pins.items() if now - at >= self._expiration_s]:
            self.release(key)

    def release(self, key: str) -> None:
        """A session is finished."""
        replica_id, _ = self._pins.pop(key, (-1, 0.0))
        if replica_id in self.sessions:
            self.sessions[replica_id] -= 1

    def finish(
        self, request: SimRequest, replica_id: int, output: np.ndarray | None, now: float
    ) -> None:
        """A request has ended, and maybe its group."""
        super().finish(request, replica_id, output, now)
        if request.session_id != -1:
            return
        key = self._key(-1, request.group_id)
        if key in self._group_requests:
            self._group_requests[key] -= 1
            if not self._group_requests[key]:
                del self._group_requests[key]
                self.release(key)

    def end_session(self, session_id: int, now: float) -> None:
        """A session is finished."""
        key = self._key(session_id, -1)
        if key is not None:
            self.release(key)

    def replicas_changed(self, joined: list[int], left: list[int], now: float) -> None:
        """Sessions of a replica that left are new ones at their next request."""
        gone = set(left)
        self._pins = {key: pin for key, pin in self._pins.items() if pin[0] not in gone}
        self.sessions = {one: self.sessions.get(one, 0) for one in self.in_flight.counts}
