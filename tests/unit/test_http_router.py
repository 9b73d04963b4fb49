"""The driver of real routers, in front of a router of ten lines that takes turns."""

import logging
import sys
from pathlib import Path

import pytest

from benchmarks.peers.http_router import PeerError, RouterKind, choices_over_http
from benchmarks.peers.regimes import leaving, strangers
from benchmarks.peers.script import End, Leave, Send

TAKES_TURNS = """
import sys
from aiohttp import ClientSession, web

port, workers, turn = int(sys.argv[1]), sys.argv[2:], 0

async def listing(request):
    rows = [{"id": str(number), "url": url} for number, url in enumerate(workers)]
    return web.json_response({"workers": rows})

async def remove(request):
    workers.pop(int(request.match_info["id"]))
    return web.json_response({})

async def forward(request):
    global turn
    worker = workers[turn % len(workers)]
    turn += 1
    async with ClientSession() as client, client.post(worker, json=await request.json()) as answer:
        return web.json_response(await answer.json())

application = web.Application()
application.add_routes([web.get("/workers", listing), web.delete("/workers/{id}", remove)])
application.add_routes([web.post("/generate", forward)])
web.run_app(application, host="127.0.0.1", port=port, print=None)
"""


def kind(program):
    return RouterKind(
        name="takes-turns",
        program=("-c", program),
        arguments=lambda workers, port, metrics, settings: [str(port), *reversed(workers)],
        listing="/workers",
    )


def run(program, script, tmp_path):
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    return choices_over_http(
        kind(program), Path(sys.executable), {}, script, num_workers=3, log=tmp_path / "log"
    )


def test_choices_are_places_in_the_routers_own_order(tmp_path):
    script = strangers(0, num_sends=30, in_flight=12)
    choices, addresses = run(TAKES_TURNS, script, tmp_path)
    assert choices == [number % 3 for number in range(30)]
    assert len(set(addresses)) == 3


def test_a_worker_that_left_keeps_its_place_and_is_not_chosen(tmp_path):
    script = leaving(0, sends=6, replicas=3)
    choices, _ = run(TAKES_TURNS, script, tmp_path)
    assert choices[:6] == [0, 1, 2, 0, 1, 2]
    assert set(choices[6:]) == {1, 2}
    assert [type(step) for step in script.steps].count(Leave) == 1
    assert sum(isinstance(step, Send) for step in script.steps) == len(choices)
    assert sum(isinstance(step, End) for step in script.steps) == len(choices)


def test_a_router_that_ends_is_named_with_its_last_words(tmp_path):
    with pytest.raises(PeerError, match=r"(?s)takes-turns ended with 3.*cannot go on"):
        run(
            "import sys; print('cannot go on', flush=True); sys.exit(3)",
            strangers(0, num_sends=2, in_flight=2),
            tmp_path,
        )


def test_a_refused_request_is_an_error(tmp_path):
    refusing = TAKES_TURNS.replace(
        "global turn", "return web.Response(status=503)\n    global turn"
    )
    with pytest.raises(PeerError, match=r"request 0: .*503"):
        run(refusing, strangers(0, num_sends=2, in_flight=2), tmp_path)
