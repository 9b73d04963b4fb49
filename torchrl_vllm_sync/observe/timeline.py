"""Pushes as a timeline that ``chrome://tracing`` and ``ui.perfetto.dev`` open.

Format: Trace Event Format, its JSON object form with complete events (``"X"``) and metadata events
(``"M"``), docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Events of one
track must nest or not meet at all (perfetto.dev/docs/faq).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.weights.transport import PushReport

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator, Sequence

    from torchrl_vllm_sync.weights.transport import LoadReport


PROCESS = 1
# What a replica does before it pauses, in this order; of the latter the former is the beginning.
_BEFORE = ("verify_s", "stage_s")
_READY = "ready_s"
_PAUSED = ("pause_s", "load_s", "resume_s")
_WHOLE_PAUSE = "whole_pause_s"


def save_timeline(path: str | os.PathLike[str], reports: PushReport | Iterable[PushReport]) -> None:
    """Writes pushes into a file that ``chrome://tracing`` and ``ui.perfetto.dev`` open.

    One track is the trainer's, one is each replica's. The trainer's phases stand where they were
    measured. A replica says when its first phase began, and each of its phases begins where the one
    before ends. Replicas on other hosts stand where their hosts' clocks put them, so that they are
    as far off as these clocks disagree. Phases that have no start of their own, such as a
    snapshot's ``copy_s`` and ``hash_s``, which take turns, are among the arguments of their push.

    Example:
        >>> reports = []
        >>> stop = service.register_version_hook(reports.append)
        >>> ...
        >>> save_timeline("pushes.json", reports)

    Args:
        path: File to write; one that exists is replaced.
        reports: One push, or several in any order.

    Raises:
        UnsupportedArgumentError: There is no push, or one does not say when it began.
        OSError: The file cannot be written.
    """
    Path(path).write_text(json.dumps(trace_of(reports)))


def trace_of(reports: PushReport | Iterable[PushReport]) -> dict[str, Any]:
    """Returns what :func:`save_timeline` writes; times are microseconds from the first push on."""
    pushes = _in_order([reports] if isinstance(reports, PushReport) else list(reports))
    first = pushes[0][0]
    replicas = dict.fromkeys(one.replica_id for _, report in pushes for one in report.replicas)
    trainers = _trainer_tracks(pushes)
    names = ["trainer", *(f"trainer {track + 1}" for track in range(1, max(trainers) + 1))]
    tracks = {name: number for number, name in enumerate(replicas, start=len(names))}
    names += [f"replica {name}" for name in replicas]
    events = [_event("M", "process_name", None, {"name": "torchrl_vllm_sync"})]
    for track, name in enumerate(names):
        events.append(_event("M", "thread_name", track, {"name": name}))
        events.append(_event("M", "thread_sort_index", track, {"sort_index": track}))
    for track, (began_at, report) in zip(trainers, pushes, strict=True):
        events += _trainer_events(report, began_at - first, track)
        for one in report.replicas:
            events += _replica_events(one, first, tracks[one.replica_id])
    about = {"began_at": first}  # seconds of Unix time
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _in_order(reports: Sequence[PushReport]) -> list[tuple[float, PushReport]]:
    """The pushes by their beginning, each with that."""
    if not reports:
        raise UnsupportedArgumentError("reports must hold at least 1 push, got none")
    begun = [(one.began_at, one) for one in reports if one.began_at is not None]
    if len(begun) < len(reports):
        versions = [one.version for one in reports if one.began_at is None]
        raise UnsupportedArgumentError(f"reports must say when they began, {versions} do not")
    return sorted(begun, key=lambda one: one[0])


def _trainer_tracks(pushes: Sequence[tuple[float, PushReport]]) -> list[int]:
    """A trainer's track for each push: the first, unless one waits there for another's end."""
    ends: list[float] = []
    tracks: list[int] = []
    for began_at, report in pushes:
        free = (track for track, end in enumerate(ends) if end <= began_at)
        track = next(free, len(ends))
        ends[track : track + 1] = [began_at + report.seconds]
        tracks.append(track)
    return tracks


def _trainer_events(report: PushReport, begin: float, track: int) -> Iterator[dict[str, Any]]:
    """The push, and within it the phases whose start is known."""
    loose = {name: one for name, one in report.phases.items() if name not in report.phase_starts}
    about = {
        "version": report.version,
        "transport": report.transport,
        "num_bytes": report.num_bytes,
        "left_behind": report.left_behind,
        **loose,
    }
    yield _span("push", track, begin, begin + report.seconds, about)
    for phase, start in sorted(report.phase_starts.items(), key=lambda one: one[1]):
        end = start + report.phases[phase]
        yield _span(phase, track, begin + start, begin + end, {"version": report.version})


def _replica_events(one: LoadReport, first: float, track: int) -> Iterator[dict[str, Any]]:
    """What a replica did; nothing if it loaded nothing, or could not say."""
    if one.began_at is None:
        return
    about = {"version": one.version}
    at = one.began_at - first
    for phase in _BEFORE:
        if seconds := one.phases.get(phase, 0.0):
            yield _span(phase, track, at, at + seconds, about)
            if phase == "stage_s" and (ready_s := one.phases.get(_READY, 0.0)):
                yield _span(_READY, track, at, at + ready_s, about)
            at += seconds
    counts = {name: one for name, one in one.phases.items() if not name.endswith("_s")}
    whole = {**about, **counts, "path": one.path, "path_reason": one.path_reason}
    bounds = [at]
    for phase in _PAUSED:
        bounds.append(bounds[-1] + one.phases.get(phase, 0.0))
    yield _span(_WHOLE_PAUSE, track, at, bounds[-1], whole)
    for phase, begin, end in zip(_PAUSED, bounds, bounds[1:], strict=False):
        yield _span(phase, track, begin, end, about)


def _span(phase: str, track: int, begin: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    """A complete event, both of whose ends are whole nanoseconds, so that what nests does."""
    begin_ns, end_ns = round(begin * 1e9), round(end * 1e9)
    times = {"ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
    return {**_event("X", phase.removesuffix("_s"), track, args), "cat": "push", **times}


def _event(kind: str, name: str, track: int | None, args: dict[str, Any]) -> dict[str, Any]:
    where = {"pid": PROCESS} if track is None else {"pid": PROCESS, "tid": track}
    return {"ph": kind, "name": name, **where, "args": args}
