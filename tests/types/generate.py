"""What ``generate`` returns, to a type checker: ``make lint`` checks this, and nothing runs it."""

# ruff: noqa: TC004  names are used, but never at run time
from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from vllm import RequestOutput, SamplingParams

    from torchrl_vllm_sync import AsyncVLLM
    from torchrl_vllm_sync.service.requests import ServedOutput


def generated(
    service: AsyncVLLM, params: SamplingParams, ids: torch.Tensor, flag: bool, anything: Any
) -> None:
    one: RequestOutput = service.generate("Hello", params, timeout_seconds=1.0)
    assert_type(one.outputs[0].text, str)
    assert_type(service.generate([1, 2]), ServedOutput)
    assert_type(service.generate(ids), ServedOutput)
    assert_type(service.generate({"prompt_token_ids": [1, 2]}), ServedOutput)
    output = service.generate("Hello", params, session_id="a", group_id=["b"], actor_index=0)
    assert_type((output.replica_id, output.min_version), tuple[str, int])
    assert_type(output.version_spans[0][0].version, int)
    assert_type(service.generate(prompt_token_ids=[1, 2]), ServedOutput)

    assert_type(service.generate(["Hello", [1, 2, 3]], params), list[ServedOutput])
    assert_type(service.generate(["Hello"], [params, params]), list[ServedOutput])
    assert_type(service.generate(("Hello", [1])), list[ServedOutput])
    assert_type(service.generate([[1, 2], [3]]), list[ServedOutput])
    assert_type(service.generate(prompt_token_ids=[[1, 2], [3]]), list[ServedOutput])
    errors = service.generate(["Hello"], return_exceptions=True)
    assert_type(errors, list[ServedOutput | Exception])
    either = service.generate(["Hello"], return_exceptions=flag)
    assert_type(either, list[ServedOutput | Exception])
    assert_type(service.generate("Hello", params, stream=True), Iterator[ServedOutput])
    assert_type(service.generate(anything), Any)

    service.generate(1.5)  # pyright: ignore[reportCallIssue, reportArgumentType]
    service.generate("Hello", timeout_s=1)  # pyright: ignore[reportCallIssue]


async def generated_with_asyncio(service: AsyncVLLM, params: SamplingParams) -> None:
    assert_type(await service.agenerate("Hello", params), ServedOutput)
    assert_type(await service.agenerate(["Hello"], params), list[ServedOutput])
    errors = await service.agenerate([[1, 2]], return_exceptions=True)
    assert_type(errors, list[ServedOutput | Exception])
    async for output in service.astream("Hello", params):
        assert_type(output, ServedOutput)
