"""What brings weights to one engine: the library's transports, or vLLM's own calls, in turn."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from torchrl_vllm_sync import errors
from torchrl_vllm_sync.checks import MAX_VERSION, Deadline, check_seconds, first_few
from torchrl_vllm_sync.engine.answers import AdmissionGate
from torchrl_vllm_sync.engine.args import payload_of
from torchrl_vllm_sync.engine.updates import SHORT_TIMEOUT_S, Pause, Replies, Updates, path_of
from torchrl_vllm_sync.replica import LoadReport, ReplicaState
from torchrl_vllm_sync.weights.module import ParamMeta, to_json
from torchrl_vllm_sync.weights.p2p.memory import this_node
from torchrl_vllm_sync.weights.snapshots.data_file import DATA_FILE, Snapshot, SnapshotReader
from torchrl_vllm_sync.weights.transport import PauseMode, check_mode

logger = logging.getLogger(__name__)

Step = Callable[[], Awaitable[None]]
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
# Seconds for a call by default.
TIMEOUT_S = 300.0
# Seconds without a call after which the process that drives an update counts as gone.
IDLE_TIMEOUT_S = 300.0
MEMORY_TAGS = frozenset({"weights", "kv_cache"})
# What workers' own failures are raised as; one that did not answer in time is a plain SyncError.
WORKERS_ANSWERED = (errors.TransferError, errors.TransferNotReadyError, errors.WeightMismatchError)


class Watchdog:
    """Calls ``give_up`` when it was started and neither stopped nor started again in time."""

    def __init__(self, give_up: Step) -> None:
        self._give_up = give_up
        self._waiting: asyncio.Task[None] | None = None
        self._giving_up: asyncio.Task[None] | None = None

    def start(self, limit_s: float) -> None:
        self.stop()
        self._waiting = asyncio.create_task(self._give_up_after(limit_s))

    def stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    async def _give_up_after(self, limit_s: float) -> None:
        await asyncio.sleep(limit_s)
        self._giving_up, self._waiting = self._waiting, None  # which nobody cancels any more
        try:
            await self._give_up()
        except errors.SyncError as error:  # nothing awaits this task
            logger.warning("%s", error)


class Arrivals:
    """Brings versions to one engine, and shows or gives away what it holds."""

    def __init__(self, updates: Updates, expected: Callable[[], list[ParamMeta]]) -> None:
        self._updates, self._expected = updates, functools.cache(expected)
        self._is_checked = False  # whether the workers have compared their plans with a reload
        self._has_plans = False  # whether they load what is broadcast by them
        self._token, self._offered = "", contextlib.AsyncExitStack()
        self._watchdog = Watchdog(lambda: self.withdraw_weights(self._token))
        self._follower: asyncio.Task[None] | None = None
        self._load: asyncio.Task[LoadReport] | None = None
        # A reader keeps mappings from load to load.
        self._reader = functools.cache(SnapshotReader)
        self._source: dict[str, Any] | None = None

    async def _ask(
        self,
        what: str,
        method: str,
        *args: Any,
        timeout_s: float,
        requires: Callable[[], None] | None = None,
    ) -> Replies:
        updates, limit_s = self._updates, timeout_s
        async with updates.exclusive(timeout_s) as deadline:
            if requires is not None:
                requires()
                limit_s = deadline.left_s
            # Others have all of it after their turn has come: an engine that waited is not silent.
            return await updates.ask_workers(method, *args, timeout_s=limit_s, what=what)

    async def model_metadata(self) -> list[list[Any]]:
        """Returns the tensors that a complete push must hold, as ``ParamMeta`` in JSON form."""
        return to_json(await asyncio.to_thread(self._expected))

    # ---- By broadcast

    async def join_broadcast(self, init_info: dict[str, Any], *, timeout_s: float) -> None:
        async with self._updates.exclusive(timeout_s) as deadline:
            info = init_info | {"timeout_s": timeout_s, "deadline": deadline.at}
            limit_s = deadline.left_s + LAST_WORDS_S
            await self._updates.ask_workers("sync_join", info, timeout_s=limit_s, what="joining")

    async def prepare_broadcast(
        self, metadata: list[list[Any]], bucket_bytes: int, *, timeout_s: float
    ) -> dict[str, Any]:
        call = "preparing", "sync_prepare", metadata, bucket_bytes
        answers = await self._ask(*call, timeout_s=timeout_s)
        path = path_of(answers)
        self._has_plans = path["path"] == "plan"
        return {**path, "direct": all(one["direct"] for one in answers)}

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

        def call(left: float) -> tuple[Any, ...]:
            return ("sync_install_staged",) if staged else ("sync_receive", *push, num_passes, left)

        def load(left: float) -> Awaitable[Replies]:
            return updates.call_workers(*call(left), timeout_s=left + LAST_WORDS_S)

        async with updates.exclusive(timeout_s) as deadline:
            updates.refuse_older(version)
            updates.refuse_foreign(version, run_id)
            phases = await self._stage(push, deadline) if staged else {}
            about: Any = {"version": version, "run_id": run_id, "phases": phases}
            limit_s = deadline.left_s
            # A reload may leave half a model, with which no step must run.
            if self._has_plans and num_passes == 1 and updates.can_swap(**options):
                about["timeout_s"] = limit_s + LAST_WORDS_S
                report = await updates.swap(*call(limit_s), **about)
            else:
                report = await updates.apply(load, timeout_s=limit_s, **about, **options)
            self._has_plans = report.path == "plan"
            return report

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
                updates.raise_failures(answers)
                began_at = min(one["began_at"] for one in answers)
                return {"stage_s": time.monotonic() - begin, "ready_s": began_at - begin}
            await asyncio.sleep(STAGED_POLL_S)
        raise errors.TransferError(f"staging took longer than {limit_s:.3g} s")

    # ---- Written by a trainer on this host into the workers' spare memory

    async def plan_writes(self, metadata: list[list[Any]], *, timeout_s: float) -> Replies:
        return await self._ask("planning", "sync_plan_writes", metadata, timeout_s=timeout_s)

    async def begin_writing(
        self, known: list[list[int] | None], *, run_id: str, path: str, timeout_s: float
    ) -> list[int]:
        """Returns the number of each worker's memory that may be written to.

        ``known`` are those that need not be handed over; ``None`` asks for a new one.
        """
        args = run_id, known, path, self._updates.replica_id, timeout_s
        call, how = ("beginning", "sync_begin_writing", *args), self._updates.require_asleep
        answers = await self._ask(*call, timeout_s=timeout_s, requires=how)
        self._is_checked = all(one["is_checked"] for one in answers)
        return [one["number"] for one in answers]

    async def take_written(
        self, numbers: list[int], *, version: int, run_id: str, timeout_s: float, **options: Any
    ) -> LoadReport:
        """Serves one version; the engine is paused, as ``options`` say, only if it must be."""
        updates, call = self._updates, ("sync_take_written", run_id, numbers)
        async with updates.exclusive(timeout_s) as deadline:
            updates.refuse_older(version)
            updates.refuse_foreign(version, run_id)
            push: Any = {"version": version, "run_id": run_id, "timeout_s": deadline.left_s}
            # The first time they reload besides, which may take long and leave half a model.
            if self._is_checked and updates.can_swap(**options):
                return await updates.swap(*call, **push)
            load = functools.partial(updates.call_workers, *call)
            report = await updates.apply(lambda left: load(timeout_s=left), **push, **options)
            self._has_plans &= report.path == "plan"
            return report

    # ---- From another replica, or to one

    async def offer_weights(self, *, timeout_s: float) -> dict[str, Any]:
        """Keeps updates out and returns what there is to take."""
        updates = self._updates
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(updates.exclusive(timeout_s))
            updates.require_whole()
            token = uuid.uuid4().hex
            answers = await self._copying("sync_peer_open", token, True)
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
        self._require_offer(token)
        if self._updates.num_waiting:
            await self.withdraw_weights(token)
            raise errors.TransferError("an update came in between, which brings newer weights")
        self._watchdog.start(OFFER_TIMEOUT_S)
        return [one["source"] for one in await self._copying("sync_peer_give", index, by_value)]

    async def weight_checksums(self, token: str) -> list[dict[str, int]]:
        self._require_offer(token)
        return [one["checksums"] for one in await self._copying("sync_peer_checksums")]

    async def withdraw_weights(self, token: str) -> None:
        """Ends an offer; does nothing if it has ended."""
        if token == self._token:
            self._token = ""
            self._watchdog.stop()
            async with self._offered:
                await self._copying("sync_peer_close")

    def _require_offer(self, token: str) -> None:
        if token != self._token:
            raise errors.TransferError("the offer does not stand any more")

    async def take_weights(self, offer: dict[str, Any], *, timeout_s: float) -> LoadReport:
        """Takes the offered weights, unless this replica holds them by now."""
        updates, version, run_id = self._updates, offer["version"], offer["run_id"]
        async with updates.exclusive(timeout_s) as deadline:
            if updates.whole:
                updates.refuse_older(version)
                if (updates.version, updates.run_id) == (version, run_id):
                    return LoadReport(version=version, loaded=False)
            own = await self._copying("sync_peer_open", offer["token"], False)
            try:
                if [a["layout"] for a in own] != [a["layout"] for a in offer["workers"]]:
                    raise errors.TransferError("the two replicas' tensors are not alike")
                return await updates.apply(
                    lambda _: self._copy(offer, deadline), version, run_id, deadline.left_s
                )
            finally:
                await self._copying("sync_peer_close")

    async def _copy(self, offer: dict[str, Any], deadline: Deadline) -> Replies:
        """Takes every chunk and compares checksums, for ``Updates.apply``."""
        actor, token, peer = offer["actor"], offer["token"], "the giving replica"
        by_value = offer["node_id"] != this_node()
        for index in range(max(one["num_chunks"] for one in offer["workers"])):
            call = actor.give_weights.remote(token, index, by_value)
            sources = await self._updates.ask(peer, call, deadline.left_s)
            await self._copying("sync_peer_take", index, sources, limit_s=deadline.left_s)
        call = actor.weight_checksums.remote(token)
        theirs = await self._updates.ask(peer, call, deadline.left_s)
        answers = await self._copying("sync_peer_checksums", limit_s=deadline.left_s)
        loaded = {"num_tensors": len(theirs[0]), "path": "peer", "path_reason": ""}
        differs = [one["checksums"] != two for one, two in zip(answers, theirs, strict=True)]
        return [
            {**loaded, "error": "the copy differs from the peer" if one else ""} for one in differs
        ]

    async def _copying(self, method: str, *args: Any, limit_s: float = COPY_TIMEOUT_S) -> Replies:
        timeout_s = min(limit_s, COPY_TIMEOUT_S)
        return await self._updates.ask_workers(method, *args, timeout_s=timeout_s, what="copying")

    # ---- For a trainer that compares what this engine computes with to its own

    async def plan_audit(self, metadata: list[Any], *, timeout_s: float) -> list[Any]:
        call, how = ("comparing", "sync_plan_audit", metadata), self._updates.require_weights
        return [one["slices"] for one in await self._ask(*call, timeout_s=timeout_s, requires=how)]

    async def _audit(self, *call: Any, timeout_s: float) -> Replies:
        updates = self._updates
        async with updates.exclusive(timeout_s) as deadline:
            updates.require_whole()
            call = *call, updates.served_adapters()
            return await updates.ask_workers(*call, timeout_s=deadline.left_s, what="comparing")

    async def audit_weights(self, digest: str, *, timeout_s: float) -> dict[str, Any]:
        answers = await self._audit("sync_audit", digest, timeout_s=timeout_s)
        return {"version": self._updates.version, "workers": [one["checksums"] for one in answers]}

    async def audit_values(
        self, digest: str, rank: int, at: int, chunk: int, *, timeout_s: float
    ) -> bytes:
        call = "sync_audit_values", digest, rank, at, chunk
        answers = await self._audit(*call, timeout_s=timeout_s)
        return answers[rank]["values"]

    # ---- From a snapshot

    def snapshot_source(self) -> dict[str, Any] | None:
        """Where the weights were loaded from; ``None`` if they came another way since."""
        source = self._source
        return source if source and source["version"] == self._updates.base else None

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
            updates.require_unpinned()
            begin, newer_than = time.perf_counter(), updates.version if updates.whole else None
            snapshot = await asyncio.to_thread(reading.enter_context, reader.read(newer_than))
            phases = {"verify_s": time.perf_counter() - begin}
            try:
                if snapshot is None:
                    if updates.version < at_least or not updates.whole:
                        held = f"replica {updates.replica_id} is at {updates.version}"
                        none = f"{directory} holds no version {at_least} or later"
                        raise errors.SnapshotError(f"{none}, and {held}")
                    if at_least:
                        updates.refuse_foreign(at_least, run_id)
                    return LoadReport(version=updates.version, loaded=False)
                if snapshot.version < at_least:
                    held = f"{directory} holds version {snapshot.version}"
                    raise errors.SnapshotError(f"{held}, not yet {at_least}")
                if compare:
                    await asyncio.to_thread(self._check_fits, snapshot)
                if deadline.passed:
                    raise errors.SyncError(f"reading {directory} took longer than {timeout_s:g} s")
                data = str(reader.directory / snapshot.manifest.path / DATA_FILE)
                call = "sync_load_snapshot", data, to_json(snapshot.metadata)

                async def load(left: float) -> Replies:
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
            model = f"the model of replica {self._updates.replica_id}"
            what = f"version {snapshot.version} does not fit {model}"
            raise errors.WeightMismatchError(f"{what}: {first_few(problems, '; ')}")

    def follow_snapshots(self, directory: str, run_id: str | None, **options: Any) -> None:
        """Loads new versions as they appear, retrying failed ones, until :meth:`stop_following`."""
        self._stop()
        self._follower = asyncio.create_task(self._follow(directory, run_id, **options))

    async def _follow(
        self, directory: str, run_id: str | None, interval_s: float, **options: Any
    ) -> None:
        updates, told = self._updates, ""
        reader = self._reader(directory, run_id=run_id, verify=options.get("verify", True))
        while not updates.is_over:
            problem = ""
            try:
                manifest = await asyncio.to_thread(reader.current)
                if manifest and (manifest.version > updates.version or not updates.whole):
                    load = self.load_snapshot(directory, run_id, at_least=0, **options)
                    self._load = asyncio.create_task(load)
                    await asyncio.shield(self._load)  # stopping leaves no load half done
                elif manifest and manifest.version < updates.version:
                    found = manifest.version
                    problem = f"version {found} is older than the replica's {updates.version}"
            except errors.SyncError as error:
                problem = str(error)
            if problem and problem != told:
                what = "replica %s cannot follow %s: %s"
                logger.warning(what, updates.replica_id, directory, problem)
            told = problem
            await asyncio.sleep(interval_s)

    def _stop(self) -> None:
        """Ends :meth:`follow_snapshots`; a load under way goes on."""
        if self._follower is not None:
            self._follower.cancel()

    async def stop_following(self) -> None:
        """Ends :meth:`follow_snapshots`; a load under way is finished first."""
        self._stop()
        if self._load is not None:
            await asyncio.wait({self._load})


@dataclass(slots=True)
class _OpenUpdate:
    limit_s: float  # between calls; of a push, for all of it
    version: int | None = None  # of a push
    run_id: str = "vLLM's own calls"
    mode: PauseMode = "keep"
    clear_cache: bool = False
    pause: Pause = field(default_factory=Pause)
    num_tensors: int = 0
    deadline: Deadline = field(default_factory=lambda: Deadline(math.inf))
    steps: Any = None  # the generator NativeCalls._run, to which each call of the update is sent


class NativeCalls:
    """Pauses of one engine and its updates, driven from outside: start, any parts, finish."""

    def __init__(self, updates: Updates, engine: AsyncLLM, gate: AdmissionGate) -> None:
        self._updates, self._engine, self._gate = updates, engine, gate
        self._open: _OpenUpdate | None = None
        self._watchdog = Watchdog(self._give_up_silent)

    def _not_ready(self, why: str) -> errors.TransferNotReadyError:
        return errors.TransferNotReadyError(f"replica {self._updates.replica_id}: {why}")

    def _refuse_open(self, what: str) -> None:
        if self._open is not None:
            raise self._not_ready(
                f"{what} has to wait: a weight update is open; finish_weight_update, or "
                "shutdown_weight_transfer_engine, ends it"
            )

    @contextlib.asynccontextmanager
    async def _turn(self, what: str, timeout_s: float = SHORT_TIMEOUT_S) -> AsyncIterator[None]:
        """Keeps other updates out; refused at once while an update is open."""
        self._refuse_open(what)
        async with self._updates.exclusive(timeout_s):
            yield

    async def pause_generation(
        self, *, mode: PauseMode = "abort", clear_cache: bool = True, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Pauses until :meth:`resume_generation`; vLLM's defaults end requests and drop caches."""
        check_mode(mode)
        async with self._turn("pause_generation", timeout_s):
            call = self._engine.pause_generation(mode=mode, clear_cache=clear_cache)
            await self._hold("pausing", call, timeout_s)

    async def resume_generation(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """Ends :meth:`pause_generation`; does nothing to an engine that is not paused."""
        async with self._turn("resume_generation", timeout_s):
            if self._updates.asleep:
                raise self._not_ready("it is asleep: wake_up, not resume_generation, ends it")
            await self._let_go()

    async def is_paused(self) -> bool:
        """Returns whether vLLM's scheduler is paused; waits while a transfer blocks the engine."""
        return await self._updates.ask("asking", self._engine.is_paused())

    async def sleep(
        self, level: int = 1, mode: PauseMode = "abort", *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Puts the engine to sleep; new requests wait at the gate until :meth:`wake_up`.

        One that shares its weights with a trainer keeps its memory.
        """
        check_mode(mode)
        if level not in (0, 1, 2):
            raise errors.UnsupportedArgumentError(f"level must be one of (0, 1, 2), got {level!r}")
        is_shared = self._updates.is_shared
        able = current_platform.is_cpu() or self._engine.vllm_config.model_config.enable_sleep_mode
        if level > 0 and not (able or is_shared):
            needs = "needs enable_sleep_mode=True at launch"
            raise errors.UnsupportedArgumentError(f"sleep(level={level}) {needs}")
        async with self._turn("sleep", timeout_s):
            await self._hold("falling asleep", self._rest(level, mode), timeout_s)
            if level > 0:
                self._updates.asleep = MEMORY_TAGS
            if level > 1 or (level and is_shared):  # a trainer may write them
                self._updates.whole = False

    async def _rest(self, level: int, mode: PauseMode) -> None:
        """Stops, and then lets memory go: vLLM would do so later, too, once nobody waits for it."""
        updates = self._updates
        await self._engine.sleep(0, mode)
        if updates.is_shared:
            await updates.ask_workers("sync_settle", what="finishing the last step")
        elif level > 0:
            was_whole, updates.whole = updates.whole, False  # as long as it may be either
            await self._engine.sleep(level, "keep")
            updates.whole = was_whole

    async def wake_up(self, tags: list[str] | None = None, *, timeout_s: float = TIMEOUT_S) -> bool:
        """Wakes the engine, or the memory that ``tags`` name; fully awake it takes requests."""
        wanted = MEMORY_TAGS if tags is None else frozenset(tags)
        if unknown := sorted(wanted - MEMORY_TAGS - {"scheduling"}):
            rule = f"tags must be among {sorted(MEMORY_TAGS)} and 'scheduling'"
            raise errors.UnsupportedArgumentError(f"{rule}, got {unknown}")
        async with self._turn("wake_up", timeout_s):
            return await self._wake(tags, self._updates.asleep - wanted, timeout_s)

    async def _wake(self, tags: list[str] | None, left: frozenset[str], timeout_s: float) -> bool:
        if not left and not self._updates.whole:
            raise self._not_ready(
                "it has no weights to serve with: wake_up(['weights']), then an update, then "
                "wake_up(['kv_cache'])"
            )
        if not self._updates.is_shared:
            await self._updates.ask("waking up", self._engine.wake_up(tags), timeout_s)
            has_adapters = self._engine.vllm_config.lora_config is not None
            if has_adapters and not self._updates.whole and "weights" not in left:
                await self._updates.ask_workers("sync_empty_slots", what="emptying slots")
        self._updates.asleep = left
        if not left:
            await self._let_go()
        return not left

    async def rouse(self, tag: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Wakes memory, if it sleeps, as far as a push has come: the cache after the weights."""
        async with self._turn("rouse", timeout_s):  # it may be falling asleep
            asleep = self._updates.asleep
            if tag in asleep and (tag == "weights" or "weights" not in asleep):
                await self._wake([tag], asleep - {tag}, timeout_s)

    async def _hold(self, what: str, call: Awaitable[None], timeout_s: float) -> None:
        """Keeps the engine from stepping by ``call``; undone if that fails, and can be."""
        before = self._updates.held
        if self._gate.state is ReplicaState.SERVING:
            self._updates.set_state(ReplicaState.UPDATING)
        self._updates.held = True
        try:
            await self._updates.ask(what, call, timeout_s)
        except BaseException as error:
            self._updates.held = before
            if self._updates.whole:
                await self._updates.resume()
            else:
                self._updates.set_state(ReplicaState.STALE, f"{what} failed: {error}")
            raise

    async def _let_go(self) -> None:
        if not self._updates.whole:
            raise self._gate.refusal()
        self._updates.held = False
        await self._updates.resume()

    async def init_weight_transfer_engine(
        self, request: Any, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        info = payload_of(request, "init_info")
        async with self._turn("init_weight_transfer_engine", timeout_s):
            ask = self._updates.ask_workers
            await ask("native_init", info, timeout_s=timeout_s, what="initialising")

    async def use_transfer_engine(self, backend: str | None = None) -> None:
        async with self._turn("use_transfer_engine"):
            await self._updates.ask_workers("native_use", backend, what="changing")

    async def shutdown_weight_transfer_engine(self) -> None:
        """Leaves the trainer's group; gives an open update up first."""
        if self._open is not None:
            await self._abandon()
        async with self._updates.exclusive(SHORT_TIMEOUT_S):
            await self._updates.ask_workers("native_shutdown", what="leaving")

    async def start_weight_update(
        self, *, timeout_s: float = TIMEOUT_S, idle_timeout_s: float = IDLE_TIMEOUT_S, **push: Any
    ) -> None:
        """Keeps other updates out, and the engine paused; a ``push`` has a version already."""
        check_seconds("idle_timeout_s", idle_timeout_s)
        self._refuse_open("start_weight_update")
        update = _OpenUpdate(timeout_s if push else idle_timeout_s, **push)
        if update.version is not None:
            self._updates.refuse_older(update.version)
            self._updates.refuse_foreign(update.version, update.run_id)
        update.steps = self._run(update, timeout_s)
        self._open = update
        await self._step("start_weight_update")

    async def update_weights(self, request: Any, *, timeout_s: float = TIMEOUT_S) -> None:
        update, updates = self._require_idle("update_weights"), self._updates
        info = payload_of(request, "update_info")

        async def receive() -> None:
            was_whole, updates.whole = updates.whole, False
            answers = await updates.call_workers("native_update", info, timeout_s=timeout_s)
            updates.whole = was_whole and all(one["untouched"] for one in answers)
            updates.raise_failures(answers)
            update.num_tensors += len(info["names"]) if "names" in info else 0

        await self._step("update_weights", receive)

    async def finish_weight_update(
        self, weight_version: str | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> LoadReport | None:
        """Ends the update: the engine goes on, unless its user had paused it; reports on a push."""
        update, updates = self._require_idle("finish_weight_update"), self._updates
        given = weight_version if update.version is None else update.version
        label = None if given is None else str(given)
        version = self._version_of(label)  # one that is refused leaves the update open

        async def finish() -> None:
            updates.whole = False
            await updates.ask_workers("native_finish", timeout_s=timeout_s, what="finishing")
            updates.apart = False
            await updates.commit(update.pause, version, label, update.run_id)

        await self._step("finish_weight_update", finish)
        if update.version is None:
            return None
        path = {"path": "layerwise", "path_reason": "vLLM's own transfer engines always take it"}
        return update.pause.report(version, [{"num_tensors": update.num_tensors, **path}])

    async def update_weights_native(
        self, request: Any, *, timeout_s: float = TIMEOUT_S, **push: Any
    ) -> LoadReport | None:
        """TorchRL's name for start, update and finish in one call."""
        await self.start_weight_update(timeout_s=timeout_s, **push)
        await self.update_weights(request, timeout_s=timeout_s)
        return await self.finish_weight_update(timeout_s=timeout_s)

    async def update_weight_version(self, new_version: str) -> None:
        """Labels weights that are in place; requests in flight freeze, so each token has one."""
        async with self._turn("update_weight_version"), contextlib.AsyncExitStack() as stack:
            version = self._version_of(str(new_version))
            if self._updates.whole and self._gate.state is not ReplicaState.STALE:
                await stack.enter_async_context(self._updates.paused(SHORT_TIMEOUT_S))
            await self._updates.label(str(new_version))
            self._gate.switch(version)

    def _version_of(self, label: str | None) -> int:
        """Returns the policy version of a label; of one that is no integer, the present version."""
        try:
            version = self._updates.version if label is None else int(label)
        except ValueError:
            return self._updates.version
        self._updates.refuse_older(version, "weight_version")
        if version > MAX_VERSION:
            rule = f"weight_version must be at most {MAX_VERSION}, or no integer"
            raise errors.UnsupportedArgumentError(f"{rule}, got {label}")
        return version

    async def _run(self, update: _OpenUpdate, timeout_s: float) -> AsyncGenerator[None, Any]:
        """An open update from its start to its end: a step that finishes it, or a failure."""
        updates = self._updates
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(setattr, self, "_open", None)
            await stack.enter_async_context(updates.exclusive(timeout_s))
            updates.require_unpinned()
            updates.require_weights()
            await updates.ask_workers("native_check", what="checking")
            pause = updates.paused(timeout_s, update.mode, update.clear_cache)
            update.pause = await stack.enter_async_context(pause)
            updates.apart = True
            try:
                await updates.ask_workers("native_start", timeout_s=timeout_s, what="starting")
                if update.version is not None:
                    update.deadline = Deadline(update.limit_s)
                while updates.apart:
                    if take := (yield):
                        await take()
            except WORKERS_ANSWERED:
                # Those that did not are busy: the next update puts their models together.
                if updates.apart and not self._engine.errored:
                    await updates.put_together()
                raise

    def _require_idle(self, what: str) -> _OpenUpdate:
        if self._open is None:
            why = "no weight update is open: start_weight_update comes first"
            raise self._not_ready(f"{what}: {why}")
        if self._open.steps.ag_running:
            why = "another call of the weight update is under way"
            raise self._not_ready(f"{what} has to wait: {why}")
        return self._open

    async def _step(self, what: str, take: Step | None = None) -> None:
        """Takes a step of the open update: a second one meanwhile is refused, a failure ends it."""
        update = self._require_idle(what)
        self._watchdog.stop()
        with contextlib.suppress(StopAsyncIteration):
            await update.steps.asend(take)
            self._watchdog.start(min(update.limit_s, update.deadline.left_s))

    async def _abandon(self, reason: str = "") -> None:
        """Gives the open update up; a replica that had received part of it is stale then."""
        given_up = errors.TransferError(f"an update was given up half-way{reason}")
        self._watchdog.stop()
        try:
            await self._require_idle("giving up").steps.athrow(given_up)
        except errors.TransferError as error:
            if error is not given_up:
                raise

    async def _give_up_silent(self) -> None:
        if update := self._open:
            version, within = update.version, f"{update.limit_s:g} s"
            late = f"version {version} did not arrive within {within}"
            reason = f"no call came for {within}" if version is None else late
            what = "replica %s: a weight update is given up: %s"
            logger.warning(what, self._updates.replica_id, reason)
            await self._abandon(f": {reason}")
