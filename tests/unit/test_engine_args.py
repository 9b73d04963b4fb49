"""Engine arguments of single replicas."""

from types import SimpleNamespace

from torchrl_vllm_sync.engine_args import for_replica


def test_each_replica_samples_with_a_seed_of_its_own():
    given = SimpleNamespace(seed=3)

    assert [for_replica(given, index).seed for index in range(3)] == [3, 4, 5]
    assert given.seed == 3
