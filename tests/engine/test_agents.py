"""What sessions asked an OpenAI server and got, as rows for the loss."""

import http.client
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace

import openai
import pytest
import ray
import torch
from tensordict import set_list_to_stack
from torchrl.objectives.llm.grpo import GRPOLoss
from vllm.sampling_params import RequestOutputKind

from tests.engine.requests import eventually, is_idle, sampling, slowed
from tests.engine.rollouts import QUIET, TOKENIZER
from torchrl_vllm_sync import GroupAdvantage, TrainerPolicy, session_rows, vLLMWrapper
from torchrl_vllm_sync.errors import (
    RewardError,
    UncorrectableSamplingError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.serve.client import ServiceClient
from torchrl_vllm_sync.serve.sessions import ASKED, Answer, Asked, Sessions
from torchrl_vllm_sync.testing import load_tiny_model, token_log_probs

KILLS = True
pytestmark = [pytest.mark.slow, *QUIET]
KEY = "a-key"


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


@pytest.fixture(scope="module")
def server(service):
    with service.serve(api_key=KEY, capture=True) as server:
        yield server


@pytest.fixture
def policy(service):
    return policy_over(service)


def policy_over(service, **settings):
    return vLLMWrapper(
        service,
        tokenizer=TOKENIZER,
        input_mode="history",
        chat_template=TOKENIZER.chat_template,
        generate_kwargs={"max_tokens": 12, "temperature": 1.0},
        return_log_probs=True,
        **settings,
    )


@contextmanager
def client_of(server, key=KEY, session=None):
    headers = {} if session is None else {"X-Session-ID": session}
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key=key, max_retries=0, default_headers=headers
    ) as client:
        client.name = client.models.list().data[0].id
        yield client


def say(client, chat, **fields):
    """The next message of an assistant, which is added to the chat."""
    answer = client.chat.completions.create(
        model=client.name, messages=chat, **{"max_completion_tokens": 12, **fields}
    )
    message = answer.choices[0].message
    chat.append({"role": "assistant", "content": message.content})
    return message.content


def reward(server, name, body, key=KEY):
    """Status and body of a reward over HTTP, by a client that knows nothing of ours."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=30)
    with closing(connection):
        body = body if isinstance(body, str) else json.dumps(body)
        connection.request(
            "POST", f"/sessions/{name}/reward", body, {"Authorization": f"Bearer {key}"}
        )
        with connection.getresponse() as answer:
            return answer.status, json.loads(answer.read())


def unpadded(row):
    """Tokens of a row, and which of them were sampled."""
    mask = row["masks", "all_attention_mask"]
    sampled = row["masks", "all_assistant_mask"][mask]
    return row["tokens", "full"][mask].tolist(), sampled


def test_a_session_of_one_turn_is_a_row_for_the_loss(service, server, policy, checkpoint):
    for at, value in enumerate((1.0, 0.0)):
        with client_of(server, session=f"one-{at}") as client:
            answer = client.chat.completions.create(
                model=client.name,
                messages=[{"role": "user", "content": "What is 3 + 4?"}],
                max_completion_tokens=12,
                seed=at,
                extra_body={"return_token_ids": True},
            )
        choice = answer.choices[0]
        assert choice.logprobs is None  # which nobody has asked for
        assert reward(server, f"one-{at}", {"reward": value})[0] == 200
        last = choice.token_ids
    sessions = server.sessions.take("one-0", "one-1")
    assert "one-0" not in server.sessions
    rows = session_rows(sessions, policy)
    tokens, sampled = unpadded(rows[1])
    prompt = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": "What is 3 + 4?"}], add_generation_prompt=True
    )
    prompt = prompt if isinstance(prompt, list) else prompt["input_ids"]
    assert tokens == [*prompt, *last]
    assert sampled.tolist() == [False] * len(prompt) + [True] * len(last)
    trained = TrainerPolicy(load_tiny_model(checkpoint))
    scored = trained(rows.clone())["log_probs", "full"]
    mask = rows["masks", "all_assistant_mask"]
    assert (scored - rows["log_probs", "full"])[mask].abs().max() < 1e-3
    rows = GroupAdvantage(2).inv(rows)
    loss = GRPOLoss(trained, entropy_coeff=0.0, masking_strategy="sft")(rows)
    assert float(loss.ESS) > 0.9999
    assert torch.isfinite(loss.loss_objective)
    assert {*rows["policy_version"].tolist()} == {service.weight_version}


QUESTION = {"role": "user", "content": "What is 3 + 4?"}
TOOL = {"role": "tool", "content": "The tool says 7.", "tool_call_id": "a"}


def tokens_of(chat):
    ids = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True)
    return ids if isinstance(ids, list) else ids["input_ids"]


def test_turns_with_a_tool_between_are_one_row_of_the_tokens_that_were_sampled(
    service, server, policy, model
):
    names, drifted = [f"two-{at}" for at in range(6)], 0
    for at, name in enumerate(names):
        with client_of(server, session=name) as client:
            chat = [dict(QUESTION)]
            say(client, chat, seed=at, stream=False)
            chat.append(dict(TOOL))
            say(client, chat, seed=at)
            chat.append({"role": "user", "content": [{"type": "text", "text": "So?"}]})
            say(client, chat, seed=at)
            chat[-2]["content"] = "So?"
        server.sessions[name].reward(float(at))
        (row,) = server.sessions[name].rows
        assert len(row.parts) == 3
        told = tokens_of(chat[:-1])
        drifted += told[: len(row.parts[-1][1].turn.ids)] != row.parts[-1][1].turn.ids[: len(told)]
    rows = session_rows(server.sessions.take(*names), policy)
    assert len(rows) == len(names)
    assert rows["next", "reward"].flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert not rows["turns", "forked"].any()
    for row in rows:
        tokens, sampled = unpadded(row)
        between = TOKENIZER.encode("\n<|im_start|>tool\nThe tool says 7.<|im_end|>\n")
        assert str(between)[1:-1] in str(tokens)
        # What the engine says of each sampled token is what the trainer finds for all the row.
        scored = token_log_probs(model, tokens)
        found = row["log_probs", "full"][row["masks", "all_attention_mask"]]
        assert (scored - found[1:])[sampled[1:]].abs().max() < 1e-3
        assert found[~sampled].isnan().all()
        versions = row["policy_versions", "full"][row["masks", "all_attention_mask"]]
        assert ((versions == service.weight_version) == sampled).all()
    assert drifted >= 3  # text that is tokenised again is other tokens


def test_a_turn_that_rewrites_an_earlier_one_begins_a_row_that_says_so(server, policy):
    with client_of(server, session="fork") as client:
        chat = [dict(QUESTION)]
        say(client, chat)
        chat.append(dict(TOOL))
        say(client, chat)
        chat[0] = {"role": "user", "content": "Something else?"}
        chat[3:] = [{"role": "user", "content": "Well?"}]
        say(client, chat)  # the question is another one
        again = [dict(QUESTION)]
        say(client, again)
        say(client, again[:1])
    server.sessions["fork"].reward(1.0)
    sampled = sum(len(one.token_ids) for one in server.sessions["fork"]._answers)
    rows = session_rows(server.sessions.take("fork"), policy)
    assert rows["turns", "forked"].tolist() == [False, True, False, False]
    assert rows["turns", "num_messages"].tolist() == [1, 4, 1, 1]
    assert rows["next", "done"].flatten().tolist() == [False, False, False, True]
    assert int(rows["masks", "all_assistant_mask"].sum()) == sampled


def test_the_samples_of_one_turn_and_branches_have_each_token_once(server, policy):
    with client_of(server, session="branch") as client:
        chat = [dict(QUESTION)]
        say(client, chat)
        asked = [*chat, dict(TOOL)]
        two = client.chat.completions.create(
            model=client.name, messages=asked, n=2, max_completion_tokens=12, seed=3
        )
        say(client, asked)
    session = server.sessions["branch"]
    session.reward(1.0)
    sampled = [len(part.token_ids) for part in session._answers]
    first = session._answers[0].turn.ids
    rows = session_rows(server.sessions.take("branch"), policy)
    assert len(rows) == len(two.choices) + 1
    assert rows["turns", "kept"].tolist() == [0, len(first), len(first)]
    assert not rows["turns", "forked"].any()
    assert int(rows["masks", "all_assistant_mask"].sum()) == sum(sampled)
    for row in rows:
        assert unpadded(row)[0][: len(first)] == first


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_that_is_sent_back_is_the_tokens_that_were_sampled(service, policy, stream):
    call = '<tool_call>{"name": "add",  "arguments": {"a":  3}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    options = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    fields = {"max_completion_tokens": 120, "tools": tools}
    with (
        service.serve(capture=True, **options) as server,
        client_of(server, "none", session="tools") as client,
    ):
        given = client.chat.completions.create(
            model=client.name,
            messages=[dict(QUESTION)],
            extra_body={"structured_outputs": {"choice": [call]}},
            stream=stream,
            **fields,
        )
        calls = given_calls(given) if stream else given.choices[0].message.tool_calls
        calls = [one if stream else one.model_dump() for one in calls]
        asked = {"role": "assistant", "content": None, "tool_calls": calls}
        chat = [dict(QUESTION), asked, dict(TOOL)]
        say(client, chat, **fields)
        session = server.sessions["tools"]
        (row,) = session.rows
        assert len(row.parts) == 2
        chat[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 4}'
        say(client, chat[:3], **fields)
        assert len(session.rows) == 2


def given_calls(chunks):
    """The calls of a stream, as its client puts them together."""
    calls = {}
    for delta in (one.choices[0].delta for one in chunks if one.choices):
        for part in delta.tool_calls or ():
            call = calls.setdefault(
                part.index,
                {"id": "a", "type": "function", "function": {"name": "", "arguments": ""}},
            )
            call["function"]["name"] += part.function.name or ""
            call["function"]["arguments"] += part.function.arguments or ""
    return [*calls.values()]


def test_answers_that_read_alike_stay_in_their_conversations(server):
    """What is behind a stop was sampled and not shown, as reasoning is."""
    chats = [[dict(QUESTION)], [{"role": "user", "content": "What is 2 + 5?"}]]
    with client_of(server, session="alike") as client:
        for chat, stop in zip(chats, ("!", "?"), strict=True):
            choice = {"structured_outputs": {"choice": [f"7{stop}"]}}
            assert say(client, chat, stop=stop, extra_body=choice) == "7"
        for chat in chats:
            say(client, [*chat, dict(TOOL)])
    (session,) = server.sessions.take("alike")
    assert [len(row.parts) for row in session.rows] == [2, 2]
    assert not any(row.forked for row in session.rows)


def test_streams_and_token_prompts_are_kept_alike(service, server, policy):
    with client_of(server, session="ids") as client:
        chat = [dict(QUESTION)]
        chunks = client.chat.completions.create(
            model=client.name, messages=chat, max_completion_tokens=12, seed=5, stream=True
        )
        text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
        chat += [{"role": "assistant", "content": text}, dict(TOOL)]
        say(client, chat, seed=5)
        (row,) = server.sessions["ids"].rows
        assert len(row.parts) == 2
        ids = [*row.parts[-1][1].turn.ids, 70, 71, 72]
        client.completions.create(model=client.name, prompt=ids, max_tokens=5, logprobs=2)
        assert [read for read, _ in row.parts][2] == [70, 71, 72]
    server.sessions["ids"].reward(0.5)
    rows = session_rows(server.sessions.take("ids"), policy)
    assert unpadded(rows[0])[0][: len(ids)] == ids
    assert int(rows["masks", "all_assistant_mask"].sum()) == sum(
        len(one.log_probs) for _, one in row.parts
    )


def test_rewards_over_http(server, policy):
    with client_of(server, session="a/b c") as client:
        say(client, [dict(QUESTION)])
    name = "a%2Fb%20c"
    assert reward(server, "nobody", {"reward": 1.0})[0] == 404
    assert reward(server, name, {"reward": 1.0}, key="wrong")[0] == 401
    for wrong in (
        '{"reward": NaN}',
        '{"reward": 1e999}',
        '{"reward": 1e39}',  # which rows would have as infinity
        f'{{"reward": {10**400}}}',
        {"reward": "1"},
        {"reward": True},
        {},
        "[",
    ):
        assert reward(server, name, wrong)[0] == 422
    with pytest.raises(RewardError, match="'a/b c' has no reward"):
        session_rows([server.sessions["a/b c"]], policy)
    assert reward(server, name, {"reward": 1.0})[0] == 200
    assert reward(server, name, {"reward": 0.25})[0] == 200  # a client may ask again
    with client_of(server, session="a/b c") as client:  # the path that a base_url has
        client.post("/sessions/a%2Fb%20c/reward", body={"reward": -2}, cast_to=object)
    (session,) = server.sessions.take("a/b c")
    assert session.score == -2.0
    assert reward(server, name, {"reward": 1.0})[0] == 404


@pytest.mark.parametrize("calls", ["abc", 5, [1], [{"function": None}], {"a": 1}])
def test_messages_of_a_session_that_are_none_are_their_sender_s_fault(server, calls):
    chat = [dict(QUESTION)]
    with client_of(server, session="odd") as client:
        say(client, chat)
        with pytest.raises(openai.BadRequestError):
            say(client, [*chat, {**chat[-1], "tool_calls": calls}])
    server.sessions.take("odd")


def test_a_session_s_own_key_asks_and_rewards_for_it_alone(server, policy):
    mine, other = server.sessions.open(), server.sessions.open()
    with client_of(server, key=mine.id, session="not-me") as client:
        say(client, [dict(QUESTION)], user="nor-me")
    assert len(mine.rows) == 1
    assert not {"not-me", "nor-me"} & {*server.sessions}
    assert reward(server, other.id, {"reward": 1.0}, key=mine.id)[0] == 404
    assert reward(server, mine.id, {"reward": 1.0}, key=mine.id)[0] == 200
    server.sessions.take(mine.id, other.id)
    assert reward(server, mine.id, {"reward": 1.0}, key=mine.id)[0] == 401
    with client_of(server, session="named") as client:
        say(client, [dict(QUESTION)])
    assert reward(server, "named", {"reward": 1.0}, key="named")[0] == 401  # a name is no key
    server.sessions.take("named")


def test_only_sessions_are_kept_and_no_more_than_asked_for(service, caplog):
    with (
        service.serve(capture=3) as server,
        client_of(server, "none") as client,
    ):
        say(client, [dict(QUESTION)])  # nobody's
        assert not len(server.sessions)
        for at in range(3):
            say(client, [dict(QUESTION)], user=f"user-{at}")
        server.sessions["user-0"].reward(1.0)
        say(client, [dict(QUESTION)], user="user-3")
        assert [*server.sessions] == ["user-0", "user-2", "user-3"]  # the oldest without a reward
        assert server.sessions.num_dropped == 1
        assert "1 sessions were dropped: more than 3 answers" in caplog.text
        assert [one.id for one in server.sessions.take()] == ["user-0"]
        say(client, [dict(QUESTION)], user="user-4")
        assert len(server.sessions) == 3
        with pytest.raises(KeyError):
            server.sessions.take("user-4", "user-1")
        assert "user-4" in server.sessions
    with service.serve() as server:
        assert server.sessions is None
        assert reward(server, "any", {"reward": 1.0}, key="none")[0] == 404
    for wrong in (0, -1, 1.5, "yes"):
        with pytest.raises(UnsupportedArgumentError, match="capture"):
            service.serve(capture=wrong)


def test_a_session_that_is_named_twice_is_taken_once(service):
    with service.serve(capture=2) as server, client_of(server, "none") as client:
        for user in ("twice", "other"):
            say(client, [dict(QUESTION)], user=user)
        assert [one.id for one in server.sessions.take("twice", "twice")] == ["twice"] * 2
        say(client, [dict(QUESTION)], user="third")
        say(client, [dict(QUESTION)], user="fourth")
        assert [*server.sessions] == ["third", "fourth"]  # as many as are kept


def test_sampling_that_a_loss_cannot_correct_for_is_refused(service, server, policy):
    with client_of(server, session="cold") as client:
        say(client, [dict(QUESTION)], temperature=0.5)
    server.sessions["cold"].reward(1.0)
    (session,) = server.sessions.take("cold")
    with pytest.raises(UncorrectableSamplingError, match=r"temperature=0\.5"):
        session_rows([session], policy)
    rows = session_rows([session], policy_over(service, allow=("temperature",)))
    assert [*rows["generation", "uncorrected"]] == ["temperature=0.5"]


async def test_an_answer_is_kept_before_its_client_can_know_its_end(service, server):
    """Who reads no further than the finish reason may be rewarded, and its session taken, then."""
    client = ServiceClient(service, service.requests.fetch("get_config"), server.sessions)
    ASKED.set(Asked(None, session_id="end"))
    prompt = {"type": "token", "prompt_token_ids": [40, 41, 42]}
    outputs = client.generate(prompt, sampling(output_kind=RequestOutputKind.DELTA), "end")
    known = [(one.finished, "end" in server.sessions) async for one in outputs]
    assert {*known} == {(False, False), (True, True)}
    server.sessions.take("end")


def test_a_session_has_no_beams_whose_tokens_nobody_sampled(server):
    fields = {"n": 2, "temperature": 1.0, "extra_body": {"use_beam_search": True}}
    with client_of(server) as client:
        assert say(client, [dict(QUESTION)], **fields)  # nobody's are searched for
        with pytest.raises(openai.APIStatusError, match="no session keeps it"):
            say(client, [dict(QUESTION)], user="beams", **fields)
    assert "beams" not in server.sessions


def test_an_answer_that_a_chat_goes_on_with_has_no_end_before_that(server):
    """Its end was sampled, and is in the tokens of that turn."""
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    with client_of(server, session="longer") as client:
        chat = [dict(QUESTION)]
        choice = {"structured_outputs": {"choice": ["7"]}}
        assert say(client, chat, extra_body=choice) == "7"
        say(client, chat, extra_body=fields)
    (session,) = server.sessions.take("longer")
    ended, longer = session._answers
    assert ended.finish_reason == "stop"
    assert longer.turn.ids[: len(ended.turn.ids) - 1] == ended.turn.ids[:-1]
    assert len(longer.turn.ids) - len(longer.token_ids) == len(ended.turn.ids) - 1


def test_a_chat_of_a_session_is_not_truncated(server):
    """The session goes on from all that its engine has read, and would read all of it again."""
    fields = {"extra_body": {"truncate_prompt_tokens": 4}}
    with client_of(server) as client:
        assert say(client, [dict(QUESTION)], **fields)  # nobody's are
        for _ in range(2):
            with pytest.raises(openai.APIStatusError, match="no prompt is truncated"):
                say(client, [dict(QUESTION)], user="cut", **fields)
            say(client, [dict(QUESTION)], user="cut")
    (session,) = server.sessions.take("cut")
    assert len(session._answers) == 2


def test_who_hangs_up_leaves_no_row(service, server):
    with client_of(server, session="gone") as client, ExitStack() as pace:
        chat = [dict(QUESTION)]
        say(client, chat)
        pace.enter_context(slowed(service, 0.2))
        stream = client.chat.completions.create(
            model=client.name,
            messages=[*chat, TOOL],
            max_completion_tokens=100,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        stream.close()
        eventually(lambda: is_idle(service))
        pace.close()
        say(client, [*chat, dict(TOOL)])
    (session,) = server.sessions.take("gone")
    (row,) = session.rows
    assert len(row.parts) == 2


def test_a_replica_that_dies_in_mid_answer_leaves_its_row_whole(service, server, policy, model):
    """Comes last: what is killed stays dead."""
    pids = {one.replica_id: ray.get(one.actor.describe.remote()).pid for one in service.replicas}
    before = service.requests.counts.totals()["retried"]
    with client_of(server, session="kill") as client, ExitStack() as pace:
        chat = [dict(QUESTION)]
        say(client, chat)
        pace.enter_context(slowed(service, 0.1))  # until the kill
        stream = client.chat.completions.create(
            model=client.name,
            messages=[*chat, TOOL],
            max_completion_tokens=100,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _ in range(20):
            next(stream)
        (victim,) = [one.replica_id for one in service.load.snapshots() if one.in_flight]
        os.kill(pids[victim], signal.SIGKILL)
        pace.close()
        assert [*stream]
    assert service.requests.counts.totals()["retried"] == before + 1
    server.sessions["kill"].reward(1.0)
    rows = session_rows(server.sessions.take("kill"), policy)
    assert len(rows) == 1
    tokens, sampled = unpadded(rows[0])
    assert int(sampled[-100:].sum()) == 100
    scored = token_log_probs(model, tokens)
    found = rows[0]["log_probs", "full"][rows[0]["masks", "all_attention_mask"]]
    assert (scored - found[1:])[sampled[1:]].abs().max() < 1e-3


def test_a_session_is_there_while_an_answer_is_added_to_it():
    sessions, read = Sessions(SimpleNamespace(all_special_ids=[]), 10), []
    asked, answer = Asked(None, session_id="a"), Answer(None, SimpleNamespace())
    sessions._keep(asked, answer, [1], None, forked=False)

    class Known(dict):
        def pop(self, *args):
            found = super().pop(*args)  # to be put last
            read.append(pool.submit(sessions.__getitem__, "a"))
            wait(read, timeout=0.5)
            return found

    with ThreadPoolExecutor(1) as pool:
        sessions._known = Known(sessions._known)
        sessions._keep(asked, answer, [1], None, forked=False)
        assert read[0].result(20) is sessions["a"]
