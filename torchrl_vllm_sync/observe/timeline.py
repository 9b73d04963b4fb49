"""Pushes as a timeline that ``chrome://tracing`` and ``ui.perfetto.dev`` open.

Format: Trace Event Format, its JSON object form with complete events (``"X"``) and metadata events
(``"M"``), docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Events of one
track must nest or not meet at all (perfetto.dev/docs/faq).
"""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.replica import LOAD_STEPS, LoadReport, PushReport

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator


_BEFORE, _PAUSED = LOAD_STEPS[:2], LOAD_STEPS[2:]


def save_timeline(path: str | os.PathLike[str], reports: PushReport | Iterable[PushReport]) -> None:
    """Writes pushes into a file that ``chrome://tracing`` and ``ui.perfetto.dev`` open.

    One track is the trainer's, one is each replica's, by its host's clock. Phases without a start
    of their own are arguments of their push.

    Example:
        >>> service.register_version_hook(reports.append)
        >>> save_timeline("pushes.json", reports)

    Args:
        path: File to write; one that exists is replaced.
        reports: One push, or several in any order.

    Raises:
        UnsupportedArgumentError: There is no push.
    """
    Path(path).write_text(json.dumps(trace_of(reports)))


def trace_of(reports: PushReport | Iterable[PushReport]) -> dict[str, Any]:
    """Returns what :func:`save_timeline` writes; times are microseconds from the first push on."""
    given = [reports] if isinstance(reports, PushReport) else list(reports)
    if not given:
        raise UnsupportedArgumentError("reports must hold at least 1 push, got none")
    pushes = sorted(given, key=lambda one: one.began_at)
    first = pushes[0].began_at
    trainers: dict[str, list[dict[str, Any]]] = {}  # by the name of the track
    replicas: dict[str, list[dict[str, Any]]] = {}
    ends: list[float] = []  # of the last push on each of the trainer's tracks
    for report in pushes:
        began_at = report.began_at
        # On the first track, unless another push, for whose end this one waits, is there still.
        track = next((at for at, end in enumerate(ends) if end <= began_at), len(ends))
        ends[track : track + 1] = [began_at + report.seconds]
        name = f"trainer {track + 1}" if track else "trainer"
        trainers.setdefault(name, []).extend(_trainer_spans(report, began_at - first))
        for one in report.replicas:
            name = f"replica {one.replica_id}"
            replicas.setdefault(name, []).extend(_replica_spans(one, first))
    events = [_event("M", "process_name", name="torchrl_vllm_sync")]
    for track, (name, spans) in enumerate({**trainers, **replicas}.items()):
        about = _event("M", "thread_name", name=name)
        order = _event("M", "thread_sort_index", sort_index=track)
        events += [{**one, "tid": track} for one in (about, order, *spans)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began_at": first}}


def _trainer_spans(report: PushReport, begin: float) -> Iterator[dict[str, Any]]:
    """The push, and within it the phases whose start is known."""
    names = ("version", "transport", "num_bytes", "left_behind")
    about = {name: getattr(report, name) for name in names}
    loose = {name: one for name, one in report.phases.items() if name not in report.phase_starts}
    yield _span("push", begin, begin + report.seconds, **about, **loose)
    for phase, start in sorted(report.phase_starts.items(), key=lambda one: one[1]):
        end = start + report.phases[phase]
        yield _span(phase, begin + start, begin + end, version=report.version)


def _replica_spans(one: LoadReport, first: float) -> Iterator[dict[str, Any]]:
    """What a replica did; nothing if it loaded nothing, or could not say."""
    if one.began_at is None:
        return
    at = one.began_at - first
    for phase in _BEFORE:
        if seconds := one.phases.get(phase, 0.0):
            yield _span(phase, at, at + seconds, version=one.version)
            if phase == "stage_s" and (ready_s := one.phases.get("ready_s", 0.0)):
                yield _span("ready_s", at, at + ready_s, version=one.version)
            at += seconds
    bounds = [*accumulate((one.phases.get(phase, 0.0) for phase in _PAUSED), initial=at)]
    counts = {name: num for name, num in one.phases.items() if not name.endswith("_s")}
    about = {"version": one.version, **counts, "path": one.path, "path_reason": one.path_reason}
    yield _span("whole_pause_s", at, bounds[-1], **about)
    for phase, (begin, end) in zip(_PAUSED, pairwise(bounds), strict=True):
        yield _span(phase, begin, end, version=one.version)


def _span(phase: str, begin: float, end: float, /, **about: Any) -> dict[str, Any]:
    """A complete event, both of whose ends are whole nanoseconds, so that what nests does."""
    begin_ns, end_ns = round(begin * 1e9), round(end * 1e9)
    times = {"ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3, "cat": "push"}
    return _event("X", phase.removesuffix("_s"), **about) | times


def _event(kind: str, title: str, /, **about: Any) -> dict[str, Any]:
    return {"ph": kind, "name": title, "pid": 1, "args": about}
