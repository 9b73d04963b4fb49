"""A transfer engine as vLLM's own are, taking the model apart at the start, that runs on a CPU."""

import pickle
from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from tests.engine.faults import FaultyWorker

BACKEND = "layerwise_for_tests"


@dataclass
class InitInfo(WeightTransferInitInfo):
    packed: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list
    pickled: bytes
    fail_at: str = ""


class LayerwiseEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Start, receive and finish are those of ``vllm/distributed/weight_transfer/ipc_engine.py``."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info):
        pass

    def start_weight_update(self):
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info):
        self.model.load_weights(self.tensors(update_info))

    def tensors(self, update_info):
        given = pickle.loads(update_info.pickled)
        for name in update_info.names:
            if name == update_info.fail_at:
                raise RuntimeError(f"injected at {name}")
            yield name, given[name]

    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self):
        pass

    @staticmethod
    def trainer_send_weights(iterator, trainer_args):
        raise NotImplementedError


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, LayerwiseEngine)


class LayerwiseWorker(FaultyWorker):
    """A worker that knows the engine, and goes wrong as it is told."""
