"""Who is in a trainer's group: it is formed with the replicas that come, without the others."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import torch

from torchrl_vllm_sync.errors import (
    ReplicaUnavailableError,
    TransferError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.replica import EngineReport, ReplicaState
from torchrl_vllm_sync.weights.broadcast_group import BroadcastGroup
from torchrl_vllm_sync.weights.reachable import describe_replicas
from torchrl_vllm_sync.weights.watched import raise_exceptions

if TYPE_CHECKING:
    from torchrl_vllm_sync.weights.transport import PendingCalls, ReplicaClient

__all__ = ["GRACE_S", "BroadcastMembers", "is_dead"]

# A replica keeps to the time limit itself. One silent for this much longer has hung.
GRACE_S = 10.0
REPORT_TIMEOUT_S = 30.0
LEAVE_TIMEOUT_S = 15.0
GROUP_ID_BITS = 32
OVER = (ReplicaState.FAILED, ReplicaState.CLOSED)


class BroadcastMembers:
    """The group of a trainer and the workers of the replicas in it.

    Lifecycle: :meth:`form` before each push, which does nothing while the group stands; after a
    push that failed :meth:`leave`; :meth:`close` at the end.

    Args:
        device: The trainer's device; ``None`` takes the current one of the engines' kind.
        interface: Network interface for rendezvous and data; ``None`` takes the one that reaches
            the other side.
        join_timeout_s: Seconds within which everybody must have come to the rendezvous.

    Attributes:
        ranks: Id of each replica in the group to the ranks of its workers.
        missing: Id of each replica that the group does without, to the reason.
        group_id: Tells this group's pushes from those of other groups.
    """

    def __init__(
        self, device: torch.device | None, interface: str | None, join_timeout_s: float
    ) -> None:
        self.ranks: dict[str, tuple[int, ...]] = {}
        self.missing: dict[str, str] = {}
        self.group_id = 0
        self._device, self._interface = device, interface
        self._join_timeout_s = join_timeout_s
        self._group: BroadcastGroup | None = None

    @property
    def group(self) -> BroadcastGroup:
        """The communicator.

        Raises:
            TransferError: There is none.
        """
        if self._group is None:
            raise TransferError("no group was formed")
        return self._group

    def form(self, client: ReplicaClient) -> bool:
        """Forms the group with the workers of every replica that is alive; nothing if it stands.

        Returns:
            Whether the group is a new one.

        Raises:
            TransferError: Nobody is there to join, or nobody came in time.
            UnsupportedArgumentError: The trainer's device and the engines' do not go together, or
                this host has not the interface.
        """
        if self._group is not None:
            if self._group.is_connected and not self._group.was_left and not self._revived(client):
                return False
            self.close()
        alive, self.missing = describe_replicas(client)
        device = _device_for(self._device, {one.device_type for one in alive.values()})
        num_workers = {name: one.num_workers for name, one in alive.items()}
        while not self._form(client, num_workers, device):
            num_workers = {n: one for n, one in num_workers.items() if n not in self.missing}
        return True

    def _form(
        self, client: ReplicaClient, num_workers: dict[str, int], device: torch.device
    ) -> bool:
        """Forms a group with these replicas, or finds out which of them to do without.

        Raises:
            TransferError: Nobody would be left.
        """
        self.ranks, world_size = {}, 1
        for name, number in num_workers.items():
            self.ranks[name] = tuple(range(world_size, world_size + number))
            world_size += number
        address, port = client.rendezvous
        group = BroadcastGroup.host(
            address,
            port=port,
            world_size=world_size,
            device=device,
            timeout_s=self._join_timeout_s,
            interface=self._interface,
        )
        self.group_id = secrets.randbits(GROUP_ID_BITS)
        info = {
            "master_address": group.rendezvous.address,
            "master_port": group.rendezvous.port,
            "world_size": world_size,
            "interface": self._interface,
            "group_id": self.group_id,
        }
        calls = client.start_calls(
            "join_broadcast",
            {name: ({**info, "rank_offset": ranks[0]},) for name, ranks in self.ranks.items()},
            timeout_s=self._join_timeout_s,
        )
        try:
            group.connect(
                timeout_s=self._join_timeout_s, watch=lambda: raise_exceptions(calls.failures())
            )
            raise_exceptions(calls.answers(self._join_timeout_s + GRACE_S))
        except TransferError as error:
            culprits = self._culprits(group, calls)
            group.close()  # which ends the others' waiting
            calls.answers(GRACE_S)
            if not culprits or len(culprits) == len(num_workers):
                raise
            reasons = calls.failures()
            self.missing |= {name: str(reasons.get(name, error)) for name in culprits}
            return False
        except BaseException:
            group.close()
            raise
        self._group = group
        return True

    def _culprits(self, group: BroadcastGroup, calls: PendingCalls) -> set[str]:
        """Returns the replicas that kept a group from being formed."""
        absent = set(group.absent())
        late = {name for name, ranks in self.ranks.items() if absent.intersection(ranks)}
        # Whoever said why is to blame, and only then whoever was silent.
        return set(calls.failures()) or late

    def _revived(self, client: ReplicaClient) -> bool:
        """Whether a replica that the group does without is there again."""
        if not self.missing:
            return False
        reports = client.start_calls("report", dict.fromkeys(self.missing, ())).answers(
            REPORT_TIMEOUT_S
        )
        return any(
            isinstance(one, EngineReport) and one.state not in OVER for one in reports.values()
        )

    def leave(self, client: ReplicaClient, answers: dict[str, Any]) -> None:
        """Gives the group up on both sides; the next push forms another.

        Args:
            client: The replicas.
            answers: What the members last answered; those that were silent are not waited for.
        """
        self.close()
        there = [
            name
            for name, one in answers.items()
            if not isinstance(one, TimeoutError | ReplicaUnavailableError)
        ]
        client.start_calls("leave_broadcast", dict.fromkeys(there, ())).answers(LEAVE_TIMEOUT_S)

    def close(self) -> None:
        """Leaves the group, which the workers notice. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _device_for(device: torch.device | None, engines: set[str]) -> torch.device:
    """Returns the trainer's device for engines on these kinds of device.

    Raises:
        UnsupportedArgumentError: They do not go together.
    """
    if len(engines) > 1:
        raise UnsupportedArgumentError(
            f"a broadcast reaches engines of one kind of device, these are on {sorted(engines)}"
        )
    (kind,) = engines
    if device is None:
        device = torch.device(kind)
    if device.type != kind or (kind == "cuda" and not torch.cuda.is_available()):
        raise UnsupportedArgumentError(
            f"the engines are on {kind} and the trainer is on "
            f"{device if device.type != kind else 'a host without CUDA'}: broadcast needs one "
            "kind of device on both sides, the memmap transport does not"
        )
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def is_dead(answer: Any) -> bool:  # noqa: ANN401
    """Whether a call to a replica ended so that there will be no other.

    Args:
        answer: What it ended with.
    """
    return isinstance(answer, ReplicaUnavailableError) and answer.state in OVER
