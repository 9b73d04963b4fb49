"""Transports that need CUDA, on engines that have none: refused by name, never chosen."""

import pytest

from tests.engine.checks import assert_holds, perturbed
from torchrl_vllm_sync import IPCTransport, MemmapTransport, WeightUpdater
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.weights.places import this_node


def test_engines_on_a_cpu_are_refused_and_go_on(service, model):
    message = "needs trainer and engines on one CUDA device"
    service.push_weights(perturbed(model, seed=200))
    version = service.weight_version
    with pytest.raises(UnsupportedArgumentError, match=f"{message}.* the engines are on cpu"):
        service.push_weights(perturbed(model, seed=201), transport=IPCTransport())
    assert service.weight_version == version
    service.use_transport(MemmapTransport())
    assert service.push_weights(model).version == version + 1
    assert_holds(service, model)


def test_without_a_choice_it_is_memmap_on_one_node(service, model):
    updater = WeightUpdater(service, source=perturbed(model, seed=210))
    report = updater.push_weights()
    assert report.transport == "memmap"
    assert_holds(service, model)
    descriptions = service.replicas.call_replicas("describe").values()
    assert {one.node_id for one in descriptions} == {this_node()}
    assert {one.device_uuids for one in descriptions} == {()}
