"""The store where a trainer and its workers meet, on which no call waits for ever."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import DistStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

__all__ = ["BoundedStore"]

# Seconds within which the process that hosts a store answers, unless it is stopped or cut off.
ANSWER_TIMEOUT_S = 10.0
# Seconds that it gets beyond a wait which it was asked for, to say that the time is over.
LAST_WORD_S = 0.5


class BoundedStore:
    """The calls of a ``TCPStore`` that the ranks of a group need, each of which ends in time.

    A ``TCPStore`` has time limits, but its client leaves them to the server: when the process that
    hosts it is stopped, no call returns until that goes on (torch 2.11 and 2.12). So each call runs
    in a thread of its own, which is left behind with it when there is no answer. The connection is
    lost then, and every later call fails at once.

    Args:
        store: The connection; nobody else may use it meanwhile.
        answer_timeout_s: Seconds to wait for the answer to calls that do not wait themselves;
            ``None`` in the process that hosts the store, whose calls are made directly.

    Attributes:
        raw: As given.
    """

    def __init__(
        self, store: TCPStore, *, answer_timeout_s: float | None = ANSWER_TIMEOUT_S
    ) -> None:
        self.raw = store
        self._answer_timeout_s = answer_timeout_s
        self._is_lost = False

    def set(self, key: str, value: str) -> None:
        """Sets ``key``.

        Raises:
            DistError: The host of the store is gone, or does not answer.
        """
        self._call(lambda: self.raw.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """Adds to the number at ``key``, at first 0, and returns it.

        Raises:
            DistError: The host of the store is gone, or does not answer.
        """
        return self._call(lambda: self.raw.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all ``keys`` are there.

        Raises:
            DistError: The host of the store is gone, or does not answer.
        """
        return self._call(lambda: self.raw.check(list(keys)))

    def await_value(self, key: str, timeout_s: float) -> str:
        """Waits until ``key`` is there and returns its value.

        Raises:
            DistError: It did not come in time, or the host of the store is gone.
        """

        def wait() -> str:
            self.raw.wait([key], timedelta(seconds=timeout_s))
            return self.raw.get(key).decode(errors="replace")  # anybody may have written it

        return self._call(wait, timeout_s + LAST_WORD_S)

    def _call(self, call: Callable[[], Any], timeout_s: float | None = None) -> Any:
        """Returns what ``call`` does, if that is in time."""
        if self._answer_timeout_s is None:
            return call()
        if self._is_lost:
            raise DistStoreError("the connection to the trainer's store was given up")
        ended: list[tuple[Any, Exception | None]] = []

        def run() -> None:
            try:
                ended.append((call(), None))
            except Exception as error:  # noqa: BLE001  raised again where the answer is awaited
                ended.append((None, error))

        thread = threading.Thread(target=run, name="trainers-store", daemon=True)
        thread.start()
        thread.join(self._answer_timeout_s if timeout_s is None else timeout_s)
        if not ended:
            self._is_lost = True
            raise DistStoreError("the process that hosts the store did not answer in time")
        answer, error = ended[0]
        if error is not None:
            raise error
        return answer
