"""Streaming one request, from as many replicas as it takes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from torchrl_vllm_sync.attempts import PendingRequest, failed
from torchrl_vllm_sync.continuation import AnswerSoFar
from torchrl_vllm_sync.errors import (
    GenerationError,
    NoReplicaAvailableError,
    ReplicaUnavailableError,
    VersionNotReachedError,
)
from torchrl_vllm_sync.ray_errors import loss
from torchrl_vllm_sync.replica_access import GRACE_S, gone, silence, timed_out

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from torchrl_vllm_sync.replica import Replica
    from torchrl_vllm_sync.replica_access import ReplicaAccess, Reserve
    from torchrl_vllm_sync.requests import EngineRequest, EngineResult
    from torchrl_vllm_sync.routing.balancer import Reservation

__all__ = ["stream_request"]


async def stream_request(
    access: ReplicaAccess, request: EngineRequest, reserve: Reserve
) -> AsyncGenerator[EngineResult]:
    """Yields the partial outputs of one request, the last one finished.

    When its replica is lost another takes it up, up to three attempts in all. It goes on behind the
    tokens that were received where the sampling parameters allow that, see ``continuation``.
    Otherwise it begins again: outputs that hold all tokens so far then start over. A stream of
    outputs that hold only new tokens cannot, and ends with a ``RequestLostError``.

    Args:
        access: The replicas.
        request: What to run.
        reserve: Reserves a replica for each of the given requests, avoiding the given ids.

    Raises:
        NoReplicaAvailableError: No replica took requests at the first attempt.
    """
    pending, so_far = PendingRequest(request, time.monotonic()), AnswerSoFar(request)
    while True:
        try:
            (reservation,) = await access.reserve([pending], reserve)
        except NoReplicaAvailableError as error:
            if not pending.losses:
                raise
            yield pending.lost(f"and {error}")
            return
        except VersionNotReachedError as error:
            yield failed(request, error)
            return
        with reservation:
            replica = access.replica(reservation.replica_id)
            if replica is None:
                access.mark(gone(reservation.replica_id), None)
                pending.note(gone(reservation.replica_id), None)
            else:
                asked = so_far.follow_up(pending.shortened())
                steps = _steps(access, asked, replica, reservation)
                try:
                    async for result in steps:
                        so_far.add(result)
                        yield result
                except ReplicaUnavailableError as error:
                    pending.note(error, replica.actor)
                else:
                    return
                finally:
                    await steps.aclose()
        why = pending.verdict or so_far.verdict
        if why:
            yield pending.lost(why)
            return


async def _steps(
    access: ReplicaAccess, request: EngineRequest, replica: Replica, reservation: Reservation
) -> AsyncGenerator[EngineResult]:
    """Yields what one replica answers, up to the end.

    Raises:
        ReplicaUnavailableError: The replica was lost, or refused the request.
    """
    from vllm.sampling_params import RequestOutputKind

    params, actor, name = request.sampling_params, replica.actor, replica.replica_id
    # Whether the last output has all tokens, and not only those of a step or of one sample.
    is_whole = params.n == 1 and params.output_kind is not RequestOutputKind.DELTA
    # A stream may be read slowly, and each step in a task of its own: the limit is on silence.
    limit_s = request.timeout_s + GRACE_S
    watch, ended = access.watch(replica), False
    try:
        refs = aiter(actor.stream.options(num_returns="streaming").remote(request))
        while not ended:
            try:
                async with watch.limited(limit_s):
                    result: EngineResult = await (await anext(refs))
            except ReplicaUnavailableError:
                ended = True
                access.disown(actor, [request.request_id])
                raise
            except RayError as error:
                found = loss(name, error)
                if found is not None:
                    ended = True
                    access.mark(found, actor)
                    if found.may_return:
                        access.disown(actor, [request.request_id])
                    raise found from None
                reason = f"replica {name}: {error}"
                yield failed(request, GenerationError(request.request_id, reason))
                return
            except TimeoutError:
                access.mark(silence(name, limit_s), actor)
                yield failed(request, timed_out(request, name, limit_s))
                return
            ended = result.error is not None or result.finished
            if isinstance(result.error, ReplicaUnavailableError):
                access.mark(result.error, actor)
                raise result.error
            if ended:
                reservation.release(_streamed_answers(result) if is_whole else [])
            yield access.completed(result)
    finally:
        if not ended:
            await asyncio.shield(access.abort(actor, [request.request_id]))


def _streamed_answers(result: EngineResult) -> list[Any]:
    """Token ids of the one sample of a result, for whom places the next requests."""
    return [] if result.output is None else result.output.answers
