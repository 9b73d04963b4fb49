"""A status as a service would give it, made by hand, with as much in it as there can be."""

import math
import threading
from dataclasses import replace

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.observe.status import FailureStatus, ReplicaStatus, ServiceStatus
from torchrl_vllm_sync.replica import Latency, LoadReport, PushReport

NOON = 1_750_000_000.0
HOSTILE = "<img src=x onerror=document.title=1>&\"'[red]\x1b[31m\u202e"
PHASES = {
    "prepare_s": 0.004,
    "ready_s": 0.003,
    "queue_s": 0.011,
    "transfer_s": 0.038,
    "send_s": 0.056,
    "acknowledge_s": 0.005,
}


def push(version, ended_at=NOON, **more):
    return PushReport(
        began_at=ended_at - 0.068,
        seconds=0.068,
        version=version,
        transport="broadcast",
        num_bytes=16_400_000_000,
        phases=PHASES,
        phase_starts={"send_s": 0.004},
        replicas=[
            LoadReport(
                replica_id="0",
                version=version,
                stage_s=0.01,
                pause_s=0.011,
                load_s=0.04,
                whole_pause_s=0.051,
                began_at=ended_at - 0.062,
            ),
            LoadReport(replica_id="1", version=version, load_s=0.034, whole_pause_s=0.053),
        ],
        **more,
    )


def replica(replica_id, **more):
    return ReplicaStatus(
        replica_id=replica_id,
        in_flight=more.pop("in_flight", 30),
        **{
            "state": ReplicaState.SERVING,
            "weight_version": 12,
            "elsewhere": 2,
            "num_unfinished": 32,
            "num_running": 28,
            "num_waiting": 4,
            "kv_cache_usage": 0.43,
            "prefix_cache_hit_rate": 0.87,
            "generated_tokens_per_s": 2483.0,
            "prompt_tokens_per_s": 612.0,
            "time_to_first_token": Latency(p50_s=0.05, p99_s=0.4),
            "inter_token_latency": Latency(p50_s=0.012, p99_s=0.09),
            "report_age_s": 0.4,
            "num_restarts": 0,
            "node": "10.0.0.7",
            "pid": 4711,
            "device_type": "cuda",
            "device_name": "NVIDIA H100 80GB HBM3",
            "num_workers": 2,
        }
        | more,
    )


def status(*replicas, **more):
    return ServiceStatus(
        **{"name": "rollouts", "time": NOON, "weight_version": 12, "in_flight": 60}
        | {"replicas": replicas, "pushes": (push(12), push(11, NOON - 7))}
        | {"model": "Qwen/Qwen2.5-7B", "launched_at": NOON - 8000}
        | {"requests": {"answered": 5120, "lost": 1, "failed": 0, "cancelled": 0, "retried": 12}}
        | {"versions": {"torchrl": "0.14.1", "vllm": "0.32.0"}}
        | more
    )


def troubled():
    """Two replicas that serve, one that is unknown, one that failed; a push that failed too."""
    reason = "its actor has not answered for 60.3 s"
    unknown = ReplicaStatus(replica_id="2", state=ReplicaState.STARTING, in_flight=0)
    dead = ReplicaStatus(
        replica_id="3", state=ReplicaState.FAILED, in_flight=0, reason=reason, weight_version=11
    )
    return status(
        replica("0"),
        replica("1", generated_tokens_per_s=2391.0, num_waiting=0, kv_cache_usage=0.38),
        unknown,
        dead,
        pushes=(
            push(12, left_behind={"3": reason}),
            PushReport(began_at=NOON - 14, seconds=5.0, version=11, error="no replica took it"),
        ),
        failures=(
            FailureStatus(at=NOON - 4, what="failed", replica_id="3", reason=reason),
            FailureStatus(at=NOON - 9, what="push", reason="no replica took it"),
        ),
    )


def hostile():
    """Texts that are markup for whoever takes them for it, everywhere that texts can be."""
    pushed = push(1, left_behind={HOSTILE: HOSTILE})
    return status(
        replica(HOSTILE, node=HOSTILE, reason=HOSTILE, state=ReplicaState.STALE),
        name=HOSTILE,
        model=HOSTILE,
        pushes=(
            replace(pushed, transport=HOSTILE, phases={f"{HOSTILE}_s": 0.05}),
            replace(pushed, began_at=NOON - 1, error=HOSTILE),
        ),
        failures=(
            FailureStatus(at=NOON, what="stale", replica_id=HOSTILE, reason=HOSTILE),
            FailureStatus(at=NOON, what="push", reason=HOSTILE),
        ),
    )


class Moving:
    """A service whose figures go up and down; each look is a second after the one before."""

    def __init__(self, scene=troubled, *, past_s=0):
        self.scene, self.looks, self.lock = scene, -past_s, threading.Lock()

    def __call__(self):
        with self.lock:
            self.looks += 1
            at = self.looks
        wave = [0.5 + 0.45 * math.sin(at / 9.0 + 2 * i) for i in range(9)]
        now = self.scene()
        moved = [
            replace(
                one,
                in_flight=round(60 * part),
                num_waiting=max(0, round(30 * (part - 0.6))),
                kv_cache_usage=part,
                time_to_first_token=Latency(p50_s=0.1 * part, p99_s=0.3 * part + 0.1),
                generated_tokens_per_s=3000 * part if at % 50 > 5 else None,
                weight_version=12 + at // 20 - (1 if i else 0) * (at % 20 < 4),
            )
            if one.num_running is not None
            else one
            for i, (one, part) in enumerate(zip(now.replicas, wave, strict=False))
        ]
        return replace(now, time=NOON + at, replicas=tuple(moved))
