"""Which GPUs the tutorials give to whom, on machines with few and with many."""

import importlib
from pathlib import Path

import pytest
import torch

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"


@pytest.fixture
def arguments(monkeypatch):
    """Returns what a tutorial makes of a command line on a machine with so many GPUs."""
    monkeypatch.syspath_prepend(str(TUTORIALS))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: arguments.num_gpus)

    def arguments(name, num_gpus, *argv):
        arguments.num_gpus = num_gpus
        return importlib.import_module(name).parse_args([*argv])

    return arguments


@pytest.mark.parametrize(
    ("num_gpus", "argv", "engine", "trainer", "shared"),
    [
        (0, [], 0, "cpu", False),
        (1, ["--tensor-parallel", "1"], 1, "cuda:0", True),
        (2, [], 2, "cuda:1", True),
        (2, ["--tensor-parallel", "1"], 1, "cuda:1", False),
        (3, ["--shape", "8b"], 2, "cuda:2", False),
        (8, [], 2, "cuda:7", False),
    ],
)
def test_tensor_parallelism_shares_a_gpu_where_it_must(
    arguments, num_gpus, argv, engine, trainer, shared
):
    args = arguments("05_tensor_parallel_fp8", num_gpus, *argv)
    assert (args.engine_gpus, args.shared) == (engine, shared)
    assert args.device == torch.device(trainer)
    assert args.quantization == ("fp8" if num_gpus else "int8_per_channel_weight_only")


@pytest.mark.parametrize(
    ("num_gpus", "visible", "engine", "ranks", "seen_by_ranks", "shared"),
    [
        (0, None, 0, 2, "", False),
        (2, None, 2, 2, "0,1", True),
        (4, None, 2, 2, "2,3,0,1", False),
        (4, "4,5,6,7", 2, 2, "6,7,4,5", False),
        (8, None, 4, 4, "4,5,6,7,0,1,2,3", False),
    ],
)
def test_experts_and_shards_share_two_gpus_and_part_more(
    arguments, monkeypatch, num_gpus, visible, engine, ranks, seen_by_ranks, shared
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    args = arguments("06_fsdp_expert_parallel", num_gpus)
    assert (args.engine_gpus, args.num_ranks, args.shared) == (engine, ranks, shared)
    assert args.seen_by_ranks == seen_by_ranks


@pytest.mark.parametrize("name", ["04_in_flight_update", "07_two_nodes"])
@pytest.mark.parametrize(("num_gpus", "engine", "trainer"), [(0, 0, "cpu"), (2, 1, "cuda:1")])
def test_the_last_gpu_is_the_trainers(arguments, name, num_gpus, engine, trainer):
    args = arguments(name, num_gpus)
    assert (args.engine_gpus, args.device) == (engine, torch.device(trainer))


@pytest.mark.parametrize(
    ("name", "num_gpus", "argv", "why"),
    [
        ("04_in_flight_update", 1, [], "one GPU for the engine and one for the trainer"),
        ("05_tensor_parallel_fp8", 1, [], "2 GPUs for the engine are needed, got 1"),
        ("05_tensor_parallel_fp8", 0, ["--shape", "8b"], "2 GPUs for the engine are needed, got 0"),
        ("05_tensor_parallel_fp8", 0, ["--tensor-parallel", "0"], "must be at least 1"),
        ("06_fsdp_expert_parallel", 3, [], "two, four or eight GPUs are needed, got 3"),
        ("06_fsdp_expert_parallel", 0, ["--shape", "30b-a3b"], "GPUs are needed, got 0"),
        ("07_two_nodes", 1, [], "one GPU for the trainer and one for each replica"),
    ],
)
def test_too_few_are_refused(arguments, capsys, name, num_gpus, argv, why):
    with pytest.raises(SystemExit) as ended:
        arguments(name, num_gpus, *argv)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err
