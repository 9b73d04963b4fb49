"""verl's ``GlobalRequestLoadBalancer`` in process: a plain class, without its Ray actor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.peers.script import End, Leave, Send

if TYPE_CHECKING:
    from benchmarks.peers.script import Script

__all__ = ["verl_choices"]


def verl_choices(script: Script, num_servers: int) -> tuple[list[int], list[float]]:
    """What verl chooses for the requests of a script, and the seconds of each decision."""
    from verl.workers.rollout import router  # pyright: ignore[reportMissingImports]

    handles: dict[str, Any] = {str(number): None for number in range(num_servers)}
    balancer = router.GlobalRequestLoadBalancer(handles)
    chosen: list[int] = []
    seconds: list[float] = []
    for step in script.steps:
        match step:
            case Send(session=session):
                name = f"session-{session}" if session != -1 else f"request-{len(chosen)}"
                begin = time.perf_counter()
                server, _ = balancer.acquire_server(name)
                seconds.append(time.perf_counter() - begin)
                chosen.append(int(server))
            case End(request):
                balancer.release_server(str(chosen[request]))
            case Leave(replica):
                balancer.remove_servers([str(replica)])
            case _:
                pass
    return chosen, seconds
