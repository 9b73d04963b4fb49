"""The default transport, chosen at the first push."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import TransferError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import NOT_STAGED
from torchrl_vllm_sync.weights.broadcast.transport import BroadcastTransport
from torchrl_vllm_sync.weights.ipc import IPCTransport
from torchrl_vllm_sync.weights.p2p.transport import P2PTransport
from torchrl_vllm_sync.weights.places import (
    Place,
    choose_transport,
    devices_of,
    place_of,
    why_not_p2p,
)
from torchrl_vllm_sync.weights.snapshots.transport import MemmapTransport
from torchrl_vllm_sync.weights.transport import failed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrl_vllm_sync.replica import EngineDescription
    from torchrl_vllm_sync.weights.places import TransportName
    from torchrl_vllm_sync.weights.source import WeightSource
    from torchrl_vllm_sync.weights.transport import Members, Push, WeightTransport

logger = logging.getLogger(__name__)


class AutoTransport:
    """Chooses by where trainer and engines are, then is that transport; see ``choose_transport``.

    The choice is made at the first push, which says where the weights are, and again when they
    have moved to another device, or after :meth:`close`. If engines turn out not to take ``p2p``,
    because a plan or a GPU does not allow it, the next best goes on for good, with a warning.

    Attributes:
        name: Name of the transport chosen; ``"auto"`` before the first push.
    """

    def __init__(self) -> None:
        self.name = "auto"
        self._chosen: WeightTransport | None = None
        self._place: Place | None = None
        self._unwritable = ""  # why engines could not be written to, though they seemed to be

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
            self._choose(place, members, source)
        try:
            if self._unwritable and isinstance(self._chosen, P2PTransport):
                self._give_p2p_up(members, source, self._unwritable)
            elif self._chosen is not None:
                self._chosen.open(members, source)
        except UnsupportedArgumentError as error:  # such as of a replica that came on another host
            if not isinstance(self._chosen, P2PTransport):
                raise
            self._give_p2p_up(members, source, str(error))

    def _choose(self, place: Place, members: Members, source: WeightSource | None) -> None:
        engines: Mapping[str, EngineDescription] = members.describe()
        unwritable = self._unwritable
        if source is not None and not devices_of(source):
            unwritable = unwritable or "the source does not say where its tensors are"
        if unwritable:
            engines = {n: replace(one, why_not_written=unwritable) for n, one in engines.items()}
        chosen = TRANSPORTS[choose_transport(place, engines)]()
        self.close()
        self._chosen, self._place, self.name = chosen, place, chosen.name
        if isinstance(chosen, P2PTransport):
            chosen.all_or_none = True
        elif any(one.why_not_written != NOT_STAGED for one in engines.values()):
            logger.info("%s is used, not p2p: %s", self.name, why_not_p2p(place, engines))

    def _give_p2p_up(self, members: Members, source: WeightSource | None, reason: str) -> None:
        """Opens what would have been chosen without it."""
        assert self._place is not None
        self._unwritable = reason
        self._choose(self._place, members, source)
        logger.warning("%s is used from now on, since p2p cannot be: %s", self.name, reason)
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
        if not isinstance(self._chosen, P2PTransport):
            return self._chosen.send(members, push)
        try:
            answers = self._chosen.send(members, push)
        except TransferError as error:  # nothing was sent
            self._give_p2p_up(members, push.source, str(error))
            return self._chosen.send(members, push)
        for name in answers.keys() - failed(answers):
            if reason := answers[name].get("path_reason"):  # a plan that the first push refuted
                self._unwritable = f"replica {name}: {reason}"  # it has got this push
        return answers

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
