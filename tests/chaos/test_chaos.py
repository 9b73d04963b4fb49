"""Five telling cells of the kill matrix; ``make chaos`` runs all of them."""

import time

import pytest
import ray

from tests.chaos.arena import Arena
from tests.chaos.cells import SIGNALS, TRANSPORTS, VICTIMS, Cell, all_cells
from tests.chaos.matrix import takes_p2p

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# Both signals, every victim and all transports; of the phases the most dangerous ones most often.
TELLING = (
    "kill-core-commit-memmap",
    "stop-worker-mid-bucket-broadcast",
    "kill-actor-mid-bucket-broadcast",
    "kill-trainer-commit-broadcast",
    "kill-worker-apply-p2p",
)


@pytest.fixture(scope="module")
def arena(request, tmp_path_factory):
    is_plain = getattr(request, "param", False)
    arena = Arena(tmp_path_factory.mktemp("chaos"), is_plain=is_plain)
    yield arena
    arena.close()


@pytest.mark.parametrize(
    ("arena", "name"), [(takes_p2p(Cell.named(one)), one) for one in TELLING], indirect=["arena"]
)
def test_nothing_is_lost(arena, name):
    verdict = arena.run(Cell.named(name))
    assert not verdict.failure, verdict


def test_the_telling_cells_hold_every_signal_victim_and_transport():
    cells = [Cell.named(name) for name in TELLING]
    assert {str(cell) for cell in cells} <= {str(cell) for cell in all_cells()}
    assert {cell.signal for cell in cells} == set(SIGNALS)
    assert {cell.victim for cell in cells} == set(VICTIMS)
    assert {cell.transport for cell in cells} == set(TRANSPORTS)
    assert {"mid-bucket", "commit"} <= {cell.phase for cell in cells}


# ---------------------------------------------------------------- a twin that must fail


@pytest.mark.parametrize("arena", [False], indirect=True)
def test_the_checks_notice_one_tensor_lost_at_one_replica(arena):
    replica = arena.service.replicas[-1]
    lost = {"zero": "model.layers.2.mlp.down_proj.weight"}
    ray.get(replica.actor.collective_rpc.remote("sync_plan", kwargs=lost))
    version = arena.push("broadcast")
    with pytest.raises(AssertionError, match=f"1 of 31 parameters are not those of .*{version}"):
        arena.check_parameters(version)
    arena.traffic.start()
    time.sleep(2)
    with pytest.raises(AssertionError, match=rf"off the model of version {version}"):
        arena.check_answers()
    ray.get(replica.actor.collective_rpc.remote("sync_plan"))
    arena.check_parameters(arena.push("broadcast"))
