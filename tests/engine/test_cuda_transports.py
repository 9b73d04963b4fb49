"""Transports that these engines cannot take part in: refused with the reason, never chosen."""

import pytest

from tests.engine.checks import assert_holds, perturbed
from torchrl_vllm_sync import MemmapTransport, P2PTransport, WeightUpdater
from torchrl_vllm_sync.errors import WeightSyncError
from torchrl_vllm_sync.weights.p2p.memory import this_node


def test_engines_that_cannot_be_written_to_are_named_and_go_on(service, model, other_model):
    service.push_weights(model)
    version = service.weight_version
    with pytest.raises(WeightSyncError, match=r"0: .*written to: vLLM's CPU .* repacks") as caught:
        service.push_weights(other_model, transport=P2PTransport())
    assert set(caught.value.failures) == {"0", "1"}
    assert service.weight_version == version
    assert_holds(service, model)
    service.use_transport(MemmapTransport())
    assert service.push_weights(other_model).version > version
    assert_holds(service, other_model)


def test_without_a_choice_it_is_memmap_on_one_node(service, model):
    updater = WeightUpdater(service, source=perturbed(model, seed=210))
    report = updater.push_weights()
    assert report.transport == "memmap"
    assert_holds(service, model)
    descriptions = service.replicas.call_replicas("describe").values()
    assert {one.node_id for one in descriptions} == {this_node()}
    assert {one.device_uuids for one in descriptions} == {()}
