"""The weight sync schemes: in a TorchRL collector, and as the GRPO scripts call them."""

import gc
import math
import pickle

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack
from torchrl.collectors.llm import LLMCollector
from torchrl.modules.llm import TransformersWrapper
from torchrl.weight_update import WeightSyncScheme as TorchRLScheme
from torchrl.weight_update.llm import get_model_metadata

from tests.engine.checks import assert_holds, distance, perturbed
from tests.engine.rollouts import (
    QUIET,
    TOKENIZER,
    agree,
    llm_collector,
    make_env,
    make_policy,
    scheme_collector,
)
from torchrl_vllm_sync import (
    VLLMDoubleBufferSyncScheme,
    VLLMWeightSyncScheme,
    WeightSyncScheme,
)
from torchrl_vllm_sync.errors import (
    NonFiniteWeightsError,
    StaleVersionError,
    TransferNotReadyError,
    UnsupportedArgumentError,
    WeightMismatchError,
)

pytestmark = QUIET


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


@pytest.fixture(params=["broadcast", "memmap"])
def scheme(request, service, tmp_path):
    """Both schemes, not connected."""
    if request.param == "broadcast":
        made = VLLMWeightSyncScheme(num_replicas=2, transport="broadcast", timeout_s=60)
    else:
        made = VLLMDoubleBufferSyncScheme(tmp_path, timeout_s=60)
    yield made
    made.shutdown()


@pytest.fixture
def sender(scheme, service, model):
    """A sender as the GRPO scripts set it up."""
    sender = scheme.create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model), vllm_engine=service)
    return sender


# ---------------------------------------------------------------- TorchRL's scripts


def test_the_name_that_grpo_scripts_import():
    assert WeightSyncScheme is VLLMWeightSyncScheme
    assert issubclass(VLLMDoubleBufferSyncScheme, TorchRLScheme)


def test_the_sender_pushes_the_registered_model(service, sender, model, other_model):
    before = service.weight_version
    perturbed(model, seed=1)
    report = sender.update_weights()
    assert report.version == service.weight_version == before + 1
    assert_holds(service, model)
    sender.update_weights(other_model)
    assert_holds(service, other_model)
    assert min(distance(service, model, index) for index in range(2)) > 0.05
    sender.update_weights(TensorDict.from_module(model).data, version=before + 7)
    assert service.weight_version == before + 7
    assert_holds(service, model)


def test_a_wrapped_model_pushes_the_same(service, scheme, model):
    policy = TransformersWrapper(
        perturbed(model, seed=2), tokenizer=TOKENIZER, input_mode="tokens", generate=False
    )
    sender = scheme.create_sender()
    sender.register_model(policy)
    sender.init_all_workers_group(get_model_metadata(policy.model), vllm_engine=service)
    sender.update_weights()
    assert_holds(service, model)


def test_addresses_of_the_service_are_taken(service, model):
    """As ``make_weight_sync_scheme`` of the GRPO scripts makes it."""
    scheme = VLLMWeightSyncScheme(
        master_address=service.get_master_address(),
        master_port=service.get_master_port(),
        gpus_per_replica=service.get_tp_size(),
        num_replicas=getattr(service, "num_replicas", 1),
        strategy="state_dict",
    )
    sender = scheme.create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(get_model_metadata(model), vllm_engine=service)
    sender.update_weights()
    assert_holds(service, model)
    sender.shutdown()
    sender.shutdown()


def test_calls_out_of_turn_are_refused(service, scheme, model):
    before = service.weight_version
    sender = scheme.create_sender()
    metadata = get_model_metadata(model)
    if isinstance(scheme, VLLMWeightSyncScheme):
        with pytest.raises(TransferNotReadyError, match="not connected: call init_all_workers"):
            sender.update_weights(model)
    with pytest.raises(TransferNotReadyError, match="scheme is not connected"):
        scheme.send(model)
    sender.init_all_workers_group(metadata, vllm_engine=service)
    with pytest.raises(UnsupportedArgumentError, match="connected already"):
        sender.init_all_workers_group(metadata, vllm_engine=service)
    with pytest.raises(TransferNotReadyError, match="no model was registered"):
        sender.update_weights()
    gone = torch.nn.Linear(1, 1)
    sender.register_model(gone)
    with pytest.raises(UnsupportedArgumentError, match="another Linear is registered already"):
        sender.register_model(model)
    del gone
    gc.collect()
    with pytest.raises(TransferNotReadyError, match="the model is gone"):
        sender.update_weights()
    sender.register_model(model)
    sender.register_model(model)
    sender.update_weights()
    with pytest.raises(StaleVersionError):
        sender.update_weights(version=before)
    assert service.weight_version == before + 1
    sender.shutdown()
    sender.init_all_workers_group(metadata, vllm_engine=service)
    sender.update_weights()
    assert service.weight_version == before + 2
    assert_holds(service, model)


def test_names_are_compared_before_anything_is_sent(service, scheme, model, other_model):
    before = service.weight_version
    sender = scheme.create_sender()
    metadata = get_model_metadata(model)
    name = "model.layers.0.mlp.down_proj.weight"
    missing = {key: value for key, value in metadata.items() if key != name}
    with pytest.raises(WeightMismatchError, match=f"1 missing: {name}"):
        sender.init_all_workers_group(missing, vllm_engine=service)
    with pytest.raises(WeightMismatchError, match="1 of another shape"):
        sender.init_all_workers_group(
            {**metadata, name: (torch.float32, torch.Size([3]))}, vllm_engine=service
        )
    nested = {tuple(key.split(".")): value for key, value in metadata.items()}
    sender.init_all_workers_group(nested, vllm_engine=service)
    with pytest.raises(WeightMismatchError, match="missing"):
        sender.update_weights({name: model.state_dict()[name]})
    assert service.weight_version == before
    sender.update_weights(other_model)
    assert service.weight_version == before + 1


def test_what_cannot_be_honoured_is_refused(service, model, tmp_path):
    metadata = get_model_metadata(model)
    for scheme, complaint in (
        (VLLMWeightSyncScheme(), "num_replicas must be 2, as the service has, got 1"),
        (VLLMWeightSyncScheme(num_replicas=2, gpus_per_replica=4), "gpus_per_replica must be 1"),
        (VLLMDoubleBufferSyncScheme(tmp_path, "/elsewhere"), "local_addr must be remote_addr"),
    ):
        with pytest.raises(UnsupportedArgumentError, match=complaint):
            scheme.create_sender().init_all_workers_group(metadata, vllm_engine=service)
    with pytest.raises(UnsupportedArgumentError, match=r"vllm_engine must be .*, got Qwen2"):
        VLLMWeightSyncScheme().create_sender().init_all_workers_group(metadata, model)
    for arguments, complaint in (
        ({"strategy": "pickle"}, "strategy must be 'tensordict' or 'state_dict', got 'pickle'"),
        ({"transport": "pigeon"}, "transport must be one of"),
        ({"transport": 3}, "transport must be a WeightTransport, got 3"),
        ({"device": "cpu", "transport": "memmap"}, "device 'cpu' is for broadcasts only"),
        ({"device": "nowhere"}, "device must be one, got 'nowhere'"),
    ):
        with pytest.raises(UnsupportedArgumentError, match=complaint):
            VLLMWeightSyncScheme(**arguments)
    with pytest.raises(UnsupportedArgumentError, match="strategy"):
        VLLMDoubleBufferSyncScheme(tmp_path, strategy="pickle")
    with pytest.raises(UnsupportedArgumentError, match="num_threads must be at least 1, got 0"):
        VLLMDoubleBufferSyncScheme(tmp_path, num_threads=0)
    with pytest.raises(UnsupportedArgumentError, match=r"layout must be one of .*, got 'heap'"):
        VLLMDoubleBufferSyncScheme(tmp_path, layout="heap")
    for address in (3, None, ""):
        with pytest.raises(UnsupportedArgumentError, match="remote_addr must be the path"):
            VLLMDoubleBufferSyncScheme(address)
    sender = VLLMDoubleBufferSyncScheme(tmp_path).create_sender()
    for given in (dict(model.state_dict()), 3, None):
        with pytest.raises(UnsupportedArgumentError, match="model must be a module"):
            sender.register_model(given)
    for version in (True, "3", 1.5, -1):
        with pytest.raises(UnsupportedArgumentError, match="version must be a policy version"):
            sender.update_weights(model, version=version)
    assert not any(tmp_path.iterdir())


# ---------------------------------------------------------------- receivers


def test_a_receiver_says_once_that_a_push_arrived(service, model):
    scheme = VLLMWeightSyncScheme(num_replicas=2)
    receiver = scheme.create_receiver(service)
    receiver.init_all_workers_group(get_model_metadata(model))
    assert not receiver.poll_and_apply(timeout=0)
    service.push_weights(model)
    assert receiver.poll_and_apply()
    assert not receiver.poll_and_apply()
    report = receiver.apply_weights(perturbed(model, seed=3))
    assert report.version == service.weight_version
    assert_holds(service, model)
    assert not receiver.poll_and_apply()
    with pytest.raises(UnsupportedArgumentError, match="inplace must be True"):
        receiver.apply_weights(model, inplace=False)


def test_a_directory_is_loaded_once_for_each_version(service, model, tmp_path):
    """A sender that knows no service stores; whoever has the service polls."""
    writing = VLLMDoubleBufferSyncScheme(tmp_path / "weights")
    sender = writing.create_sender()
    sender.register_model(perturbed(model, seed=4))
    receiver = pickle.loads(pickle.dumps(writing)).create_receiver(service)
    assert not receiver.poll_and_apply()
    before = service.weight_version
    sender.update_weights(version=before + 1)
    assert distance(service, model, 0) > 0.05
    assert receiver.poll_and_apply()
    assert service.weight_version == before + 1
    assert_holds(service, model)
    assert not receiver.poll_and_apply()
    perturbed(model, seed=5)
    sender.update_weights()
    sender.update_weights()
    assert receiver.poll_and_apply()
    assert not receiver.poll_and_apply()
    assert service.weight_version == before + 3
    assert_holds(service, model)
    with pytest.raises(StaleVersionError):
        sender.update_weights(version=before)
    with pytest.raises(NonFiniteWeightsError):
        sender.update_weights({name: one * math.nan for name, one in model.state_dict().items()})
    assert not receiver.poll_and_apply()
    with pytest.raises(TransferNotReadyError, match="register the collector with the receiver"):
        sender.register_collector(object())
    sender.shutdown()


def test_stored_weights_of_another_model_leave_the_engines_as_they_were(service, model, tmp_path):
    """The sender that stored them knows no service, so that only the replicas can tell."""
    service.push_weights(perturbed(model, seed=6))
    before = service.weight_version
    scheme = VLLMDoubleBufferSyncScheme(tmp_path / "weights")
    sender, receiver = scheme.create_sender(), scheme.create_receiver(service)
    state = dict(model.state_dict())
    name, stored = "model.norm.weight", before
    for weights, complaint in (
        ({"policy": torch.ones(2)}, "model.embed_tokens.weight is missing; .* and 45 more"),
        ({**state, name: torch.ones(3)}, f"{name} has shape \\[3\\] instead of"),
    ):
        stored += 1
        sender.update_weights(weights, version=stored)
        with pytest.raises(WeightMismatchError, match=complaint):
            receiver.poll_and_apply()
        assert service.weight_version == before
        assert_holds(service, model)
    for timeout in (0, -1, float("nan"), "1", None):
        with pytest.raises(UnsupportedArgumentError, match="timeout must be a finite number"):
            receiver.poll_and_apply(timeout)
    sender.update_weights(perturbed(model, seed=7))
    assert receiver.poll_and_apply()
    assert_holds(service, model)
    sender.shutdown()


# ---------------------------------------------------------------- collectors


def test_a_collector_that_takes_schemes(service, scheme, model):
    collector = scheme_collector(service, scheme)
    scheme.create_sender().register_model(model)
    before = agree(service, collector)
    collector.update_policy_weights_(perturbed(model, seed=6))
    assert agree(service, collector) == before + 1
    assert_holds(service, model)
    scheme.send(weights=TensorDict.from_module(perturbed(model, seed=7)).data)
    assert agree(service, collector) == before + 2
    assert_holds(service, model)
    perturbed(model, seed=8)
    collector.update_policy_weights_()
    assert agree(service, collector) == before + 3
    scheme.create_sender().update_weights()
    assert agree(service, collector) == before + 4
    assert_holds(service, model)
    with pytest.raises(UnsupportedArgumentError, match="worker_ids must be None, got 0"):
        collector.update_policy_weights_(model, worker_ids=0)
    with pytest.raises(WeightMismatchError):
        collector.update_policy_weights_(collector.policy)
    assert agree(service, collector) == before + 4
    with pytest.raises(RuntimeError, match="twice"):
        scheme.connect()
    collector.shutdown()


def test_llm_collectors_refuse_schemes_and_take_senders(service, scheme, sender, model):
    policy = make_policy(service)
    with pytest.raises(TypeError, match="weight_sync_schemes"):
        LLMCollector(make_env(), policy=policy, weight_sync_schemes={"policy": scheme})
    collector = llm_collector(service)
    sender.register_collector(collector)
    assert agree(service, collector) == service.weight_version
    before = service.weight_version
    sender.update_weights()
    assert agree(service, collector) == before + 1
    collector.shutdown()


def test_a_scheme_without_an_engine_to_find_is_refused(service):
    scheme = VLLMWeightSyncScheme(num_replicas=2)
    with pytest.raises(UnsupportedArgumentError, match="has no engine: give the scheme a service"):
        scheme.init_on_sender(model_id="policy", context=None)
    assert not scheme.initialized_on_sender
    with pytest.raises(UnsupportedArgumentError, match=r"\['devices'\] have no meaning"):
        scheme.init_on_sender(devices=["cpu"])
    scheme = VLLMWeightSyncScheme(num_replicas=2, service=service)
    scheme.init_on_sender(model_id="policy")
    scheme.connect()
    scheme.shutdown()


def test_the_receiving_end_in_a_collector(service, scheme, model):
    """TorchRL's worker processes make it of a pickled copy; polling moves their collectors."""
    collector = llm_collector(service)
    copy = pickle.loads(pickle.dumps(scheme))
    copy.init_on_receiver(model_id="policy", context=collector, worker_idx=0)
    copy.connect(worker_idx=0)
    before = service.weight_version
    if isinstance(scheme, VLLMWeightSyncScheme):
        service.push_weights(perturbed(model, seed=9))
    else:
        scheme.create_sender().update_weights(perturbed(model, seed=9), version=before + 1)
    assert copy.receive(timeout=30) is None
    assert agree(service, collector) == before + 1
    assert_holds(service, model)
    collector.shutdown()
