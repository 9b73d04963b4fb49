"""The replay buffer in an actor: a copy is the same buffer, and only its maker ends it."""

import os
import pickle
import sys
from functools import partial

import pytest
import ray
import torch
from ray import cloudpickle
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement
from torchrl.data.replay_buffers.ray_buffer import RayReplayBuffer as TorchRLBuffer

from tests.warm import warm_cluster
from torchrl_vllm_sync import RayReplayBuffer

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
pytestmark = [pytest.mark.ray, pytest.mark.slow]
CONFIG = {"num_cpus": 0, "num_gpus": 0}
# Ray's workers cannot import test modules.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with warm_cluster(num_cpus=2, include_dashboard=False):
        yield


def rows(first, number=4):
    return TensorDict({"value": torch.arange(first, first + number)}, [number])


def make(kind=RayReplayBuffer, **options):
    return kind(
        storage=partial(LazyTensorStorage, 32), batch_size=4, remote_config=CONFIG, **options
    )


def test_torchrls_own_does_not_pickle():
    """When this fails, TorchRL has mended it, and the subclass can go."""
    buffer = make(TorchRLBuffer)
    with pytest.raises(AttributeError, match="_futures_lock"):
        pickle.dumps(buffer)
    buffer.close()


def test_a_copy_reads_and_writes_the_same_buffer():
    buffer = make(sampler=SamplerWithoutReplacement)
    assert isinstance(buffer, TorchRLBuffer)
    copy = pickle.loads(pickle.dumps(buffer))
    again = pickle.loads(pickle.dumps(copy))
    assert type(copy) is type(again) is RayReplayBuffer
    buffer.extend(rows(0))
    copy.extend(rows(4))
    again.extend(rows(8))
    assert len(buffer) == len(copy) == len(again) == 12
    assert copy.write_count == 12
    assert buffer[:]["value"].tolist() == copy[:]["value"].tolist() == list(range(12))
    seen = torch.cat([batch["value"] for batch in copy]).sort().values
    assert seen.tolist() == list(range(12))
    copy.empty(empty_write_count=False)
    assert (len(buffer), buffer.write_count) == (0, 12)
    copy.close()
    copy.close()
    again.shutdown()
    assert not copy.is_alive
    assert buffer.is_alive
    buffer.extend(rows(0))
    assert len(buffer) == 4
    buffer.close()


def test_tasks_and_actors_take_it():
    buffer = make()

    @ray.remote(num_cpus=0)
    def fill(target, first):
        target.extend(rows(first))
        return len(target)

    assert max(ray.get([fill.remote(buffer, first) for first in (0, 4, 8)])) == 12
    assert sorted(buffer[:]["value"].tolist()) == list(range(12))
    buffer.close()
