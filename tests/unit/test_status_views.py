"""A status in words: in a terminal, in a notebook, and by the command."""

import contextlib
import io
import json
import re
import socket
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console

from tests.fakes.observe import HOSTILE, replica, status, troubled
from tests.fakes.observe import hostile as hostile_status
from tests.fakes.service import replicas_of, service_of
from torchrl_vllm_sync import ReplicaState, cli
from torchrl_vllm_sync.errors import ServiceClosedError
from torchrl_vllm_sync.observe.status import ReplicaStatus
from torchrl_vllm_sync.observe.views import (
    COLUMNS,
    UNKNOWN,
    absent_html,
    latency_text,
    milliseconds_text,
    printable,
    services_view,
    status_html,
    status_view,
)
from torchrl_vllm_sync.replica import Latency

ROOT = Path(__file__).resolve().parent.parent.parent


def drawn(view, width=120):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system="truecolor"
    )
    console.print(view)
    return console.file.getvalue()


def plain(view, width=120):
    return re.sub(r"\x1b\[[0-9;]*m", "", drawn(view, width))


def replica_cells(one):
    return tuple(text(one) for text in COLUMNS.values())


def unknown_replica():
    return ReplicaStatus(replica_id="2", state=ReplicaState.STARTING, in_flight=0)


# ---------------------------------------------------------------- words


def test_what_is_not_known_is_a_dash_and_zero_is_not():
    assert replica_cells(unknown_replica()) == ("2", "starting", *[UNKNOWN] * (len(COLUMNS) - 2))
    idle = replica(
        "0", in_flight=0, elsewhere=0, num_running=0, num_waiting=0, kv_cache_usage=0.0,
        prefix_cache_hit_rate=0.0, generated_tokens_per_s=0.0, prompt_tokens_per_s=0.0,
        weight_version=0,
    )  # fmt: skip
    assert UNKNOWN not in replica_cells(idle)


def test_there_is_a_cell_for_every_column():
    assert len(replica_cells(replica("0"))) == len(COLUMNS)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, UNKNOWN), (0.0042, "4.2 ms"), (0.2, "200 ms"), (4.5, "4,500 ms"), (61.04, "61.0 s")],
)
def test_times_are_short(seconds, text):
    assert milliseconds_text(seconds) == text


def test_a_latency_names_its_unit_once_if_there_is_one():
    assert latency_text(Latency(p50_s=0.012, p99_s=0.4)) == "12.0 / 400 ms"
    assert latency_text(Latency(p50_s=0.5, p99_s=12.0)) == "500 ms / 12.0 s"


def test_texts_are_one_short_line_without_control_characters():
    assert printable("\n a\rb\x1b[31m\u202ec\nd") == "a b [31m c"
    assert len(printable("x" * 10_000)) == 300
    assert printable("x" * 300) == "x" * 300


# ---------------------------------------------------------------- a terminal


def test_the_terminal_shows_replicas_pushes_and_failures():
    text = plain(status_view(troubled(), 120))
    assert "TTFT" not in text
    wide = plain(status_view(troubled(), 140), 140)
    assert "50.0 / 400 ms" in wide
    assert "12.0 / 90.0 ms" in wide
    for part in (
        "5,120 answered, 1 lost, 0 failed, 0 cancelled, 12 retried",
        "rollouts version 12, 2 of 4 replicas serve, 64 in flight, 4,874 tokens/s",
        "pause 53.0 ms, 1 left behind",
        "Qwen/Qwen2.5-7B; up 2:13:20; 4 x NVIDIA H100 80GB HBM3, 1 node; torchrl 0.14.1, vllm 0.32",
        "replica 3 failed: its actor has not answered for 60.3 s",
        "version 11 failed at",
    ):
        assert part in text
    assert re.search(r"transfer +38\.0 ms ━━━━", text)
    assert re.search(r"replica 0: load +40\.0 ms ━━━━", text)
    assert "acknowledge" not in text  # what the slowest replica did stands for it
    assert "replica 1: load" not in text
    row = next(line.split() for line in text.splitlines() if line.startswith(" 2 "))
    assert row == ["2", "starting", *[UNKNOWN] * 10]


def test_a_narrow_terminal_leaves_figures_out_and_breaks_no_row():
    lines = plain(status_view(troubled(), 80), 80).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("serving" in line and line.rstrip().endswith("2,483") for line in lines) == 1


def test_without_a_push_it_says_so():
    assert "no push yet" in plain(status_view(status(replica("0"), pushes=())))
    assert "0 of 0 replicas" in plain(status_view(status()))


def test_hostile_texts_are_neither_markup_nor_terminal_codes():
    whole = drawn(status_view(hostile_status()), 400)
    assert "\x1b[31m[" not in whole
    assert "\u202e" not in whole
    assert "[red] [31m" in plain(status_view(hostile_status()), 400)
    assert "[red] [31m" in plain(services_view({HOSTILE: 1}), 400)


def test_a_bar_is_never_longer_than_the_whole():
    from dataclasses import replace

    from tests.fakes.observe import push

    strange = replace(push(1), seconds=0.0, phases={"send_s": 5.0, "back_s": -1.0})
    text = plain(status_view(status(replica("0"), pushes=(strange,))))
    assert max(line.count("━") for line in text.splitlines()) <= 40


# ---------------------------------------------------------------- a notebook


def test_the_notebooks_table_has_every_replica():
    rows = re.sub("<[^>]*>", "", status_html(troubled())).splitlines()
    replicas = [one.split()[:2] for one in rows if re.match(" *[0-3] ", one)]
    assert replicas == [["0", "serving"], ["1", "serving"], ["2", "starting"], ["3", "failed"]]
    assert any("last push version 12" in one for one in rows)
    assert all(name in "".join(rows) for name in COLUMNS)


def test_hostile_texts_are_escaped_in_a_notebook():
    for page in (status_html(hostile_status()), absent_html(HOSTILE)):
        assert "<img" not in page
        assert "&lt;img" in page


def test_a_service_that_is_not_launched_has_a_line_only():
    service = service_of(replicas_of(launched=False))
    assert service._repr_html_() == absent_html("rollouts")


# ---------------------------------------------------------------- the command


class Observed:
    """A service that somebody looks at."""

    def __init__(self, *statuses):
        self.statuses, self.left = list(statuses), False

    def status(self):
        told = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if isinstance(told, Exception):
            raise told
        return told

    def __enter__(self):
        return self.status

    def __exit__(self, *_):
        self.left = True


@pytest.fixture
def cluster(monkeypatch):
    """Runs the command where one service, or whatever a test says, is on a cluster."""
    from torchrl_vllm_sync.service import replicas as members

    services = {"rollouts": Observed(troubled())}

    def observed(name):
        if name not in services:
            raise ServiceClosedError(f"no service named {name!r} runs on the Ray cluster at x")
        return services[name]

    monkeypatch.setattr(members, "observed", observed)
    monkeypatch.setattr(members, "running_services", lambda: dict.fromkeys(services, 3))
    monkeypatch.setattr(cli, "_connect", lambda address: None)
    monkeypatch.setattr(cli.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("COLUMNS", "120")
    return services


def test_the_command_tells_its_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"torchrl-vllm-sync {metadata.version('torchrl-vllm-sync')}\n"


def test_the_command_shows_a_service_and_lets_go_of_it(cluster, capsys):
    assert cli.main(["status", "rollouts"]) == 0
    assert "2 of 4 replicas serve" in capsys.readouterr().out
    assert cluster["rollouts"].left


def test_the_command_prints_json_as_it_is(cluster, capsys):
    cluster["rollouts"] = Observed(hostile_status())
    assert cli.main(["status", "rollouts", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["name"] == HOSTILE
    assert told["replicas"][0]["state"] == "stale"


def test_without_a_name_it_lists_the_services(cluster, capsys):
    assert cli.main(["status"]) == 0
    assert "rollouts" in capsys.readouterr().out
    assert cli.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"services": {"rollouts": 3}}
    cluster.clear()
    assert cli.main(["status"]) == 0
    assert "no service runs" in capsys.readouterr().out


def test_a_service_that_is_not_there_is_an_error_on_stderr(cluster, capsys):
    assert cli.main(["status", "no[red]ne"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no service named 'no[red]ne'" in err


def test_watching_ends_with_the_service(cluster, capsys):
    closed = status(replica("0", state=ReplicaState.CLOSED))
    cluster["rollouts"] = Observed(troubled(), troubled(), troubled(), closed)
    assert cli.main(["status", "rollouts", "--watch"]) == 1
    out, err = capsys.readouterr()
    assert "2 of 4 replicas serve" in out
    assert "was shut down" in err
    assert cluster["rollouts"].left


def test_watching_as_json_is_a_line_for_each_look(cluster, capsys):
    gone = ServiceClosedError("gone")
    cluster["rollouts"] = Observed(troubled(), troubled(), troubled(), gone)
    assert cli.main(["status", "rollouts", "--watch", "0.5", "--json"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["num_serving"] for line in lines] == [2, 2]


def test_an_interrupt_ends_watching_well(cluster, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.time, "sleep", interrupt)
    assert cli.main(["status", "rollouts", "--watch"]) == 0
    assert cluster["rollouts"].left


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["status", "--watch", "0"],
        ["status", "--watch", "nan"],
        ["status", "--no"],
    ],
)
def test_wrong_arguments_are_status_2(cluster, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: torchrl-vllm-sync" in capsys.readouterr().err


@pytest.mark.parametrize(
    "failure", [ConnectionError("none"), ValueError("bad"), RuntimeError("no")]
)
def test_no_cluster_is_a_typed_error(failure, monkeypatch, capsys):
    import ray

    asked = {}

    def init(**options):
        asked.update(options)
        raise failure

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(cli, "_check_reachable", lambda address: None)
    assert cli.main(["status", "--address", "10.0.0.9:6379"]) == 1
    assert asked["address"] == "10.0.0.9:6379"
    assert "no Ray cluster was found at 10.0.0.9:6379" in capsys.readouterr().err
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert cli.main(["status"]) == 1
    assert asked["address"] == "auto"
    assert "on this machine" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["127.0.0.1:{port}", "localhost:{port}", "h:99999", "local"])
def test_where_no_cluster_can_be_it_is_said_at_once(address, monkeypatch, capsys):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: pytest.fail("it would try for minutes"))
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]  # free in a moment
    assert cli.main(["status", "--address", address.format(port=port)]) == 1
    assert "no Ray cluster was found at" in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_ends_it_without_a_word():
    import subprocess
    import sys

    code = """if True:
        from torchrl_vllm_sync import cli
        from torchrl_vllm_sync.service import replicas
        cli._connect = print
        replicas.running_services = lambda: {"a": 1}
        cli.main(["status", "--watch", "0.01", "--json"])
    """
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe) as process:
        assert process.stdout.readline() == b"None\n"
        assert json.loads(process.stdout.readline()) == {"services": {"a": 1}}
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_command_and_the_page_are_in_the_package():
    from importlib import resources

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"torchrl-vllm-sync": "torchrl_vllm_sync.cli:main"}
    packed = project["tool"]["setuptools"]["package-data"]["torchrl_vllm_sync"]
    package = Path(str(resources.files("torchrl_vllm_sync")))
    inside = [one.relative_to(package).as_posix() for one in package.rglob("*") if one.is_file()]
    assert {*packed} <= {*inside}
    assert {one for one in inside if one.endswith(".html")} <= {*packed}


def test_the_registry_lists_services_by_their_actors(monkeypatch):
    from torchrl_vllm_sync.service import replicas as members

    named = [
        {"namespace": "torchrl_vllm", "name": members.actor_name(name, replica_id)}
        for name, replica_id in (("b", "0"), ("a-b", "1"), ("a-b", "0"), ("a", "10"), ("a", "9"))
    ]
    named += [
        {"namespace": "other", "name": members.actor_name("c", "0")},
        {"namespace": "torchrl_vllm", "name": "something-else-0"},
        {"namespace": "torchrl_vllm", "name": members.actor_name("d", "one")},
    ]
    monkeypatch.setattr(members.ray.util, "list_named_actors", lambda all_namespaces: named)
    assert members.running_services() == {"a": 2, "a-b": 2, "b": 1}
    assert members.living_ids("a") == ["9", "10"]
    assert members.living_ids("a-b") == ["0", "1"]


def test_rich_is_imported_only_when_something_is_shown():
    import subprocess
    import sys

    code = "import sys, torchrl_vllm_sync.cli; print('rich' in sys.modules)"
    command = [sys.executable, "-c", code]
    with contextlib.chdir("/"):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
