"""How a status reads, alike in a terminal and on a page, and how pushes read as a timeline."""

from __future__ import annotations

import datetime
import io
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from rich import box, filesize
from rich.console import Console, Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.observe.status import FailureStatus, ReplicaStatus, ServiceStatus
from torchrl_vllm_sync.replica import LOAD_STEPS, Latency, LoadReport, PushReport, seconds_of

UNKNOWN = "\N{EN DASH}"
MAX_LENGTH = 300  # of a text
MAX_FAILURES = 5
BAR_WIDTH = 40
# Columns of a terminal from which on all of the table is shown, and those that one needs for more
# than the rest of it.
WIDE = 140
_WIDTHS = {"prompt/s": 100, "restarts": 100, "node": 100, "TTFT": WIDE, "ITL": WIDE}
_STYLES = {
    "serving": "green",
    "updating": "cyan",
    "starting": "yellow",
    "draining": "yellow",
    "stale": "red",
    "failed": "bold red",
    "closed": "dim",
}


def printable(text: str) -> str:
    """Returns a text's first line, without control characters, and cut if it is very long."""
    text = text.lstrip().partition("\n")[0]
    clean = "".join(one if one.isprintable() else " " for one in text[: MAX_LENGTH + 1])
    return clean if len(text) <= MAX_LENGTH else f"{clean[: MAX_LENGTH - 1]}…"


def number_text(value: float | None) -> str:
    """Returns a count or a rate, with thousands apart."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def share_text(value: float | None) -> str:
    """Returns a share of 0 to 1 in percent."""
    return UNKNOWN if value is None else f"{100 * value:.0f} %"


def milliseconds_text(seconds: float | None) -> str:
    """Returns seconds as milliseconds, or as seconds from 10 s on."""
    if seconds is None:
        return UNKNOWN
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds < 0.1 else f"{1e3 * seconds:,.0f} ms"


def latency_text(latency: Latency | None) -> str:
    """Returns the median and the 99th percentile."""
    if latency is None:
        return UNKNOWN
    p50, p99 = milliseconds_text(latency.p50_s), milliseconds_text(latency.p99_s)
    return f"{p50.removesuffix(' ms') if p99.endswith('ms') else p50} / {p99}"


def clock_text(at: float) -> str:
    """Returns a time in seconds since 1970 as one of day, of this machine's zone."""
    return time.strftime("%H:%M:%S", time.localtime(at))


# Headings of the table of replicas, and the text below each.
COLUMNS: dict[str, Callable[[ReplicaStatus], str]] = {
    "replica": lambda one: printable(one.replica_id),
    "state": lambda one: str(one.state),
    "version": lambda one: UNKNOWN if one.weight_version is None else str(one.weight_version),
    "in flight": lambda one: number_text(one.samples),
    "running": lambda one: number_text(one.num_running),
    "waiting": lambda one: number_text(one.num_waiting),
    "KV": lambda one: share_text(one.kv_cache_usage),
    "hits": lambda one: share_text(one.prefix_cache_hit_rate),
    "tokens/s": lambda one: number_text(one.generated_tokens_per_s),
    "prompt/s": lambda one: number_text(one.prompt_tokens_per_s),
    "TTFT": lambda one: latency_text(one.time_to_first_token),
    "ITL": lambda one: latency_text(one.inter_token_latency),
    "restarts": lambda one: number_text(one.num_restarts),
    "node": lambda one: UNKNOWN if one.node is None else printable(one.node),
}


def headline(status: ServiceStatus) -> str:
    """Returns what matters most of a service, on one line, without its name."""
    return (
        f"version {status.weight_version}, "
        f"{status.num_serving} of {len(status.replicas)} replicas serve, "
        f"{number_text(status.samples)} in flight, "
        f"{number_text(status.generated_tokens_per_s)} tokens/s, "
        f"at {clock_text(status.time)}"
    )


def about_text(status: ServiceStatus) -> str:
    """Returns what a service is, on one line: model, time since launch, hardware and versions."""
    parts = [status.model, status.hardware]
    parts += [", ".join(f"{name} {number}" for name, number in status.versions.items())]
    if status.uptime_s is not None:
        parts.insert(1, f"up {datetime.timedelta(seconds=round(status.uptime_s))}")
    return "; ".join(printable(one) for one in parts if one)


def push_text(push: PushReport) -> str:
    version = UNKNOWN if push.version is None else push.version
    if push.error:
        return f"version {version} failed at {clock_text(push.ended_at)}: {printable(push.error)}"
    size = "" if push.num_bytes is None else f", {filesize.decimal(push.num_bytes)}"
    pause = "" if push.pause_s is None else f", pause {milliseconds_text(push.pause_s)}"
    left = f", {len(push.left_behind)} left behind" if push.left_behind else ""
    return (
        f"version {version} at {clock_text(push.ended_at)} in {milliseconds_text(push.seconds)} "
        f"by {printable(push.transport or UNKNOWN)}{size}{pause}{left}"
    )


def failure_text(failure: FailureStatus) -> str:
    who = "push" if failure.replica_id is None else f"replica {printable(failure.replica_id)}"
    what = "failed" if failure.what == "push" else failure.what
    why = f": {printable(failure.reason)}" if failure.reason else ""
    return f"{clock_text(failure.at)} {who} {what}{why}"


def status_html(status: ServiceStatus) -> str:
    """Returns what a terminal shows, as a page's fragment."""
    console = Console(file=io.StringIO(), record=True, width=WIDE + 20)
    console.print(status_view(status))
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def absent_html(name: str) -> str:
    """Returns what stands for a service that has no replicas."""
    return f"<div><b>AsyncVLLM {escape(name)}</b> is not launched, or was shut down</div>"


def status_view(status: ServiceStatus, width: int = WIDE) -> RenderableType:
    """Returns a status for ``rich``; none of its texts is taken for markup or terminal codes."""
    title = Text.assemble((printable(status.name), "bold"), " ", headline(status))
    about = Text(about_text(status), "dim")
    parts: list[RenderableType] = [title, about, _replicas(status, width)]
    if status.pushes:
        parts += _last_push(status.pushes[0])
        parts += [Text(f"before it: {push_text(one)}", "dim") for one in status.pushes[1:4]]
    else:
        parts.append(Text("no push yet that this process heard of", "dim"))
    if status.requests:
        number = [f"{number_text(n)} {printable(end)}" for end, n in status.requests.items()]
        parts.append(Text(f"requests of this process: {', '.join(number)}", "dim"))
    told = {one.replica_id: one.reason for one in status.replicas if one.reason}
    parts += [Text(f"replica {printable(n)}: {printable(why)}", "red") for n, why in told.items()]
    if status.failures:
        parts.append(Text("lately", "bold"))
        parts += [Text(failure_text(one), "red") for one in status.failures[:MAX_FAILURES]]
    return Group(*parts)


def services_view(services: Mapping[str, int]) -> RenderableType:
    table = Table("service", Column("replicas alive", justify="right"), box=box.SIMPLE_HEAD)
    for name, num_replicas in services.items():
        table.add_row(Text(printable(name), "bold"), str(num_replicas))
    return table


def _replicas(status: ServiceStatus, width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    shown = [one for one in COLUMNS if width >= _WIDTHS.get(one, 0)]
    for column in shown:
        justify = "left" if column in ("replica", "state", "node") else "right"
        table.add_column(column, justify=justify, no_wrap=column == "state", overflow="fold")
    for one in status.replicas:
        styles = {"state": _STYLES[one.state]}
        table.add_row(*(Text(COLUMNS[name](one), styles.get(name, "")) for name in shown))
    return table


def _last_push(push: PushReport) -> list[RenderableType]:
    """One line for the push, and a bar for each of its phases, as long as its part of the whole."""
    line = Text.assemble(("last push ", "bold"), (push_text(push), "red" if push.error else ""))
    table = Table.grid("", Column(justify="right"), "", padding=(0, 1, 0, 0))
    phases = seconds_of(push.phases)
    if (slowest := push.slowest) is not None:  # for which the trainer waited
        phases.pop("acknowledge", None)
        of_replica = seconds_of(slowest.steps).items()
        phases |= {f"replica {slowest.replica_id}: {name}": took for name, took in of_replica}
    for name, seconds in phases.items():
        part = min(max(seconds / push.seconds, 0.0), 1.0) if push.seconds > 0 else 0.0
        bar = Text("━" * max(round(part * BAR_WIDTH), 1), "blue")
        table.add_row(Text(f"  {printable(name)}", "dim"), milliseconds_text(seconds), bar)
    return [line, table] if phases else [line]


# ---- Pushes as a timeline
#
# Trace Event Format, its JSON object form with complete events ("X") and metadata events ("M"),
# docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Events of one track must
# nest or not meet at all (perfetto.dev/docs/faq).

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
    given = [reports] if isinstance(reports, PushReport) else reports
    if not (pushes := sorted(given, key=lambda one: one.began_at)):
        raise UnsupportedArgumentError("reports must hold at least 1 push, got none")
    first = pushes[0].began_at
    trainers, replicas = defaultdict[str, list[Any]](list), defaultdict[str, list[Any]](list)
    ends: list[float] = []  # of the last push on each of the trainer's tracks
    for report in pushes:
        began_at = report.began_at
        # On the first track, unless another push, for whose end this one waits, is there still.
        track = next((at for at, end in enumerate(ends) if end <= began_at), len(ends))
        ends[track : track + 1] = [began_at + report.seconds]
        name = f"trainer {track + 1}" if track else "trainer"
        trainers[name] += _trainer_spans(report, began_at - first)
        for one in report.replicas:
            replicas[f"replica {one.replica_id}"] += _replica_spans(one, first)
    events = [_event("M", "process_name", name="torchrl_vllm_sync")]
    for track, (name, spans) in enumerate((trainers | replicas).items()):
        about = _event("M", "thread_name", name=name)
        order = _event("M", "thread_sort_index", sort_index=track)
        events += [one | {"tid": track} for one in (about, order, *spans)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began_at": first}}


def _trainer_spans(report: PushReport, begin: float) -> Iterator[dict[str, Any]]:
    """The push, and within it the phases whose start is known."""
    about = {n: getattr(report, n) for n in ("version", "transport", "num_bytes", "left_behind")}
    about |= {name: one for name, one in report.phases.items() if name not in report.phase_starts}
    yield _span("push", begin, begin + report.seconds, **about)
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
