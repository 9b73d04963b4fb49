"""The default transport, chosen at the first push."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import TransferError
from torchrl_vllm_sync.weights.broadcast.transport import BroadcastTransport
from torchrl_vllm_sync.weights.ipc import IPCTransport
from torchrl_vllm_sync.weights.p2p.transport import P2PTransport
from torchrl_vllm_sync.weights.places import Place, choose_transport, place_of
from torchrl_vllm_sync.weights.snapshots.transport import MemmapTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrl_vllm_sync.weights.places import TransportName
    from torchrl_vllm_sync.weights.source import WeightSource
    from torchrl_vllm_sync.weights.transport import Members, Push, WeightTransport


class AutoTransport:
    """Chooses by where trainer and engines are, then is that transport; see ``choose_transport``.

    The choice is made at the first push, which says where the weights are, and again when they
    have moved to another device, or after :meth:`close`.

    Attributes:
        name: Name of the transport chosen; ``"auto"`` before the first push.
    """

    def __init__(self) -> None:
        self.name = "auto"
        self._chosen: WeightTransport | None = None
        self._place: Place | None = None

    @property
    def chosen(self) -> WeightTransport | None:
        """The transport chosen; ``None`` before the first push."""
        return self._chosen

    @property
    def is_collective(self) -> bool:
        """Whether that is so of the transport chosen; ``True`` before."""
        return self._chosen is None or self._chosen.is_collective

    @property
    def run_id(self) -> str:
        """That of the transport chosen; empty before."""
        return "" if self._chosen is None else self._chosen.run_id

    @property
    def last_version(self) -> int:
        """Newest version that the transport chosen stores; 0 before."""
        return 0 if self._chosen is None else self._chosen.last_version

    def open(self, members: Members, source: WeightSource | None = None) -> None:
        """Chooses if that is due and the source is known, and opens the transport chosen.

        Arguments are those of :meth:`WeightTransport.open`.
        """
        place = self._place if source is None else place_of(source)
        if place is not None and (self._chosen is None or place != self._place):
            chosen = TRANSPORTS[choose_transport(place, members.describe())]()
            self.close()
            self._chosen, self._place, self.name = chosen, place, chosen.name
        if self._chosen is not None:
            self._chosen.open(members, source)

    def send(self, members: Members, push: Push) -> dict[str, Any]:
        """Sends through the transport chosen.

        Arguments and result are those of :meth:`WeightTransport.send`.

        Raises:
            TransferError: None was chosen yet.
        """
        if self._chosen is None:
            raise TransferError("no transport was chosen yet: open it for what will be sent")
        return self._chosen.send(members, push)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy may be elsewhere, and chooses for itself

    def close(self) -> None:
        """Closes the transport chosen, and forgets the choice. Idempotent."""
        if self._chosen is not None:
            self._chosen.close()
        self._chosen = self._place = None
        self.name = "auto"


TRANSPORTS: dict[TransportName, Callable[[], WeightTransport]] = {
    "auto": AutoTransport,
    "broadcast": BroadcastTransport,
    "ipc": IPCTransport,
    "memmap": MemmapTransport,
    "p2p": P2PTransport,
}
