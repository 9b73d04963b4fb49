"""Collectors, the pacer's actor and the trainer are killed, and no row is lost or trained twice."""

import contextlib
import copy
import logging
import os
import random  # noqa: TID251  each is seeded
import signal
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError
from torchrl.data import ConsumingSampler, ReplayBuffer

from tests.engine.paced import GROUP, Trained, in_order, make_env
from tests.engine.requests import eventually
from tests.engine.rollouts import QUIET, TOKENIZER
from tests.engine.test_paced_rollouts import (
    CONFIG,
    ENVIRONMENT,
    lists_are_stacks,  # noqa: F401
    make_policy,
)
from torchrl_vllm_sync import (
    Pacer,
    RayReplayBuffer,
    RolloutCollector,
    RolloutStorage,
    RunState,
    WeightUpdater,
)
from torchrl_vllm_sync.errors import PacingError
from torchrl_vllm_sync.testing import load_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), *QUIET]
logger = logging.getLogger(__name__)
ROWS, STALENESS = 2 * GROUP, 2
NUM_COLLECTORS, ROUNDS = 2, 2
LONG, LIMIT_S = 10**6, 240.0  # batches until a kill; processes begin slowly on a busy machine
# Of a buffer with room for one batch, rows that are written twice might overwrite each other.
ROOM = 2 * ROWS
BUFFER = {"sampler": ConsumingSampler, "batch_size": ROWS, "remote_config": CONFIG}
BUFFER["storage"] = partial(RolloutStorage, ROOM)
# In a collector: it has a ticket; it is its turn; it is about to write; it has written.
MOMENTS = ["_begun", "_has_to_write", "extend", "_deliver"]


class Account(Trained):
    """What a model was trained on: a part of its run, saved and loaded with it."""

    def __init__(self, service, updater):
        super().__init__(service, updater)
        self.behind, self.pushed = [], {}
        self.note()

    def note(self):
        """Which weights are there now: those of so many batches."""
        self.pushed[self.service.weight_version] = len(self.asked)

    def step(self, rows):
        # No row is of weights that a resumed run has given up.
        of_batch = [self.pushed[one] for one in rows["policy_version"].tolist()]
        self.behind.append(len(self.asked) - min(of_batch))
        super().step(rows)
        self.note()

    def check(self):
        """Each question once for each row of its group, in order, and by weights that were new."""
        assert self.asked == in_order(len(self.asked), ROWS)
        assert max(self.behind) <= STALENESS

    def state_dict(self):
        return {name: copy.copy(getattr(self, name)) for name in ("asked", "behind", "pushed")}

    def load_state_dict(self, state):
        vars(self).update(copy.deepcopy(state))


def collector(service, pacer, buffer, make=RolloutCollector):
    return make(
        partial(make_env, GROUP, TOKENIZER),
        policy=make_policy(service),
        dialog_turns_per_batch=GROUP,
        replay_buffer=buffer,
        pacer=pacer,
    )


def new_pacer(shared):
    return Pacer(STALENESS, ROWS, shared=shared, timeout_s=LIMIT_S)


def exhaust(rollouts):
    for _ in rollouts:
        pass


def pid_of(actor):
    """An actor's process; None while it has none."""
    try:
        return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=LIMIT_S)
    except RayActorError:
        return None


def die_in(moment, one):
    """Has a collector killed when it comes there."""
    owner = one.replay_buffer if moment == "extend" else one
    setattr(owner, moment, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


class Actor:
    """A collector in an actor, killed and begun anew: by Ray under its name, or another one."""

    def __init__(self, make, pacer, *, restarts):
        config = CONFIG | {"runtime_env": ENVIRONMENT, "max_restarts": -1 if restarts else 0}
        self.make = partial(make, make=RolloutCollector.as_remote(config).remote)
        self.pacer, self.restarts = pacer, restarts
        self.actor = self.make()

    def start(self):
        self.pid = eventually(lambda: pid_of(self.actor), LIMIT_S)
        self.name = ray.get(self.actor.__ray_call__.remote(lambda one: one.name), timeout=60)
        ray.get(self.actor.start.remote(), timeout=60)

    def kill(self, moment, after_s):
        """At a moment of its work, or else some seconds from now."""
        if moment is None:
            time.sleep(after_s)
            os.kill(self.pid, signal.SIGKILL)
        else:
            trap = self.actor.__ray_call__.remote(partial(die_in, moment))
            with contextlib.suppress(RayActorError):  # it may be there before it has answered
                ray.get(trap, timeout=60)
        eventually(lambda: pid_of(self.actor) != self.pid)
        if not self.restarts:
            self.pacer.leave(self.name)
            self.actor = self.make()
        before = self.name
        self.start()
        assert (self.name == before) == self.restarts


@pytest.mark.parametrize("seed", [0])
def test_collectors_that_are_killed_lose_no_row_and_have_none_trained_twice(
    service, checkpoint, seed
):
    chance, pacer, buffer = random.Random(seed), new_pacer(shared=True), RayReplayBuffer(**BUFFER)
    account = Account(service, WeightUpdater(service, source=load_tiny_model(checkpoint)))
    make = partial(collector, service, pacer, buffer)
    actors = [Actor(make, pacer, restarts=one) for one in (True, False)]
    survivor = make()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Actor.start, actors))
        sampling = pool.submit(exhaust, survivor)
        for moment in chance.sample(MOMENTS, ROUNDS):
            moments = chance.sample([moment, None], 2)
            logger.warning("seed %d: %s after batch %d", seed, moments, len(account.asked))
            kills = [
                pool.submit(one.kill, at, chance.uniform(0, 1))
                for one, at in zip(actors, moments, strict=True)
            ]
            while (under_way := wait(kills, timeout=0.1)).not_done:  # some time to begin anew
                for one in under_way.done:  # else what went wrong shows as a wait in vain
                    one.result()
                pacer.wait_for_batch()
                account.step(buffer.sample(ROWS))
                pacer.trained(ROWS)
            for one in kills:
                one.result()
        for one in (survivor.name, *(one.name for one in actors)):
            pacer.leave(one)
        assert isinstance(sampling.exception(timeout=60), PacingError)
    account.check()
    assert len(account.asked) >= ROUNDS
    for one in actors:
        ray.kill(one.actor)
    survivor.shutdown()
    buffer.close()


def train(service, checkpoint, saves, pacer, buffer, num_batches=LONG):
    """Goes on from the newest save, if there is one, and saves after each second batch."""
    model = load_tiny_model(checkpoint)
    account = Account(service, WeightUpdater(service, source=model))
    collectors = [collector(service, pacer, buffer) for _ in range(NUM_COLLECTORS)]
    parts = {"updater": account.updater, "buffer": buffer, "account": account}
    run = RunState(model, pacer=pacer, **parts)
    if num_saved(saves):
        run.load(saves, audit=False)
        account.note()
    with ThreadPoolExecutor(NUM_COLLECTORS) as pool:
        sampling = [pool.submit(exhaust, one) for one in collectors]
        try:
            while len(account.asked) < num_batches:
                pacer.wait_for_batch()
                account.step(buffer.sample(ROWS))
                pacer.trained(ROWS)
                if len(account.asked) % 2 == 0:
                    run.save(saves)
        finally:
            for one in collectors:
                pacer._tell("leave", one.name)
            assert all(isinstance(one.exception(timeout=60), PacingError) for one in sampling)
            for one in collectors:
                one.shutdown()
    return account


def num_saved(saves):
    return len([*saves.glob("step-*")])


def kill(pid, saves, chance):
    """A process at a random moment after one save more, or two."""
    wanted, after_s = num_saved(saves) + chance.randint(1, 2), chance.uniform(0, 0.5)
    eventually(lambda: num_saved(saves) >= wanted, LIMIT_S)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    logger.warning("killed %.3f s after save %d, there are %d", after_s, wanted, num_saved(saves))


@pytest.mark.parametrize("seed", [0])
def test_a_run_whose_pacer_is_killed_fails_and_goes_on_from_its_newest_save(
    service, checkpoint, tmp_path, seed
):
    chance, buffer = random.Random(seed), RayReplayBuffer(**BUFFER)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pacer = new_pacer(shared=True)
            killing = pool.submit(kill, pid_of(pacer._ledger), tmp_path, chance)
            with pytest.raises(PacingError, match="the pacer's actor died"):
                train(service, checkpoint, tmp_path, pacer, buffer)
            killing.result()
    wanted = 2 * num_saved(tmp_path) + 3
    account = train(service, checkpoint, tmp_path, new_pacer(shared=True), buffer, wanted)
    account.check()
    assert len(account.asked) == wanted
    buffer.close()


@ray.remote(num_cpus=0, runtime_env=ENVIRONMENT)
class Trainer:
    """A trainer's process, with its collectors in threads."""

    def train(self, service, checkpoint, saves, *num_batches):
        storage, sampler = RolloutStorage(ROOM), ConsumingSampler()
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=ROWS)
        pacer = new_pacer(shared=False)
        return train(service, checkpoint, saves, pacer, buffer, *num_batches).state_dict()


@pytest.mark.parametrize("seed", [0])
def test_a_trainer_that_is_killed_goes_on_from_its_newest_save(service, checkpoint, tmp_path, seed):
    chance = random.Random(seed)
    for _ in range(2):
        trainer = Trainer.remote()
        pid = pid_of(trainer)
        training = trainer.train.remote(service, checkpoint, tmp_path)
        kill(pid, tmp_path, chance)
        with pytest.raises(RayActorError):
            ray.get(training, timeout=60)
    wanted = 2 * num_saved(tmp_path) + 3
    training = Trainer.remote().train.remote(service, checkpoint, tmp_path, wanted)
    account = Account(service, None)
    account.load_state_dict(ray.get(training, timeout=LIMIT_S))
    account.check()
    assert len(account.asked) == wanted


def lose(asked):
    del asked[1][0]


def repeat(asked):
    asked[1].append(asked[1][-1])


def exchange(asked):
    """As many rows as there should be, of which one is lost and one is there twice."""
    asked[1][GROUP - 1] = asked[1][GROUP]


def disorder(asked):
    asked[1], asked[2] = asked[2], asked[1]


@pytest.mark.parametrize("wrong", [lose, repeat, exchange, disorder])
def test_the_account_notices_a_row_that_is_lost_or_comes_twice(wrong):
    """The negative control."""
    account = Account(SimpleNamespace(weight_version=0), None)
    account.asked, account.behind = in_order(3, ROWS), [0, 1, STALENESS]
    account.check()
    wrong(account.asked)
    with pytest.raises(AssertionError):
        account.check()
    account.asked, account.behind = in_order(3, ROWS), [0, 1, STALENESS + 1]
    with pytest.raises(AssertionError):
        account.check()
