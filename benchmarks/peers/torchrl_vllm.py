"""TorchRL's own service and updater, driven by the benchmark of pushes as ours are.

Read in TorchRL 0.14.1 (``torchrl/modules/llm/backends/vllm/vllm_async.py``,
``torchrl/collectors/llm/weight_update/vllm_v2.py``). A push puts the engines to sleep at level 0,
which ends their requests with ``finish_reason`` "abort"; their slots begin new ones. From vLLM 0.28
on the classes that it imports are gone; of 0.26 it needs the one change below.
"""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch
    from torchrl.modules.llm import AsyncVLLM


@contextlib.contextmanager
def running(checkpoint: Path, actor_class: type, num_replicas: int, **engine: Any) -> Iterator[Any]:
    """Launches TorchRL's service; its engines are gone afterwards."""
    from torchrl.modules.llm import AsyncVLLM
    from vllm import AsyncEngineArgs

    begin = time.perf_counter()
    kind: Any = ray.remote(num_cpus=0, num_gpus=0)(actor_class)
    service = AsyncVLLM(AsyncEngineArgs(str(checkpoint), **engine), num_replicas, actor_class=kind)
    try:
        service._launch()
        service.actor_class = None  # the trainer gets a copy, and Ray pickles no classes of actors
        print(f"TorchRL's launched in {time.perf_counter() - begin:.1f} s", flush=True)
        yield service
    finally:
        service.shutdown()


def engine_class() -> type:
    """TorchRL's engine, which vLLM 0.26 can update, and which times its sleep."""
    from torchrl.modules.llm.backends.vllm.vllm_async import _AsyncLLMEngine

    class Engine(_AsyncLLMEngine):
        _asleep, _awake = 0.0, 0.0

        async def update_weights_native(self, update_request: Any) -> None:
            """As TorchRL's, without the ``is_checkpoint_format`` that vLLM 0.26 does not take."""
            await self.engine.start_weight_update()
            try:
                await self.engine.update_weights(update_request)
            finally:
                await self.engine.finish_weight_update()

        async def sleep(self, level: int = 0) -> None:
            self._asleep = time.perf_counter()
            await super().sleep(level)

        async def wake_up(self, tags: list[str] | None = None) -> None:
            await super().wake_up(tags)
            self._awake = time.perf_counter()

        def last_pause_s(self) -> float:
            return self._awake - self._asleep

    return Engine


class TorchRLUpdater:
    """``vLLMUpdaterV2`` of a trainer on ``cuda:0``, with the face of ours."""

    def __init__(self, service: AsyncVLLM, model: torch.nn.Module) -> None:
        from torchrl.collectors.llm import vLLMUpdaterV2

        device = next(model.parameters()).device
        if device.index:
            raise ValueError(f"TorchRL's updater sends from cuda:0; the trainer has {device}")
        self._service, self._model = service, model
        self._updater = vLLMUpdaterV2(service)
        self._updater.init()

    def push_weights(self) -> Any:
        """Pushes, and returns what the benchmark reads of a report."""
        begin = time.perf_counter()
        self._updater.push_weights((n, p.detach()) for n, p in self._model.named_parameters())
        seconds = time.perf_counter() - begin
        pauses = ray.get([one.last_pause_s.remote() for one in self._service.actors], timeout=30)
        how = {"path": "layerwise", "path_reason": "vLLM's own"}
        replicas = [SimpleNamespace(phases={"whole_pause_s": one}, **how) for one in pauses]
        return SimpleNamespace(seconds=seconds, phases={}, replicas=replicas)

    def disconnect(self) -> None:
        """Nothing: the group ends with the process."""
