"""Single replicas brought to the version of another: from its snapshot, or by its weights."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torchrl_vllm_sync.weights.transport import ReplicaClient

__all__ = ["catch_up_from_peer", "catch_up_from_snapshot"]

# A replica keeps to the time limit itself. One silent for this much longer has hung.
GRACE_S = 10.0
# Seconds within which a replica must show that all of it is alive before another gives it anything.
PROBE_TIMEOUT_S = 10.0


def catch_up_from_snapshot(
    client: ReplicaClient,
    replica_ids: Collection[str],
    givers: Sequence[str],
    version: int,
    *,
    timeout_s: float,
) -> dict[str, Any]:
    """Has replicas load the snapshot that others loaded, whichever process stored it.

    Args:
        client: The replicas.
        replica_ids: Those that load.
        givers: Ids of replicas that hold ``version``.
        version: Oldest version to load.
        timeout_s: Seconds for all of it.

    Returns:
        Replica id to its answer, or to the exception that came instead; empty if no giver has
        its weights from a snapshot.
    """
    deadline = time.monotonic() + timeout_s
    calls = client.start_calls("snapshot_source", dict.fromkeys(givers, ()))
    told = calls.answers(min(PROBE_TIMEOUT_S, timeout_s)).values()
    source = next((one for one in told if isinstance(one, dict)), None)
    if source is None:
        return {}
    left_s = max(deadline - time.monotonic(), 1.0)
    return client.start_calls(
        "load_snapshot",
        dict.fromkeys(replica_ids, (source["directory"], source["run_id"])),
        at_least=version,
        timeout_s=left_s,
    ).answers(left_s + GRACE_S)


def catch_up_from_peer(
    client: ReplicaClient,
    replica_ids: Collection[str],
    givers: Sequence[str],
    version: int,
    *,
    timeout_s: float,
) -> dict[str, Any]:
    """Has replicas copy the weights of one that serves, which goes on serving.

    Pushes to the giving replica wait for a chunk at most. A replica that is silent gets nothing.

    Args:
        client: The replicas.
        replica_ids: Those that take, one after the other.
        givers: Ids of replicas that hold ``version``; the first that can gives.
        version: Policy version.
        timeout_s: Seconds for all of it.

    Returns:
        Replica id to its answer, or to the exception that came instead.
    """
    deadline = time.monotonic() + timeout_s
    probes = client.start_calls("probe_workers", dict.fromkeys(replica_ids, ()))
    answers = {
        name: one
        for name, one in probes.answers(min(PROBE_TIMEOUT_S, timeout_s)).items()
        if isinstance(one, BaseException)
    }
    left = [one for one in replica_ids if one not in answers]
    if not left:
        return answers
    reason: BaseException = RuntimeError(f"no replica is there that serves version {version}")
    for giver in givers:
        left_s = max(deadline - time.monotonic(), 1.0)
        calls = client.start_calls("offer_weights", {giver: ()}, timeout_s=left_s)
        offer = calls.answers(left_s).get(giver, reason)
        if isinstance(offer, BaseException):
            reason = offer
            continue
        try:
            while left and offer["version"] == version and time.monotonic() < deadline:
                name = left[0]
                left_s = max(deadline - time.monotonic(), 1.0)
                call = client.start_calls("take_weights", {name: (offer,)}, timeout_s=left_s)
                answers |= call.answers(left_s + GRACE_S)
                del left[0]
        finally:
            withdrawal = client.start_calls("withdraw_weights", {giver: (offer["token"],)})
            withdrawal.answers(GRACE_S)
        break
    return dict.fromkeys(left, reason) | answers
