"""Six telling cells of the kill matrix; ``make chaos`` runs all of them."""

import time

import pytest
import ray

from tests.chaos.arena import Arena
from tests.chaos.cells import RELOADING, SIGNALS, TRANSPORTS, VICTIMS, Cell, all_cells

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# Both signals, every victim and all transports; of the phases the most dangerous ones most often.
TELLING = (
    "kill-core-commit-memmap",
    "stop-worker-mid-bucket-broadcast",
    "kill-actor-mid-bucket-broadcast",
    "kill-trainer-commit-broadcast",
    "kill-worker-apply-p2p",
    "kill-trainer-mid-bucket-swapped",
)


@pytest.fixture(scope="module")
def arenas(tmp_path_factory):
    """Gives an arena with the engines that a cell needs, of which one is open at a time."""
    opened = {}

    def get(engines):
        if engines not in opened:
            close()
            opened[engines] = Arena(tmp_path_factory.mktemp("chaos"), engines=engines)
        return opened[engines]

    def close():
        while opened:
            opened.popitem()[1].close()

    yield get
    close()


# Negative controls; first, since the last two of the cells have arenas of their own.
def test_the_checks_notice_one_tensor_lost_at_one_replica(arenas):
    arena = arenas(RELOADING)
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


def test_the_checks_notice_a_pause(arenas):
    with pytest.raises(AssertionError, match="an engine was paused"):
        arenas(RELOADING).push("swapped", pauses=False)


@pytest.mark.parametrize("name", TELLING)
def test_nothing_is_lost(arenas, name):
    cell = Cell.named(name)
    verdict = arenas(cell.engines).run(cell)
    assert not verdict.failure, verdict


def test_the_telling_cells_hold_every_signal_victim_and_transport():
    cells = [Cell.named(name) for name in TELLING]
    assert {str(cell) for cell in cells} <= {str(cell) for cell in all_cells()}
    assert {cell.signal for cell in cells} == set(SIGNALS)
    assert {cell.victim for cell in cells} == set(VICTIMS)
    assert {cell.transport for cell in cells} == set(TRANSPORTS)
    assert {"mid-bucket", "commit"} <= {cell.phase for cell in cells}
