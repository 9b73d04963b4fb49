"""Sessions on real engines: turns stay on one replica, whose prefix cache answers for them."""

import asyncio
import functools
import itertools
import os
import pickle
import signal
import threading

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack
from torchrl.envs import AsyncEnvPool, StepCounter, TrajCounter
from torchrl.envs.llm.chat import ChatEnv
from torchrl.envs.llm.transforms.tools import ToolTransformBase
from torchrl.modules.llm.policies.common import Tokens

from tests.engine.checks import TOLERANCE
from tests.engine.conftest import ENGINE
from tests.engine.faults import engine_core_pid
from tests.engine.requests import endless, eventually, is_idle, sampling, slowed, token_ids
from tests.engine.rollouts import QUIET, SAMPLING, TOKENIZER
from torchrl_vllm_sync import TrainerPolicy, vLLMWrapper
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.testing import load_tiny_model

pytestmark = QUIET
BLOCK = ENGINE["block_size"]
TURNS = 3
CHATS = 6
KILLS = True


@pytest.fixture(autouse=True)
def fresh(service):
    """No session and no cached prefix of an earlier test."""
    service.create_load_balancer()
    eventually(lambda: is_idle(service))
    service.reset_prefix_cache()


def openings(first):
    """Prompts of two whole blocks and a half, all different."""
    return [[first + chat, *range(10, 10 + 2 * BLOCK + BLOCK // 2)] for chat in range(CHATS)]


def converse(generate, prompts, turns=TURNS):
    """Runs conversations turn by turn; the outputs of each turn."""
    said, outputs = [list(prompt) for prompt in prompts], []
    for turn in range(turns):
        outputs.append(generate(said))
        for words, output in zip(said, outputs[-1], strict=True):
            words += [*token_ids(output), *range(100 + turn, 100 + turn + BLOCK)]
    return outputs


def homes(outputs):
    """For each conversation the replicas that answered its turns, in order."""
    return [
        list(turns) for turns in zip(*[[o.replica_id for o in t] for t in outputs], strict=True)
    ]


def test_turns_of_a_session_stay_and_its_cache_answers(service):
    chats = [f"stay {chat}" for chat in range(CHATS)]
    outputs = converse(
        lambda said: service.generate(said, sampling(), session_id=chats), openings(5)
    )
    assert all(len(set(one)) == 1 for one in homes(outputs))
    assert {one[0] for one in homes(outputs)} == set(service.load.replica_ids)
    for earlier, later in itertools.pairwise(outputs):
        for before, after in zip(earlier, later, strict=True):
            asked = len(before.prompt_token_ids)
            assert after.num_cached_tokens >= asked // BLOCK * BLOCK
    assert service.release_sessions([*chats, "never seen"]) == CHATS


def test_without_keys_and_in_turn_they_do_not_stay(service):
    service.create_load_balancer("round-robin")
    # One request less than all at each turn: the next turn's begin with the other replica.
    outputs = converse(lambda said: service.generate(said, sampling()), openings(20)[1:])
    assert all(len(set(one)) == 2 for one in homes(outputs))
    assert all(one.num_cached_tokens == 0 for one in outputs[1])


def test_sessions_stay_whatever_the_strategy(service):
    service.create_load_balancer("round-robin")
    chats = list(range(CHATS - 1))
    outputs = converse(
        lambda said: service.generate(said, sampling(), session_id=chats), openings(30)[1:]
    )
    assert all(len(set(one)) == 1 for one in homes(outputs))


def test_siblings_prefill_their_prompt_once(service):
    """Two prompts, eight samples of each, in one batch."""
    prompts = [prompt for prompt in openings(40)[:2] for _ in range(8)]
    groups = [at // 8 for at in range(16)]
    params = [sampling(temperature=1.0, seed=at) for at in range(16)]
    outputs = service.generate(prompts, params, group_id=groups)
    places = [output.replica_id for output in outputs]
    assert len({*places[:8]}) == len({*places[8:]}) == 1
    assert places[0] != places[8]
    again = service.generate(prompts, params, group_id=groups)
    assert [output.replica_id for output in again] == places
    assert all(output.num_cached_tokens == 2 * BLOCK for output in again)


def test_streams_and_asyncio_take_keys_too(service):
    (prompt, *_) = openings(50)
    first = service.generate(prompt, sampling(), session_id=7)

    async def others():
        batch = await service.agenerate([prompt], sampling(), session_id=[7])
        stream = service.astream(prompt, sampling(), session_id=7, group_id="g")
        return batch, [output async for output in stream]

    batch, steps = asyncio.run(others())
    (*_, last) = service.generate(prompt, sampling(), session_id=7, stream=True)
    assert {batch[0].replica_id, steps[-1].replica_id, last.replica_id} == {first.replica_id}


@pytest.mark.parametrize("name", ["session_id", "group_id"])
@pytest.mark.parametrize("key", [["a"], ["a", "b", "c"], 1.5, "", True, ["a", b"b"]])
def test_wrong_keys_are_refused_before_anything_is_sent(service, name, key):
    prompts = openings(60)[:2]
    with pytest.raises(UnsupportedArgumentError, match=name):
        service.generate(prompts, sampling(), **{name: key})
    with pytest.raises(UnsupportedArgumentError, match=name):
        asyncio.run(service.agenerate(prompts, sampling(), **{name: key}))
    assert service.load.total_in_flight == 0
    assert service.get_num_unfinished_requests() == [0, 0]


def test_a_pickled_service_has_sessions_of_its_own_and_agrees_on_new_ones(service):
    copy = pickle.loads(pickle.dumps(service))
    (prompt, *_) = openings(70)
    here = [service.generate(prompt, sampling(), session_id=f"p{at}").replica_id for at in range(4)]
    ended = copy.load.clock()
    # Its reports must be of after these: one of before counts them as another process's.
    eventually(
        lambda: all(
            one.asked_at > ended and one.num_elsewhere == 0 for one in copy.load.snapshots()
        )
    )
    # Each finds both replicas idle, so the prompt alone decides.
    there = [copy.generate(prompt, sampling(), session_id=f"p{at}").replica_id for at in range(4)]
    assert here == there
    assert copy.release_sessions("p0") == 1
    assert service.release_sessions(["p0", "p1"]) == 2


def test_a_replica_named_by_the_caller_is_the_sessions_from_then_on(service):
    (prompt, *_) = openings(80)
    homes = [
        service.generate(prompt, sampling(), session_id="moved", actor_index=index).replica_id
        for index in (0, 1)
    ]
    assert homes == service.load.replica_ids
    assert service.generate(prompt, sampling(), session_id="moved").replica_id == homes[1]


# TorchRL's wrapper and environments


class Echo(ToolTransformBase):
    def _process_batch_item(self, content, index):
        return [f"{len(content)} characters, says the tool, and that is all there is to say"]


def queries(first):
    while True:
        yield {"query": [f"{first}: What is the number of the day after this one, in words?"]}


def make_env(num, *, counted=False, first=0):
    env = ChatEnv.from_dataloader(
        dataloader=queries(first),
        batch_size=(num,),
        repeats=num,
        tokenizer=TOKENIZER,
        input_mode="history",
    ).append_transform(StepCounter(max_steps=TURNS))
    if counted:
        env = env.append_transform(TrajCounter())
    return env.append_transform(Echo())


def make_policy(service, **kwargs):
    return vLLMWrapper(
        service,
        tokenizer=TOKENIZER,
        input_mode="history",
        chat_template=TOKENIZER.chat_template,
        generate_kwargs=SAMPLING,
        pad_output=False,
        return_log_probs=True,
        **kwargs,
    )


@pytest.mark.parametrize("counted", [False, True], ids=["by-content", "by-number"])
def test_the_wrapper_finds_the_conversations_of_an_environment(service, counted):
    """Seven siblings of one group, in two episodes; in turn they would change replicas."""
    service.create_load_balancer("round-robin")
    with set_list_to_stack(True):
        env, policy = make_env(7, counted=counted), make_policy(service)
        for _ in range(2):
            rows = env.rollout(TURNS, policy)
            replicas = rows["generation", "replica_id"]
            assert all(len(set(conversation)) == 1 for conversation in replicas)
            cached = rows["generation", "num_cached_tokens"]
            assert (cached[:, 1:] > 0).all()
    assert len(service.requests.balancer.sessions) == 7  # the first episode's are released


def test_a_wrapper_told_not_to_leaves_rows_to_the_strategy(service):
    service.create_load_balancer("round-robin")
    with set_list_to_stack(True):
        policy = make_policy(service).get_new_version(find_sessions=False)
        rows = make_env(7).rollout(TURNS, policy)
    assert all(len(set(one)) == 2 for one in rows["generation", "replica_id"])
    assert len(service.requests.balancer.sessions) == 0


def test_conversations_of_a_pool_stay_though_their_turns_mix(service):
    """Environments answer when they like; each numbers its own trajectories, alike."""
    service.create_load_balancer("round-robin")
    policy = make_policy(service)
    replicas = {}
    with set_list_to_stack(True):
        makers = [functools.partial(make_env, 1, counted=True, first=at) for at in range(5)]
        pool = AsyncEnvPool(makers, stack="lazy")
        try:
            ready = pool.reset()
            for _ in range(12):
                pool.async_step_and_maybe_reset_send(policy(ready))
                done, ready = pool.async_step_and_maybe_reset_recv()
                for row in done.view(-1).unbind(0):
                    name = int(row["env_index"]), int(row["traj_count"])
                    replicas.setdefault(name, []).append(row["generation", "replica_id"])
            while pool._current_step_reset:
                pool.async_step_and_maybe_reset_recv()
        finally:
            pool.close()
    assert sum(len(one) == TURNS for one in replicas.values()) >= 5
    assert all(len(set(one)) == 1 for one in replicas.values())
    assert {one[0] for one in replicas.values()} == set(service.load.replica_ids)


# A replica dies: last, because the others need both


def sample_masked(service, trained, rows):
    prompts = torch.arange(5, 45).expand(8, 40) + torch.arange(8)[:, None]
    policy = vLLMWrapper(
        service,
        tokenizer=TOKENIZER,
        input_mode="tokens",
        generate_kwargs={"top_p": 0.9, "top_k": 40, "max_tokens": 150, "ignore_eos": True},
        trainer=trained,
        return_sampling_mask=True,
    )
    rows.append(policy(TensorDict(tokens=Tokens(prompt=prompts, batch_size=8), batch_size=8)))


def assert_masked(trained, rows):
    """The ratio of equal weights is 1 by the masks of these rows, and not without them."""
    answers, sampled = rows["masks", "all_assistant_mask"], rows["log_probs", "full"].clone()
    for is_masked, given in {True: rows, False: rows.exclude("sampling_mask")}.items():
        scored = trained(given.clone())["log_probs", "full"]
        apart = (scored - sampled)[answers].abs()
        assert apart.max() < TOLERANCE if is_masked else apart.mean() > 0.01


@pytest.mark.slow
def test_a_session_whose_replica_dies_moves_and_finishes(service, checkpoint):
    trained = TrainerPolicy(load_tiny_model(checkpoint))
    service.push_weights(trained.model)
    chats = [f"dying {chat}" for chat in range(CHATS)]
    prompts = openings(110)
    before = service.generate(prompts, sampling(), session_id=chats)
    victim = before[0].replica_id
    index = service.load.replica_ids.index(victim)
    pid = engine_core_pid(service.actors[index])
    answers, rows, num_mine = [], [], sum(one.replica_id == victim for one in before)
    callers = [
        threading.Thread(
            target=lambda: answers.extend(service.generate(prompts, endless(), session_id=chats))
        ),
        threading.Thread(target=sample_masked, args=(service, trained, rows)),
    ]
    with slowed(service):  # until it is hit, with tokens left to sample
        for caller in callers:
            caller.start()
        eventually(lambda: service.load.snapshots()[index].in_flight > num_mine)
        os.kill(pid, signal.SIGKILL)
    for caller in callers:
        caller.join(timeout=120)
    assert len(answers) == CHATS
    (survivor,) = {*service.load.replica_ids} - {victim}
    assert {one.replica_id for one in answers} == {survivor}
    assert {*rows[0]["generation", "replica_id"]} == {survivor}
    assert_masked(trained, rows[0])
    after = service.generate(prompts, sampling(), session_id=chats)
    assert {one.replica_id for one in after} == {survivor}
    assert min(one.num_cached_tokens for one in after) == 2 * BLOCK
