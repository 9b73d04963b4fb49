"""The OpenAI server, asked by the client that everybody uses."""

import asyncio
import contextlib
import dataclasses
import gc
import http.client
import json
import os
import pickle
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from random import Random  # noqa: TID251  seeded

import openai
import psutil
import pytest
import ray

from tests.engine.requests import (
    eventually,
    is_idle,
    num_running,
    sampling,
    slowed,
    token_ids,
)
from torchrl_vllm_sync import AsyncVLLM, ReplicaState, cli
from torchrl_vllm_sync.errors import GenerationError, UnsupportedArgumentError
from torchrl_vllm_sync.serve.server import _listen

KILLS = True
KEY = "a-key"
PROMPT = list(range(40, 90))
MESSAGES = [{"role": "user", "content": "What is 3 + 4?"}]


@pytest.fixture(scope="module")
def server(service):
    with service.serve(api_key=KEY) as server:
        yield server


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def name(client):
    (model,) = client.models.list().data
    return model.id


def ask(server, path, body=None, headers=(), method="POST"):
    """Status, headers and body of one bare request with the right key."""
    given = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **dict(headers)}
    body = json.dumps(body) if isinstance(body, dict) else body
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request(method, path, body, given)
        with connection.getresponse() as answer:
            return answer.status, answer.headers, answer.read()


def texts(stream):
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


@pytest.mark.parametrize("stream", [False, True])
def test_seeds_give_the_tokens_of_generate(service, client, name, stream):
    fields = {"max_tokens": 12, "seed": 5, "temperature": 1.0}
    wanted = service.generate(PROMPT, sampling(**fields)).outputs[0]
    answer = client.completions.create(
        model=name,
        prompt=PROMPT,
        stream=stream,
        logprobs=1,
        extra_body={"return_token_ids": True},
        **fields,
    )
    chunks = list(answer) if stream else [answer]
    found = [one for chunk in chunks for one in chunk.choices]
    assert [token for one in found for token in one.token_ids] == list(wanted.token_ids)
    assert "".join(one.text for one in found) == wanted.text
    assert sum(len(one.logprobs.tokens) for one in found) == 12
    assert all(chunk.policy_versions == [service.weight_version] for chunk in chunks)


def test_a_chat_is_the_template_s_prompt(service, client, name):
    prompt = service.requests.tokenizer().apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=False
    )
    fields = {"n": 2, "seed": 3, "temperature": 1.0}
    wanted = service.generate(prompt, sampling(max_tokens=16, **fields)).outputs
    wanted = [one.text for one in wanted]
    chat = {"model": name, "messages": MESSAGES, "max_completion_tokens": 16, **fields}
    two = client.chat.completions.create(**chat)
    assert [one.message.content for one in two.choices] == wanted
    assert two.usage.completion_tokens == 32
    found = ["", ""]
    for chunk in client.chat.completions.create(stream=True, **chat):
        for one in chunk.choices:
            found[one.index] += one.delta.content or ""
    assert found == wanted
    stop = wanted[0][3:5]
    stopped = client.chat.completions.create(stop=stop, **chat).choices[0]
    assert stopped.message.content == wanted[0].partition(stop)[0]
    assert stopped.finish_reason == "stop"


def test_structured_outputs_and_tools_are_vllm_s(service, client, name):
    chat = {"model": name, "messages": MESSAGES, "max_completion_tokens": 120}
    extra = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = client.chat.completions.create(**chat, extra_body=extra)
    assert answer.choices[0].message.content in ("yes", "no")
    call = '<tool_call>{"name": "add", "arguments": {"a": 3}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    extra = {"structured_outputs": {"choice": [call]}}
    with (
        service.serve(tool_call_parser="hermes", enable_auto_tool_choice=True) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(**chat, tools=tools, extra_body=extra)
    (found,) = answer.choices[0].message.tool_calls
    assert (found.function.name, json.loads(found.function.arguments)) == ("add", {"a": 3})
    with pytest.raises(UnsupportedArgumentError, match="nobody"):
        service.serve(tool_call_parser="nobody", enable_auto_tool_choice=True)


def test_tokens_come_back_for_tokens(service, server, name):
    _, _, body = ask(server, "/tokenize", {"model": name, "prompt": "Hello"})
    ids = json.loads(body)["tokens"]
    assert ids == service.requests.tokenizer().encode("Hello")
    _, _, body = ask(server, "/detokenize", {"model": name, "tokens": ids})
    assert json.loads(body)["prompt"] == "Hello"
    wanted = token_ids(service.generate(PROMPT, sampling()))
    given = {"temperature": 0.0, "max_tokens": 4}
    asked = {"model": name, "token_ids": PROMPT, "sampling_params": given}
    code, _, body = ask(server, "/inference/v1/generate", asked)
    assert (code, json.loads(body)["choices"][0]["token_ids"]) == (200, wanted)


def test_what_an_engine_refuses_is_the_client_s_fault(service, server, name):
    params = {"max_tokens": None, "min_tokens": 1000}  # more than there is room for
    asked = {"model": name, "token_ids": PROMPT, "sampling_params": params}
    code, _, body = ask(server, "/inference/v1/generate", asked)
    assert code == 400
    assert "min_tokens" in json.loads(body)["error"]["message"]
    with pytest.raises(GenerationError, match="min_tokens"):  # by whom it is asked directly, too
        service.generate(PROMPT, sampling(**params))


def test_every_answer_tells_its_versions(service, server, client, name, other_model):
    before = service.weight_version
    with slowed(service, 0.2):  # until the push has ended
        fields = {"max_tokens": 100, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(model=name, prompt=PROMPT, stream=True, **fields)
        first = next(stream)
        service.push_weights(other_model)
    *_, last = stream
    assert first.policy_versions == [before]
    assert last.policy_versions == [before, before + 1]
    raw = client.completions.with_raw_response.create(model=name, prompt=PROMPT, max_tokens=2)
    assert raw.headers["x-policy-versions"] == str(before + 1)
    assert raw.parse().policy_versions == [before + 1]
    asked = {"model": name, "token_ids": PROMPT, "sampling_params": {"max_tokens": 4}}
    _, headers, body = ask(server, "/inference/v1/generate", {**asked, "stream": True})
    assert headers["x-policy-versions"] == str(before + 1)
    events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: {")]
    assert json.loads(events[-1])["policy_versions"] == [before + 1]
    (span,) = json.loads(events[-1])["choices"][0]["weight_versions"]
    assert span == {"version": str(before + 1), "start": 0, "end": 4}


def test_sessions_and_groups_reach_the_balancer(service, server, client, name):
    balancer = service.requests.balancer
    for fields in (
        {"user": "ann"},
        {"user": "else", "extra_headers": {"X-Session-ID": "bob"}},
        {"extra_headers": {"X-Group-ID": "six"}},
    ):
        client.completions.create(model=name, prompt=PROMPT, max_tokens=2, **fields)
    known = [balancer.sessions.get(one) is not None for one in ("ann", "bob", "else")]
    assert known == [True, True, False]
    assert balancer.groups.get("six") is not None
    for user in ("\ud800", "x" * 257):  # no name for a session, and no fault
        body = json.dumps({"model": name, "prompt": PROMPT, "max_tokens": 1, "user": user})
        assert ask(server, "/v1/completions", body)[0] == 200
    long = {"X-Session-ID": "x" * 257}
    asked = {"model": name, "prompt": PROMPT, "max_tokens": 1}
    assert ask(server, "/v1/completions", asked, long)[0] == 400


def test_only_who_may_is_answered(service, server, name, monkeypatch):
    asked = {"model": name, "prompt": "x", "max_tokens": 1}
    assert ask(server, "/v1/completions", asked)[0] == 200
    for key in ("Bearer wrong", "Bearer", "", f"Basic {KEY}"):
        for path in ("/v1/completions", "/tokenize", "/inference/v1/generate", "/metrics"):
            assert ask(server, path, asked, {"Authorization": key})[0] == 401
    for state, code in (("serving", 200), ("stale", 503)):
        load = service.load.snapshots()
        shown = [dataclasses.replace(one, state=ReplicaState(state)) for one in load]
        monkeypatch.setattr(service.load, "snapshots", lambda shown=shown: shown)
        assert ask(server, "/health", headers={"Authorization": ""}, method="GET")[0] == code
        monkeypatch.undo()
    for path in ("/metrics", "/scale_elastic_ep", "/inference/v1/abort_requests", "/docs", "/load"):
        assert [ask(server, path, {}, method=one)[0] for one in ("GET", "POST")] == [404, 404]
    assert ask(server, "/v1/completions", asked, {"Host": "evil.example"})[0] == 400
    assert server.host == "127.0.0.1"
    with pytest.raises(UnsupportedArgumentError, match="port"):
        service.serve(port=server.port)
    for key in ("", 1234):
        with pytest.raises(UnsupportedArgumentError, match="api_key"):
            service.serve(api_key=key)
    with pytest.raises(UnsupportedArgumentError, match="tool_parser"):
        service.serve(tool_parser="hermes")


def test_options_bring_their_routes(service, name):
    def read(path):
        code, _, body = ask(asked, path, method="GET")
        assert code == 200
        return json.loads(body)

    with contextlib.ExitStack() as stack:
        options = {"enable_server_load_tracking": True, "enable_tokenizer_info_endpoint": True}
        asked = stack.enter_context(service.serve(api_key=KEY, **options))
        assert read("/tokenizer_info")["tokenizer_class"]
        assert read("/load") == {"server_load": 0}
        url = f"{asked.url}/v1"
        client = stack.enter_context(openai.OpenAI(base_url=url, api_key=KEY, max_retries=0))
        fields = {"max_tokens": 100, "extra_body": {"ignore_eos": True}}
        with slowed(service, 0.2):
            stream = client.completions.create(model=name, prompt=PROMPT, stream=True, **fields)
            next(stream)
            assert read("/load") == {"server_load": 1}
        assert list(stream)
        eventually(lambda: read("/load") == {"server_load": 0})
        other = stack.enter_context(service.serve(api_key=KEY))
        for path in ("/load", "/tokenizer_info"):
            assert ask(other, path, method="GET")[0] == 404


def test_nobody_s_body_is_read_without_a_key(server):
    headers = {"Authorization": "", "Content-Length": "1000"}  # of which none comes
    assert ask(server, "/health", headers=headers, method="GET")[0] == 200


def test_large_bodies_are_refused(server):
    length = {"Content-Length": str((32 << 20) + 1)}
    assert ask(server, "/v1/completions", None, length)[0] == 413
    chunks = (bytes(1 << 20) for _ in range(33))  # whose length is not said before
    assert ask(server, "/v1/completions", chunks)[0] == 413


@pytest.fixture
def hasty(service, monkeypatch):
    """A server that waits for its clients for a second."""
    monkeypatch.setattr("torchrl_vllm_sync.serve.server.SLOW_S", 1)
    with service.serve(api_key=KEY) as server:
        yield server


def connections(server):
    return len(server._server.server_state.connections)


@pytest.mark.slow
def test_who_sends_or_reads_no_more_is_let_go(service, hasty, name):
    headers = f"Host: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Length: %d\r\n\r\n"
    asked = {"model": name, "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "n": 16}
    body = json.dumps({**asked, "stream": True, "logprobs": 5}).encode()
    with contextlib.ExitStack() as stack:
        silent, deaf = (
            stack.enter_context(socket.create_connection((hasty.host, hasty.port), 30))
            for _ in range(2)
        )
        silent.sendall(b"POST /v1/completions HTTP/1.1\r\n" + (headers % 1000).encode() + b"{")
        assert b" 408 " in silent.recv(1000)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        deaf.sendall(b"POST /v1/completions HTTP/1.1\r\n" + (headers % len(body)).encode() + body)
        eventually(lambda: connections(hasty) == 1)
        eventually(lambda: connections(hasty) == 0)
    eventually(lambda: is_idle(service))


def nonsense(random):
    """What no client sends: bytes, heads without a body, bodies that are no request."""
    head = "POST /v1/%s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n"
    values = [None, True, -1, 2**70, 1e308, "\ud800", "x" * 10**5, [], {}, [[[0]]], {"a": {}}]
    fields = ["model", "prompt", "messages", "max_tokens", "stop", "n", "logprobs", "stream"]
    fields += ["logit_bias", "tools", "response_format", "user", "echo", "seed", "temperature"]
    path = random.choice(["completions", "chat/completions", "models", "../health", "\0"])
    head %= path, random.choice([KEY, KEY, KEY, "wrong", "\xff"])
    body = json.dumps({one: random.choice(values) for one in random.sample(fields, 6)}).encode()
    bodies = [body, body[: len(body) // 2], b"[" * 10**5, random.randbytes(1000), b""]
    body = random.choice(bodies)
    length = random.choice([len(body), len(body), len(body) + 9, -1, 10**30, "x"])
    whole = head.encode("latin-1") + f"Content-Length: {length}\r\n\r\n".encode() + body
    return random.choice([whole, whole, whole, whole[: len(whole) // 2], random.randbytes(500)])


@pytest.mark.slow
def test_nonsense_costs_its_sender_one_answer(service, hasty, name):
    random, own = Random(7), psutil.Process()

    def send(sent):
        """The status that it is answered with; none for what has no end."""
        answer = b""
        with (
            socket.create_connection((hasty.host, hasty.port), 4) as connection,
            contextlib.suppress(OSError),  # it may have hung up by then
        ):
            connection.sendall(sent)
            while b"\r\n\r\n" not in answer and (more := connection.recv(2**16)):
                answer += more
        return answer[9:12]

    def flood(number):
        with ThreadPoolExecutor(25) as pool:
            codes = set(pool.map(send, [nonsense(random) for _ in range(number)]))
        eventually(lambda: connections(hasty) == 0)
        eventually(lambda: is_idle(service))
        return codes, (own.num_threads(), own.num_fds())

    _, before = flood(50)
    codes, after = flood(300)
    assert all(then <= now + 2 for now, then in zip(before, after, strict=True))
    assert codes >= {b"400", b"401", b"404", b"408"}
    assert b"500" not in codes
    asked = {"model": name, "prompt": "x", "max_tokens": 1}
    assert ask(hasty, "/v1/completions", asked)[0] == 200


@pytest.mark.parametrize("fields", [{"max_tokens": -1}, {"logprobs": 10**6}, {"prompt": [10**6]}])
def test_a_caller_s_fault_is_said_to_be_one(client, name, fields):
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**{"model": name, "prompt": "x", **fields})


def test_hanging_up_ends_the_request_and_nothing_else(service, server, name):
    async def run():
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:

            def ask(**fields):
                asked = {"model": name, "prompt": PROMPT, "extra_body": {"ignore_eos": True}}
                return client.completions.create(**{"max_tokens": 200, **asked, **fields})

            kept = asyncio.create_task(ask(max_tokens=120))
            whole = [asyncio.create_task(ask()) for _ in range(4)]
            streams = [await ask(stream=True) for _ in range(4)]
            for one in streams:
                await anext(one)
            await asyncio.to_thread(eventually, lambda: num_running(service) == 9)
            for task in whole:
                task.cancel()
            for one in streams:
                await one.close()
            await asyncio.to_thread(eventually, lambda: service.load.total_in_flight == 1)
            await asyncio.to_thread(eventually, lambda: num_running(service) == 1)
            assert not kept.done()
            await asyncio.to_thread(pace.close)
            return await kept

    with contextlib.ExitStack() as pace:
        pace.enter_context(slowed(service, 0.2))
        answer = asyncio.run(run())
    assert answer.usage.completion_tokens == 120
    eventually(lambda: is_idle(service))


def test_it_ends_with_its_service(service):
    with pickle.loads(pickle.dumps(service)) as copy:
        server = copy.serve()
        code, _, _ = ask(server, "/v1/models", method="GET", headers={"Authorization": "no"})
        assert code == 200
    assert not server.is_open
    assert service.generate(PROMPT, sampling()).finished


def test_the_command_serves_until_it_is_interrupted(service, server, monkeypatch, capfd):
    launched, found, thresholds = [], [], [gc.get_threshold()]
    copy = pickle.loads(pickle.dumps(service))

    def launch(model, **fields):
        launched.append((model, fields))
        return copy

    def looks(_):
        (server,) = copy._views
        found.append(ask(server, "/v1/models", method="GET")[0])
        thresholds.append(gc.get_threshold())
        yield
        os.kill(os.getpid(), signal.SIGTERM)
        yield

    monkeypatch.setattr(AsyncVLLM, "from_pretrained", launch)
    monkeypatch.setattr(cli, "_looks", looks)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        given = ["--replicas", "2", "--port", "0", "--option", f"api_key={KEY}"]
        assert cli.main(["serve", "a/model", *given, "--engine", "max_model_len=64"]) == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
        gc.set_threshold(*thresholds[0])
        gc.unfreeze()
    assert thresholds[1][0] >= 10 * thresholds[0][0]  # its process looks for garbage rarely
    assert launched == [("a/model", {"num_replicas": 2, "max_model_len": 64})]
    assert found == [200]
    said = capfd.readouterr().out
    assert "serving at http://127.0.0.1:" in said
    assert "as a/model" in said
    with pytest.raises(SystemExit, match="2"):
        cli.main(["serve", "a/model", "--engine", "max_model_len"])
    auto = "enable_auto_tool_choice=true"
    for wrong, told in (
        (["--port", str(server.port)], "must be free to listen on"),
        (["--port", "99999"], "port must be from 0 to 65535, got 99999"),
        (["--option", "served-model-name=a"], "no options of vLLM's server: ['served_model_name']"),
        (["--option", "api_key=1234"], "api_key must be text"),
        (["--option", "capture=0"], "capture must be at least 1"),
        (["--option", "tool_parser=hermes"], "tool_parser"),
        (["--option", auto, "--option", "tool_call_parser=nobody"], "nobody"),
        (["--option", "chat_template=/no/such.jinja"], "but doesn't exist"),
    ):
        assert cli.main(["serve", "a/model", "--port", "0", *wrong]) == 1
        assert told in " ".join(capfd.readouterr().err.split())
    assert len(launched) == 1  # said before any engine is started


def test_another_vllm_is_refused_by_name(service, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.launchers.app", None)
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.openai.api_server", None)
    with pytest.raises(UnsupportedArgumentError, match=r"as 0\.26 and 0\.32 serve"):
        service.serve()


def test_a_replica_that_dies_in_mid_stream_is_not_noticed(service, client, name):
    params = sampling(max_tokens=150, ignore_eos=True)
    wanted = service.generate(PROMPT, params).outputs[0].text
    before = service.requests.counts.totals()["retried"]
    pids = {one.replica_id: ray.get(one.actor.describe.remote()).pid for one in service.replicas}
    with slowed(service, 0.1):  # until the kill: twelve seconds are left of the answer
        stream = client.completions.create(
            model=name,
            prompt=PROMPT,
            max_tokens=150,
            temperature=0.0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = "".join(next(stream).choices[0].text for _ in range(30))
        (victim,) = [one.replica_id for one in service.load.snapshots() if one.in_flight]
        os.kill(pids[victim], signal.SIGKILL)
    text += texts(stream)
    assert text == wanted
    assert service.requests.counts.totals()["retried"] == before + 1
    assert service.load.total_in_flight == 0


def test_what_is_sent_does_not_wait_until_the_client_has_acknowledged_more():
    listening = _listen("127.0.0.1", 0)
    with listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
