"""Prompts begin with the tokens of the turn before, whatever a template puts around them."""

import pytest
from tensordict import TensorDict, set_list_to_stack

from tests.fakes import dialogs
from torchrl_vllm_sync.requests.turns import Turn, behind, end_of_turn, is_of

pytestmark = pytest.mark.filterwarnings("ignore:Response history should have one more batch dim")
TURNS = 200  # of each template; more by python -m tests.fakes.dialogs


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("name", dialogs.MODELS)
def test_no_turn_drifts_and_forks_are_those_of_the_template(name, pad_output):
    found = dialogs.count(dialogs.MODELS[name], TURNS, pad_output=pad_output)
    assert found["drifts"] == found["wrong"] == 0
    assert found["exact"] + found["forked"] == found["turns"] == TURNS
    assert found["forked"] == found["forks that the template made"]
    assert bool(found["forked"]) == name.startswith("qwen3")


@pytest.mark.parametrize("name", dialogs.MODELS)
def test_encoded_anew_they_drift(name):
    """The same conversations, in rows that do not carry their last turn."""
    found = dialogs.count(dialogs.MODELS[name], TURNS, carry=False)
    assert found["drifts"] > max(found["forks that the template made"], TURNS // 10) or (
        found["drifts"] == found["forks that the template made"] == TURNS
    )


@pytest.mark.parametrize("name", dialogs.MODELS)
def test_of_answers_as_a_tokenizer_has_them_prompts_are_the_whole_encoded(name):
    """So what is put behind an answer, its end and newlines, is neither missing nor twice there."""
    make, template, end, _ = dialogs.MODELS[name]
    tokenizer, exact = make(), 0
    for one in dialogs.converse(dialogs.MODELS[name], canonical=True):
        chat = one.row["history"].prompt.tolist(tolist_first=True)
        chat = [{**each, "content": each["content"].removesuffix(end)} for each in chat]
        text = tokenizer.apply_chat_template(
            chat, chat_template=template, tokenize=False, add_generation_prompt=True
        )
        assert one.sent == tokenizer.encode(text, add_special_tokens=False)
        exact += int(one.row["turns", "kept"]) > 0
    assert bool(exact) == (name != "qwen3 without thinking")


@pytest.mark.parametrize("pad_output", [False, True])
def test_losses_see_each_sampled_token_once(pad_output):
    for one in dialogs.converse(dialogs.MODELS["qwen2.5"], pad_output=pad_output):
        prompt, answer = dialogs.unpadded(one.row)
        response = one.row["tokens", "response"].tolist()
        assert answer == response[: len(answer)]
        assert len(one.row["history"].prompt) == int(one.row["turns", "num_messages"])
        assert prompt == one.sent


def test_a_row_left_by_another_conversation_says_nothing():
    """As after a reset of an environment: the entries of the last conversation are still there."""
    model = dialogs.MODELS["qwen2.5"]
    last = [one.row for one in dialogs.converse(model, rows=2, turns=2)]
    fresh = dialogs.History.from_chats([[{"role": "user", "content": "New?"}]] * 2)
    data = dialogs.lazy_stack(last)
    data["history"] = dialogs.ChatHistory(prompt=fresh, batch_size=2)
    row = dialogs.policy_for(model)[0](data)
    assert row["turns", "kept"].tolist() == [0, 0]
    assert row["turns", "forked"].tolist() == [False, False]


def test_rows_without_turns_and_with_them_are_in_one_batch():
    """As a pool of environments has them."""
    model = dialogs.MODELS["qwen2.5"]
    going = next(dialogs.converse(model, rows=1, turns=2))
    chat = going.row["history"].full.tolist(tolist_first=True)
    chat = [{name: one[name] for name in ("role", "content")} for one in chat]
    history = [
        dialogs.History.from_chats([[*chat, {"role": "tool", "content": "4"}]])[0],
        dialogs.History.from_chats([[{"role": "user", "content": "New?"}]])[0],
    ]
    rows = [going.row.clone(False), TensorDict()]
    for one, prompt in zip(rows, history, strict=True):
        one["history"] = dialogs.ChatHistory(prompt=prompt)
    row = dialogs.policy_for(model)[0](dialogs.lazy_stack(rows))
    prompt, answer = dialogs.unpadded(going.row)
    assert row["turns", "kept"].tolist() == [len(prompt) + len(answer), 0]
    assert row["turns", "forked"].tolist() == [False, False]


# Text alone

ASKED = "user: hi\nassistant: "
TURN = Turn(1, ASKED, "well </s>", [1, 2])


def chat(answer, *more):
    roles = ["user", "assistant", "user"]
    return [
        {"role": role, "content": one}
        for role, one in zip(roles, ["hi", answer, *more], strict=False)
    ]


@pytest.mark.parametrize(
    ("answer", "shown", "rest"),
    [
        ("well </s>", "well </s>\nuser: so\n", "\nuser: so\n"),
        ("well </s>", "well</s>\nuser: so\n", "\nuser: so\n"),  # trimmed
        ("well </s>", "well  </s>\nuser: so\n", "\nuser: so\n"),  # a space of the template's own
        ("well </s>", "well \nuser: so\n", "\nuser: so\n"),  # no end
        ("well ", "well </s>\nuser: so\n", "\nuser: so\n"),  # an environment has cut the end off
        ("well </s>", " well </s>\n", None),  # a space that nobody has sampled
        ("well </s>", "ell </s>\n", None),
        ("other </s>", "other </s>\n", None),
        ("well, well </s>", "well, well </s>\n", None),
    ],
)
def test_what_is_behind_an_answer(answer, shown, rest):
    assert behind(TURN, chat(answer, "so"), ASKED + shown, "</s>") == rest


def test_an_answer_that_was_cut_gets_the_end_that_the_template_puts():
    turn = TURN._replace(answer="we")
    assert behind(turn, chat("we", "so"), ASKED + "we</s>\nuser", "</s>") == "</s>\nuser"


def test_an_answer_that_is_gone_on_with_has_no_end_before_that():
    """As ``continue_final_message`` of a chat shows it: the turn's tokens have the end."""
    assert behind(TURN, chat("well </s>"), ASKED + "well ", "</s>") is None
    assert behind(TURN, chat("well </s>"), ASKED + "well", "</s>") is None  # trimmed
    cut = TURN._replace(answer="well ")
    assert behind(cut, chat("well "), ASKED + "well ", "</s>") == ""


def test_a_prompt_that_is_shown_in_another_way_is_none_of_the_turn():
    assert behind(TURN, chat("well </s>"), "USER: hi\nassistant: well </s>", "</s>") is None
    assert is_of(TURN, chat("well </s>"), "</s>")


@pytest.mark.parametrize(
    ("tail", "end"),
    [("<e>\n", "<e>"), (" <e>", "<e>"), ("<e><f>", "<e>"), ("\n", ""), ("<e2>", "<e2>")],
)
def test_the_end_of_a_turn_is_found(tail, end):
    special = ["<e>", "<f>", "<e2>"]
    assert (
        end_of_turn(lambda chat: "".join(f"[{one['content']}{tail}" for one in chat), special)
        == end
    )
