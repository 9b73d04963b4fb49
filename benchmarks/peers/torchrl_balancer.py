"""TorchRL's ``LoadBalancer`` in process, with actors made up.

The class is TorchRL's; its service and its actors are stubs that count what a script has in flight,
and ``ray.get`` inside it returns what they were asked.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest import mock

from benchmarks.peers.script import End, Send

if TYPE_CHECKING:
    from benchmarks.peers.script import Script

__all__ = ["torchrl_choices"]


def torchrl_choices(script: Script, num_actors: int) -> tuple[list[int], list[float]]:
    """What TorchRL chooses for the requests of a script, and the seconds of each decision."""
    from torchrl.modules.llm.backends.vllm import vllm_async as module

    counts = [0] * num_actors
    service = SimpleNamespace(
        actors=[SimpleNamespace() for _ in range(num_actors)],
        get_num_unfinished_requests=lambda: list(counts),
    )
    balancer = module.LoadBalancer(service)  # pyright: ignore[reportArgumentType]
    chosen: list[int] = []
    seconds: list[float] = []
    no_ray = SimpleNamespace(get=lambda value: value)
    with mock.patch.object(module, "_get_ray", return_value=no_ray):
        for step in script.steps:
            match step:
                case Send():
                    prompt = script.tokens(len(chosen)).tolist()
                    begin = time.perf_counter()
                    actor = balancer.select_actor(prompt=prompt)
                    seconds.append(time.perf_counter() - begin)
                    counts[actor] += 1
                    chosen.append(actor)
                case End(request):
                    counts[chosen[request]] -= 1
                case _:
                    pass
    return chosen, seconds
