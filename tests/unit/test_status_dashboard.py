"""The dashboard's server: what it answers, to whom, and that nothing of it stays."""

import contextlib
import gc
import http.client
import json
import logging
import math
import os
import socket
import threading
import time

import pytest
import torch

from tests.fakes.observe import HOSTILE, NOON, Moving, hostile, push, replica, status
from tests.fakes.service import replicas_of, service_of
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.errors import ServiceClosedError, UnsupportedArgumentError
from torchrl_vllm_sync.observe import page as page_module
from torchrl_vllm_sync.observe.page import Dashboard, ServiceGoneError, _sample_of
from torchrl_vllm_sync.routing.ledger import LoadTracker


def threads():
    return [one.name for one in threading.enumerate() if one.name.startswith("dashboard")]


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    monkeypatch.setattr(page_module._Server, "timeout", 0.02)  # that long a board takes to close
    yield
    assert threads() == []


@pytest.fixture
def board():
    with Dashboard(lambda: status(replica("0"))) as board:
        yield board


def ask(board, path, method="GET", **headers):
    """Asks with a connection of its own; returns the status, the headers and the body."""
    connection = http.client.HTTPConnection(board.host, board.port, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_serves_a_page_and_its_data(board):
    code, headers, page = ask(board, "/")
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert page.startswith(b"<!doctype html>")
    assert b"http://" not in page.replace(b"http://www.w3.org/2000/svg", b"")  # nothing from afar
    assert b"https://" not in page
    code, headers, told = ask(board, "/status.json")
    assert (code, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(told) == json.loads(json.dumps(status(replica("0")).as_dict()))


def test_answers_may_not_be_kept_framed_or_fed_from_elsewhere(board):
    for path in ("/", "/status.json", "/nowhere"):
        headers = ask(board, path)[1]
        assert headers["Cache-Control"] == "no-store"
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/nowhere", "/../pyproject.toml", "/dashboard.html", "/%2e", "*"])
def test_there_is_nothing_else(board, path):
    assert ask(board, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_can_only_be_read(board, method):
    assert ask(board, "/status.json", method)[0] == 501


def test_a_head_has_no_body(board):
    code, headers, body = ask(board, "/", "HEAD")
    assert (code, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000


@pytest.mark.parametrize("name", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example"])
def test_on_the_loopback_address_other_names_are_refused(board, name):
    assert ask(board, "/status.json", Host=name)[0] == 421


def test_on_the_loopback_address_its_own_names_are_answered(board):
    for name in ("localhost", f"LOCALHOST:{board.port}", "127.0.0.1:1", "[::1]:8080", "[::1]"):
        assert ask(board, "/status.json", Host=name)[0] == 200


def test_elsewhere_any_name_is_answered():
    with Dashboard(lambda: status(replica("0")), host="0.0.0.0") as board:
        assert board.url == f"http://127.0.0.1:{board.port}/"
        assert ask(board, "/status.json", Host="trainer.example:80")[0] == 200


def test_the_history_grows_and_can_be_asked_for_in_parts():
    with Dashboard(Moving()) as board:
        until(lambda: len(board._history.samples) >= 2)
        whole = json.loads(ask(board, "/history.json")[2])["samples"]
        assert [one["time"] for one in whole] == sorted(one["time"] for one in whole)
        later = json.loads(ask(board, f"/history.json?since={whole[0]['time']}")[2])
        assert later["samples"][: len(whole) - 1] == whole[1:]
        assert later["status"]["name"] == "rollouts"
        for since in ("nonsense", "", "-1", "nan&since="):
            assert ask(board, f"/history.json?since={since}")[0] == 200


def test_a_sample_has_what_the_plots_show_and_nothing_invented():
    told = status(
        replica("0"),
        replica("1", elsewhere=None, generated_tokens_per_s=None, state=ReplicaState.STARTING),
    )
    sample = _sample_of(told)
    figures = {"in_flight": 32, "waiting": 4, "kv": 0.43, "tokens": 2483.0, "version": 12}
    figures |= {"ttft": 0.05, "ttft_p99": 0.4, "itl": 0.012, "itl_p99": 0.09}
    assert sample == {
        "time": NOON,
        "replicas": {"0": figures, "1": figures | {"in_flight": None, "tokens": None}},
        "pushes": [
            {"at": NOON, "version": 12, "failed": False},
            {"at": NOON - 7, "version": 11, "failed": False},
        ],
        "numbers": {},
        "histograms": {},
    }


def test_what_a_run_logs_is_in_the_next_sample_alone():
    sampled = threading.Semaphore(0)
    looks = 0

    def look():
        nonlocal looks
        sampled.release()
        looks += 1
        if looks == 2:
            board.log("reward", 0.25)
            board.log("reward", 0.5)
            board.log("loss", math.nan)
            board.log("gain", torch.tensor(0.25, dtype=torch.bfloat16, requires_grad=True))
            board.log("age", [0, 1, 1, 3, math.inf])
            board.log("length", [0.5, 24.5])
            board.log("none", [])
        elif looks == 4:
            raise ServiceGoneError("gone")
        return status()

    board = Dashboard(look)
    for _ in range(4):
        assert sampled.acquire(timeout=20)
    board.close()
    assert [one["numbers"] for one in board._history.samples] == [
        {},
        {"reward": 0.5, "loss": None, "gain": 0.25},
        {},
    ]
    assert board._history.samples[0]["histograms"] == {}
    age, length = board._history.samples[1]["histograms"].values()
    assert age == {"edges": [-0.5, 0.5, 1.5, 2.5, 3.5], "counts": [1, 2, 0, 1]}
    assert (len(length["edges"]), length["counts"]) == (25, [1, *[0] * 22, 1])


@pytest.mark.parametrize(
    ("name", "value"), [(("a", "b"), 1.0), (5, 1.0), ("a", "x"), ("a", [[1], []])]
)
def test_what_is_no_figure_is_refused_and_the_page_goes_on(board, name, value):
    with pytest.raises(UnsupportedArgumentError, match="must be"):
        board.log(name, value)
    assert not any(board._logged.values())


def test_a_push_is_in_one_sample_whether_it_failed_or_not():
    first = status(pushes=(push(12),))
    second = status(pushes=(push(13, NOON + 1, error="no"), push(12)))
    assert [one["version"] for one in _sample_of(first)["pushes"]] == [12]
    assert _sample_of(second, first)["pushes"] == [{"at": NOON + 1, "version": 13, "failed": True}]
    assert _sample_of(second, second)["pushes"] == []


def test_pushes_are_marked_once_though_a_look_fails_between():
    looks = iter([status(), ZeroDivisionError(), status()])
    done = threading.Event()

    def look():
        told = next(looks, None)
        if told is None:
            done.set()
            raise ServiceGoneError("gone")
        if isinstance(told, Exception):
            raise told
        return told

    board = Dashboard(look)
    assert done.wait(20)
    board.close()
    assert [len(one["pushes"]) for one in board._history.samples] == [2, 0]


def test_hostile_texts_are_data_only():
    with Dashboard(hostile) as board:
        code, headers, told = ask(board, "/status.json")
    assert (code, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(told)["name"] == HOSTILE
    assert b"\x1b" not in told


def test_without_a_status_it_says_why_and_goes_on():
    def look():
        raise ServiceClosedError("it was shut down")

    with Dashboard(look) as board:
        code, _, told = ask(board, "/history.json")
        assert (code, json.loads(told)) == (503, {"error": "it was shut down"})
        assert ask(board, "/")[0] == 200
        assert board.is_open


def test_it_ends_when_nobody_has_the_service_any_more():
    def look():
        raise ServiceGoneError("gone")

    board = Dashboard(look)
    until(lambda: not board.is_open)
    with pytest.raises(ConnectionRefusedError):
        ask(board, "/")


@pytest.mark.parametrize("port", [-1, 65536, True, 1.5, "80", None])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(UnsupportedArgumentError, match="port must be"):
        Dashboard(status, port=port)


@pytest.mark.parametrize("host", ["", None, 7])
def test_a_host_that_is_none_is_refused(host):
    with pytest.raises(UnsupportedArgumentError, match="host must be"):
        Dashboard(status, host=host)


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "x" * 300, "\ud800"])
def test_a_host_that_is_not_this_machine_is_refused(host):
    with pytest.raises(UnsupportedArgumentError, match="free to listen on"):
        Dashboard(status, host=host)


def test_a_port_that_is_taken_is_refused_and_free_again_after_closing(board):
    with pytest.raises(UnsupportedArgumentError, match=f"{board.port}: .*in use"):
        Dashboard(status, port=board.port)
    ask(board, "/")
    board.close()
    with Dashboard(lambda: status(replica("0")), port=board.port) as again:
        assert ask(again, "/status.json")[0] == 200


def test_closing_twice_and_showing_what_it_is(board):
    assert repr(board) == f"Dashboard('{board.url}')"
    board.close()
    board.close()
    assert not board.is_open
    assert repr(board).endswith(", closed)")


def test_connections_that_say_nothing_hold_up_neither_others_nor_the_end(board):
    silent = [socket.create_connection((board.host, board.port)) for _ in range(5)]
    silent[0].sendall(b"GET /status.json HTTP/1.1\r\nHo")
    assert ask(board, "/status.json")[0] == 200
    begin = time.monotonic()
    board.close()
    assert time.monotonic() - begin < 20
    for one in silent:
        one.close()


def test_many_at_once_are_all_answered(board):
    codes = []
    askers = [
        threading.Thread(target=lambda: codes.append(ask(board, "/status.json")[0]))
        for _ in range(40)
    ]
    for one in askers:
        one.start()
    for one in askers:
        one.join()
    assert codes == [200] * 40


def test_what_no_browser_sends_does_no_harm(board):
    for bad in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n"):
        with socket.create_connection((board.host, board.port)) as one:
            one.sendall(bad)
            one.shutdown(socket.SHUT_WR)
            one.settimeout(5)
            while one.recv(4096):
                pass
    assert ask(board, "/status.json")[0] == 200


def raw(board, text):
    """Answer to what is sent as it is, until the other end closes."""
    with socket.create_connection((board.host, board.port), timeout=10) as one:
        one.sendall(text)
        return b"".join(iter(lambda: one.recv(4096), b""))


@pytest.mark.parametrize("address", [b"http://[::1", b"http://[v1]/", b"http://]/?since=1"])
def test_an_address_that_is_none_is_answered_and_prints_nothing(board, address, capfd, caplog):
    caplog.set_level(logging.INFO)
    answer = raw(board, b"GET " + address + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer.split()[1] == b"400"
    assert b"Content-Security-Policy" in answer
    until(lambda: len(threads()) == 1)
    assert (capfd.readouterr(), caplog.records) == (("", ""), [])


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_flood_of_connections_takes_no_more_than_the_bound(board):
    before = descriptors()
    with contextlib.ExitStack() as flood:
        for _ in range(200):
            one = flood.enter_context(socket.create_connection((board.host, board.port)))
            with contextlib.suppress(ConnectionError):  # closed already, as one too many
                one.sendall(b"GET /status.json HTTP/1.1\r\nHo")
        with contextlib.suppress(ConnectionError):
            assert raw(board, b"") == b""  # closed: all before it have been seen to
        assert descriptors() < before + 200 + page_module.MAX_CONNECTIONS + 10
        assert len(threads()) == 1 + page_module.MAX_CONNECTIONS
    until(lambda: (descriptors(), len(threads())) == (before, 1))
    assert ask(board, "/status.json")[0] == 200


def test_those_that_are_there_are_served_during_a_flood(board, monkeypatch):
    monkeypatch.setattr(page_module, "MAX_CONNECTIONS", 2)
    with contextlib.ExitStack() as flood:
        early, _ = [
            flood.enter_context(socket.create_connection((board.host, board.port), timeout=10))
            for _ in range(2)
        ]
        until(lambda: len(threads()) == 3)
        assert raw(board, b"") == b""  # closed at once
        early.sendall(b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert early.recv(4096).split()[1] == b"200"


@pytest.mark.parametrize("sent", [b"G", b"GET / HTTP/1.1\r\nA: "])
def test_a_request_that_comes_byte_by_byte_is_cut_off_in_time(board, monkeypatch, sent):
    monkeypatch.setattr(page_module, "_REQUEST_S", 0.5)

    def send_slowly(slow):
        deadline = time.monotonic() + 8
        while time.monotonic() < deadline:
            slow.sendall(b"x")
            assert ask(board, "/status.json")[0] == 200
            time.sleep(0.05)

    with socket.create_connection((board.host, board.port), timeout=10) as slow:
        slow.sendall(sent)
        with pytest.raises(ConnectionError):
            send_slowly(slow)
    until(lambda: len(threads()) == 1)


def test_an_answer_that_nobody_takes_is_cut_off_in_time(board, monkeypatch):
    monkeypatch.setattr(page_module, "_REQUEST_S", 0.5)
    monkeypatch.setattr(page_module, "_page", lambda: bytes(1 << 26))
    with socket.create_connection((board.host, board.port), timeout=10) as one:
        one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: len(threads()) == 2)
        until(lambda: len(threads()) == 1)
    assert ask(board, "/status.json")[0] == 200


def test_a_look_that_fails_is_shown_until_one_works():
    broken = threading.Event()
    num_looks = 0

    def look():
        nonlocal num_looks
        num_looks += 1
        if broken.is_set():
            raise ZeroDivisionError("no replicas")
        return status(replica("0"))

    with Dashboard(look) as board:
        until(lambda: len(board._history.samples) == 1)
        broken.set()
        looked = num_looks
        until(lambda: num_looks > looked)  # by the dashboard itself
        for path in ("/status.json", "/history.json"):
            code, _, told = ask(board, path)
            assert (code, json.loads(told)) == (503, {"error": "ZeroDivisionError: no replicas"})
        assert ask(board, "/")[0] == 200
        broken.clear()
        until(lambda: len(board._history.samples) == 2)
        assert ask(board, "/history.json")[0] == 200


def test_figures_that_are_not_finite_are_unknown_wherever_they_are():
    told = status(
        replica("0", kv_cache_usage=math.nan, generated_tokens_per_s=math.inf),
        pushes=(push(12, left_behind={}), push(11, ended_at=-math.inf)),
    )
    with Dashboard(lambda: told) as board:
        until(lambda: board._history.samples)
        text = ask(board, "/history.json")[2].decode()
    assert "NaN" not in text
    assert "Infinity" not in text
    shown = json.loads(text)
    assert shown["status"]["replicas"][0]["kv_cache_usage"] is None
    assert shown["status"]["generated_tokens_per_s"] is None
    assert shown["status"]["pushes"][1]["began_at"] is None
    figures = shown["samples"][0]["replicas"]["0"]
    assert (figures["kv"], figures["tokens"], figures["waiting"]) == (None, None, 4)


# ---------------------------------------------------------------- of a service


def view():
    """A service of one replica."""
    load = LoadTracker(["0"], state=ReplicaState.SERVING)
    return service_of(replicas_of(load=load), committed=3)


def test_a_service_shows_itself_and_takes_its_dashboards_along():
    service = view()
    first, second = service.dashboard(), service.dashboard()
    assert first.port != second.port
    assert first.url.startswith("http://127.0.0.1:")
    assert json.loads(ask(second, "/status.json")[2])["weight_version"] == 3
    first.close()
    service._end_views()
    service._end_views()
    assert not second.is_open


def test_a_dashboard_does_not_keep_its_service():
    service = view()
    board = service.dashboard()
    del service
    gc.collect()
    until(lambda: not board.is_open)


def test_a_service_that_is_not_launched_has_no_dashboard():
    service = view()
    service.replicas.close()
    with pytest.raises(ServiceClosedError):
        service.dashboard()
