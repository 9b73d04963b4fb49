"""What a service of real engines says of itself, to this process and to others."""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import ray
from vllm import SamplingParams

from torchrl_vllm_sync import attach
from torchrl_vllm_sync.errors import WeightMismatchError
from torchrl_vllm_sync.replica import seconds_of

PROMPTS = [[7 + i, *range(20, 90)] for i in range(8)]  # two whole blocks and a part of one
TOKENS = SamplingParams(max_tokens=100, ignore_eos=True)


def totals(status):
    counters = [one.counters for one in status.replicas]
    return {
        name: sum(getattr(one, name) for one in counters)
        for name in (
            "num_prompt_tokens",
            "num_generated_tokens",
            "prefix_cache_queries",
            "prefix_cache_hits",
        )
    }


def settled(service):
    """The status when the engines have reported what is done by now."""
    service.replicas.learn()
    return service.status()


@pytest.mark.slow
def test_counters_are_what_was_asked_for_and_rates_show_while_it_runs(service):
    before = totals(settled(service))
    seen, done = [], threading.Event()

    def watch():
        while not done.is_set():
            reports, status = service.load.snapshots(), service.status()
            after = service.load.snapshots()
            if [one.counted for one in reports] == [one.counted for one in after]:
                seen.append((reports, status))
            time.sleep(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.monotonic()
    rounds = 0
    while rounds < 2 or time.monotonic() - begin < 4:  # reports come once a second
        service.generate(PROMPTS, TOKENS)
        rounds += 1
    done.set()
    watcher.join()
    after = totals(settled(service))
    gained = {name: after[name] - before[name] for name in after}
    assert gained["num_generated_tokens"] == rounds * 8 * 100
    assert gained["num_prompt_tokens"] == rounds * 8 * 71
    assert gained["prefix_cache_queries"] == rounds * 8 * 71
    assert 0 < gained["prefix_cache_hits"] <= (rounds - 1) * 8 * 64
    assert max(one.in_flight for _, one in seen) == 8
    assert any(one.generated_tokens_per_s for _, one in seen)
    for reports, status in seen:
        for told, one in zip(reports, status.replicas, strict=True):
            if one.generated_tokens_per_s is not None:
                since, then = told.counted[0]
                gain = told.counters.num_generated_tokens - then.num_generated_tokens
                rate = gain / (told.measured_at - since)
                assert one.generated_tokens_per_s == pytest.approx(rate)
    assert any(one.num_running for _, status in seen for one in status.replicas)
    assert all(0 <= one.kv_cache_usage <= 1 for one in service.status().replicas)
    assert all(0 < one.prefix_cache_hit_rate < 1 for one in service.status().replicas)
    # As many requests and tokens as latencies are kept of: those of earlier tests are forgotten.
    begin, many = time.monotonic(), [[5, 6, 5 + at % 400] for at in range(640)]
    service.generate(many, SamplingParams(max_tokens=17, ignore_eos=True))
    for one in settled(service).replicas:
        for latency in (one.time_to_first_token, one.inter_token_latency):
            assert 0 < latency.p50_s <= latency.p99_s < time.monotonic() - begin


def test_pushes_and_their_failures_are_told_here_and_to_others(service, model):
    with attach(service.name) as other:
        report = service.push_weights(model)
        (pushed, *_) = service.status().pushes
        assert (pushed.version, pushed.transport) == (report.version, report.transport)
        assert pushed.num_bytes == report.num_bytes
        assert {one.replica_id for one in pushed.replicas} == {"0", "1"}
        assert 0 < pushed.pause_s < pushed.seconds
        assert all(0 <= one <= pushed.seconds for one in seconds_of(pushed.phases).values())
        assert time.time() - 60 < pushed.ended_at <= time.time()
        other.replicas.learn()
        assert other.status().pushes[0] == pushed
        assert other.status().weight_version == report.version

        with pytest.raises(WeightMismatchError):
            service.push_weights({})
        (failed, *_) = service.status().pushes
        assert (failed.version, failed.transport) == (None, None)
        assert failed.error
        assert service.status().failures[0].what == "push"
        other.replicas.learn()
        assert [one.error for one in other.status().pushes[:2]] == [failed.error, ""]
    assert service.status().num_serving == 2


def test_facts_of_replicas(service):
    told = settled(service)
    assert [one.replica_id for one in told.replicas] == ["0", "1"]
    for one in told.replicas:
        assert (str(one.state), one.num_restarts, one.device_type) == ("serving", 0, "cpu")
        assert "CPU with" in one.device_name
        assert one.node == ray.util.get_node_ip_address()
        assert one.report_age_s < 20
    assert len({one.pid for one in told.replicas}) == 2
    assert told.hardware.startswith("CPU with")
    assert told.hardware.endswith(" cores, 1 node")
    assert told.model == service.engine_args.model
    assert 0 < told.uptime_s < 3600
    with attach(service.name) as other:
        assert other.status().launched_at == told.launched_at
    assert "serving" in service._repr_html_()


def test_the_dashboard_of_an_attached_service_shows_the_same(service):
    with attach(service.name) as other, other.dashboard() as board:
        with urllib.request.urlopen(f"{board.url}status.json", timeout=10) as answer:
            told = json.load(answer)
        assert told["name"] == service.name
        assert told["num_serving"] == 2
    assert not board.is_open
    names = [one.name for one in threading.enumerate()]
    assert not [one for one in names if one.startswith("dashboard")]


# They take seconds to import, and nothing that is shown needs them.
COMMAND = """
import sys
from torchrl_vllm_sync.cli import main
status = main()
heavy = {"vllm", "torch", "torchrl"} & {*sys.modules}
assert not heavy, heavy
raise SystemExit(status)
"""


def command(*arguments):
    address = ray.get_runtime_context().gcs_address
    told = [sys.executable, "-c", COMMAND, "status", *arguments]
    done = subprocess.run(
        [*told, "--address", address],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"COLUMNS": "120"},
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_the_command_finds_services_and_shows_one(service, model):
    version = service.push_weights(model).version
    code, out, err = command("--json")
    assert code == 0, err
    assert json.loads(out)["services"][service.name] == 2
    code, out, err = command(service.name, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["weight_version"], told["num_serving"]) == (version, 2)
    assert told["pushes"][0]["version"] == version
    assert told["generated_tokens_per_s"] is not None
    code, out, err = command("nobody")
    assert (code, out) == (1, "")
    assert "no service named 'nobody'" in err
