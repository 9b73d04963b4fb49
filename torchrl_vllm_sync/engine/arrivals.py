"""Loads of a version into one engine: by broadcast, from a snapshot, or from another replica."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any

import ray

from torchrl_vllm_sync.checks import first_few
from torchrl_vllm_sync.engine.updates import Watchdog, path_of, raise_failures
from torchrl_vllm_sync.errors import SnapshotError, SyncError, TransferError, WeightMismatchError
from torchrl_vllm_sync.replica import LoadReport
from torchrl_vllm_sync.weights.module import ParamMeta, to_json
from torchrl_vllm_sync.weights.p2p.handover import this_node
from torchrl_vllm_sync.weights.snapshots.data_file import DATA_FILE
from torchrl_vllm_sync.weights.snapshots.reader import SnapshotReader

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from torchrl_vllm_sync.checks import Deadline
    from torchrl_vllm_sync.engine.updates import Updates
    from torchrl_vllm_sync.weights.snapshots.reader import Snapshot
    from torchrl_vllm_sync.weights.transport import PauseMode

logger = logging.getLogger(__name__)

# Seconds between checks that staged weights have arrived.
STAGED_POLL_S = 0.005
# Seconds beyond the time limit for a worker to answer whether its weights are as they were, which
# is unknown of one that stays silent.
LAST_WORDS_S = 5.0
# Seconds for a worker to leave its group.
LEAVE_TIMEOUT_S = 10.0
# Seconds for one call of a copy from a peer.
COPY_TIMEOUT_S = 60.0
# Seconds after which an offer of which nothing is taken ends: it must not keep updates out.
OFFER_TIMEOUT_S = 15.0


class BroadcastLoads:
    """Takes part in a trainer's broadcasts."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates

    async def join_broadcast(self, init_info: dict[str, Any], *, timeout_s: float) -> None:
        """Has every worker join the trainer's group."""
        async with self._updates.exclusive(timeout_s) as deadline:
            info = init_info | {"timeout_s": timeout_s, "deadline": deadline.at}
            limit_s = deadline.left_s + LAST_WORDS_S
            await self._updates.ask_workers("sync_join", info, timeout_s=limit_s, what="joining")

    async def prepare_broadcast(
        self, metadata: list[list[Any]], bucket_bytes: int, *, timeout_s: float
    ) -> dict[str, Any]:
        """Announces to every worker what all coming pushes consist of."""
        async with self._updates.exclusive(timeout_s):
            answers = await self._updates.ask_workers(
                "sync_prepare", metadata, bucket_bytes, timeout_s=timeout_s, what="preparing"
            )
        return {**path_of(answers), "direct": all(one["direct"] for one in answers)}

    async def receive_broadcast(
        self,
        push_id: int,
        digest: str,
        *,
        version: int,
        run_id: str,
        direct: bool = False,
        num_passes: int = 1,
        staged: bool = False,
        timeout_s: float,
        **options: Any,
    ) -> LoadReport:
        """Receives one version; ``options`` say how the engine is paused."""
        updates, push = self._updates, (push_id, digest, direct)

        def load(left: float) -> Awaitable[list[dict[str, Any]]]:
            if staged:
                return updates.call_workers("sync_install_staged", timeout_s=left)
            args = *push, num_passes, left
            return updates.call_workers("sync_receive", *args, timeout_s=left + LAST_WORDS_S)

        async with updates.exclusive(timeout_s) as deadline:
            updates.refuse_older(version)
            updates.refuse_foreign(version, run_id)
            phases = await self._stage(push, deadline) if staged else {}
            limit_s = deadline.left_s
            return await updates.apply(load, version, run_id, limit_s, phases=phases, **options)

    async def leave_broadcast(self) -> None:
        """Has every worker leave the group; workers whose engine is dead have left it."""
        if not self._updates.is_over:
            await self._updates.call_workers("sync_leave", timeout_s=LEAVE_TIMEOUT_S)

    async def _stage(self, push: tuple[int, str, bool], deadline: Deadline) -> dict[str, float]:
        """Receives into spare memory; returns the seconds that took."""
        updates, limit_s, begin = self._updates, deadline.left_s, time.monotonic()
        await updates.ask_workers("sync_stage", *push, limit_s, timeout_s=limit_s, what="preparing")
        while not deadline.passed:
            answers = await updates.call_workers("sync_staged", timeout_s=deadline.left_s)
            if all(answers):
                raise_failures(updates.replica_id, answers)
                began_at = min(one["began_at"] for one in answers)
                return {"stage_s": time.monotonic() - begin, "ready_s": began_at - begin}
            await asyncio.sleep(STAGED_POLL_S)
        raise TransferError(f"staging took longer than {limit_s:.3g} s")


class WrittenLoads:
    """Serves what a trainer on this host has written into the workers' spare memory."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._is_checked = False  # whether the workers have compared their plans with a reload

    async def plan_writes(
        self, metadata: list[list[Any]], *, timeout_s: float
    ) -> list[dict[str, Any]]:
        """Returns, of each worker, where the tensors of all coming pushes go."""
        async with self._updates.exclusive(timeout_s):
            return await self._updates.ask_workers(
                "sync_plan_writes", metadata, timeout_s=timeout_s, what="planning"
            )

    async def begin_writing(
        self, known: list[list[int]], *, run_id: str, path: str, timeout_s: float
    ) -> list[int]:
        """Returns the number of each worker's memory that may be written to."""
        updates = self._updates
        async with updates.exclusive(timeout_s):
            args = run_id, known, path, updates.replica_id, timeout_s
            answers = await updates.ask_workers(
                "sync_begin_writing", *args, timeout_s=timeout_s, what="beginning"
            )
        self._is_checked = all(one["is_checked"] for one in answers)
        return [one["number"] for one in answers]

    async def take_written(
        self,
        numbers: list[int],
        *,
        version: int,
        run_id: str,
        timeout_s: float,
        mode: PauseMode,
        clear_cache: bool,
    ) -> LoadReport:
        """Serves one version; the engine is paused only if it must be."""
        updates, call = self._updates, ("sync_take_written", run_id, numbers)

        def load(left: float) -> Awaitable[list[dict[str, Any]]]:
            return updates.call_workers(*call, timeout_s=left)

        async with updates.exclusive(timeout_s) as deadline:
            updates.refuse_older(version)
            updates.refuse_foreign(version, run_id)
            push: Any = {"version": version, "run_id": run_id, "timeout_s": deadline.left_s}
            # The first time they reload besides, which may take long and leave half a model.
            if self._is_checked and updates.can_swap(mode, clear_cache):
                return await updates.swap(*call, **push)
            return await updates.apply(load, **push, mode=mode, clear_cache=clear_cache)


class PeerLoads:
    """Gives this engine's weights to another replica, of one version, or takes another's."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._token = ""
        self._offered = contextlib.AsyncExitStack()
        self._watchdog = Watchdog(lambda: self.withdraw_weights(self._token))

    async def offer_weights(self, *, timeout_s: float) -> dict[str, Any]:
        """Keeps updates out and returns what there is to take."""
        updates = self._updates
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(updates.exclusive(timeout_s))
            if not updates.whole:
                raise TransferError(f"replica {updates.replica_id} holds no whole version")
            token = uuid.uuid4().hex
            answers = await self._ask("sync_peer_open", token, True)
            self._token, self._offered = token, stack.pop_all()
        self._watchdog.start(OFFER_TIMEOUT_S)
        return {
            "actor": ray.get_runtime_context().current_actor,
            "token": token,
            "node_id": this_node(),
            "version": updates.version,
            "run_id": updates.run_id,
            "workers": [{"layout": a["layout"], "num_chunks": a["num_chunks"]} for a in answers],
        }

    async def give_weights(self, token: str, index: int, by_value: bool) -> list[Any]:
        """Returns chunk ``index`` of each worker: its bytes, or the file that holds it now."""
        self._require(token)
        if self._updates.num_waiting:
            await self.withdraw_weights(token)
            raise TransferError("an update came in between, which brings newer weights")
        self._watchdog.start(OFFER_TIMEOUT_S)
        return [one["source"] for one in await self._ask("sync_peer_give", index, by_value)]

    async def weight_checksums(self, token: str) -> list[dict[str, int]]:
        self._require(token)
        return [one["checksums"] for one in await self._ask("sync_peer_checksums")]

    async def withdraw_weights(self, token: str) -> None:
        """Ends an offer; does nothing if it has ended."""
        if token == self._token:
            self._token = ""
            self._watchdog.stop()
            async with self._offered:
                await self._ask("sync_peer_close")

    def _require(self, token: str) -> None:
        if token != self._token:
            raise TransferError("the offer does not stand any more")

    async def take_weights(self, offer: dict[str, Any], *, timeout_s: float) -> LoadReport:
        """Takes the offered weights, unless this replica holds them by now."""
        updates, version, run_id = self._updates, offer["version"], offer["run_id"]
        async with updates.exclusive(timeout_s) as deadline:
            if updates.whole:
                updates.refuse_older(version)
                if (updates.version, updates.run_id) == (version, run_id):
                    return LoadReport(version=version, loaded=False)
            own = await self._ask("sync_peer_open", offer["token"], False)
            try:
                if [a["layout"] for a in own] != [a["layout"] for a in offer["workers"]]:
                    raise TransferError("the two replicas' tensors are not alike")
                return await updates.apply(
                    lambda _: self._copy(offer, deadline), version, run_id, deadline.left_s
                )
            finally:
                await self._ask("sync_peer_close")

    async def _copy(self, offer: dict[str, Any], deadline: Deadline) -> list[dict[str, Any]]:
        """Takes every chunk and compares checksums, for ``Updates.apply``."""
        actor, token, peer = offer["actor"], offer["token"], "the giving replica"
        by_value = offer["node_id"] != this_node()
        for index in range(max(one["num_chunks"] for one in offer["workers"])):
            call = actor.give_weights.remote(token, index, by_value)
            sources = await self._updates.ask(peer, call, deadline.left_s)
            await self._ask("sync_peer_take", index, sources, deadline=deadline)
        call = actor.weight_checksums.remote(token)
        theirs = await self._updates.ask(peer, call, deadline.left_s)
        answers = await self._ask("sync_peer_checksums", deadline=deadline)
        loaded = {"num_tensors": len(theirs[0]), "path": "peer", "path_reason": ""}
        differs = [one["checksums"] != two for one, two in zip(answers, theirs, strict=True)]
        return [
            {**loaded, "error": "the copy differs from the peer" if one else ""} for one in differs
        ]

    async def _ask(
        self, method: str, *args: Any, deadline: Deadline | None = None
    ) -> list[dict[str, Any]]:
        limit_s = min(deadline.left_s, COPY_TIMEOUT_S) if deadline else COPY_TIMEOUT_S
        return await self._updates.ask_workers(method, *args, timeout_s=limit_s, what="copying")


class Audits:
    """Shows what this engine computes with to a trainer that compares it with its own."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates

    async def plan_audit(
        self, metadata: list[list[Any]], *, timeout_s: float
    ) -> list[list[list[Any]]]:
        """Returns, of each worker, which slices of such tensors it holds."""
        answers = await self._ask("sync_plan_audit", metadata, timeout_s=timeout_s)
        return [one["slices"] for one in answers]

    async def audit_weights(self, digest: str, *, timeout_s: float) -> dict[str, Any]:
        """Returns the version that is served, and checksums of each worker's slices."""
        answers = await self._ask("sync_audit", digest, timeout_s=timeout_s)
        checksums = [one["checksums"] for one in answers]
        return {"version": self._updates.version, "workers": checksums}

    async def audit_values(
        self, digest: str, rank: int, at: int, chunk: int, *, timeout_s: float
    ) -> bytes:
        """Returns the bytes of a part of one worker's slice."""
        args = digest, rank, at, chunk
        answers = await self._ask("sync_audit_values", *args, timeout_s=timeout_s)
        return answers[rank]["values"]

    async def _ask(self, method: str, *args: Any, timeout_s: float) -> list[dict[str, Any]]:
        updates = self._updates
        async with updates.exclusive(timeout_s) as deadline:
            updates.require_weights()
            if not updates.whole:
                raise TransferError(f"replica {updates.replica_id} holds no whole version")
            limit_s = deadline.left_s
            return await updates.ask_workers(method, *args, timeout_s=limit_s, what="comparing")


class SnapshotLoads:
    """Applies stored versions to one engine, each at most once."""

    def __init__(self, updates: Updates, expected: Callable[[], list[ParamMeta]]) -> None:
        self._updates = updates
        self._expected = functools.cache(expected)
        self._follower: asyncio.Task[None] | None = None
        self._load: asyncio.Task[LoadReport] | None = None
        # A reader keeps mappings from load to load.
        self._reader = functools.cache(SnapshotReader)
        self._source: dict[str, Any] | None = None

    def snapshot_source(self) -> dict[str, Any] | None:
        """Where the weights were loaded from; ``None`` if they came another way since."""
        source = self._source
        return source if source and source["version"] == self._updates.version else None

    async def load_snapshot(
        self,
        directory: str,
        run_id: str | None,
        *,
        at_least: int,
        verify: bool = True,
        compare: bool = False,
        timeout_s: float,
        **options: Any,
    ) -> LoadReport:
        """Loads the newest version stored in ``directory``, unless the engine holds it already."""
        updates, reading = self._updates, contextlib.ExitStack()
        reader = self._reader(directory, run_id=run_id, verify=verify)
        async with updates.exclusive(timeout_s) as deadline:
            begin, newer_than = time.perf_counter(), updates.version if updates.whole else None
            snapshot = await asyncio.to_thread(reading.enter_context, reader.read(newer_than))
            phases = {"verify_s": time.perf_counter() - begin}
            try:
                if snapshot is None:
                    self._check_held(directory, run_id, at_least)
                    return LoadReport(version=updates.version, loaded=False)
                if snapshot.version < at_least:
                    raise SnapshotError(
                        f"{directory} holds version {snapshot.version}, not yet {at_least}"
                    )
                if compare:
                    await asyncio.to_thread(self._check_fits, snapshot)
                if deadline.passed:
                    raise SyncError(f"reading {directory} took longer than {timeout_s:g} s")
                data = str(reader.directory / snapshot.manifest.path / DATA_FILE)
                call = "sync_load_snapshot", data, to_json(snapshot.metadata)

                async def load(left: float) -> list[dict[str, Any]]:
                    answers = await updates.call_workers(*call, timeout_s=left)
                    if not any(answer["error"] for answer in answers):
                        await asyncio.to_thread(reading.close)  # raises unless it was one version
                    return answers

                version, run = snapshot.version, snapshot.manifest.run_id
                limit_s = deadline.left_s
                report = await updates.apply(load, version, run, limit_s, phases=phases, **options)
                self._source = {"directory": directory, "run_id": run, "version": version}
                return report
            finally:
                await asyncio.to_thread(reading.__exit__, *sys.exc_info())

    def _check_held(self, directory: str, run_id: str | None, at_least: int) -> None:
        """Accepts that ``directory`` holds nothing newer, or raises."""
        updates = self._updates
        if updates.version < at_least or not updates.whole:
            raise SnapshotError(
                f"{directory} holds no version {at_least} or later, and replica "
                f"{updates.replica_id} is at {updates.version}"
            )
        if at_least:
            updates.refuse_foreign(at_least, run_id)

    def _check_fits(self, snapshot: Snapshot) -> None:
        """Refuses tensors of another model: the trainer that stored them may know no engine."""
        try:
            wanted = {meta.name: list(meta.shape) for meta in self._expected()}
        except ValueError:
            return  # transformers has no such model to compare with; vLLM decides
        given = {meta.name: list(meta.shape) for meta in snapshot.metadata}
        if problems := [
            f"{name} has shape {given[name]} instead of {shape}"
            if name in given
            else f"{name} is missing"
            for name, shape in wanted.items()
            if given.get(name) != shape
        ]:
            raise WeightMismatchError(
                f"version {snapshot.version} does not fit the model of replica "
                f"{self._updates.replica_id}: {first_few(problems, '; ')}"
            )

    def follow_snapshots(self, directory: str, run_id: str | None, **options: Any) -> None:
        """Loads new versions as they appear, retrying failed ones, until :meth:`stop_following`."""
        self.stop()
        self._follower = asyncio.create_task(self._follow(directory, run_id, **options))

    async def _follow(
        self,
        directory: str,
        run_id: str | None,
        *,
        interval_s: float,
        timeout_s: float,
        verify: bool = True,
    ) -> None:
        updates, told = self._updates, ""
        reader = self._reader(directory, run_id=run_id, verify=verify)
        while not updates.is_over:
            problem = ""
            try:
                manifest = await asyncio.to_thread(reader.current)
                if manifest and (manifest.version > updates.version or not updates.whole):
                    load = self.load_snapshot(
                        directory, run_id, at_least=0, verify=verify, timeout_s=timeout_s
                    )
                    self._load = asyncio.create_task(load)
                    await asyncio.shield(self._load)  # :meth:`stop` leaves no load half done
                elif manifest and manifest.version < updates.version:
                    found = manifest.version
                    problem = f"version {found} is older than the replica's {updates.version}"
            except SyncError as error:
                problem = str(error)
            if problem and problem != told:
                what = "replica %s cannot follow %s: %s"
                logger.warning(what, updates.replica_id, directory, problem)
            told = problem
            await asyncio.sleep(interval_s)

    def stop(self) -> None:
        """Ends :meth:`follow_snapshots`; a load under way goes on."""
        if self._follower is not None:
            self._follower.cancel()

    async def stop_following(self) -> None:
        """Ends :meth:`follow_snapshots`; a load under way is finished first."""
        self.stop()
        if self._load is not None:
            await asyncio.wait({self._load})
