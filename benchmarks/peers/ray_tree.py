"""Ray's prefix-aware router in process: its own tree and its own choice, with replicas made up.

``PrefixCacheAffinityRouter`` is made without its constructor, which wants a running Serve: the
methods that choose are Ray's, the tree is Ray's ``PrefixTree`` in this process instead of in an
actor, and queue lengths are those of the script. ``ray.get`` inside the router's module is replaced
by the identity for the time of a script.
"""

from __future__ import annotations

import asyncio
import math
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.peers.script import End, Leave, Script, Send, Wait

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ray_choices"]


class _Remote:
    """Methods of a tree under the names of an actor's."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=getattr(self._tree, name))


class _ReplicaId:
    """A replica's id: a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def to_full_id_str(self) -> str:
        return str(self.number)


def ray_choices(
    script: Script, num_replicas: int, settings: dict[str, Any]
) -> tuple[list[int], list[float]]:
    """What Ray chooses for the requests of a script.

    Args:
        script: What happens; an eviction, if any, at every wait.
        num_replicas: Replicas at the start.
        settings: ``imbalanced_threshold``, None for infinite, ``match_rate_threshold``, and perhaps
            ``eviction_threshold`` and ``eviction_target`` in characters.

    Returns:
        The replica of each request, and the seconds of each decision. Where queues were uneven, Ray
        draws lots, and the first of the shortest queues stands for them here.
    """
    from ray.llm._internal.serve.routing_policies.prefix_aware import prefix_aware_router as module
    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

    tree = PrefixTree()
    identities = [_ReplicaId(number) for number in range(num_replicas)]
    tree.add_tenants([identity.to_full_id_str() for identity in identities], 0)
    queues = dict.fromkeys(range(num_replicas), 0)
    replicas = {
        number: SimpleNamespace(replica_id=identity, max_ongoing_requests=10**9)
        for number, identity in enumerate(identities)
    }

    async def probe(candidates: list[Any], _: int) -> list[tuple[Any, int]]:
        return [(one, queues[one.replica_id.number]) for one in candidates]

    router: Any = object.__new__(module.PrefixCacheAffinityRouter)
    threshold = settings["imbalanced_threshold"]
    router._imbalanced_threshold = math.inf if threshold is None else threshold
    router._match_rate_threshold = settings["match_rate_threshold"]
    router._use_replica_queue_len_cache = False
    router._tree_actor = _Remote(tree)
    router._probe_queue_lens = probe
    router._replicas = {one.replica_id: one for one in replicas.values()}

    chosen: list[int] = []
    seconds: list[float] = []

    async def run() -> None:
        clock = _clock()
        for step in script.steps:
            match step:
                case Send():
                    text = script.text(len(chosen))
                    pending: Any = SimpleNamespace(args=[SimpleNamespace(prompt=text)])
                    begin = time.perf_counter()
                    (found,) = await router._prefix_match_best_replicas(
                        pending, list(replicas.values())
                    )
                    best = await router._select_from_candidate_replicas(
                        found or list(replicas.values()), 0
                    )
                    seconds.append(time.perf_counter() - begin)
                    assert best is not None
                    number = best.replica_id.number
                    tree.insert(text, str(number), next(clock))
                    queues[number] += 1
                    chosen.append(number)
                case End(request):
                    queues[chosen[request]] -= 1
                case Leave(number):
                    tree.remove_tenants([str(number)])
                    del replicas[number], queues[number]
                case Wait():
                    for number in [one for one in queues if _evicts(tree, str(one), settings)]:
                        excess = tree.tenant_to_char_count[str(number)]
                        tree.evict_tenant_by_lru(str(number), excess - settings["eviction_target"])
                case _:
                    pass

    by_name = SimpleNamespace(
        from_full_id_str=lambda name: identities[int(name)],
    )
    with (
        mock.patch("ray.get", lambda value: value),
        mock.patch.object(module, "ReplicaID", by_name),
    ):
        asyncio.run(run())
    return chosen, seconds


def _evicts(tree: Any, tenant: str, settings: dict[str, Any]) -> bool:
    """Whether a replica owns so much that Ray's loop would take some away."""
    threshold = settings.get("eviction_threshold")
    return threshold is not None and tree.tenant_to_char_count[tenant] > threshold


def _clock() -> Iterator[int]:
    time_s = 0
    while True:
        time_s += 1
        yield time_s
