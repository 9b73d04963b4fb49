"""The service as vLLM's serving classes see an engine, and the application that they make of it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from http import HTTPStatus
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync import errors
from torchrl_vllm_sync.serve.sessions import ASKED, Recording, Sessions

if TYPE_CHECKING:
    from fastapi import FastAPI


# All that is mounted: what else vLLM has, such as routes that scale, abort or profile, is not.
_INFRA = {"/health", "/version", "/tokenize", "/detokenize", "/v1/models"}
PATHS = _INFRA | {"/v1/completions", "/v1/chat/completions", "/inference/v1/generate"}
_ASKED_FOR = {  # by options of their own
    "/load": "enable_server_load_tracking",
    "/tokenizer_info": "enable_tokenizer_info_endpoint",
}
_OF_PROMPT = ("prompt_token_ids", "prompt", "cache_salt")
_REFUSED = ("lora_request", "priority", "kv_hints")
MAX_KEY = 256  # characters of a session's or a group's name


class ServiceClient:
    """What vLLM's serving classes use of its ``EngineClient``, over all replicas of a service."""

    errored = False  # replicas die and return; what none of them takes is answered by 503

    def __init__(self, service: Any, config: Any, sessions: Sessions | None) -> None:
        from vllm.v1.engine.input_processor import InputProcessor

        from torchrl_vllm_sync.engine.internals import check_lengths

        self._service, self._sessions = service, sessions
        self.vllm_config, self.model_config = config, config.model_config
        self.input_processor = InputProcessor(config)
        self.renderer, self._check_lengths = self.input_processor.renderer, check_lengths

    async def generate(
        self, prompt: Any, params: Any, name: str, *, session_id: str | None = None, **more: Any
    ) -> AsyncGenerator[Any]:
        """Yields outputs as an engine does; what a replica loses is gone on with by another."""
        is_other = prompt.get("type") != "token" or more.get("data_parallel_rank") is not None
        if is_other or any(more.get(name) for name in _REFUSED):
            told = "text and token ids alone are supported, without adapters, priorities and hints"
            raise NotImplementedError(told)
        if params.structured_outputs and more.get("reasoning_ended"):
            raise NotImplementedError("structured output needs reasoning to be parsed here")
        asked = ASKED.get()
        session_id, group_id = asked.session_id or session_id, asked.group_id
        if too_long := [one for one in (session_id, group_id) if one and len(one) > MAX_KEY]:
            told = f"must have at most {MAX_KEY} characters, got {len(too_long[0])}"
            raise ValueError(f"names of sessions and groups {told}")
        one = {name: prompt[name] for name in _OF_PROMPT if name in prompt}
        recording, given = None, params
        if self._sessions is not None and asked.session_id is not None:
            if asked.is_search:
                raise NotImplementedError("what beams hold was not sampled: no session keeps it")
            if asked.is_cut:
                told = "a session's turn begins with all of the turn before: no prompt is truncated"
                raise NotImplementedError(told)
            recording = Recording(self._sessions, asked, one, params)
            one["prompt_token_ids"], given = recording.prompt_ids, recording.params
        keys = {"session_id": session_id, "group_id": group_id}
        try:
            # Not by ``astream``, whose thread for prompts of text would cost those of tokens time.
            batch = self._service.requests.prepare(one, given, None, **keys, stream=True)
            async with contextlib.aclosing(self._service.requests.stream(batch)) as outputs:
                async for output in outputs:
                    spans = (one for some in output.version_spans for one in some)
                    asked.versions.update(one.version for one in spans)
                    if recording is not None:
                        recording.add(output)
                        if output.finished:  # before its client can know, and go on or give up
                            recording.end()
                    yield output
        except errors.SyncError as error:
            # What vLLM refuses is refused as vLLM does it, as what is wrong with the request.
            processed = self.input_processor.process_inputs(name, prompt, params, ("generate",))
            self._check_lengths(processed)
            if (other := _as_http(error)) is error:
                raise
            raise other from error

    def check_admission(self, *_: Any) -> None: ...  # the service queues

    async def check_health(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        if not any(one.state.admits_requests for one in self._service.load.snapshots()):
            raise EngineDeadError

    async def is_tracing_enabled(self) -> bool:
        return False


def _as_http(error: errors.SyncError) -> Exception:
    """The error of vLLM's that has the right status; a caller's fault and an engine's have it."""
    if isinstance(error, ValueError) or type(error) is errors.GenerationError:
        return error
    status = HTTPStatus(504 if isinstance(error, errors.GenerationTimeoutError) else 503)
    try:
        from vllm.exceptions import GracefulHTTPError
    except ImportError:  # vLLM 0.26
        protocol = import_module("vllm.entrypoints.openai.engine.protocol")
        other = protocol.GenerationError(str(error))
        other.status_code = status
        return other
    return GracefulHTTPError(str(error), status)


@contextlib.contextmanager
def _by_vllm() -> Iterator[None]:
    """Has what vLLM does not know, or does not take, be our refusal."""
    import vllm
    from vllm.exceptions import VLLMValidationError

    level, refused = logging.root.level, (KeyError, TypeError, ValueError, VLLMValidationError)
    try:
        yield
    except (ImportError, AttributeError, *refused) as error:
        told = f"vLLM {vllm.__version__} cannot serve this, as 0.26 and 0.32 serve: {error!r}"
        raise errors.UnsupportedArgumentError(told) from error
    finally:  # model_hosting_container_standards has raised it, for all of the process
        logging.root.setLevel(level)


def _parts_of_vllm() -> tuple[Any, Callable[[Any], None], Callable[..., Any], Callable[..., Any]]:
    """``cli_args``, ``validate_api_server_args``, ``build_app`` and ``init_app_state``."""
    try:
        from vllm.entrypoints.launchers import cli_args, launcher
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:  # vLLM 0.26
        launcher: Any = import_module("vllm.entrypoints.openai.api_server")
        cli_args = import_module("vllm.entrypoints.openai.cli_args")
        build_app, init_app_state = launcher.build_app, launcher.init_app_state
    return cli_args, launcher.validate_api_server_args, build_app, init_app_state


def server_args(options: Mapping[str, Any]) -> Any:
    """vLLM's arguments of a server with these options, which ``vllm serve`` checks as well."""
    with _by_vllm():
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        cli_args, validate, *_ = _parts_of_vllm()
        args: Any = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args([])
        known = {one.name for one in dataclasses.fields(cli_args.BaseFrontendArgs)}
        if unknown := sorted(options.keys() - known):
            raise errors.UnsupportedArgumentError(
                f"no options of vLLM's server: {unknown}; an engine takes its own as it is launched"
            )
        vars(args).update(vars(cli_args.BaseFrontendArgs(**options)))
        cli_args.validate_parsed_serve_args(args)
        validate(args)
        return args


async def make_app(
    service: Any, api_key: str | None, options: Mapping[str, Any], sessions: Sessions | None
) -> FastAPI:
    """vLLM's application over a service, with the paths above and no others."""
    args = server_args(options)
    engine_args, config = service.engine_args, service.requests.fetch("get_config")
    if sessions is not None:  # what a client does not say is not to be what a loss cannot correct
        config.model_config.generation_config = "vllm"
    args.model, args.api_key = engine_args.model, [api_key]
    names = engine_args.served_model_name or engine_args.model
    args.served_model_name = [names] if isinstance(names, str) else names
    app = await app_over(ServiceClient(service, config, sessions), config, args)
    # vLLM's own routes do not tell: those of one application are also in later ones of the process.
    paths = PATHS | {path for path, option in _ASKED_FOR.items() if getattr(args, option)}
    app.router.routes[:] = [one for one in app.routes if getattr(one, "path", None) in paths]
    return app


async def app_over(client: Any, config: Any, args: Any) -> FastAPI:
    """vLLM's application over an engine, or what stands for one."""
    with _by_vllm():
        *_, build_app, init_app_state = _parts_of_vllm()
        args.structured_outputs_config = config.structured_outputs_config
        args.allowed_origins = []  # other sites' pages must not ask through a visitor's browser
        args.enable_scale_out = True
        app = build_app(args, ("generate",), config.model_config)
        await init_app_state(client, app.state, args, ("generate",))
    return app
