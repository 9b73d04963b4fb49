"""Which conversation a policy's rows belong to, without a policy."""

import pickle
import random  # noqa: TID251 - seeded

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, lazy_stack

from torchrl_vllm_sync.rl.conversations import ConversationFinder


def rows(num, **entries):
    out = lazy_stack([TensorDict() for _ in range(num)])
    for key, value in entries.items():
        out.set(key, value)
    return out


def find(finder, prompts, **entries):
    return finder.find(rows(len(prompts), **entries), prompts)


def sessions(found):
    return [one.session_id for one in found]


def said(prompts, answers):
    return [[*prompt, answer] for prompt, answer in zip(prompts, answers, strict=True)]


def heard(prompts, message="tool"):
    return [[*prompt, message] for prompt in prompts]


PROMPTS = [["system", "a"], ["system", "a"], ["system", "b"]]


def test_siblings_are_other_sessions_of_one_group():
    found = find(ConversationFinder(), PROMPTS)
    assert len(set(sessions(found))) == 3
    groups = [one.group_id for one in found]
    assert groups[0] == groups[1] != groups[2]


def test_a_row_that_continues_what_was_answered_is_the_same_conversation():
    finder = ConversationFinder()
    first = find(finder, PROMPTS)
    full = said(PROMPTS, ["x", "y", "x"])
    finder.answered(first, full)
    second = find(finder, heard(full))
    assert second == first  # the group too, which names the first prompt
    longer = said(heard(full), ["z", "z", "z"])
    finder.answered(second, longer)
    assert find(finder, heard(longer)) == first


def test_rows_are_recognised_in_any_order_and_number():
    finder = ConversationFinder()
    first = find(finder, PROMPTS)
    full = said(PROMPTS, ["x", "y", "z"])
    finder.answered(first, full)
    assert find(finder, heard([full[2]])) == [first[2]]
    assert find(finder, heard([full[1], full[0]])) == [first[1], first[0]]


def test_siblings_that_said_the_same_are_counted():
    finder = ConversationFinder()
    first = find(finder, PROMPTS[:2])
    full = said(PROMPTS[:2], ["x", "x"])
    finder.answered(first, full)
    assert set(sessions(find(finder, heard(full)))) == set(sessions(first))


def test_a_prompt_that_continues_nothing_is_new():
    finder = ConversationFinder()
    first = find(finder, PROMPTS)
    finder.answered(first, said(PROMPTS, ["x", "y", "z"]))
    other = find(finder, said(PROMPTS, ["X", "Y", "Z"]))
    assert not set(sessions(other)) & set(sessions(first))
    split = find(finder, [["system", "ax"]])  # the same text, cut elsewhere
    assert not set(sessions(split)) & set(sessions(first))


def test_a_conversation_goes_on_from_its_last_answer_only():
    finder = ConversationFinder()
    first = find(finder, PROMPTS[:1])
    full = said(PROMPTS[:1], ["x"])
    finder.answered(first, full)
    assert find(finder, heard(full)) == first
    assert find(finder, heard(full)) != first  # a sampler that begins there again


def test_several_answers_to_a_prompt_are_one_session():
    finder = ConversationFinder()
    first = find(finder, PROMPTS[1:])
    finder.answered(first, [[*PROMPTS[at], answer] for at in (1, 2) for answer in "xyz"])
    turns = heard([[*PROMPTS[1], "z"], [*PROMPTS[1], "x"], [*PROMPTS[2], "y"]])
    assert sessions(find(finder, turns)) == sessions([first[0], first[0], first[1]])


def test_what_a_new_conversation_takes_the_place_of_is_over():
    finder = ConversationFinder()
    first = find(finder, PROMPTS)
    full = said(PROMPTS, ["x", "y", "z"])
    finder.answered(first, full)
    assert finder.ended() == []
    mixed = find(finder, [heard(full)[0], ["system", "c"], heard(full)[2]])
    assert sessions(mixed)[::2] == sessions(first)[::2]
    assert finder.ended() == [first[1].session_id]
    assert finder.ended() == []
    assert find(finder, heard([full[1]])) != [first[1]]  # and forgotten


def test_a_conversation_that_moved_to_another_row_is_not_over():
    finder = ConversationFinder()
    first = find(finder, PROMPTS[1:])
    full = said(PROMPTS[1:], ["x", "y"])
    finder.answered(first, full)
    moved = find(finder, [["system", "new"], *heard(full[:1])])
    assert moved[1] == first[0]
    assert finder.ended() == []


def test_where_rows_are_merged_from_several_callers_their_positions_end_nothing():
    finder = ConversationFinder()
    for at in range(5):
        finder.find(rows(2), [[f"{at}"], [f"{at}"]], by_position=False)
    assert finder.ended() == []


def test_numbers_of_trajectories_name_conversations_whatever_is_said():
    finder = ConversationFinder()
    for key in ("traj_count", ("collector", "traj_ids")):
        counted = rows(2)
        counted.set(key, torch.tensor([[4], [5]]))
        first = finder.find(counted, PROMPTS[:2], by_content=False)
        assert len(set(sessions(first))) == 2
        assert finder.find(counted, [["edited"], ["history"]], by_content=False) == first
    counted.set(key, torch.tensor([[4], [6]]))
    finder.find(counted, PROMPTS[:2], by_content=False)
    assert finder.ended() == [first[1].session_id]


def test_environments_of_a_pool_count_for_themselves():
    finder = ConversationFinder()
    index, count = NonTensorStack(0, 1), torch.tensor([[3], [3]])
    first = find(finder, PROMPTS[:2], env_index=index, traj_count=count)
    assert len(set(sessions(first))) == 2
    (again,) = find(finder, [["x"]], env_index=NonTensorStack(1), traj_count=count[:1])
    assert again == first[1]
    find(finder, [["x"]], env_index=NonTensorStack(1), traj_count=count[:1] + 1)
    assert finder.ended() == [first[1].session_id]


def test_in_a_pool_the_environment_is_the_place():
    finder = ConversationFinder()
    first = find(finder, PROMPTS[1:], env_index=NonTensorStack(0, 1))
    find(finder, [["new"]], env_index=NonTensorStack(1))
    assert finder.ended() == [first[1].session_id]


def test_rows_without_messages_are_conversations_too():
    first = find(ConversationFinder(), [[], []])
    assert len(set(sessions(first))) == 2
    assert first[0].group_id == first[1].group_id


def test_without_numbers_and_content_nothing_tells():
    assert ConversationFinder().find(rows(1), [["a"]], by_content=False) is None


def test_memory_is_bounded():
    finder = ConversationFinder(capacity=10)
    for at in range(200):
        found = finder.find(rows(1 + at % 7), [[f"{at}"]] * (1 + at % 7))
        finder.answered(found, [[f"{at}", "x"]] * (1 + at % 7))
    assert len(finder._known) == 10
    assert sum(len(ends) for _, ends in finder._known.values()) == 10
    assert sum(map(len, finder._waiting.values())) == 10
    assert len(finder._places) <= 10


@pytest.mark.parametrize("seed", range(5))
def test_random_dialogues_are_told_apart(seed):
    """Many dialogues of few words, in batches of random rows, against what really happened."""
    chance = random.Random(seed)
    finder = ConversationFinder()
    dialogues = [[chance.choice("ab")] for _ in range(20)]
    for _ in range(60):
        turn = chance.sample(range(20), chance.randint(1, 20))
        found = finder.find(rows(len(turn)), [dialogues[at] for at in turn], by_position=False)
        assert len(set(sessions(found))) == len(turn)
        for at in turn:
            dialogues[at].append(chance.choice("xy"))
        finder.answered(found, [dialogues[at] for at in turn])
        for at in turn:
            dialogues[at].append("tool")
    assert len(finder._known) == 20  # nothing was taken for new


def test_copies_name_sessions_of_their_own_and_groups_alike():
    finder = ConversationFinder(capacity=7)
    copy = pickle.loads(pickle.dumps(finder))
    (first,), (other,) = find(finder, PROMPTS[:1]), find(copy, PROMPTS[:1])
    assert first.session_id != other.session_id
    assert first.group_id == other.group_id
    assert copy._capacity == 7
