"""A service's pushes and policy versions, and vLLM's own weight calls on all its replicas."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from torchrl_vllm_sync import errors
from torchrl_vllm_sync.checks import DEFAULT_TIMEOUT_S, check_seconds, check_version
from torchrl_vllm_sync.engine.args import payload_of
from torchrl_vllm_sync.observe.status import StatusLog
from torchrl_vllm_sync.replica import PushReport, ReplicaState
from torchrl_vllm_sync.routing.ledger import describe_replicas
from torchrl_vllm_sync.service.replicas import RPC_TIMEOUT_S, Answers, Replicas
from torchrl_vllm_sync.weights.audit import AuditReport
from torchrl_vllm_sync.weights.module import ParamMeta, from_json
from torchrl_vllm_sync.weights.push import VersionHooks, WeightPusher
from torchrl_vllm_sync.weights.transport import GRACE_S, PauseMode, WeightTransport

# Seconds for vLLM's calls that have no limit of their own.
CALL_TIMEOUT_S = DEFAULT_TIMEOUT_S + GRACE_S


class Weights:
    """Pushes weights to replicas, and knows from their reports which policy versions they hold."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.log, self.hooks = StatusLog(replicas.load), VersionHooks()
        strict = not replicas.settings.max_restarts
        self.pusher = WeightPusher(
            replicas,
            self.expected,
            self.hooks.announce,
            strict=strict,
            wakes=replicas.settings.colocated,
            shares=replicas.settings.shares_weights,
        )
        self._metadata: list[ParamMeta] | None = None

    @property
    def version(self) -> int:
        """Newest version that all serving replicas are known to hold; kept while none serves."""
        return max(self.pusher.committed, self._replicas.served_version())

    @property
    def versions(self) -> dict[str, int | None]:
        """Replica id to the version it last said it holds; ``None`` if it has not said."""
        return {one.replica_id: one.weight_version for one in self._replicas.known()}

    def wait_for_version(self, version: int, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Returns :attr:`weight_version` as soon as it is ``version`` or later.

        Args:
            version: Policy version; one that nobody has pushed yet is waited for too.
            timeout_s: Seconds to wait; 0 only looks.

        Raises:
            VersionNotReachedError: It was not reached in time; it says what each replica holds.
        """
        check_version("version", version)
        check_seconds("timeout_s", timeout_s, or_zero=True)

        def reached() -> int | None:
            self._replicas.require()
            return known if (known := self.version) >= version else None

        load = self._replicas.load
        if (found := load.wait_until(reached, timeout_s)) is None:
            held = {one.replica_id: one.describe() for one in load.snapshots()}
            raise errors.VersionNotReachedError(version, held, timeout_s)
        return found

    def expected(self) -> list[ParamMeta]:
        """Returns the tensors that a push must hold."""
        if self._metadata is None:
            calls = self._replicas.start_calls("model_metadata", self._replicas.everyone())
            if (found := calls.first_answer(RPC_TIMEOUT_S)) is None:
                for failure in calls.failures().values():
                    raise failure
                states = describe_replicas(self._replicas.load.snapshots(), ())
                raise errors.NoReplicaAvailableError(
                    f"no replica says what a push must hold: {states}"
                )
            self._metadata = from_json(found)
        return self._metadata

    def model_metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Returns name to dtype and full shape of each tensor that a push must hold.

        Names are those of the loaded model's checkpoint; a tied output head is left out.
        """
        return {one.name: (one.dtype, torch.Size(one.shape)) for one in self.expected()}

    def push(
        self,
        weights: Any,
        *,
        version: int | None = None,
        transport: WeightTransport | None = None,
        timeout_s: float | None = None,
        clear_cache: bool = False,
        mode: PauseMode = "keep",
        strict: bool | None = None,
        audit: bool = False,
        allow_nonfinite: bool = False,
    ) -> PushReport:
        """Brings every replica to new weights, keeping requests in flight.

        Args:
            weights: A module, a state dict, a TensorDict, a ``WeightSource``, or an iterable of
                ``(name, tensor)``.
            version: Policy version; by default one more than the newest that this process knows.
                One version names the same weights each time: repeating the last one is a retry.
            transport: How to send from now on; to begin with an ``AutoTransport``.
            timeout_s: Seconds after which a silent replica counts as failed; the others then get
                everything once more. By default 30 s and three times the median of pushes like this
                one, and 300 s for the first.
            clear_cache: Recompute keys and values of requests in flight under the new weights.
            mode: What becomes of requests in flight: ``"keep"`` freezes them until the new weights
                are in, ``"wait"`` lets them finish first, ``"abort"`` returns them as they are.
            strict: Raise if any replica is left behind, and commit nothing. Otherwise one replica
                is enough, and the report's ``left_behind`` names the others. ``None`` is strict
                where the service restarts no replicas.
            audit: Compare afterwards what every worker computes with, as :meth:`audit` does. A
                replica that holds other weights is left behind, and named.
            allow_nonfinite: Send NaN and infinity, too. Of adapters that are merged, and of other
                tensors that are computed as they are sent, the module's parameters are looked at;
                of sharded ones each rank's, whose own call raises, and names them.

        Returns:
            What was sent, how long each phase took, and what each replica answered.

        Raises:
            WeightMismatchError: The weights do not fit the model; nothing was sent.
            NonFiniteWeightsError: They hold NaN or infinity; no engine serves any of them.
            TransferError: ``audit`` cannot be done, see :meth:`audit`; nothing was sent.
            StaleVersionError: ``version`` is older than the newest, or this process pushed other
                weights under it; nothing was sent.
            PushUnderWayError: Another trainer is pushing; nothing was sent.
            SnapshotError: The memmap transport could not store the weights; nothing was loaded.
            WeightSyncError: No replica reached the version, or with ``strict`` some did not; these
                take no requests until they do. If none did, whole ones go on with what they hold.
        """
        self._replicas.require()
        if transport is not None:
            self.pusher.use(transport)
        how: Any = {"clear_cache": clear_cache, "mode": mode, "strict": strict, "audit": audit}
        how |= {"allow_nonfinite": allow_nonfinite, "timeout_s": timeout_s}
        return self.pusher.push(weights, version=version, on_end=self._end_push, **how)

    def audit(self, weights: Any, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> AuditReport:
        """Compares what every worker of every replica computes with to the trainer's weights.

        Each element counts, as a load would slice, cast and quantise it. Nothing is loaded and
        requests go on, which wait for the comparison once. Pushes are kept out meanwhile.

        Args:
            weights: What :meth:`push_weights` takes; of a sharded model use its ``audit=True``.
            timeout_s: Seconds for each of its steps.

        Returns:
            What was compared; nothing differs.

        Raises:
            WeightAuditError: Something differs. It names each tensor, worker and replica, and says
                how much the first of each replica differs.
            TransferError: A replica did not answer, holds no whole version, or computes with other
                tensors than a trainer can tell: repacked ones (vLLM's CPU backend), LoRA layers, or
                quantised ones other than to fp8, with one scale a layer on one worker. It says
                which.
            WeightMismatchError: The weights do not fit the model.
            PushUnderWayError: Another trainer is pushing.
        """
        check_seconds("timeout_s", timeout_s)
        self._replicas.require()
        return self.pusher.audit(weights, timeout_s)

    def _end_push(self, pushed: PushReport | None) -> None:
        """Passes the outcome of a push to listeners and replicas."""
        if pushed is not None:
            self.log.end_push(pushed)
        if self._replicas.membership is not None:
            self._replicas.learn(doubtful=pushed.left_behind if pushed else (), pushed=pushed)

    def learn_versions(self, *, notify: bool = True) -> None:
        """Updates versions and states at once, after something other than a push changed them."""
        if self._replicas.membership is not None:
            self.pusher.look_again()
            self._replicas.learn()
        if notify:
            self.hooks.moved(self.version)


class NativeClient:
    """vLLM's ``VLLMWeightSyncClient``, pause and sleep calls, on every replica at once."""

    def __init__(self, replicas: Replicas, weights: Weights) -> None:
        self._replicas, self._weights = replicas, weights

    def init_weight_transfer_engine(
        self, request: Any, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Initialises the transfer engine of every replica; blocks until the trainer has come.

        Args:
            request: vLLM's ``WeightTransferInitRequest``, or a mapping: its ``init_info``, or the
                fields of that. To ``rank_offset`` the workers of the replicas before each are
                added; ``world_size`` must be the trainer's ranks and :meth:`get_world_size`.
            timeout_s: Seconds to wait for the replicas' answers.

        Raises:
            UnsupportedArgumentError: Also if ``world_size`` has no room for every worker.
            TransferError: A replica could not: fields that do not fit, a peer that did not come.
        """
        info = payload_of(request, "init_info")
        if not isinstance(info, dict):
            raise errors.UnsupportedArgumentError(f"init_info must be a mapping, got {info!r}")
        shares, calls = self._shares(), self._replicas.everyone(info)
        offset, world_size = info.get("rank_offset"), info.get("world_size")
        if offset is not None:
            num = sum(map(len, shares.values()))
            if world_size is not None and world_size < offset + num:
                rule = f"{offset + num}, for {offset} trainer rank(s) and {num} workers"
                raise errors.UnsupportedArgumentError(
                    f"world_size must be at least {rule}, got {world_size}"
                )
            calls = {
                name: ({**info, "rank_offset": offset + own.start},) for name, own in shares.items()
            }
        self._weights.pusher.step_aside()
        self._call("init_weight_transfer_engine", calls=calls, timeout_s=timeout_s).raise_failures()

    def shutdown_weight_transfer_engine(self) -> None:
        """Has every replica leave the trainer's group, and give an open update up.

        A replica that had received part of it is stale until a later update succeeds.
        """
        self._call("shutdown_weight_transfer_engine").raise_failures()
        self._replicas.learn()

    def use_transfer_engine(self, backend: str | None = None) -> None:
        """Has every worker use another of vLLM's transfer engines, without a new launch.

        Args:
            backend: A name that vLLM's ``WeightTransferEngineFactory`` knows in the workers, such
                as ``"nccl"``; ``None`` goes back to that of the launch, which ``broadcast`` needs.
        """
        self._weights.pusher.step_aside()
        self._call("use_transfer_engine", backend).raise_failures()

    def start_weight_update(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Begins an update on every replica, or on none; pushes wait until it has ended.

        Engines that nobody paused are paused until then, and their requests in flight kept.

        Args:
            timeout_s: Seconds to wait for a push that is under way.

        Raises:
            SyncError: A replica did not pause, or took pushes all the time.
        """
        answers = self._call("start_weight_update", timeout_s=timeout_s)
        if answers.failures and (begun := answers.good):
            how: Any = {"calls": dict.fromkeys(begun, ()), "deadline_s": timeout_s + GRACE_S}
            self._call("shutdown_weight_transfer_engine", **how)
        answers.raise_failures()

    def update_weights(self, weights: Any, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Replaces the weights on all replicas; TorchRL's and vLLM's name for it.

        Args:
            weights: Whatever :meth:`push_weights` takes: a whole push, with its errors. Or vLLM's
                ``WeightTransferUpdateRequest``, a mapping with ``update_info``, that payload
                itself, or a list of it by worker: a part of what :meth:`start_weight_update` began.
            timeout_s: Seconds for it.

        Raises:
            UnsupportedArgumentError: A list has not one part for each worker.
            TransferError: A replica did not receive its part. Its update is over, and unless
                nothing had been touched it is stale until a later update succeeds.
        """
        if not is_payload(weights):
            self._weights.push(weights, timeout_s=timeout_s)
            return
        info = payload_of(weights, "update_info")
        shares, calls = self._shares(), self._replicas.everyone(info)
        if isinstance(info, list):
            if len(info) != (num := sum(map(len, shares.values()))):
                raise errors.UnsupportedArgumentError(
                    f"a list of update_info must have one for each of {num} workers, "
                    f"got {len(info)}"
                )
            calls = {name: (info[own.start : own.stop],) for name, own in shares.items()}
        self._call("update_weights", calls=calls, timeout_s=timeout_s).raise_failures()

    def finish_weight_update(
        self, weight_version: str | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Ends an update on every replica; they go on unless :meth:`pause_generation` holds them.

        Args:
            weight_version: Label of the weights; an integer moves the policy version.
            timeout_s: Seconds for it.

        Raises:
            StaleVersionError: An integer older than the version held; the update stays open.
            TransferError: A replica could not; it is stale until a later update succeeds.
        """
        answers = self._call("finish_weight_update", weight_version, timeout_s=timeout_s)
        self._weights.learn_versions(notify=not answers.failures)
        answers.raise_failures()

    def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        clear_cache: bool = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Pauses every engine until :meth:`resume_generation`; new requests wait at the replicas.

        Args:
            mode: What becomes of requests in flight, as in :meth:`push_weights`.
            clear_cache: Drop cached prefixes; frozen requests recompute theirs.
            timeout_s: Seconds for it; ``"wait"`` takes as long as the requests in flight.

        Raises:
            SyncError: It took too long; that engine goes on.
        """
        how = {"mode": mode, "clear_cache": clear_cache, "timeout_s": timeout_s}
        self._call("pause_generation", **how).raise_failures()

    def resume_generation(self, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Ends :meth:`pause_generation`; engines that are asleep must be woken first.

        Arguments are those of :meth:`pause_generation`.

        Raises:
            ReplicaUnavailableError: A replica's weights are not whole; it stays paused.
        """
        self._call("resume_generation", timeout_s=timeout_s).raise_failures()
        self._replicas.learn()

    def is_paused(self) -> bool:
        """Returns whether every engine is paused."""
        return all(self._replicas.call_replicas("is_paused").raise_failures().values())

    def sleep(
        self, level: int = 1, mode: PauseMode = "abort", *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Puts every engine to sleep; new requests wait at the replicas until :meth:`wake_up`.

        Args:
            level: 0 pauses only; 1 moves weights to the host and drops keys and values; 2 drops
                both: then ``wake_up(["weights"])``, an update, ``wake_up(["kv_cache"])``. On GPUs
                1 and 2 need ``enable_sleep_mode`` at launch.
            mode: See :meth:`push_weights`.
            timeout_s: Seconds for it.
        """
        start = time.perf_counter()
        with self._weights.pusher.exclusive(timeout_s):  # catching up wakes one, too
            answers = self._call("sleep", level, mode, timeout_s=timeout_s)
            dead = [name for name, one in answers.items() if is_dead(one)]
            if level > 0:
                self._replicas.load.note_asleep([*answers.good, *dead])
        seconds = time.perf_counter() - start
        self._replicas.learn()
        if self._replicas.settings.colocated:  # what is dead holds nothing, and comes back asleep
            answers = Answers({name: one for name, one in answers.items() if name not in dead})
        answers.raise_failures()
        if level > 0:
            self._weights.pusher.slept_s = seconds

    def wake_up(
        self, tags: list[str] | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> bool:
        """Wakes every engine; weights that level 2 dropped must be replaced first.

        Arguments not listed are those of :meth:`sleep`.

        Args:
            tags: Memory to wake: ``"weights"``, ``"kv_cache"``; ``None`` wakes all.

        Returns:
            Whether all are fully awake and take requests.
        """
        answers = self._call("wake_up", tags, timeout_s=timeout_s)
        self._replicas.learn()
        if not self._replicas.settings.colocated or True not in answers.values():
            answers.raise_failures()  # else others are dead, or sleep until the next push
        awake = not answers.failures and all(answers.values())
        if awake:
            self._weights.pusher.slept_s = None
        return awake

    def _shares(self) -> dict[str, range]:
        """Returns the workers of each replica, counted through all of them."""
        self._replicas.require()
        numbers = {n.replica_id: n.description.num_workers for n in self._replicas.current()}
        ends = itertools.accumulate(numbers.values())
        pairs = zip(numbers.items(), ends, strict=True)
        return {name: range(end - number, end) for (name, number), end in pairs}

    def _call(self, method: str, *args: Any, timeout_s: float | None = None, **how: Any) -> Answers:
        """Calls all replicas, which keep the time limit themselves."""
        if timeout_s is not None:
            how |= {"timeout_s": timeout_s, "deadline_s": timeout_s + GRACE_S}
        return self._replicas.call_replicas(method, *args, **{"deadline_s": CALL_TIMEOUT_S, **how})


def is_dead(answer: Any) -> bool:
    """Whether nobody answered who will come back by himself."""
    is_unavailable = isinstance(answer, errors.ReplicaUnavailableError)
    return is_unavailable and answer.state is ReplicaState.FAILED and not answer.may_return


def is_payload(weights: Any) -> bool:
    """Whether ``weights`` describe a transfer, rather than being weights."""
    if isinstance(weights, list):
        return bool(weights) and all(isinstance(one, dict) for one in weights)
    if not isinstance(weights, dict) or not weights:
        return type(weights).__name__ == "WeightTransferUpdateRequest"
    holds_tensors = any(isinstance(one, (torch.Tensor, dict)) for one in weights.values())
    return "update_info" in weights or not holds_tensors
