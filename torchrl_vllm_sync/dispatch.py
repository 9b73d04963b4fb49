"""Sending a batch to its replicas: one Ray call for each, and every request answered once."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from ray.exceptions import RayError

from torchrl_vllm_sync.attempts import PendingRequest, failed
from torchrl_vllm_sync.errors import (
    GenerationError,
    NoReplicaAvailableError,
    ReplicaUnavailableError,
    VersionNotReachedError,
)
from torchrl_vllm_sync.ray_errors import loss
from torchrl_vllm_sync.replica_access import GRACE_S, ReplicaAccess, gone, silence, timed_out
from torchrl_vllm_sync.stream_dispatch import stream_request

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence
    from typing import Any

    from torchrl_vllm_sync.replica import Replica
    from torchrl_vllm_sync.replica_access import Reserve
    from torchrl_vllm_sync.requests import EngineRequest, EngineResult
    from torchrl_vllm_sync.routing.balancer import Reservation
    from torchrl_vllm_sync.routing.ledger import LoadTracker

    Accept = Callable[[EngineResult], None]

__all__ = ["Dispatcher"]


class Dispatcher:
    """Sends requests to replicas and collects one result for each.

    Args:
        replicas: Returns the current replicas.
        load: Ledger to mark replicas in that turn out dead or stale.
        recovers: Says whether a replica is on its way. As long as none takes requests, they wait
            for it up to their time limits; otherwise they fail at once.
    """

    def __init__(
        self,
        replicas: Callable[[], list[Replica]],
        load: LoadTracker,
        recovers: Callable[[], bool] = lambda: False,
    ) -> None:
        self._access = ReplicaAccess(replicas, load, recovers)

    async def run(
        self,
        requests: Sequence[EngineRequest],
        reserve: Reserve,
        *,
        on_result: Accept | None = None,
    ) -> list[EngineResult]:
        """Runs every request to a result, an output or an error.

        What a replica lost by dying is sent to the others, up to three attempts; results that had
        arrived are kept. Cancelling ends the engines' work too.

        Args:
            requests: Requests with unique ids, and one ``min_version``. None is sent before a
                replica holds that; the wait counts against their time limits.
            reserve: Reserves a replica for each of the given requests, avoiding the given ids.
            on_result: Called with each result as it arrives.

        Returns:
            Results in the order of ``requests``.

        Raises:
            NoReplicaAvailableError: No replica took requests at the first attempt.
        """
        results: dict[str, EngineResult] = {}
        begin = time.monotonic()

        def accept(result: EngineResult) -> None:
            results[result.request_id] = result
            if on_result is not None:
                on_result(result)

        await self._place([PendingRequest(one, begin) for one in requests], reserve, accept)
        return [results[request.request_id] for request in requests]

    async def _place(
        self, pending: Sequence[PendingRequest], reserve: Reserve, accept: Accept
    ) -> None:
        """Sends each request to a replica, and those that it lost to another."""
        try:
            reservations = await self._access.reserve(pending, reserve)
        except NoReplicaAvailableError as error:
            if not any(one.losses for one in pending):
                raise
            for one in pending:
                accept(one.lost(f"and {error}"))
            return
        except VersionNotReachedError as error:
            for one in pending:
                accept(failed(one.request, error))
            return
        shares: dict[str, list[tuple[PendingRequest, Reservation]]] = {}
        for one, reservation in zip(pending, reservations, strict=True):
            shares.setdefault(reservation.replica_id, []).append((one, reservation))
        with contextlib.ExitStack() as releases:
            for reservation in reservations:
                releases.callback(reservation.release)
            try:
                async with asyncio.TaskGroup() as group:
                    for replica_id, share in shares.items():
                        group.create_task(self._serve(replica_id, share, reserve, accept))
            except BaseExceptionGroup as failures:  # such as what cannot be pickled
                raise failures.exceptions[0] from None

    async def _serve(
        self,
        replica_id: str,
        share: list[tuple[PendingRequest, Reservation]],
        reserve: Reserve,
        accept: Accept,
    ) -> None:
        """Has one replica run its share, and others what it lost."""
        lost = await self._call(replica_id, share, accept)
        for one in [one for one in lost if one.verdict]:
            accept(one.lost(one.verdict))
        again = [one for one in lost if not one.verdict]
        if again:
            await self._place(again, reserve, accept)

    async def _call(
        self,
        replica_id: str,
        share: list[tuple[PendingRequest, Reservation]],
        accept: Accept,
    ) -> list[PendingRequest]:
        """Makes the one call to one replica, giving places back as results arrive.

        Returns:
            The requests that the replica lost.
        """
        inside = {one.request.request_id: (one, place) for one, place in share}
        lost: list[PendingRequest] = []
        actor: Any = None

        def lose(request_id: str, error: ReplicaUnavailableError) -> None:
            one, place = inside.pop(request_id)
            place.release()
            one.note(error, actor)
            lost.append(one)

        def lose_all(error: ReplicaUnavailableError) -> None:
            for request_id in list(inside):
                lose(request_id, error)

        replica = self._access.replica(replica_id)
        if replica is None:
            self._access.mark(gone(replica_id), None)
            lose_all(gone(replica_id))
            return lost
        actor = replica.actor
        batch = [one.shortened() for one, _ in share]
        limit_s = max(request.timeout_s for request in batch) + GRACE_S
        try:
            async with self._access.watch(replica).limited(limit_s):
                async for ref in actor.run_batch.options(num_returns="streaming").remote(
                    batch, want_prompt=False
                ):
                    for result in await ref:
                        if isinstance(result.error, ReplicaUnavailableError):
                            self._access.mark(result.error, actor)
                            lose(result.request_id, result.error)
                            continue
                        _, place = inside.pop(result.request_id)
                        place.release(_answers(result), _begun(result))
                        accept(self._access.completed(result))
        except ReplicaUnavailableError as error:
            self._access.disown(actor, list(inside))
            lose_all(error)
        except RayError as error:
            found = loss(replica_id, error)
            if found is not None:
                self._access.mark(found, actor)
                if found.may_return:
                    self._access.disown(actor, list(inside))
                lose_all(found)
            for one, _ in inside.values():
                reason = f"replica {replica_id}: {error}"
                accept(failed(one.request, GenerationError(one.request.request_id, reason)))
        except TimeoutError:
            self._access.mark(silence(replica_id, limit_s), actor)
            for one, _ in inside.values():
                accept(failed(one.request, timed_out(one.request, replica_id, limit_s)))
        finally:
            if inside:
                await asyncio.shield(self._access.abort(actor, list(inside)))
        return lost

    def stream(self, request: EngineRequest, reserve: Reserve) -> AsyncGenerator[EngineResult]:
        """Yields the partial outputs of one request, the last one finished.

        See :func:`stream_request`.
        """
        return stream_request(self._access, request, reserve)


def _answers(result: EngineResult) -> list[Any]:
    """Token ids of the samples of a result, for whom places the next requests."""
    return [] if result.output is None else result.output.answers


def _begun(result: EngineResult) -> int | None:
    """Oldest version that sampled a token of a result, whose keys and values its replica has."""
    return min((one.spans[0].version for one in result.samples if one.spans), default=None)
