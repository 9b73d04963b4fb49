"""What sessions asked an OpenAI server and got, as rows for the loss."""

import http.client
import json
from contextlib import closing, contextmanager

import openai
import pytest
import torch
from tensordict import set_list_to_stack
from torchrl.objectives.llm.grpo import GRPOLoss

from tests.engine.rollouts import QUIET, TOKENIZER
from torchrl_vllm_sync import GroupAdvantage, TrainerPolicy, session_rows, vLLMWrapper
from torchrl_vllm_sync.testing import load_tiny_model

pytestmark = QUIET
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
