"""Collector, service and samples say one version after every way of pushing, never two."""

import logging
import pickle

import pytest
import ray
from tensordict import TensorDict, set_list_to_stack
from torchrl.weight_update.llm import get_model_metadata

from tests.engine.checks import perturbed
from tests.engine.rollouts import QUIET, agree, llm_collector, ray_collector, scheme_collector
from tests.engine.test_native_calls import Trainer
from torchrl_vllm_sync import (
    VLLMDoubleBufferSyncScheme,
    VLLMWeightSyncScheme,
    WeightUpdater,
    vLLMWrapper,
)
from torchrl_vllm_sync.errors import WeightMismatchError

pytestmark = QUIET


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


def connected(scheme, service, model):
    """A sender as the GRPO scripts set it up."""
    sender = scheme.create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model), vllm_engine=service)
    return sender


def each_way(service, model, collector, second, tmp_path):
    """Every way of pushing that TorchRL or this library offers, by name, and who owns it."""
    updater = WeightUpdater(service, source=model)
    schemes = (VLLMWeightSyncScheme(num_replicas=2), VLLMDoubleBufferSyncScheme(tmp_path))
    senders = [connected(scheme, service, model) for scheme in schemes]
    for one in (collector, second):
        updater.register_collector(one)
        for sender in senders:
            sender.register_collector(one)
    receiver = schemes[0].create_receiver(service)
    receiver.register_collector(collector)
    receiver.register_collector(second)
    collector.weight_updater = updater
    yield "updater.push_weights", updater.push_weights
    yield "updater()", updater
    yield "update_policy_weights_", lambda: collector.update_policy_weights_(model)
    yield "with nothing", collector.update_policy_weights_
    weights = TensorDict.from_module(model).data
    yield "weights=", lambda: collector.update_policy_weights_(weights=weights)
    for name, sender in zip(("broadcast sender", "memmap sender"), senders, strict=True):
        yield name, sender.update_weights
        yield f"{name} with weights", lambda sender=sender: sender.update_weights(weights)
    yield "receiver.apply_weights", lambda: receiver.apply_weights(model)
    yield "service.push_weights", lambda: service.push_weights(model)
    yield "service.update_weights", lambda: service.update_weights(model.state_dict().items())
    for sender in senders:
        sender.shutdown()


def test_every_way_of_pushing_is_one_version(service, model, tmp_path):
    collector, second = llm_collector(service), llm_collector(service)
    ways = each_way(service, model, collector, second, tmp_path)
    for name, push in ways:
        before = service.weight_version
        perturbed(model, seed=1)
        push()
        assert service.weight_version == before + 1, name
        assert agree(service, collector, second, sampled=False) == before + 1, name
    assert agree(service, collector, second) == service.weight_version
    for one in (collector, second):
        one.shutdown()


def test_vllms_own_calls_count_when_they_carry_a_version(service, model):
    collector, trainer = llm_collector(service), Trainer(service)
    updater = WeightUpdater(service)
    updater.register_collector(collector)
    before = service.weight_version
    try:
        trainer.meet()
        trainer.update(perturbed(model, seed=2), str(before + 1))
        assert agree(service, collector) == before + 1
        trainer.update(perturbed(model, seed=3))  # no version: nothing moves
        assert agree(service, collector) == before + 1
    finally:
        service.shutdown_weight_transfer_engine()
        trainer.close()
    updater.push_weights(model)
    assert agree(service, collector) == before + 2
    collector.shutdown()


def test_schemes_of_several_collectors(service, model):
    """Each collector has a scheme of its own, and hears of the other's pushes too."""
    schemes = [VLLMWeightSyncScheme(num_replicas=2, transport="memmap") for _ in range(2)]
    collectors = [scheme_collector(service, scheme) for scheme in schemes]
    for scheme, other in zip(schemes, reversed(collectors), strict=True):
        scheme.create_sender().register_collector(other)
        scheme.create_sender().register_model(model)
    before = agree(service, *collectors)
    for step, push in enumerate(
        [
            collectors[0].update_policy_weights_,
            collectors[1].update_policy_weights_,
            schemes[0].send,
            schemes[1].create_sender().update_weights,
            lambda: collectors[1].update_policy_weights_(model),
        ]
    ):
        push()
        assert agree(service, *collectors, sampled=False) == before + step + 1
    agree(service, *collectors)
    for scheme, collector in zip(schemes, collectors, strict=True):
        collector.shutdown()
        scheme.shutdown()


def test_a_collector_begins_with_the_services_version(service, model):
    updater = WeightUpdater(service, source=model)
    updater.push_weights()
    collector = llm_collector(service, weight_updater=updater)
    assert agree(service, collector) == service.weight_version > 0
    batch = next(iter(collector))
    assert set(batch["next", "policy_version"].flatten().tolist()) == {service.weight_version}
    collector.shutdown()


def test_users_hooks_and_counting_by_hand_do_not_make_it_twice(service, model):
    updater = WeightUpdater(service, source=model)
    collector = llm_collector(service, weight_updater=updater)
    heard = []
    updater.register_post_hook(collector.increment_version)
    updater.register_post_hook(updater.increment_version)
    updater.register_post_hook(lambda: heard.append(collector.policy_version))
    before = service.weight_version
    updater.push_weights()
    collector.update_policy_weights_(model)
    collector.increment_version()
    assert agree(service, collector) == before + 2
    assert heard == [before + 1, before + 2]
    collector.shutdown()


def test_a_collector_that_is_not_registered_counts_twice_by_the_same_calls(service, model):
    """What the test above would see if nothing kept the version."""
    updater = WeightUpdater(service, source=model)
    collector = llm_collector(service)
    updater.register_post_hook(collector.increment_version)
    updater.push_weights()
    collector.increment_version()
    assert collector.policy_version == 2
    assert collector.policy_version != service.weight_version
    collector.shutdown()


def test_pickled_updaters_and_schemes_count_on(service, model, tmp_path):
    collector = llm_collector(service)
    updater = pickle.loads(pickle.dumps(WeightUpdater(service, source=model)))
    updater.register_collector(collector)
    updater.push_weights(model)
    assert collector.policy_version == updater.service.weight_version
    service.wait_for_version(collector.policy_version, timeout_s=10)
    for scheme in (VLLMWeightSyncScheme(num_replicas=2), VLLMDoubleBufferSyncScheme(tmp_path)):
        copy = pickle.loads(pickle.dumps(scheme))
        sender = connected(copy, service, model)
        sender.register_collector(collector)
        before = service.weight_version
        sender.update_weights()
        assert agree(service, collector) == before + 1
        copy.shutdown()
    updater.service._let_go()
    collector.shutdown()


def test_a_push_that_failed_leaves_every_version(service, model):
    scheme = VLLMWeightSyncScheme(num_replicas=2)
    collector = scheme_collector(service, scheme)
    before = agree(service, collector)
    bad = {name: tensor for name, tensor in model.state_dict().items() if "down_proj" not in name}
    for push in (
        lambda: collector.update_policy_weights_(bad),
        lambda: scheme.send(bad),
        lambda: scheme.create_sender().update_weights(bad),
        lambda: service.push_weights(bad),
    ):
        with pytest.raises(WeightMismatchError):
            push()
        assert agree(service, collector, sampled=False) == before
    collector.update_policy_weights_(model)
    assert agree(service, collector) == before + 1
    collector.shutdown()
    scheme.shutdown()


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_collectors_in_actors_follow_and_may_die(service, model, caplog):
    updater = WeightUpdater(service, source=model)
    updater.push_weights()
    collectors = [ray_collector(service), ray_collector(service, weight_updater=updater)]
    assert agree(service, collectors[1], sampled=False) > 0  # from the beginning
    scheme = VLLMWeightSyncScheme(num_replicas=2)
    sender = connected(scheme, service, model)
    for one in collectors:
        updater.register_collector(one)
        sender.register_collector(one)
    updater.register_post_hook(collectors[0].increment_version)
    before = agree(service, *collectors)
    updater.push_weights()
    sender.update_weights()
    collectors[1].increment_version()
    assert agree(service, *collectors, sampled=False) == before + 2
    collectors[0].weight_updater = updater  # a copy of it goes to the actor
    collectors[0].update_policy_weights_(model.state_dict())
    assert collectors[0].policy_version == before + 3
    updater.push_weights()
    assert agree(service, *collectors) == before + 4

    ray.kill(collectors[1]._collector)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        updater.push_weights()
    assert [one.message for one in caplog.records if "died" in one.message]
    assert agree(service, collectors[0]) == before + 5
    assert updater.collectors == [collectors[0]]
    caplog.clear()
    updater.push_weights()
    assert not [one for one in caplog.records if "died" in one.message]
    scheme.shutdown()
    collectors[0].shutdown()


def test_the_wrapper_is_this_librarys(service):
    """Stamps come from the engines, not from the collector that is compared with them."""
    collector = llm_collector(service)
    assert type(collector.policy) is vLLMWrapper
    service_version = service.weight_version
    collector.policy_version_tracker.version = service_version + 100
    assert set(next(iter(collector))["policy_version"].flatten().tolist()) == {service_version}
    collector.shutdown()
