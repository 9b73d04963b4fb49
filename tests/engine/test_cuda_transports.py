"""Transports that need CUDA, on engines that have none: refused by name, and nothing changes."""

import pytest

from tests.engine.checks import assert_holds, perturbed
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.weights.memmap_transport import MemmapTransport
from torchrl_vllm_sync.weights.vllm_nccl_transport import VLLMNCCLTransport

TRANSPORTS = {"vllm-nccl": (VLLMNCCLTransport, "needs NCCL between CUDA devices")}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_engines_on_a_cpu_are_refused_and_go_on(service, model, name):
    kind, message = TRANSPORTS[name]
    service.push_weights(perturbed(model, seed=200))
    version = service.weight_version
    with pytest.raises(UnsupportedArgumentError, match=f"{message}.* the engines are on cpu"):
        service.push_weights(perturbed(model, seed=201), transport=kind())
    assert service.weight_version == version
    service.use_transport(MemmapTransport())
    assert service.push_weights(model).version == version + 1
    assert_holds(service, model)
