"""``RolloutCollector`` at the pace of training: the same batches however far ahead it samples."""

import itertools
import threading
from collections import Counter

import pytest
import torch
from ray.exceptions import GetTimeoutError, RayTaskError
from torchrl.data import ListStorage, ReplayBuffer
from torchrl.envs import StepCounter

from tests.unit.test_policy import CannedService, lists_are_stacks  # noqa: F401
from tests.unit.test_rollouts import (
    Gated,
    Seen,
    collector,
    length,
    make_env,
    make_policy,
    number,
    pytestmark,  # noqa: F401
)
from torchrl_vllm_sync.errors import (
    GenerationError,
    PacingTimeoutError,
    RowLayoutError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.rl.groups import RolloutStorage
from torchrl_vllm_sync.rl.pacing import Pacer
from torchrl_vllm_sync.rl.rollouts import TextReward


def numbers(batches):
    """Which questions each batch has, a group of two each; no group is torn."""
    found = [[number(one) for one in rows["query"]] for rows in batches]
    assert all(one[::2] == one[1::2] for one in found)
    return [one[::2] for one in found]


def in_order(num_batches):
    return [[2 * at, 2 * at + 1] for at in range(num_batches)]


@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_so_many_batches_are_under_way_and_come_in_order(staleness):
    service, begun = Gated(), []
    batches = iter(
        collector(policy=make_policy(service), max_staleness=staleness, total_dialog_turns=4 * 10)
    )
    service.free.release(100)
    seen = []
    for at in range(10):
        seen.append(next(batches))
        new = min(at + staleness + 1, 10) - len(begun)
        begun.extend(service.begun.acquire(timeout=20) for _ in range(new))
        assert service.calls == len(begun) == min(at + staleness + 1, 10)
    assert all(begun)
    assert next(batches, None) is None
    assert numbers(seen) == in_order(10)


class Late(CannedService):
    """Answers each batch after the one behind it, as far as that has begun."""

    def __init__(self, ahead):
        super().__init__()
        self.ahead, self.calls, self.answered = ahead, itertools.count(), []
        self.done = [threading.Event() for _ in range(40)]

    def generate(self, *args, **kwargs):
        at = next(self.calls)
        if at % (self.ahead + 1) < self.ahead:
            self.done[at + 1].wait(20)
        self.answered.append(at)
        self.done[at].set()
        return super().generate(*args, **kwargs)


def test_a_batch_that_takes_long_overtakes_none_and_is_waited_for():
    service = Late(2)
    made = collector(policy=make_policy(service), max_staleness=2, total_dialog_turns=4 * 3)
    assert numbers(made) == in_order(3)
    assert service.answered == [2, 1, 0]


def test_rows_have_the_seeds_of_the_synchronous_run_however_far_ahead_they_are_sampled():
    class Seeded(CannedService):
        def __init__(self):
            super().__init__()
            self.seeds = {}

        def generate(self, prompts, sampling_params, **kwargs):
            asked = [tuple(one["prompt_token_ids"]) for one in prompts]
            for one, params in zip(asked, sampling_params, strict=True):
                self.seeds.setdefault(one, []).append(params.seed)
            return super().generate(prompts, sampling_params, **kwargs)

    found = []
    for staleness in (0, 3):
        policy = make_policy(Seeded(), generate_kwargs={"max_tokens": 9, "seed": 0})
        found.append(policy.model.seeds)
        assert len([*collector(policy=policy, max_staleness=staleness, total_dialog_turns=32)]) == 8
    assert found[0] == found[1]
    assert len({*itertools.chain(*found[0].values())}) == 32


def test_what_a_collector_fails_to_sample_is_sampled_by_another():
    class Breaks(CannedService):
        def generate(self, *args, **kwargs):
            raise GenerationError("2", "it broke")

    pacer = Pacer(1, 4)
    collectors = [
        collector(policy=make_policy(one), pacer=pacer, total_dialog_turns=8)
        for one in (Breaks(), CannedService())
    ]
    with pytest.raises(GenerationError, match="it broke"):
        next(iter(collectors[0]))
    seen = []
    for rows in collectors[1]:
        seen.append(rows)
        pacer.trained(4)
    assert numbers(seen) == in_order(2)


def test_a_loop_that_is_left_goes_on_where_it_was():
    made = collector(max_staleness=2, total_dialog_turns=4 * 5)
    seen = [next(iter(made)) for _ in range(5)]
    assert next(iter(made), None) is None
    assert numbers(seen) == in_order(5)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("num_rows", [4, 2, 1])
def test_groups_that_are_not_kept_are_replaced_by_the_next(staleness, num_rows):
    judged, rewards = Counter(), {}

    def keep(rows):
        assert rows.batch_size == (2,)
        (at,) = {*map(number, rows["query"])}
        rewards[at] = rows["next", "reward"].flatten().tolist()
        judged[at] += 1
        return at not in {5, 6, 8} and at % 7 != 2

    made = collector(
        env=make_env(num_rows=num_rows),
        max_staleness=staleness,
        keep=keep,
        total_dialog_turns=4 * 6,
    )
    batches = [*made]
    seen = [number(one) for rows in batches for one in rows["query"]]
    first = min(seen)  # the environment takes some when it is made
    kept = [one for one in range(first, 100) if one not in {5, 6, 8} and one % 7 != 2]
    assert {*judged.values()} == {1}
    for rows in batches:
        found = rows["next", "reward"].flatten().tolist()
        asked = [number(one) for one in rows["query"]]
        for at in {*asked}:
            assert [one for one, of in zip(found, asked, strict=True) if of == at] == rewards[at]
        for masks in (rows["masks", "all_attention_mask"],):
            assert masks.any(0).all()  # as wide as its rows
    assert {*Counter(seen).values()} == {2}
    assert len(seen) == 24
    if staleness == 0:
        assert sorted({*seen}) == kept[:12]
        assert [sorted({*map(number, rows["query"])}) for rows in batches] == [
            kept[at : at + 2] for at in range(0, 12, 2)
        ]


def test_a_filter_that_keeps_nothing_ends(monkeypatch):
    made = collector(keep=lambda rows: False)
    monkeypatch.setattr(made._pacer, "timeout_s", 0.2)
    with pytest.raises(PacingTimeoutError, match=r"no group was kept within 0.2 s"):
        next(iter(made))


REFUSED = {
    "max_staleness is not for": {"pacer": Pacer(1, 4), "max_staleness": 1},
    "yield_completed_trajectories is not for": {
        "pacer": Pacer(1, 4),
        "yield_completed_trajectories": True,
    },
    "keep is not for yield_completed": {
        "keep": bool,
        "max_staleness": 1,
        "yield_completed_trajectories": True,
    },
    "batches of 4 rows are no part of batch_size=6": {"pacer": Pacer(0, 6)},
    "4 rows .* not of whole groups of 8": {"keep": bool, "env": {"repeats": 8}},
    "keep, path 'torchrl: Seen": {"keep": bool, "made": [Seen(), StepCounter(max_steps=1)]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_go_together_is_refused_and_leaves_all_as_it_was(message):
    settings = dict(REFUSED[message])
    env = make_env(*settings.pop("made", ()), **settings.pop("env", {}))
    policy, names = make_policy(), [type(one) for one in env.transform]
    with pytest.raises(UnsupportedArgumentError, match=message):
        collector(env=env, policy=policy, **settings)
    assert policy._collector is None
    assert [type(one) for one in env.transform] == names


def test_collectors_whose_environments_took_other_rows_of_the_data_set_are_refused():
    pacer, resumed = Pacer(1, 4), Pacer(1, 4)
    collector(pacer=pacer)
    resumed.load_state_dict(pacer.state_dict())
    for one in (pacer, resumed):
        with pytest.raises(UnsupportedArgumentError, match="of 2 rows, where others have 4"):
            collector(env=make_env(num_rows=2), pacer=one)
        collector(pacer=one)


@pytest.mark.parametrize("end", ["shutdown", "async_shutdown"])
@pytest.mark.parametrize("staleness", [0, 2, None])
def test_a_collector_in_a_thread_ends_quietly_while_it_samples_or_waits_for_its_turn(
    staleness, end
):
    class Held(CannedService):
        def generate(self, *args, **kwargs):
            begun.release()
            assert held.acquire(timeout=20)
            return super().generate(*args, **kwargs)

    waits = staleness is None  # for the turn of its second batch, an hour at most
    begun, held = threading.Semaphore(0), threading.Semaphore(2 * waits)
    how = {"pacer": Pacer(1, 4)} if waits else {"max_staleness": staleness}
    buffer = ReplayBuffer(storage=ListStorage(99), batch_size=4)
    made = collector(policy=make_policy(Held()), replay_buffer=buffer, **how)
    made.start()
    assert all(begun.acquire(timeout=20) for _ in range(1 + waits))
    answers = threading.Timer(0.1, held.release, [3])
    answers.start()
    getattr(made, end)()
    answers.join()
    assert made.closed
    assert not made.is_running()
    assert len(buffer) == 4 * (waits or end == "async_shutdown")


def test_a_collector_that_outlives_ray_ends_without_starting_it_anew(monkeypatch):
    made = collector(pacer=Pacer(1, 4))
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    made._pacer.shared = True  # a call of whose actor has Ray start
    made.shutdown()
    assert made.closed


class Slow(CannedService):
    """Takes a while, another one each time."""

    least_s = 0.0

    def __init__(self, seed, fails=()):
        super().__init__()
        self.random, self.fails = torch.Generator().manual_seed(seed), fails
        self.calls = 0

    def generate(self, *args, **kwargs):
        threading.Event().wait(self.least_s + 0.02 * float(torch.rand((), generator=self.random)))
        self.calls += 1
        if self.calls in self.fails:
            raise GenerationError("2", "it broke")
        return super().generate(*args, **kwargs)


def train(pacer, buffer, batches, collectors, fails=()):
    """Runs collectors in threads of their own, and a trainer in this one."""
    problems = []

    def run(made):
        try:
            for _ in made:
                pass
        except (GenerationError, PacingTimeoutError) as error:  # the latter when training has ended
            problems.append(type(error))

    threads = [threading.Thread(target=run, args=(made,)) for made in collectors]
    for one in threads:
        one.start()
    trained, behind = [], []
    while len(trained) < 8 * batches:
        deadline = threading.Event()
        for _ in range(2000):
            if len(buffer) - len(trained) >= 8:
                break
            deadline.wait(0.01)
        behind.append(len(buffer) - len(trained))
        trained += [number(row["query"]) for row in buffer[len(trained) : len(trained) + 8]]
        pacer.trained(8)
    for one in threads:
        one.join(20)
    assert not any(one.is_alive() for one in threads)
    assert problems.count(GenerationError) == len(fails)
    assert len(problems) == len(collectors)
    return trained, behind


@pytest.mark.parametrize("fails", [pytest.param((), marks=pytest.mark.slow), (2,)])
def test_collectors_of_one_pacer_fill_a_buffer_in_the_order_of_the_data_set(fails):
    pacer = Pacer(2, 8, timeout_s=3.0)
    buffer = ReplayBuffer(storage=ListStorage(1000), batch_size=8)
    services = [Slow(0, fails), Slow(1), Slow(2)]
    collectors = [
        collector(policy=make_policy(one), replay_buffer=buffer, pacer=pacer) for one in services
    ]
    assert len({one.name for one in collectors}) == 3
    trained, behind = train(pacer, buffer, 12, collectors, fails)
    assert trained[::2] == trained[1::2] == [*range(12 * 4)]
    assert max(behind) <= 3 * 8
    assert all(one.calls > 1 for one in services)


def test_a_collector_whose_last_batch_was_anothers_holds_nothing_afterwards(monkeypatch):
    pacer = Pacer(1, 4, timeout_s=3.0)
    pacer._call("join", "dead", 4)
    assert pacer._call("admit", "dead").number == 0
    made = collector(
        pacer=pacer,
        replay_buffer=ReplayBuffer(storage=ListStorage(99), batch_size=4),
        total_dialog_turns=4,
    )
    begun, tickets = made._begun, []

    def dies(ticket):
        tickets.append(ticket.number)
        if len(tickets) == 1:
            pacer.leave("dead")
        return begun(ticket)

    monkeypatch.setattr(made, "_begun", dies)
    assert [*made] == [None]
    assert tickets == [1, 0]
    pacer._call("join", "next", 4)
    assert pacer._call("admit", "next").number == 1


def test_rows_that_are_in_the_buffer_are_handed_on_without_being_written(monkeypatch):
    pacer = Pacer(2, 4, timeout_s=3.0)
    buffer = ReplayBuffer(storage=ListStorage(99), batch_size=4)
    dies, lives = (collector(pacer=pacer, replay_buffer=buffer) for _ in range(2))
    monkeypatch.setattr(dies, "_deliver", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(iter(dies))
    assert len(buffer) == 4
    pacer.leave(dies.name)
    pacer.trained(4)
    next(iter(lives))
    assert [number(row["query"]) for row in buffer[:]] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_is_in_the_buffer_is_not_judged_anew(monkeypatch):
    """Else groups that take the place of others would be lost with them."""
    pacer = Pacer(2, 4, timeout_s=3.0)
    buffer = ReplayBuffer(storage=ListStorage(99), batch_size=4)
    dies, lives = (
        collector(pacer=pacer, replay_buffer=buffer, keep=keep)
        for keep in (lambda _: True, lambda rows: number(rows["query"][0]) != 0)
    )
    monkeypatch.setattr(dies, "_deliver", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        next(iter(dies))
    pacer.leave(dies.name)
    pacer.trained(4)
    next(iter(lives))
    assert [number(row["query"]) for row in buffer[:]] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("is_emptied", [False, True])
def test_what_a_buffer_refuses_is_sampled_by_another(is_emptied):
    """Its writer has counted the rows all the same."""
    pacer = Pacer(2, 4, timeout_s=3.0)
    buffer = ReplayBuffer(storage=RolloutStorage(4), batch_size=4)
    good, odd = (
        collector(policy=make_policy(return_log_probs=one), pacer=pacer, replay_buffer=buffer)
        for one in (True, False)
    )
    batches = iter(good)
    next(batches)
    pacer.trained(4)
    with pytest.raises(RowLayoutError, match="these rows lack it"):
        next(iter(odd))
    if is_emptied:
        buffer.empty()
    next(batches)
    assert [number(one) for one in buffer[:]["query"]] == [2, 2, 3, 3]
    assert pacer._ledger.num_delivered == 2


@pytest.mark.parametrize("is_answer", [False, True])
def test_of_a_buffer_elsewhere_only_an_answer_is_a_refusal(monkeypatch, is_answer):
    """The negative control: what has taken the rows, and did not say so, gets them once."""
    monkeypatch.setattr("torchrl_vllm_sync.rl.rollouts.RayReplayBuffer", ReplayBuffer)
    pacer = Pacer(2, 4, timeout_s=3.0)
    buffer = ReplayBuffer(storage=RolloutStorage(99), batch_size=4)
    first, other = (collector(pacer=pacer, replay_buffer=buffer) for _ in range(2))
    extend, refusal = buffer.extend, RayTaskError("extend", "", RowLayoutError((), "odd"))
    error = refusal if is_answer else GetTimeoutError("no answer")

    def fails(rows):
        extend(rows)
        raise error

    monkeypatch.setattr(buffer, "extend", fails)
    with pytest.raises(type(error)):
        next(iter(first))
    monkeypatch.setattr(buffer, "extend", extend)
    pacer.trained(4)
    next(iter(other))
    written = [0, 0, 1, 1] if is_answer else [2, 2, 3, 3]  # anew, or the next
    assert [number(one) for one in buffer[:]["query"]][4:] == written


def test_without_turns_the_order_is_lost(monkeypatch):
    """The negative control."""
    monkeypatch.setattr("torchrl_vllm_sync.rl.pacing.Ledger.turn", lambda *_: True)

    def deliver(self, owner, number):
        del self._held[number]
        self.num_delivered += 1
        self._notify()

    monkeypatch.setattr("torchrl_vllm_sync.rl.pacing.Ledger.deliver", deliver)
    pacer = Pacer(2, 8, timeout_s=3.0)
    buffer = ReplayBuffer(storage=ListStorage(1000), batch_size=8)
    services = [Slow(at) for at in range(3)]
    services[0].least_s = 0.2  # others write what comes after its first batch meanwhile
    collectors = [
        collector(policy=make_policy(one), replay_buffer=buffer, pacer=pacer) for one in services
    ]
    trained, _ = train(pacer, buffer, 12, collectors)
    assert trained[::2] != sorted(trained[::2])


def test_what_goes_torchrls_way_is_paced_by_batches():
    pacer = Pacer(1, 4, timeout_s=0.2)
    env = make_env(StepCounter(max_steps=1), TextReward(length), Seen())
    made = collector(env=env, pacer=pacer)
    assert made.path.startswith("torchrl: ")
    batches = iter(made)
    assert len(next(batches)) == 4
    pacer.trained(4)
    assert len(next(batches)) == 4
    told = (
        r"the rows' turn did not come within 0.2 s: 12 rows admitted, 4 trained .*batch 2 is next"
    )
    with pytest.raises(PacingTimeoutError, match=told):
        next(batches)
    pacer.trained(4)  # the collector has ended; another samples what it was about to hand on
    assert len(next(iter(collector(env=make_env(Seen(), StepCounter(1)), pacer=pacer)))) == 4
    assert pacer._ledger.num_admitted == 3
