"""The service as vLLM's serving classes see an engine, and the application that they make of it."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync import errors

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import AsyncGenerator, Mapping

    from fastapi import FastAPI

# All that is mounted: whatever else vLLM has, such as pages that scale, abort or profile, is not.
PATHS = frozenset(
    {
        "/health",
        "/version",
        "/tokenize",
        "/detokenize",
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/inference/v1/generate",
    }
)
_OF_PROMPT = ("prompt_token_ids", "prompt", "cache_salt")


@dataclass(slots=True)
class Asked:
    """One HTTP request: what its headers say, and which policy versions have answered it."""

    group_id: str | None = None
    versions: set[int] = field(default_factory=set)

    def note(self, output: Any) -> Any:
        self.versions.update(one.version for spans in output.version_spans for one in spans)
        return output


ASKED: ContextVar[Asked] = ContextVar("ASKED")


class ServiceClient:
    """What vLLM's serving classes use of its ``EngineClient``, over all replicas of a service."""

    errored = False  # replicas die and return; what none of them takes is answered by 503

    def __init__(self, service: Any, config: Any) -> None:
        from vllm.v1.engine.input_processor import InputProcessor

        self._service, self.vllm_config, self.model_config = service, config, config.model_config
        self.input_processor = InputProcessor(config)
        self.renderer = self.input_processor.renderer

    async def generate(
        self,
        prompt: Mapping[str, Any],
        sampling_params: Any,
        request_id: str,  # noqa: ARG002  the service has ids of its own
        *,
        lora_request: Any = None,
        session_id: str | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        kv_hints: Any = None,
        **_: Any,
    ) -> AsyncGenerator[Any]:
        """Yields outputs as an engine does; a replica that dies meanwhile is another's turn."""
        from vllm.sampling_params import RequestOutputKind

        if prompt.get("type") != "token":
            raise NotImplementedError("prompts must be text or token ids")
        if priority or data_parallel_rank is not None or kv_hints is not None:
            raise NotImplementedError("priority, data-parallel rank and KV hints are not supported")
        config = self.vllm_config
        sampling_params.verify(
            self.model_config,
            config.speculative_config,
            config.structured_outputs_config,
            self.input_processor.tokenizer,
        )
        asked = ASKED.get()
        one = {name: prompt[name] for name in _OF_PROMPT if name in prompt}
        options = {"lora_request": lora_request, "session_id": session_id}
        options["group_id"] = asked.group_id
        try:
            if sampling_params.output_kind is RequestOutputKind.FINAL_ONLY:
                output = await self._service.agenerate(one, sampling_params, **options)
                yield asked.note(output)
                return
            outputs = self._service.astream(one, sampling_params, **options)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield asked.note(output)
        except errors.SyncError as error:
            raise _as_http(error) from error

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Admits everything: the service queues."""

    async def check_health(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        if not any(one.state.admits_requests for one in self._service.load.snapshots()):
            raise EngineDeadError

    async def add_lora(self, lora_request: Any) -> bool:  # noqa: ARG002
        """Leaves it to each engine, which loads an adapter with the first request for it."""
        return True

    async def is_tracing_enabled(self) -> bool:
        return False


def _as_http(error: errors.SyncError) -> Exception:
    """The error of vLLM's that has the right status; a caller's fault and an engine's have it."""
    from vllm.exceptions import GracefulHTTPError

    if isinstance(error, errors.GenerationTimeoutError):
        return GracefulHTTPError(str(error), HTTPStatus.GATEWAY_TIMEOUT)
    if isinstance(error, ValueError) or type(error) is errors.GenerationError:
        return error
    return GracefulHTTPError(str(error), HTTPStatus.SERVICE_UNAVAILABLE)


def serving_args(engine_args: Any, options: Mapping[str, Any]) -> Namespace:
    """The arguments of ``vllm serve``; refuses options that are none, and a vLLM without them."""
    import vllm

    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state  # noqa: F401
        from vllm.entrypoints.launchers.app import build_app  # noqa: F401
        from vllm.entrypoints.launchers.cli_args import BaseFrontendArgs, make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise errors.UnsupportedArgumentError(
            f"serve needs the serving classes of vLLM 0.32, and {vllm.__version__} has others: "
            f"{error}"
        ) from error
    try:
        given = vars(BaseFrontendArgs(**options))
    except (TypeError, ValueError) as error:
        raise errors.UnsupportedArgumentError(f"options are not vLLM's: {error}") from error
    args: Any = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    vars(args).update(given)
    names = engine_args.served_model_name or engine_args.model
    args.model, args.served_model_name = engine_args.model, names
    if isinstance(names, str):
        args.served_model_name = [names]
    args.allowed_origins = []  # pages of other sites must not ask through their visitors' browsers
    args.disable_fastapi_docs = args.enable_scale_out = True
    return args


async def make_app(service: Any, args: Namespace) -> FastAPI:
    """vLLM's application over a service, with the paths above and no others."""
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app

    config = service.requests.engine_config()
    args.structured_outputs_config = config.structured_outputs_config
    try:
        client: Any = ServiceClient(service, config)
        app = build_app(args, ("generate",), config.model_config)
        await init_app_state(client, app.state, args, ("generate",))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise errors.UnsupportedArgumentError(f"vLLM cannot serve this: {error!r}") from error
    app.router.routes[:] = [one for one in app.routes if getattr(one, "path", None) in PATHS]
    return app
