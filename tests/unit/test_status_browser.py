"""The dashboard's page in a browser: what it shows, and that no text of a service is code to it.

It needs Debian's ``chromium``. At a desk without one these tests are skipped, in CI they fail.
"""

import html
import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
import torch

from tests.fakes.observe import HOSTILE, Moving, hostile, troubled
from tests.fakes.rl import stamped_rows
from torchrl_vllm_sync import DashboardLogger, PushReport, RunLog
from torchrl_vllm_sync.errors import ServiceClosedError
from torchrl_vllm_sync.observe.page import Dashboard, History, _sample_of
from torchrl_vllm_sync.observe.views import UNKNOWN, printable
from torchrl_vllm_sync.weights.push import VersionHooks

PLOTS = ("in_flight", "waiting", "kv", "tokens", "ttft", "itl", "version")


@pytest.fixture
def browse(tmp_path):
    """Opens a page, lets it run for so many of its own seconds, and returns it as it is then."""
    browser = shutil.which("chromium")
    if browser is None:
        if os.environ.get("CI") == "true":
            pytest.fail("there is no chromium, which .ci/run installs")
        pytest.skip("there is no chromium; on Debian: apt-get install chromium")

    def run(url, *options, seconds=3):
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        budget = f"--virtual-time-budget={1000 * seconds}"
        command = [browser, *flags, profile, budget, *options, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
        return done.stdout

    return run


def filled(scene, num_samples=120):
    """A dashboard that has seen a service for two minutes."""
    look = Moving(scene, past_s=num_samples)
    board = Dashboard(look)
    seen = [look() for _ in range(num_samples)]
    board._history.samples.extend(map(_sample_of, seen, [None, *seen]))
    return board


def texts(page, tag):
    """The texts of all elements of one kind, without the elements inside them."""
    found = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page, re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]*>", " ", one)).strip() for one in found]


def test_the_page_shows_replicas_plots_pushes_and_failures(browse):
    with filled(troubled) as board:
        page = browse(board.url, "--dump-dom")
    assert "<title>rollouts, version 12</title>" in page
    assert re.search(r'id="serving">2 of 4<', page)
    about = "Qwen/Qwen2.5-7B · up 2 h 13 min · 4 x NVIDIA H100 80GB HBM3, 1 node · torchrl 0.14.1"
    assert f'id="about">{about}, vllm 0.32.0<' in page
    rows = [texts(one, "td") for one in re.findall(r"<tr>.*?</tr>", page, re.DOTALL)]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert rows[0][1] == "serving"
    assert rows[2] == ["2", "starting", *[UNKNOWN] * 12]
    assert rows[3][1] == "failed its actor has not answered for 60.3 s"
    for key in PLOTS:
        (plot,) = re.findall(rf'<svg [^>]*id="plot-{key}".*?</svg>', page, re.DOTALL)
        drawn = re.findall(r'<path class="line" stroke="(#\w+)" d="M[^"]{100,}"', plot)
        assert drawn[:2] == ["#0072b2", "#e69f00"], key
        assert "NaN" not in plot
        assert ('class="line tail"' in plot) == (key in ("ttft", "itl"))
        assert len(re.findall(r'<path class="push(?: failed)?" d="M[^"]+"', plot)) == 2, key
    phases = re.findall(r'<div class="phase"><span>([\w ]+)</span>', page)
    assert phases == ["prepare", "ready", "queue", "transfer", "send", "replica 0", "replica 1"]
    assert re.search(r"width: 82\.35\d*%; left: 5\.88\d*%", page)  # 56 of 68 ms, from 4 ms on
    for step, width, left in (("stage", 14.7, 8.8), ("pause", 16.1, 23.5), ("load", 58.8, 39.7)):
        place = rf"width: {width}\d*%; left: {left}\d*%"
        assert re.search(rf'<i class="{step}"[^>]*{place}', page), step
    assert any("version 11" in one and "no replica took it" in one for one in texts(page, "li"))
    assert any("replica 3 failed" in one for one in texts(page, "li"))
    assert "1 lost" in texts(page, "li")
    assert "12 retried" in texts(page, "li")
    assert re.search(r'id="trouble" role="alert"></div>', page)


def test_what_a_run_logged_has_a_plot_or_a_histogram(browse):
    with filled(troubled) as board:
        first, *_, last = board._history.samples
        first["numbers"] = {"reward": -0.5, "loss": None, HOSTILE: 1.0}
        last["numbers"] = {"reward": 0.25}
        last["histograms"] = {"length": {"edges": [-0.5, 0.5, 1.5], "counts": [3, 1]}}
        page = browse(board.url, "--dump-dom")
    (logged,) = re.findall(r'id="logged">.*?</section>', page, re.DOTALL)
    clean = printable(HOSTILE).strip()
    assert [one.split()[0] for one in texts(logged, "h2")] == [clean.split()[0], "reward", "length"]
    assert "reward  0.25" in texts(logged, "h2")
    drawn = r'class="line" stroke="#0072b2" d="M50.0 130.0l0.1 0L[\d.]+ 38.5"'  # from -0.5 to 0.25
    assert re.search(drawn, logged), re.findall('class="line"[^>]*', logged)
    heights = [float(one) for one in re.findall(r'class="bar"[^>]* height="([\d.]+)"', logged)]
    assert heights == [pytest.approx(3 * heights[1]), pytest.approx(30.5)]
    assert "<img" not in page


def test_a_run_that_logs_to_it_is_shown_beside_its_engines(browse):
    hooks, rows = VersionHooks(), stamped_rows([1, 1, 4], [4], padded=True)
    rows["next", "reward"] = torch.tensor([[[1.0]], [[0.5]]])
    service = SimpleNamespace(register_version_hook=hooks.register, weight_version=5)
    with filled(troubled) as board, RunLog(DashboardLogger(board), service) as log:
        before = browse(board.url, "--dump-dom")
        log(rows, 0, loss={"ESS": 0.875})
        pushed = {"began_at": 1.0, "version": 6, "transport": "memmap", "seconds": 0.125}
        hooks.announce(PushReport(**pushed))
        board._sample(board._look)
        page = browse(board.url, "--dump-dom")
    assert "rollout/reward" not in before
    (logged,) = re.findall(r'id="logged">.*?</section>', page, re.DOTALL)
    titles = [re.sub(r"\s+", " ", one) for one in texts(logged, "h2")]
    for name, value in {
        "rollout/reward": "0.75",
        "rollout/staleness": "2.5",
        "loss/ESS": "0.875",
        "push/seconds": "0.125",
    }.items():
        assert f"{name} {value}" in titles, titles
    assert any(one.startswith("rollout/staleness by row at") for one in titles)
    assert len(texts(page, "tr")) == len(texts(before, "tr")) > 1  # of the engines


def test_a_file_is_shown_as_such_with_its_gaps_joined(browse, tmp_path):
    look, path = Moving(), tmp_path / "run.jsonl"
    history, before = History(path), None
    for i in range(40):
        told = look()
        if not i % 10:  # every 10 s, which on a live page would be a gap
            history.add(_sample_of(told, before), told.as_dict())
            before = told
    history.close()
    with Dashboard(None, history=path) as board:
        page = browse(board.url, "--dump-dom")
    assert re.search(r'id="time">until [\d/]+, [\d:]+, from a file<', page)
    (plot,) = re.findall(r'<svg [^>]*id="plot-kv".*?</svg>', page, re.DOTALL)
    (first, _) = re.findall(r'class="line" stroke="[^"]*" d="([^"]+)"', plot)
    assert (first.count("M"), first.count("L")) == (1, 3)


def test_texts_of_a_service_are_never_markup(browse):
    with filled(hostile, 5) as board:
        page = browse(board.url, "--dump-dom")
    assert "<img" not in page
    assert "<title>1</title>" not in page
    clean = printable(HOSTILE).strip()
    assert "\x1b" not in page
    assert "\u202e" not in page
    shown = html.escape(clean, quote=False)
    assert page.count(shown) >= 8  # name, model, replica, reason, node, phase, pushes, failures


def test_a_service_that_cannot_tell_is_said_to(browse):
    def look():
        raise ServiceClosedError("<b>it was shut down</b>")

    with Dashboard(look) as board:
        page = browse(board.url, "--dump-dom")
    assert "No answer from the service: &lt;b&gt;it was shut down&lt;/b&gt;." in page


def test_the_page_is_drawn(browse, tmp_path):
    shot = tmp_path / "dashboard.png"
    with filled(troubled) as board:
        browse(board.url, f"--screenshot={shot}", "--window-size=1240,860", "--hide-scrollbars")
    pixels = np.round(255 * matplotlib.image.imread(shot)[..., :3]).astype(int)
    assert pixels.shape == (860, 1240, 3)
    for color in ((0x00, 0x72, 0xB2), (0xE6, 0x9F, 0x00)):  # the lines of two replicas
        near = np.abs(pixels - color).max(axis=-1) < 12
        assert near.sum() > 1000
        assert near.any(axis=0).sum() > 600  # all over the page, not in a legend only
