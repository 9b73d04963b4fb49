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
from torchrl_vllm_sync.weights.broadcast.group import BroadcastGroup
from torchrl_vllm_sync.weights.places import current_device, home_device
from torchrl_vllm_sync.weights.transport import (
    SilentReplicas,
    awaited_replicas,
    describe_replicas,
    is_dead,
    is_lost,
    raise_exceptions,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrl_vllm_sync.weights.source import WeightSource
    from torchrl_vllm_sync.weights.transport import PendingCalls, ReplicaClient


# A replica keeps to the time limit itself. One silent for this much longer has hung.
GRACE_S = 10.0
LEAVE_TIMEOUT_S = 15.0
GROUP_ID_BITS = 32


class BroadcastMembers:
    """The group of a trainer and the workers of the replicas in it.

    Lifecycle: :meth:`form` before each push, which does nothing while the group stands and its
    members are the replicas that a push waits for; after a push that failed :meth:`leave`;
    :meth:`close` at the end. Replicas that were silent are left out until they show life.

    Attributes:
        ranks: Id of each replica in the group to the ranks of its workers.
        crew: Id of each replica in the group to its incarnation.
        missing: Id of each replica that the group does without, to the reason.
        group_id: Tells this group's pushes from those of other groups.
    """

    def __init__(
        self, device: torch.device | None, interface: str | None, join_timeout_s: float
    ) -> None:
        self.ranks: dict[str, tuple[int, ...]] = {}
        self.crew: dict[str, str] = {}
        self._silent = SilentReplicas()
        self.missing: dict[str, str] = {}
        self.group_id = 0
        self._device, self._interface = device, interface
        self._join_timeout_s = join_timeout_s
        self._group: BroadcastGroup | None = None
        self._last: torch.device | None = None

    @property
    def group(self) -> BroadcastGroup:
        """The communicator."""
        if self._group is None:
            raise TransferError("no group was formed")
        return self._group

    @property
    def is_formed(self) -> bool:
        """Whether there is a communicator, of use or not."""
        return self._group is not None

    @property
    def silent(self) -> dict[str, str]:
        """Id of each replica that is left out for its silence, to what it was silent about."""
        return self._silent.reasons

    def form(
        self,
        client: ReplicaClient,
        without: Mapping[str, str] | None = None,
        source: WeightSource | None = None,
    ) -> bool:
        """Forms the group with the workers of every replica that is alive; nothing if it stands."""
        without = without or {}
        self._silent.look(client)
        if self._group is not None:
            if self._stands(client, self._group, source):
                standings = client.standings()
                absent = {n: one.absence for n, one in standings.items() if one.absence}
                self.missing = absent | self.silent  # others than when it was formed, perhaps
                return False
            self.close()
        left_out = {**self.silent, **without}
        alive, missing = describe_replicas(client, left_out)
        self._note_silent(client, alive, missing)
        self.missing = missing | left_out
        kinds = {one.device_type for one in alive.values()}
        device = self._device_for(source, kinds)
        num_workers = {name: one.num_workers for name, one in alive.items()}
        while not self._form(client, num_workers, device):
            num_workers = {n: one for n, one in num_workers.items() if n not in self.missing}
        return True

    def _stands(
        self, client: ReplicaClient, group: BroadcastGroup, source: WeightSource | None
    ) -> bool:
        """Whether the group can be used from here and consists of those that a push waits for."""
        if not group.is_connected or group.was_left:
            return False
        home = None if self._device else home_device(source, group.device.type)
        if home not in (None, group.device):
            return False
        awaited = awaited_replicas(client.standings())
        return self.crew == {n: one for n, one in awaited.items() if n not in self.silent}

    def _device_for(self, source: WeightSource | None, engines: set[str]) -> torch.device:
        """Returns the trainer's device for engines on these kinds of device."""
        if len(engines) > 1:
            raise UnsupportedArgumentError(
                f"a broadcast reaches engines of one kind of device, these are on {sorted(engines)}"
            )
        (kind,) = engines
        device = self._device or home_device(source, kind) or self._last or torch.device(kind)
        if device.type != kind or (kind == "cuda" and not torch.cuda.is_available()):
            raise UnsupportedArgumentError(
                f"the engines are on {kind} and the trainer is on "
                f"{device if device.type != kind else 'a host without CUDA'}: broadcast needs one "
                "kind of device on both sides, the memmap transport does not"
            )
        return device if device.index is not None else current_device(kind)

    def _note_silent(
        self, client: ReplicaClient, alive: Mapping[str, Any], missing: Mapping[str, str]
    ) -> None:
        """Does without the replicas that were waited for and did not say what they are."""
        awaited = awaited_replicas(client.standings()).keys()
        self._silent.note(
            client, {n: why for n, why in missing.items() if n in awaited - alive.keys()}
        )

    def _form(
        self, client: ReplicaClient, num_workers: dict[str, int], device: torch.device
    ) -> bool:
        """Forms a group with these replicas, or finds out which of them to do without."""
        self.ranks, world_size = {}, 1
        standings = client.standings()
        self.crew = {n: standings[n].incarnation for n in num_workers if n in standings}
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
            answers = calls.answers(GRACE_S)
            lost = {name: one for name, one in answers.items() if is_lost(one)}
            culprits = culprits or set(lost)
            self._silent.note(
                client, {name: str(one) for name, one in lost.items() if not is_dead(one)}
            )
            if not culprits or len(culprits) == len(num_workers):
                raise
            reasons = calls.failures()
            self.missing |= {name: str(reasons.get(name, error)) for name in culprits}
            return False
        except BaseException:
            group.close()
            raise
        self._group, self._last = group, group.device
        return True

    def _culprits(self, group: BroadcastGroup, calls: PendingCalls) -> set[str]:
        """Returns the replicas that kept a group from being formed."""
        absent = set(group.absent())
        late = {name for name, ranks in self.ranks.items() if absent.intersection(ranks)}
        # Whoever said why is to blame, and only then whoever was silent.
        return set(calls.failures()) or late

    def leave(self, client: ReplicaClient, answers: dict[str, Any]) -> None:
        """Gives the group up on both sides; the next push forms another."""
        self.close()
        silent = {n: str(one) for n, one in answers.items() if is_lost(one) and not is_dead(one)}
        self._silent.note(client, silent)
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
