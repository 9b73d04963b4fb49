"""GroupAdvantage gives what TorchRL's MCAdvantage gives, for dense rows and for all others."""

import copy
import pickle
import random  # noqa: TID251  seeded
import threading

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.objectives.llm import MCAdvantage, MCAdvantageSelector

from tests.fakes.dense import contents, dense_rows, stack_of
from torchrl_vllm_sync.errors import RewardError, RowLayoutError, UnsupportedArgumentError
from torchrl_vllm_sync.rl.groups import GroupAdvantage, RolloutStorage


def batch(groups, rewards=None, *, seed=0, **options):
    """Rows of groups that are named by letters; of other widths for each seed."""
    lengths = random.Random(seed)
    prompts = [lengths.randint(1, 4 + seed) for _ in groups]
    answers = [lengths.randint(1, 6 - seed % 3) for _ in groups]
    if rewards is None:
        rewards = [lengths.choice([0.0, 0.25, 1.0]) for _ in groups]
    return dense_rows(prompts, answers, queries=list(groups), rewards=rewards, **options)


def told(rows):
    """What was returned, comparable whatever the widths of rows."""
    if rows is None:
        return None
    advantages = [row["advantage"].flatten().tolist() for row in rows.unbind(0)]
    return [one["row"] for one in contents(rows)], contents_without_padding(rows), advantages


def contents_without_padding(rows):
    return [{**one, "elsewhere": None} for one in contents(rows)]


def assert_same(batches, group_size=4, **options):
    """Passes batches through both; returns how many rows each has let through."""
    theirs, ours = MCAdvantage(group_size, **options), GroupAdvantage(group_size, **options)
    num_rows = []
    for rows in batches:
        expected, found = told(theirs._inv_call(rows.clone())), told(ours._inv_call(rows))
        assert (found is None) == (expected is None)
        if found is not None:
            assert found[0] == expected[0]
            assert found[1] == expected[1]
            torch.testing.assert_close(found[2], expected[2], equal_nan=True)
        assert ours.get_stats() == theirs.get_stats()
        num_rows.append(0 if found is None else len(found[0]))
    return num_rows


@pytest.mark.parametrize("column", [None, stack_of], ids=["objects", "stacks"])
@pytest.mark.parametrize(
    ("names", "num_rows"),
    [
        pytest.param(["aaaabbbbcccc"], [12], id="complete"),
        pytest.param(["abcabcabcabc"], [12], id="interleaved"),
        pytest.param(["aaaaaaaabbbb"], [12], id="a group twice"),
        pytest.param(["aaabbb", "abcc", "cc"], [0, 8, 4], id="split over extends"),
        pytest.param(["aabbccdd", "dcbadcba"], [0, 16], id="all split"),
        pytest.param(["aaaaab", "bbaa", "ab"], [4, 0, 8], id="left over"),
    ],
)
def test_groups_are_those_of_torchrl(names, num_rows, column):
    options = {} if column is None else {"column": column}
    batches = [batch(one, seed=at, **options) for at, one in enumerate(names)]
    assert assert_same(batches) == num_rows
    assert assert_same(batches, trajectory_return="sum") == num_rows


@pytest.mark.parametrize("how", ["sum", "max", "mean"])
def test_groups_without_a_signal_are_dropped_like_torchrls(how):
    rewards = [0, 0, 0, 0, 1, 0, 1, 0, 1, 1, 1, 1]
    batches = [batch("aaaabbbbcccc", rewards), batch("aaaa", [0, 1, 0, 1], seed=1)]
    options = {"trajectory_return": how, "keep_return_bounds": (0.1, 0.9)}
    assert assert_same(batches, **options) == [4, 4]


@pytest.mark.parametrize("strategy", ["first", "uniform", "balanced"])
@pytest.mark.parametrize(("smallest", "bounds"), [(None, (0.1, 0.9)), (5, (0.1, 0.9)), (5, None)])
def test_candidates_are_chosen_like_torchrls(strategy, smallest, bounds):
    rewards = random.Random(1)
    # Few rewards, so that some groups need candidates beyond the first four.
    batches = [
        batch(rewards.choices("abc", k=12), rewards.choices([0.0, 1.0], [4, 1], k=12), seed=at)
        for at in range(4)
    ]
    num_rows = assert_same(
        batches,
        trajectory_return="sum",
        keep_return_bounds=bounds,
        candidate_group_size=8,
        candidate_selection_min_size=smallest,
        candidate_selector=MCAdvantageSelector(strategy),
    )
    assert sum(num_rows) >= 8


def test_a_selector_sees_the_trajectories():
    class Longest(MCAdvantageSelector):
        def select(self, candidates, *, group_size, keep_return_bounds=None):
            tokens = candidates["trajectories"].get(("masks", "all_attention_mask"), as_list=True)
            lengths = torch.tensor([one.sum() for one in tokens])
            return lengths.argsort(descending=True, stable=True)[:group_size].tolist()

    selector = Longest(in_keys=["trajectories"])
    batches = [batch("aaabaaab"), batch("bbbbaaaa", seed=3)]
    options = {"trajectory_return": "mean", "candidate_group_size": 6}
    assert assert_same(
        batches, candidate_selector=selector, candidate_selection_min_size=6, **options
    ) == [4, 4]


def test_dense_rows_are_never_taken_one_by_one(monkeypatch):
    def refuse(self, tensordict):
        pytest.fail("a row was taken by itself")

    monkeypatch.setattr(MCAdvantage, "_inv_call_single", refuse)
    transform = GroupAdvantage(4, trajectory_return="sum")
    assert transform._inv_call(batch("aaabb")) is None
    assert len(transform._inv_call(batch("abb", seed=1))) == 8


def test_groups_may_have_numbers():
    rows = batch("aabbaabb")
    rows["number"] = torch.tensor([3, 3, 4, 4, 3, 3, 4, 4])
    rows["pair"] = torch.tensor([[0, 1], [0, 1], [1, 1], [1, 1]] * 2)
    assert assert_same([rows], prompt_key="number") == [8]
    assert assert_same([rows], prompt_key="pair") == [8]


def test_rows_of_random_groups_and_batches():
    numbers = random.Random(5)
    batches = [
        batch(numbers.choices("abcdef", k=numbers.randint(2, 16)), seed=at) for at in range(8)
    ]
    assert sum(assert_same(batches, group_size=3)) > 30


# ---------------------------------------------------------------- what goes TorchRL's way


def lazy(rows):
    return lazy_stack([one.clone() for one in rows.unbind(0)])


def test_other_rows_go_torchrls_way_and_find_their_group():
    first, second, third = batch("aabbc"), batch("abcc", seed=1), batch("abcc", seed=2)
    # Dense rows wait; ragged ones join them; then dense ones again.
    assert assert_same([first, lazy(second), third, lazy(batch("cc", seed=3))]) == [0, 0, 12, 0]
    assert assert_same([lazy(first), second, third]) == [0, 0, 12]


def test_trajectories_of_several_steps_go_torchrls_way():
    rewards = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 7.0]).reshape(-1, 1)
    done = torch.tensor([False, True, True, False, False, True]).reshape(-1, 1)
    rows = TensorDict(
        {"query": stack_of("aaaaaa"), "next": {"reward": rewards, "done": done}}, batch_size=[6]
    )
    expected, found = MCAdvantage(3)._inv_call(rows.clone()), GroupAdvantage(3)._inv_call(rows)
    assert found["advantage"].flatten().tolist() == expected["advantage"].flatten().tolist()


def test_single_rows_complete_groups():
    waiting, buffer = (
        batch("aaab"),
        ReplayBuffer(storage=RolloutStorage(8), transform=(transform := GroupAdvantage(4))),
    )
    buffer.extend(waiting)
    assert transform._inv_call(batch("a", seed=2)) is not None
    assert transform.queued_groups == 1


@pytest.mark.slow  # a process is started for the queues
def test_threads_that_write_at_once_lose_no_row(monkeypatch):
    advantage, second = GroupAdvantage(4), threading.Event()
    check, found = advantage._check_rewards, []

    def check_slowly(columns):
        check(columns)
        if threading.current_thread() is first:
            writer.start()
            second.wait(0.2)  # the other is done, or waits

    def write():
        found.append(advantage._inv_call(batch("aa", seed=1)))
        second.set()

    monkeypatch.setattr(advantage, "_check_rewards", check_slowly)
    first, writer = threading.current_thread(), threading.Thread(target=write)
    found.append(advantage._inv_call(batch("aa")))
    writer.join()
    assert sum(0 if one is None else len(one) for one in found) == 4
    assert advantage.queued_trajectories == 0


@pytest.mark.slow
def test_shared_queues_keep_what_waits():
    transform = GroupAdvantage(4)
    assert transform._inv_call(batch("aab", [1.0, 0.0, 3.0])) is None
    transform.share_memory_()
    assert transform.is_shared
    assert transform.queued_trajectories == 3
    found = transform._inv_call(batch("aab", [1.0, 0.0, 3.0], seed=1))
    assert [round(one, 4) for one in found["advantage"].flatten().tolist()] == [
        0.866,
        -0.866,
        0.866,
        -0.866,
    ]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_wait_on_their_own(copied):
    transform = GroupAdvantage(4)
    transform._inv_call(batch("aaabb"))
    other = copied(transform)
    assert len(other._inv_call(batch("ac", seed=1))) == 4
    assert (transform.queued_trajectories, other.queued_trajectories) == (5, 3)


# ---------------------------------------------------------------- what waits, and what is refused


def test_groups_that_never_complete_are_told_and_dropped_on_demand():
    transform = GroupAdvantage(4)
    for at in range(5):
        assert transform._inv_call(batch([f"{at}"] * 3)) is None
    assert transform.queued_groups == 5
    assert transform.queued_trajectories == 15
    assert transform.max_queued_trajectories_per_group == 3
    transform.clear_queues()
    assert transform.queued_groups == 0
    assert transform._inv_call(batch("00")) is None


def test_what_waits_holds_only_the_rows_that_wait():
    transform = GroupAdvantage(4)
    transform._inv_call(batch("aaaabbbbcc"))
    (queue,) = transform.queues.values()
    assert [one.columns.size for one in queue] == [2, 2]


def broken(rows, value):
    rows["next", "reward"] = value
    return rows


@pytest.mark.parametrize("options", [{}, {"trajectory_return": "sum"}])
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (torch.tensor([1.0, torch.nan, 0.0]).reshape(3, 1, 1), r"1 of 3 .* rows \[1\] hold \[nan"),
        (torch.tensor([1.0, 0.0, torch.inf]).reshape(3, 1, 1), r"rows \[2\] hold \[inf\]"),
        (
            torch.zeros(3, 2, 1),
            r"3 rows need a number each, got torch.float32 of shape \[3, 2, 1\]",
        ),
        (torch.zeros(3, 1, 1, dtype=torch.int64), "got torch.int64"),
    ],
)
def test_wrong_rewards_are_named_and_leave_queues_as_they_were(reward, message, options):
    transform = GroupAdvantage(4, **options)
    transform._inv_call(batch("aaab"))
    before = transform.get_stats()
    with pytest.raises(RewardError, match=message):
        transform._inv_call(broken(batch("abb", seed=1), reward))
    assert transform.get_stats() == before
    assert len(transform._inv_call(batch("abb", seed=1))) == 4


def test_missing_rewards_are_named():
    with pytest.raises(RewardError, match="reward"):
        GroupAdvantage(2)._inv_call(batch("aa").exclude(("next", "reward")))


def test_rows_that_do_not_fit_those_that_wait_leave_queues_as_they_were():
    transform = GroupAdvantage(4)
    transform._inv_call(batch("aaa"))
    other = batch("ab", seed=1)
    other["extra"] = torch.zeros(2)
    before = transform.get_stats()
    with pytest.raises(RowLayoutError, match="extra"):
        transform._inv_call(other)
    assert transform.get_stats() == before
    assert len(transform._inv_call(other.exclude("extra"))) == 4


def test_rows_that_never_showed_padding_get_another_token():
    def split(**options):
        transform = GroupAdvantage(4, **options)
        transform._inv_call(dense_rows([3, 3], [2, 2], queries=["a", "a"]))
        return transform._inv_call(dense_rows([4, 4], [2, 2], queries=["a", "a"]))

    for options, token in (({}, 0), ({"padding_token": 9}, 9)):
        rows = split(**options)
        assert rows["tokens", "prompt"][:, 0].tolist()[:2] == [token, token]
        assert rows["masks", "all_attention_mask"][:, 0].tolist() == [False, False, True, True]


# ---------------------------------------------------------------- in a buffer


@pytest.mark.parametrize("storage", [RolloutStorage, LazyStackStorage])
def test_a_buffer_holds_groups_that_are_complete(storage):
    buffer = ReplayBuffer(storage=storage(32), transform=GroupAdvantage(4), batch_size=8)
    first, second = batch("aaaabbb"), batch("bcccc", seed=1)
    buffer.extend(first)
    assert len(buffer) == 4
    buffer.extend(second)
    assert len(buffer) == 12
    given = contents(first) + contents(second)
    expected = [given[at] for at in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)]
    stored = contents(buffer[:])
    assert [one["row"] for one in stored] == [one["row"] for one in expected]
    for group in torch.tensor([row["advantage"].item() for row in buffer[:].unbind(0)]).split(4):
        assert abs(group.sum()) < 1e-5
    assert "advantage" not in first


@pytest.mark.parametrize("size", [1, 0])
def test_groups_of_one_have_no_advantages(size):
    with pytest.raises(UnsupportedArgumentError, match=f"grpo_size must be .* 2, got {size}"):
        GroupAdvantage(grpo_size=size)


def test_rewards_whose_spread_no_number_holds_are_refused():
    with pytest.raises(RewardError, match="must be below 1e18, got 3e"):
        GroupAdvantage(grpo_size=2).inv(batch("aa", [3e38, -3e38]))
    rows = GroupAdvantage(grpo_size=2).inv(batch("aa", [9e17, -9e17]))
    assert rows["advantage"].isfinite().all()
