"""Blocking calls that may never return, made in a thread while the replicas are watched."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import SyncError, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrl_vllm_sync.weights.transport import PendingCalls

__all__ = ["raise_exceptions", "watched"]

# Seconds between looks at the replicas.
WATCH_S = 0.05


def watched(what: str, call: Callable[[], Any], pending: PendingCalls, deadline: float) -> Any:
    """Makes ``call`` in a thread and waits for it, but not for ever.

    The thread is left behind when this raises early; ending what it does is the caller's.

    Args:
        what: Names the call in errors.
        call: What may block.
        pending: Calls to the replicas whose failures end the wait.
        deadline: ``time.monotonic()`` that ends it too.

    Raises:
        SyncError: ``call`` raised it.
        TransferError: ``call`` raised something else, a replica failed, or time is up.
    """
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:  # noqa: BLE001  raised below, on the caller's thread
            failure.append(error)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(WATCH_S)
        raise_exceptions(pending.failures())
        if time.monotonic() > deadline:
            raise TransferError(f"{what} did not end in time")
    for error in failure:
        if isinstance(error, SyncError) or not isinstance(error, Exception):
            raise error
        raise TransferError(f"{what} broke off: {type(error).__name__}: {error}") from error
    return result[0]


def raise_exceptions(answers: Mapping[str, Any]) -> None:
    """Raises for the replicas that failed.

    Args:
        answers: Replica id to its answer, or to the exception that came instead.

    Raises:
        TransferError: At least one did.
    """
    failures = {name: one for name, one in answers.items() if isinstance(one, BaseException)}
    if failures:
        reasons = (f"replica {name}: {one!s}" for name, one in failures.items())
        raise TransferError("; ".join(reasons))
