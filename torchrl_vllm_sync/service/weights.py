"""A service's pushes and policy versions, and vLLM's own weight calls on all its replicas."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from torchrl_vllm_sync.engine.args import num_workers, payload_of
from torchrl_vllm_sync.errors import UnsupportedArgumentError, VersionNotReachedError
from torchrl_vllm_sync.observe.status import StatusLog
from torchrl_vllm_sync.versions import check_version
from torchrl_vllm_sync.weights.metadata import from_json
from torchrl_vllm_sync.weights.push import VersionHooks, WeightPusher
from torchrl_vllm_sync.weights.transport import GRACE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrl_vllm_sync.replica import PushStatus
    from torchrl_vllm_sync.service.replicas import Answers, Replicas
    from torchrl_vllm_sync.weights.metadata import ParamMeta
    from torchrl_vllm_sync.weights.transport import PushReport, WeightTransport


class Weights:
    """Pushes weights to replicas, and knows which policy versions they hold.

    What other processes do is known from the replicas' reports, which come once a second, and ten
    times a second while a version is waited for.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.log, self.hooks = StatusLog(replicas.load), VersionHooks()
        self.pusher = WeightPusher(
            replicas,
            self.expected,
            self.hooks.announce,
            strict=not replicas.settings.max_restarts,
        )
        self._metadata: list[ParamMeta] | None = None
        self._last_served = 0

    @property
    def version(self) -> int:
        """Newest version that all serving replicas are known to hold; kept while none serves."""
        held = [
            one.weight_version
            for one in self._replicas.known()
            if one.state.admits_requests and one.weight_version is not None
        ]
        if held:
            self._last_served = min(held)
        return max(self.pusher.committed, self._last_served)

    @property
    def versions(self) -> dict[str, int | None]:
        """Replica id to the version it last said it holds; ``None`` if it has not said."""
        return {one.replica_id: one.weight_version for one in self._replicas.known()}

    def wait_for_version(self, version: int, timeout_s: float) -> int:
        """Waits until :attr:`version` is ``version`` or later, and returns it."""
        check_version("version", version)
        check_wait("timeout_s", timeout_s)

        def reached() -> int | None:
            self._replicas.require()
            known = self.version
            return known if known >= version else None

        load = self._replicas.load
        found = load.wait_until(reached, timeout_s)
        if found is None:
            held = {one.replica_id: one.describe() for one in load.snapshots()}
            raise VersionNotReachedError(version, held, timeout_s)
        return found

    def listen_to_versions(self, listener: Callable[[int], object]) -> Callable[[], None]:
        """Calls ``listener`` with each version this process brings about; returns what ends that.

        Unlike hooks also after updates through vLLM's own calls, and again for one pushed again.
        """
        return self.hooks.listen(listener)

    def listen_to_pushes(self, listener: Callable[[PushStatus], object]) -> Callable[[], None]:
        """Calls ``listener``, which must not raise, as each push ends, in the pushing thread."""
        return self.log.listen(listener)

    def expected(self) -> list[ParamMeta]:
        """Returns the tensors that a push must hold."""
        if self._metadata is None:
            answers = self._replicas.call_replicas("model_metadata")
            good = [one for name, one in answers.items() if name not in answers.failures]
            if not good:
                answers.raise_failures()
            self._metadata = from_json(good[0])
        return self._metadata

    def model_metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Returns name to dtype and full shape of each tensor that a push must hold."""
        return {one.name: (one.dtype, torch.Size(one.shape)) for one in self.expected()}

    def push(
        self,
        weights: Any,
        *,
        version: int | None = None,
        transport: WeightTransport | None = None,
        **options: Any,
    ) -> PushReport:
        """Brings every replica to new weights; ``options`` are those of ``PushOptions``."""
        self._replicas.require()
        if transport is not None:
            self.pusher.use(transport)
        return self.pusher.push(weights, version=version, on_end=self._end_push, **options)

    def _end_push(self, pushed: PushStatus | None) -> None:
        """Passes the outcome of a push to listeners and replicas."""
        if pushed is not None:
            self.log.end_push(pushed)
        if self._replicas.membership is not None:
            self._replicas.learn(doubtful=pushed.left_behind if pushed else (), pushed=pushed)

    def learn_versions(self) -> None:
        """Updates versions and states at once, after something other than a push changed them."""
        self.pusher.look_again()
        self._replicas.learn()
        self.hooks.moved(self.version)


def check_wait(name: str, seconds: Any) -> None:
    """Refuses what is no time to wait."""
    if not (isinstance(seconds, int | float) and 0 <= seconds < math.inf):
        raise UnsupportedArgumentError(f"{name} must be a finite number from 0 on, got {seconds!r}")


DEFAULT_TIMEOUT_S = 300.0


class NativeClient:
    """vLLM's own weight-transfer, pause and sleep calls, on every replica at once.

    They make a service a ``VLLMWeightSyncClient``, the object that vLLM's trainer-side engines
    drive (``vllm/distributed/weight_transfer/base.py``, 0.26 to 0.32). Each returns when all have
    answered, and raises the first failure; one out of turn raises ``TransferNotReadyError`` and
    does nothing.
    """

    def __init__(self, replicas: Replicas, weights: Weights) -> None:
        self._replicas, self._weights = replicas, weights

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **options: Any) -> Any:
        """Calls all with the same arguments, and returns their answers."""
        return self._call(method, self._everyone(*args), timeout_s, **options).raise_failures()

    def call_and_learn(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """The same for a call after which replicas are in other states."""
        answers = self.call(method, *args, timeout_s=timeout_s)
        self._replicas.learn()
        return answers

    def initialise(self, request: Any, timeout_s: float) -> None:
        """Initialises every replica's transfer engine, each with a ``rank_offset`` of its own."""
        info = payload_of(request, "init_info")
        if not isinstance(info, dict):
            raise UnsupportedArgumentError(f"init_info must be a mapping, got {info!r}")
        workers, everyone = self._workers, self._everyone(info)
        offset, world_size = info.get("rank_offset"), info.get("world_size")
        if offset is not None:
            needed = offset + len(everyone) * workers
            if world_size is not None and world_size < needed:
                raise UnsupportedArgumentError(
                    f"world_size must be at least {needed}, for {offset} trainer rank(s) and "
                    f"{len(everyone) * workers} workers, got {world_size}"
                )
            everyone = {
                name: ({**info, "rank_offset": offset + index * workers},)
                for index, name in enumerate(everyone)
            }
        self._weights.pusher.step_aside()
        self._call("init_weight_transfer_engine", everyone, timeout_s).raise_failures()

    def use_engine(self, backend: str | None) -> None:
        """Has every worker use another of vLLM's transfer engines."""
        self._weights.pusher.step_aside()
        self.call("use_transfer_engine", backend)

    def start_update(self, timeout_s: float) -> None:
        """Begins an update on every replica, or on none."""
        answers = self._call("start_weight_update", self._everyone(), timeout_s)
        failures = answers.failures
        if failures and (begun := answers.keys() - failures.keys()):
            self._call("shutdown_weight_transfer_engine", dict.fromkeys(begun, ()), timeout_s)
        answers.raise_failures()

    def update(self, weights: Any, timeout_s: float) -> None:
        """Takes one part of an update: a payload for all, or a list with one for each worker."""
        info = payload_of(weights, "update_info")
        calls, workers = self._everyone(info), self._workers
        if isinstance(info, list):
            if len(info) != len(calls) * workers:
                raise UnsupportedArgumentError(
                    f"a list of update_info must have one for each of {len(calls) * workers} "
                    f"workers, got {len(info)}"
                )
            calls = {
                name: (info[index * workers : (index + 1) * workers],)
                for index, name in enumerate(calls)
            }
        self._call("update_weights", calls, timeout_s).raise_failures()

    def finish_update(self, weight_version: str | None, timeout_s: float) -> None:
        """Ends an update; then this process knows the versions, whether or not all have ended."""
        try:
            self.call("finish_weight_update", weight_version, timeout_s=timeout_s)
        finally:
            if self._replicas.membership is not None:
                self._weights.pusher.look_again()
                self._replicas.learn()
        self._weights.hooks.moved(self._weights.version)

    @property
    def _workers(self) -> int:
        return num_workers(self._replicas.settings.engine_args)

    def _everyone(self, *args: Any) -> dict[str, tuple[Any, ...]]:
        self._replicas.require()
        return {one.replica_id: args for one in self._replicas.current()}

    def _call(
        self,
        method: str,
        calls: Mapping[str, tuple[Any, ...]],
        timeout_s: float | None,
        **options: Any,
    ) -> Answers:
        if timeout_s is not None and method != "shutdown_weight_transfer_engine":
            options["timeout_s"] = timeout_s
        pending = self._replicas.start_calls(method, calls, **options)
        return pending.answers((timeout_s or DEFAULT_TIMEOUT_S) + GRACE_S)


def is_payload(weights: Any) -> bool:
    """Whether ``weights`` describe a transfer, rather than being weights."""
    if type(weights).__name__ == "WeightTransferUpdateRequest":
        return True
    if isinstance(weights, list):
        return bool(weights) and all(isinstance(one, dict) for one in weights)
    if not isinstance(weights, dict) or not weights:
        return False
    return "update_info" in weights or not any(
        isinstance(one, (torch.Tensor, dict)) for one in weights.values()
    )
