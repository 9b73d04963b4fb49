"""A recorded plan against vLLM's own loaders, whose result it must equal bit by bit."""

import gc

import pytest
import torch

from tests.unit.vllm_models import VllmModels, make_checkpoint, single_process_group
from torchrl_vllm_sync.engine.load_plan import (
    record_load_plan,
)
from torchrl_vllm_sync.weights.buckets import BucketLayout
from torchrl_vllm_sync.weights.metadata import ParamMeta

NUM_SLOTS = 3


def send(layout, checkpoint, slots, bound):
    """Fills each bucket as a sender does, in its slot, and loads it."""
    for number, bucket in enumerate(layout.buckets):
        slot = slots[number % len(slots)]
        slot.fill_(255)
        for piece in bucket.pieces:
            flat = checkpoint[piece.name].reshape(-1)
            rows = flat[piece.first_element : piece.first_element + piece.num_elements]
            end = piece.byte_offset + piece.num_bytes
            slot[piece.byte_offset : end].copy_(rows.view(torch.uint8))
        bound[number].copy()


def push(plan, checkpoint, bucket_bytes=4096):
    """A whole push through ``plan``; returns the number of copies that it took."""
    metadata = [ParamMeta.of(name, tensor) for name, tensor in checkpoint.items()]
    layout = BucketLayout(metadata, bucket_bytes)
    slots = [torch.empty(layout.bucket_bytes, dtype=torch.uint8) for _ in range(NUM_SLOTS)]
    bound = plan.bind(layout, slots)
    send(layout, checkpoint, slots, bound)
    return sum(bucket.num_copies for bucket in bound)


def assert_equal(found, expected):
    expected = dict(expected.named_parameters())
    for name, tensor in found.named_parameters():
        assert torch.equal(tensor, expected[name]), f"{name} differs"


@pytest.fixture(scope="module")
def vllm_process(tmp_path_factory):
    """vLLM in this process, as a group of one."""
    pytest.importorskip("vllm")
    with single_process_group(tmp_path_factory.mktemp("group")):
        yield
    gc.collect()


RANKS = [(0, 1), (0, 2), (1, 2)]


@pytest.mark.parametrize("rank_and_size", RANKS, ids=lambda pair: f"rank{pair[0]}of{pair[1]}")
@pytest.mark.parametrize("name", ["llama"])
def test_plan_loads_what_the_loader_loads(name, rank_and_size, vllm_process, tmp_path):
    from torchrl_vllm_sync.engine.checkpoint import checkpoint_metadata

    models = VllmModels(tmp_path, name, *rank_and_size)
    metadata = checkpoint_metadata(models.model_config)
    model, expected = models.build(fill=0.0), models.build(fill=-2.0)
    with models.active():
        plan = record_load_plan(model, metadata)
    checkpoint = make_checkpoint(metadata)
    models.load(expected, checkpoint)
    push(plan, checkpoint)
    assert_equal(model, expected)
