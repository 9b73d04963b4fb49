"""A ``vllm serve`` of somebody else as a replica: an engine whose core is at the end of HTTP.

vLLM's ``AsyncLLM`` calls its engine core through a client. Here that client asks a server, so that
all before it is every replica's: gate, pushes, salts, streams and stops. The server says itself
which version sampled which token.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import re
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np
from safetensors.torch import save_file
from transformers import AutoTokenizer
from vllm import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.outputs import LogprobsLists

from torchrl_vllm_sync.engine import internals
from torchrl_vllm_sync.engine.actor import EngineActor
from torchrl_vllm_sync.engine.answers import SpanChecker, versions_of_labels
from torchrl_vllm_sync.engine.args import make_engine_args
from torchrl_vllm_sync.errors import GenerationError, ServerError, UnsupportedArgumentError
from torchrl_vllm_sync.replica import EngineCounters, EngineDescription, ReplicaState
from torchrl_vllm_sync.weights.module import ParamMeta, from_json
from torchrl_vllm_sync.weights.p2p.memory import this_node
from torchrl_vllm_sync.weights.snapshots.data_file import open_tensordict

GENERATE = "/inference/v1/generate"
# The routes behind what a replica has its workers do for vLLM's own calls, and their one field.
NATIVE = {
    "native_init": ("/init_weight_transfer_engine", "init_info"),
    "native_start": ("/start_weight_update", ""),
    "native_update": ("/update_weights", "update_info"),
    "native_finish": ("/finish_weight_update", ""),
    "native_shutdown": ("/shutdown_weight_transfer_engine", ""),
}
logger = logging.getLogger(__name__)

SERVERS = "servers"  # key of ``additional_config``: the addresses, and what all of them serve
CONNECT_TIMEOUT_S = 10.0
ASK_TIMEOUT_S = 60.0  # for what a server knows; its first look at its machine takes it long
WATCH_S = 1.0
LINE_BYTES = 2**22  # of one line of a stream: a token with all log-probabilities may be long
PART_BYTES = 2**30  # of one file of a checkpoint, which is made in memory
# What tokenizers split differently.
PROBE = "Naïve café: 12345 + 67890 = 80235;\n\tdef f(x):  return x**2  # ≠ 日本語 🙂"
DEV_MODE = "it takes no weights: start it with VLLM_SERVER_DEV_MODE=1"
# ``reload_weights`` leaves what that backend has repacked as it was.
NOT_ON_CPU = "it takes no weights: vLLM's CPU backend does not reload tied output heads and experts"
_FIGURE = re.compile(r"^(process_start_time_seconds|vllm:\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_CACHE = re.compile(r'vllm:cache_config_info\{.*?\bblock_size="(\d+)".*?num_gpu_blocks="(\d+)"')
# Set where answers are put together, which is here.
_OWN_PARAMS = ("output_kind", "skip_clone", "flat_logprobs", "output_text_buffer_length")


class _Token(msgspec.Struct):
    token_id: int
    logprob: float
    rank: int | None = None
    top_logprobs: list[_Token] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[_Span] | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


def logprobs_of(tokens: Sequence[_Token], num: int) -> LogprobsLists:
    """As an engine core sends them: the sampled token, then the ``num`` likeliest."""
    rows: list[list[_Token]] = []
    for one in tokens:
        likeliest = one.top_logprobs[1:]  # without the sampled one, which comes first
        if one.rank is not None and one.rank <= len(likeliest) + 1:
            likeliest.insert(one.rank - 1, one)
        rows.append([one, *(likeliest if num < 0 else likeliest[:num])])
    return LogprobsLists(
        np.array([[one.token_id for one in row] for row in rows]),
        np.array([[one.logprob for one in row] for row in rows], np.float32),
        np.array([one.rank or 0 for one in tokens]),
        None,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says of itself."""

    model: str  # the name that it serves it under
    root: str  # path or name of the checkpoint, on its host
    max_model_len: int
    vllm_version: str
    tokens: list[int]  # of ``PROBE``
    config: dict[str, Any] | None  # vLLM's; None where it takes no weights
    label: str  # of its weights
    is_paused: bool
    figures: Figures

    def of_config(self, part: str, name: str, default: Any = None) -> Any:
        return ((self.config or {}).get(part) or {}).get(name, default)


class Figures(defaultdict[str, list[float]]):
    """What a page of Prometheus metrics says, by name, of each engine."""

    def __init__(self, page: str = "") -> None:
        super().__init__(list)
        for name, value in _FIGURE.findall(page):
            self[name].append(float(value))
        self.blocks = [(int(size), int(num)) for size, num in _CACHE.findall(page)]

    @property
    def started_at(self) -> list[float]:
        """When the server's process did, which tells it from a later one; empty if unknown."""
        return self["process_start_time_seconds"]

    def total(self, name: str) -> int:
        return int(sum(self[f"vllm:{name}"]))


class Server:
    """One server's HTTP routes; all that goes wrong is a ``ServerError`` that names it."""

    def __init__(self, address: str, api_key: str | None) -> None:
        self.address = address.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    def error(self, reason: str) -> ServerError:
        return ServerError({self.address: reason})

    @contextlib.contextmanager
    def understood(self) -> Iterator[None]:
        """Around what reads answers, which may be anybody's."""
        try:
            yield
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise self.error(f"it does not answer as vLLM does: {error!r}") from error

    @contextlib.asynccontextmanager
    async def request(
        self,
        path: str,
        json: Any = None,
        limit_s: float | None = None,
        fine: Sequence[int] = (),
        **given: Any,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Posts what is given, or gets; gives the answer, whose status is good, or fine."""
        if self._session is None:
            # A connection each: one that the server is just closing cannot lose a request.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, read_bufsize=LINE_BYTES
            )
        limit = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            how = self._session.get if json is None else self._session.post
            async with how(self.address + path, json=json, timeout=limit, **given) as answer:
                if answer.status >= 400 and answer.status not in fine:
                    raise self.error(_refusal(path, answer.status, await answer.text()))
                yield answer
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            why = str(error) or f"no answer to {path} in time"
            raise self.error(f"{type(error).__name__}: {why}") from error

    async def ask(
        self, path: str, json: Any = None, limit_s: float | None = ASK_TIMEOUT_S, **given: Any
    ) -> Any:
        """Returns the answer's JSON, or text."""
        async with self.request(path, json, limit_s, **given) as answer:
            is_json = answer.content_type == "application/json"
            return await (answer.json() if is_json else answer.text())

    async def figures(self) -> Figures:
        page = await self.ask("/metrics", limit_s=CONNECT_TIMEOUT_S, fine=[404])
        return Figures(page if isinstance(page, str) else "")  # some have no such page

    async def look(self) -> ServerFacts:
        """Asks for all that must be known before it is used."""
        with self.understood():
            served = (await self.ask("/v1/models"))["data"][0]
            # An empty request is not valid, where the route is there.
            await self.ask(GENERATE, {}, fine=(400, 422))
            probe = {"model": served["id"], "prompt": PROBE, "add_special_tokens": False}
            told = await self.ask("/weight_info", fine=[404])
            config, label, is_paused = None, told.get("weight_version", internals.UNLABELLED), False
            if "weight_version" in told:
                is_paused = (await self.ask("/is_paused"))["is_paused"]
                config = (await self.ask("/server_info?config_format=json"))["vllm_config"]
            return ServerFacts(
                model=served["id"],
                root=served["root"],
                max_model_len=served["max_model_len"],
                vllm_version=(await self.ask("/version"))["version"],
                tokens=(await self.ask("/tokenize", probe))["tokens"],
                config=config,
                label=label,
                is_paused=is_paused,
                figures=await self.figures(),
            )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _refusal(path: str, status: int, body: str) -> str:
    """Why a server refused, in its own words if there are some."""
    with contextlib.suppress(msgspec.DecodeError):
        body = _told(msgspec.json.decode(body))
    hint = " (is api_key right?)" if status == 401 else ""
    return f"{path} answered with status {status}{hint}: {body}"


def _told(error: Any) -> str:
    while isinstance(error, dict):
        error = next(
            (error[one] for one in ("error", "detail", "message") if one in error), str(error)
        )
    return str(error)


async def look_at(addresses: Sequence[str], api_key: str | None) -> dict[str, ServerFacts]:
    """Asks all servers; raises for all that fail."""
    if isinstance(addresses, str) or not addresses:
        raise UnsupportedArgumentError(f"addresses must be a list of some, got {addresses!r}")
    servers = [Server(one, api_key) for one in addresses]
    try:
        found = await asyncio.gather(*(one.look() for one in servers), return_exceptions=True)
    finally:
        await asyncio.gather(*(one.close() for one in servers))
    failures: dict[str, str] = {}
    facts: dict[str, ServerFacts] = {}
    for server, one in zip(servers, found, strict=True):
        if isinstance(one, ServerError):
            failures |= one.failures
        elif isinstance(one, BaseException):
            raise one
        else:
            facts[server.address] = one
    if failures:
        raise ServerError(failures)
    return facts


def check_alike(facts: ServerFacts, wanted: dict[str, Any]) -> str:
    """Why a server does not serve what the others do; empty if it does."""
    if wanted["root"] is not None and facts.root != wanted["root"]:
        return f"it serves {facts.root}, the others {wanted['root']}"
    if facts.tokens != wanted["tokens"]:
        return f"its tokenizer is another than that of {wanted['model']}"
    if facts.max_model_len < wanted["max_model_len"]:
        return f"its max_model_len is {facts.max_model_len}, below {wanted['max_model_len']}"
    return ""


def connected_args(facts: dict[str, ServerFacts], model: str | None) -> AsyncEngineArgs:
    """What a service of these servers would have been launched with; refuses unlike ones."""
    (address, first), *_ = facts.items()
    name = first.root if model is None else model
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        what = f"it serves {name}, which cannot be read here: name a copy of it by model"
        raise ServerError({address: f"{what}: {error}"}) from error
    wanted = {
        "addresses": list(facts),
        "model": name,
        "root": first.root if model is None else None,
        "tokens": tokenizer.encode(PROBE, add_special_tokens=False),
        "max_model_len": min(one.max_model_len for one in facts.values()),
    }
    if unlike := {one: why for one, its in facts.items() if (why := check_alike(its, wanted))}:
        raise ServerError(unlike)
    known = {"logprobs_mode": first.of_config("model_config", "logprobs_mode", "raw_logprobs")}
    if dtype := first.of_config("model_config", "dtype"):
        known["dtype"] = str(dtype).removeprefix("torch.")
    seeds = [one.of_config("model_config", "seed") for one in facts.values() if one.config]
    if len(set(seeds)) < len(seeds):
        what = "servers have one seed (%s), so that equal prompts may get equal answers: see --seed"
        logger.warning(what, seeds)
    length = wanted["max_model_len"]
    return make_engine_args(
        name, max_model_len=length, additional_config={SERVERS: wanted}, **known
    )


class ServerCore(EngineCoreClient):
    """What ``AsyncLLM`` takes for the client of its engine core."""

    core_engines, engine_ranks_managed = (b"",), [0]

    def __init__(
        self, server: Server, facts: ServerFacts, config: Any, on_loss: Callable[[str], object]
    ) -> None:
        self._server, self._facts, self._on_loss = server, facts, on_loss
        self._label: str | None = facts.label  # None while it changes
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._watch: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._is_paused = facts.is_paused
        self._is_open = False  # whether an update of vLLM's own calls is
        self.processor: Any = None  # the engine's, which knows requests by their ids
        self.outputs_queue: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self.resources = SimpleNamespace(engine_dead=False)
        self.why_no_weights = "" if facts.config is not None else DEV_MODE
        is_cpu = str(facts.of_config("device_config", "device")) == "cpu"
        if is_cpu and (config.tie_word_embeddings or getattr(config, "num_experts", None)):
            self.why_no_weights = NOT_ON_CPU

    # ---- Requests

    async def get_supported_tasks_async(self) -> Any:
        return ("generate",)

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await self.outputs_queue.get()
        while not self.outputs_queue.empty():
            outputs.outputs.extend(self.outputs_queue.get_nowait().outputs)
        return outputs

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        name, params = request.request_id, request.sampling_params
        assert params is not None
        refused = {
            "lora_request": request.lora_request is not None,
            "images and sound": bool(request.mm_features),
            "prompt_logprobs": params.prompt_logprobs is not None,  # no stream has them
            "logprob_token_ids": params.logprob_token_ids is not None,  # nor these
        }
        if given := [what for what, is_given in refused.items() if is_given]:
            why = f"a server of others is not asked for {' and '.join(given)}"
            raise GenerationError(request.external_req_id or name, why)
        state = self.processor.request_states[name]
        state.num_cached_tokens = None  # which it does not say in a stream
        self._streams[name] = asyncio.create_task(self._stream(request, state))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for one in request_ids:
            if stream := self._streams.pop(one, None):
                stream.cancel()  # which has the server drop it

    def _body(self, request: EngineCoreRequest) -> dict[str, Any]:
        params: Any = request.sampling_params
        sent = msgspec.to_builtins(params)
        sent = {k: v for k, v in sent.items() if k not in _OWN_PARAMS and not k.startswith("_")}
        if structure := sent.get("structured_outputs"):
            sent["structured_outputs"] = {k: v for k, v in structure.items() if k[0] != "_"}
        sent["max_tokens"] = params.max_tokens  # or the server has a default of its own
        if params.logprobs:  # the sampled token counts as one of them
            sent["logprobs"] = params.logprobs + (params.logprobs > 0)
        return {
            "model": self._facts.model,
            "token_ids": request.prompt_token_ids,
            "sampling_params": sent,
            "cache_salt": request.cache_salt,
            "stream": True,
        }

    async def _stream(self, request: EngineCoreRequest, state: Any) -> None:
        begun = state.detokenizer.num_output_tokens()  # by another replica
        name, num = request.request_id, state.logprobs_processor.num_logprobs
        is_whole = False
        try:
            async with self._server.request(GENERATE, self._body(request)) as answer:
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    for choice in self._choices(line[6:]):
                        self._take(name, state, choice, num, begun)
                        is_whole |= choice.finish_reason is not None
            if not is_whole:
                self._lose("it ended an answer without a reason")
        except Exception as failure:  # noqa: BLE001  a result, too
            await self._fail(state, failure)
        finally:
            self._streams.pop(name, None)

    def _choices(self, event: bytes) -> list[_Choice]:
        if (chunk := _decode(event)).error is not None:
            raise self._server.error(_told(chunk.error))
        return chunk.choices

    async def _fail(self, state: Any, failure: Exception) -> None:
        """Ends a request, or all if the server is lost, which go on elsewhere then."""
        if isinstance(failure.__cause__, aiohttp.ClientError | TimeoutError):
            self._lose(str(failure))
            return
        try:
            await self._server.ask("/health")
        except ServerError as error:
            self._lose(str(error))
        state.queue.put(failure)  # to no avail if all have ended

    def _take(self, name: str, state: Any, choice: _Choice, num: int | None, begun: int) -> None:
        tokens = choice.logprobs and choice.logprobs.content
        if choice.weight_versions is not None:
            former = [one for one in state.weight_version_starts if one[1] < begun]
            now = [(one.version, begun + one.start) for one in choice.weight_versions]
            state.weight_version_starts[:] = former + now
        output = EngineCoreOutput(
            request_id=name,
            new_token_ids=choice.token_ids or [],
            new_logprobs=logprobs_of(tokens, num or 0) if tokens and num is not None else None,
            stop_reason=choice.stop_reason,
        )
        outputs = [output]
        if choice.finish_reason is not None:
            reason = FinishReason[choice.finish_reason.upper()]
            if isinstance(choice.stop_reason, str):
                # The stop is found here as well, which cuts the text; if not, this ends it.
                end = EngineCoreOutput(
                    name, [], finish_reason=reason, stop_reason=choice.stop_reason
                )
                outputs.append(end)
            else:
                output.finish_reason = reason
        self.outputs_queue.put_nowait(EngineCoreOutputs(outputs=outputs))

    # ---- Whether it is there, and what it does

    def begin(self, stats: ServerStats) -> None:
        self._watch = asyncio.create_task(self._look_again(stats))

    async def _look_again(self, stats: ServerStats) -> None:
        """Takes up figures, and notices a server that is another than it was."""
        while not self.resources.engine_dead:
            await asyncio.sleep(WATCH_S)
            try:
                with self._server.understood():
                    await self._look_once(stats)
            except ServerError as error:
                # Silence is noticed by whoever watches the engine.
                if isinstance(error.__cause__, aiohttp.ClientConnectorError):
                    self._lose(str(error))

    async def _look_once(self, stats: ServerStats) -> None:
        found, label = await self._server.figures(), self._label
        stats.read(found)
        if found.started_at != self._facts.figures.started_at:
            self._lose("it was started anew, and has the weights of its start")
        if self._facts.config is not None and label is not None:
            now = (await self._server.ask("/weight_info"))["weight_version"]
            if label == self._label != now:
                self._lose(f"others gave it the weights {now!r}")

    def _lose(self, reason: str) -> None:
        if not self.resources.engine_dead:
            self.resources.engine_dead = True
            self._on_loss(reason)

    def shutdown(self, timeout: float | None = None) -> None:  # noqa: ARG002
        """Lets go of the server, which lives on; from any thread."""

        async def end() -> None:
            for one in [*self._streams.values(), *filter(None, [self._watch])]:
                one.cancel()
            await self._server.close()

        if self._loop.is_running():
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(end()))

    # ---- Pauses and labels

    async def pause_scheduler_async(self, mode: Any = "abort", clear_cache: bool = True) -> None:
        self.require_weights()
        how = {"mode": mode, "clear_cache": str(clear_cache).lower()}
        self._is_paused = True  # also if this is given up on the way
        await self._server.ask("/pause", {}, params=how, limit_s=None)

    async def resume_scheduler_async(self) -> None:
        if self._is_paused:
            await self._server.ask("/resume", {})
            self._is_paused = False

    async def is_scheduler_paused_async(self) -> bool:
        return self._is_paused

    async def set_weight_version_async(self, weight_version: str) -> None:
        self._label = None
        await self._server.ask("/update_weight_version", {"new_version": weight_version})
        self._label = weight_version

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        how = {"reset_running_requests": reset_running_requests, "reset_external": reset_connector}
        how = {name: str(value).lower() for name, value in how.items()}
        return (await self._server.ask("/reset_prefix_cache", {}, params=how))["success"]

    async def sleep_async(self, *_: Any, **__: Any) -> None:
        raise self._server.error("a server of others is not put to sleep")

    # ---- What a replica has its workers do

    async def _call_utility_async(
        self, _: str, method: str, __: None, args: Any = (), kwargs: Any = None, **more: Any
    ) -> list[Any]:
        del more  # which engine: there is one
        match method:
            case "check_health" | "sync_staging_refusal":
                await self._server.ask("/health", limit_s=None)
                return [""]
            case "sync_describe":
                device = str(self._facts.of_config("device_config", "device", ""))
                return [("", device, "it is a server of others")]
            case "sync_load_snapshot":
                return [await self._reload(*args)]
            case "native_check":
                return [{"error": ""}]
            case "native_use":
                return [self._use(*args)]
            case "native_abandon":  # it is put together, with what came
                return [await self._native("native_finish") if self._is_open else {"error": ""}]
            case _ if method in NATIVE:
                return [await self._native(method, *args)]
            case _ if method.startswith(("sync_", "native_")):
                why = f"it has no workers of this library, which {method} is for"
                raise self._server.error(f"{why}: AsyncVLLM.launch starts engines that have")
            case _:
                asked = {"method": method, "args": list(args), "kwargs": kwargs or {}}
                return (await self._server.ask("/collective_rpc", asked, limit_s=None))["results"]

    async def _reload(self, data: str, metadata: list[list[Any]]) -> dict[str, Any]:
        """Has it load a checkpoint, which is beside the snapshots for as long as that takes."""
        directory = Path(data).parents[1]
        folder = directory.with_name(f"{directory.name}-{os.getpid()}")
        facts = {"path": "files", "path_reason": "a server of others reads checkpoints alone"}
        try:
            num = await asyncio.to_thread(write_checkpoint, Path(data), from_json(metadata), folder)
            asked = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            await self._server.ask("/collective_rpc", asked, limit_s=None)
        except ServerError as error:
            return {"error": str(error), **facts}
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return {"error": "", "num_tensors": num, **facts}

    def _use(self, backend: str | None) -> dict[str, Any]:
        own = self._facts.of_config("weight_transfer_config", "backend")
        if backend in (None, own):
            return {"error": ""}
        how = f'start it with --weight-transfer-config \'{{"backend": "{backend}"}}\''
        return _failure(self._server.error(f"its weight transfer engine is {own}: {how}"))

    async def _native(self, method: str, info: Any = None) -> dict[str, Any]:
        (path, field), touches = NATIVE[method], method in ("native_update", "native_finish")
        try:
            self.require_weights()
            await self._server.ask(path, {field: info} if field else {}, limit_s=None)
        except ServerError as error:
            return {**_failure(error), "untouched": not touches}
        self._is_open = method in ("native_start", "native_update")
        return {"error": "", "untouched": not touches}

    def require_weights(self) -> None:
        if self.why_no_weights:
            raise self._server.error(self.why_no_weights)


def _failure(error: ServerError) -> dict[str, Any]:
    return {"error": str(error), "error_type": "TransferError"}


def write_checkpoint(data: Path, metadata: Sequence[ParamMeta], folder: Path) -> int:
    """Writes a stored version as vLLM reads checkpoints; returns the number of tensors."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=data.parents[1].stat().st_mode & 0o777)
    stored, part, num_bytes, num_parts = open_tensordict(data, metadata), {}, 0, 0
    for meta in metadata:
        if part and num_bytes + meta.num_bytes > PART_BYTES:
            save_file(part, folder / f"model-{num_parts:05}.safetensors")
            part, num_bytes, num_parts = {}, 0, num_parts + 1
        part[meta.name] = stored.get(meta.name)
        num_bytes += meta.num_bytes
    save_file(part, folder / f"model-{num_parts:05}.safetensors")
    return len(metadata)


class ServerStats(internals.StatsRecorder):
    """What a server's metrics say of it; latencies are those that are seen here."""

    _counters: EngineCounters | None = None

    def read(self, found: Figures) -> None:
        usage = found["vllm:kv_cache_usage_perc"]
        if usage:  # else it has no such page
            running, waiting = (
                found.total(f"num_requests_{one}") for one in ("running", "waiting")
            )
            self._by_engine[0] = running, waiting, max(usage), time.monotonic()
            self._counters = EngineCounters(
                num_prompt_tokens=found.total("prompt_tokens_total"),
                num_generated_tokens=found.total("generation_tokens_total"),
                num_preempted=found.total("num_preemptions_total"),
                prefix_cache_queries=found.total("prefix_cache_queries_total"),
                prefix_cache_hits=found.total("prefix_cache_hits_total"),
            )

    def counters(self) -> Any:
        return self._counters


class LabelledSpans(SpanChecker):
    """Takes a server's spans: what is counted here lags behind by what is on its way."""

    def agreed(self, request_id: str, counted: Any, labelled: Any, num_tokens: int) -> Any:
        del request_id
        theirs = versions_of_labels(labelled, num_tokens)
        return counted if theirs is None else theirs


class ServerActor(EngineActor):
    """The actor of a replica that is a server of others."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._stats = ServerStats()
        self._answers.checker = LabelledSpans(self.replica_id)

    async def _launch(self) -> None:
        os.environ.update(self._environment)
        wanted = self._engine_args.additional_config[SERVERS]
        index, addresses = int(self.replica_id), wanted["addresses"]
        if index >= len(addresses):
            told = f"replicas must be the {len(addresses)} that are connected to: connect() to more"
            raise UnsupportedArgumentError(told)
        self._server = server = Server(addresses[index], os.environ.get("VLLM_API_KEY"))
        self._facts = facts = await self._look(server)
        if why := check_alike(facts, wanted):
            raise server.error(why)
        config = self._engine_args.create_engine_config(UsageContext.ENGINE_CONTEXT)
        model = config.model_config.hf_config
        self._core = ServerCore(server, facts, model, self._lost)
        self.engine = internals.engine_over(self._core, config, self._stats)
        self._core.processor = self.engine.output_processor
        with contextlib.suppress(ValueError):  # a label of others is no version
            self._gate.version = int(facts.label)
        await self._begin()
        self._core.begin(self._stats)
        if facts.is_paused:
            # Whoever updated it did not come to an end.
            await self.engine.resume_generation()
            self._updates.whole = False
            if not self._joins_later:
                self._updates.set_state(ReplicaState.STALE, "it was paused, as for an update")

    async def _look(self, server: Server) -> ServerFacts:
        """Waits for a server that is to return; the launch has a time limit."""
        while True:
            try:
                return await server.look()
            except ServerError as error:
                if not (self._joins_later and isinstance(error.__cause__, aiohttp.ClientError)):
                    raise
            await asyncio.sleep(WATCH_S)

    def _lost(self, reason: str) -> None:
        self._gate.set(ReplicaState.FAILED, f"server {self._server.address}: {reason}")

    async def load_snapshot(self, *args: Any, **options: Any) -> Any:
        self._core.require_weights()  # before it is paused for them
        return await _load_snapshot(self, *args, **options)

    async def admit(self, version: int, run_id: str | None) -> None:
        if self._updates.version > version:  # a number of others, for their weights
            self._updates.whole = False
        self._updates.admit(version, run_id)

    def describe(self) -> EngineDescription:
        facts, (size, num) = self._facts, (*self._facts.figures.blocks, (None, None))[0]
        own = super().describe()
        parallel = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
        return dataclasses.replace(
            own,
            device_type="server",  # its memory is nobody's to write to
            node_id=this_node() if is_here(self._server.address) else "",
            block_size=size or own.block_size,
            num_kv_blocks=num,
            vllm_version=facts.vllm_version,
            num_workers=math.prod(facts.of_config("parallel_config", one, 1) for one in parallel),
        )


_load_snapshot: Any = EngineActor.load_snapshot  # pyright: ignore[reportAttributeAccessIssue]


def is_here(address: str) -> bool:
    """Whether an address is this machine's own."""
    host = urlsplit(address).hostname or ""
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as one:
        try:
            one.bind(place)
        except OSError:
            return False
    return True
