"""The short forms of the soak's two parts; ``make soak`` runs the long ones."""

import itertools

import pytest
from tensordict import set_list_to_stack

from tests.engine.rollouts import QUIET
from tests.soak import flat
from tests.soak.soak import KINDS, soak

pytestmark = [pytest.mark.ray, pytest.mark.slow, *QUIET]


@pytest.mark.timeout(600)
def test_a_short_soak_loses_nothing_and_keeps_nothing(cluster, checkpoint):
    """By its seed each kind of event happens once, after most have once before it is measured."""
    found, told = soak(
        checkpoint, num_requests=500, num_events=4, seed=129, call_pause_s=1.0, push_pause_s=3.0
    )
    assert not found
    assert told["requests"] > 500
    assert {name: told[name] for name in KINDS} == {
        "kill actor": 2,
        "kill core": 1,
        "join": 2,
        "leave": 2,
    }
    assert told["push"] > 10


def test_what_processes_hold_is_looked_at_between_pushes_and_steps(plain):
    with set_list_to_stack(True):
        found = dict(flat.parts(plain, ["broadcast", "memmap", "p2p"], 2, 2))
    assert [*found] == [f"2 pushes by {one}" for one in ("broadcast", "memmap", "p2p")] + [
        "2 collector steps"
    ]
    processes = {"trainer", *map(" ".join, itertools.product(["actor", "engine core"], "01"))}
    for looks in found.values():
        assert processes <= looks.keys()
        assert all(len(values) == 3 and min(values) > 50 for values in looks.values())


def test_memory_that_is_kept_is_noticed(plain):
    kept = []
    looks = flat.watched(plain, lambda: kept.append(bytearray(b"x" * 2**25)), 4)
    (told,) = flat.grown(looks)
    assert told.startswith("trainer: ")
