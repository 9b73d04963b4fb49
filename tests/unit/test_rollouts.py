"""``RolloutCollector`` gives the rows of TorchRL's collector, dense; and rewards are checked."""

import asyncio
import gc
import itertools
import re
import threading
import weakref
from concurrent.futures import Future

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, is_tensor_collection
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import StepCounter, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv, DataLoadingPrimer
from torchrl.modules.llm import vLLMWrapper as TorchRLWrapper

from tests.unit.test_policy import (
    TOKENIZER,
    CannedService,
    assert_same_rows,
    lists_are_stacks,  # noqa: F401
    retold,
    swap,
)
from torchrl_vllm_sync import vLLMWrapper
from torchrl_vllm_sync.errors import (
    GenerationError,
    InvalidPromptError,
    PacingError,
    RewardError,
    TokenizerMismatchError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.rl import tasks
from torchrl_vllm_sync.rl.groups import GroupAdvantage, RolloutStorage
from torchrl_vllm_sync.rl.rollouts import RolloutCollector, TextReward

pytestmark = [
    pytest.mark.filterwarnings("ignore:Response history should have one more batch dim"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage"),
    pytest.mark.filterwarnings("ignore:frames_per_batch"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
LAID_OUT = ("tokens", "masks", "log_probs", "policy_versions")


def sums():
    """A question, its answer and a number, for ever."""
    for at in itertools.count():
        yield {
            "query": [f"What is {at} + {'1' * (at % 3)}?"],
            "answer": [str(at)],
            "hard": torch.tensor([at % 2]),
        }


def length(prompts, answers, *, answer, hard):
    """How long an answer is, and what it was to: different for each row."""
    rows = zip(prompts, answers, answer, hard, strict=True)
    return [len(said) + len(asked) / 10 + int(right) + one for asked, said, right, one in rows]


def make_env(*transforms, num_rows=4, data=None, **settings):
    settings = {"tokenizer": TOKENIZER, "input_mode": "history", "repeats": 2, **settings}
    env = ChatEnv.from_dataloader(data or sums(), batch_size=(num_rows,), **settings)
    for one in transforms or (StepCounter(max_steps=1), TextReward(length)):
        env = env.append_transform(one)
    return env


def make_policy(service=None, kind=vLLMWrapper, **settings):
    return kind(
        service or CannedService(),
        tokenizer=TOKENIZER,
        **{
            "input_mode": "history",
            "chat_template": TOKENIZER.chat_template,
            "generate_kwargs": {"max_tokens": 9},
            "return_log_probs": True,
            "pad_output": False,
            **settings,
        },
    )


def collector(kind=RolloutCollector, env=None, policy=None, **settings):
    settings = {"dialog_turns_per_batch": 4, "flatten_data": True, **settings}
    return kind(env or make_env(), policy=policy or make_policy(), **settings)


def texts(rows, path=()):
    """All that is no tensor, by its path."""
    found = {}
    plain = getattr(rows, "_tensordict", rows)
    for name in plain.keys():  # noqa: SIM118  a TensorDict
        entry = plain.get(name)
        if isinstance(entry, NonTensorStack | NonTensorData):
            found[*path, name] = entry.tolist()
        elif is_tensor_collection(entry):
            found |= texts(entry, (*path, name))
    return {name: value for name, value in found.items() if name[-1] != "padded"}


def assert_same_row(dense, ragged):
    """One row of each: the same entries, once padding is taken away."""
    present = dense["masks", "all_attention_mask"]
    width = dense["tokens", "prompt"].shape[-1]
    parts = {"prompt": present[:width], "response": present[width:]}
    assert set(dense.keys(True, True)) == set(ragged.keys(True, True))
    for name in ragged.keys(True, True):
        found, wanted = dense[name], ragged[name]
        if name[0] in LAID_OUT:
            found = found[parts.get(name[-1], present)]
        assert found.dtype == wanted.dtype, name
        assert found.shape == wanted.shape, name
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True, msg=str(name))
    assert texts(dense) == texts(ragged)


CASES = {
    "groups": {},
    "versions": {"track_policy_version": True},
    "a system prompt": {"env": {"system_prompt": "Be brief."}},
    "one row": {"env": {"num_rows": 1, "repeats": None}, "dialog_turns_per_batch": 1},
    "no log-probabilities": {"policy": {"return_log_probs": False}},
    "empty answers": {"service": {"lengths": (0, 2)}},
    "more rows than asked for": {"dialog_turns_per_batch": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_torchrls_collector(case):
    settings = dict(CASES[case])
    env, policy, service = (settings.pop(one, {}) for one in ("env", "policy", "service"))
    theirs, ours = (
        collector(
            kind,
            make_env(**env),
            make_policy(CannedService(**service), **policy),
            total_dialog_turns=3 * settings.get("dialog_turns_per_batch", 4),
            **settings,
        )
        for kind in (LLMCollector, RolloutCollector)
    )
    assert ours.path == "columns"
    batches = [*zip(theirs, ours, strict=True)]
    assert len(batches) >= 2
    for wanted, found in batches:
        assert type(found) is TensorDict
        assert found.batch_size == wanted.batch_size
        for one, other in zip(
            found.reshape(-1).unbind(0), wanted.reshape(-1).unbind(0), strict=True
        ):
            assert_same_row(one, other)


def test_dense_rows_take_as_many_operations_however_many_they_are():
    """An operation of torch lets go of Python's lock, and a trainer's thread waits for it anew."""

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += 1
            return function(*args, **(kwargs or {}))

    policy, chats = make_policy(), [[{"role": "user", "content": "Why?"}]]
    counts = []
    for num_rows in (4, 64):
        with Counting() as counting:
            policy.answer_chats(chats, [0] * num_rows)
        counts.append(counting.count)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("settings", [{"num_samples": 1}, {"prompt_logprobs": 0}])
def test_dense_rows_have_log_probs_of_answers_alone_whatever_is_asked_for(settings):
    settings = dict(settings)
    policy = make_policy(num_samples=settings.pop("num_samples", None), generate_kwargs=settings)
    rows = policy.answer_chats([[{"role": "user", "content": "Why?"}]], [0, 0])["log_probs"]
    length = rows.response.shape[-1]
    assert rows.prompt is None
    assert rows.full[:, :-length].isnan().all()
    assert torch.equal(rows.full[:, -length:], rows.response)


def test_dense_rows_that_are_kept_keep_no_outputs():
    service = CannedService()
    rows = make_policy(service).answer_chats([[{"role": "user", "content": "Why?"}]], [0, 0])
    outputs = [weakref.ref(one) for one in service.outputs]
    said = [one.outputs[0].token_ids for one in service.outputs]
    del service.outputs
    assert [one() for one in outputs] == [None, None]
    assert rows["text"].response == TOKENIZER.batch_decode(said)


def test_several_steps_are_one_batch_in_torchrls_order():
    theirs, ours = (
        collector(kind, dialog_turns_per_batch=12, total_dialog_turns=24)
        for kind in (LLMCollector, RolloutCollector)
    )
    for wanted, found in zip(theirs, ours, strict=True):
        assert found["query"] == wanted["query"]
        assert found["answer"] == wanted["answer"]
        assert found["hard"].tolist() == wanted["hard"].tolist()


def test_a_changed_row_is_noticed():
    """The twin of the above."""
    theirs, ours = (
        next(iter(collector(kind, total_dialog_turns=4)))
        for kind in (LLMCollector, RolloutCollector)
    )
    at = int(ours["masks", "all_attention_mask"][1].nonzero()[-1])
    ours["log_probs", "full"][1, at] += 1e-6
    assert_same_row(ours[0], theirs[0])
    with pytest.raises(AssertionError, match="log_probs"):
        assert_same_row(ours[1], theirs[1])
    ours["query"][0] = "another"
    with pytest.raises(AssertionError):
        assert_same_row(ours[0], theirs[0])


def test_rows_go_into_a_buffer():
    buffer = ReplayBuffer(storage=LazyStackStorage(4), batch_size=4)
    for _ in collector(replay_buffer=buffer, total_dialog_turns=4):
        assert len(buffer) == 4
        assert {*buffer[:]["query"]} == {"What is 2 + 11?", "What is 3 + ?"}


def test_rows_pass_groups_and_a_storage_unchanged():
    buffer = ReplayBuffer(storage=RolloutStorage(8), transform=GroupAdvantage(2), batch_size=8)
    batches = [*collector(total_dialog_turns=8)]
    for rows in batches:
        buffer.extend(rows)
    for at, wanted in enumerate(batches):
        found = buffer[torch.arange(4) + 4 * at]
        assert found["advantage"].shape == (4, 1, 1)
        assert found["tokens"].padded is True
        assert found["history"].full.batch_size == (4, 2)
        found = found.exclude("advantage")
        assert_same_rows(found, wanted)
        assert texts(found) == texts(wanted)
        found["tokens"].padded = False
        with pytest.raises(AssertionError, match="padded"):
            assert_same_rows(found, wanted)


class Seen(Transform):
    """Any transform that this library does not know."""


class OtherChats(ChatEnv):
    """Any environment of the same face."""


class OtherPrimer(DataLoadingPrimer):
    """Any other source of prompts."""


def changed_env(of_primer=DataLoadingPrimer, of_chats=ChatEnv):
    """An environment that is, but for its classes, one that has a fast way."""
    env = make_env()
    env.transform[0].__class__, env.base_env.__class__ = of_primer, of_chats
    return env


OTHER_WAYS = {
    "the environment is no ChatEnv but OtherChats": {"made": {"of_chats": OtherChats}},
    "prompts come from OtherPrimer": {"made": {"of_primer": OtherPrimer}},
    "the policy is no torchrl_vllm_sync.vLLMWrapper but vLLMWrapper": {
        "policy": {"kind": TorchRLWrapper}
    },
    "Seen looks at rows": {"env": [StepCounter(max_steps=1), TextReward(length), Seen()]},
    "there may be several turns": {"env": [StepCounter(max_steps=2), TextReward(length)]},
    "input_mode='text'": {"mode": "text"},
    "prefer_tokens=True": {"policy": {"prefer_tokens": True}},
    "log-probabilities of prompts": {"policy": {"generate_kwargs": {"prompt_logprobs": 1}}},
    "whole trajectories": {"collector": {"yield_completed_trajectories": True}},
    "rows by step": {"collector": {"flatten_data": False}},
}


@pytest.mark.parametrize("why", OTHER_WAYS)
def test_what_has_no_fast_way_goes_torchrls(why):
    case = OTHER_WAYS[why]
    mode = case.get("mode", "history")
    transforms = [transform.clone() for transform in case.get("env", ())]
    one = collector(
        env=changed_env(**case["made"])
        if "made" in case
        else make_env(*transforms, input_mode=mode),
        policy=make_policy(**{"input_mode": mode, **case.get("policy", {})}),
        **case.get("collector", {}),
    )
    assert one.path.startswith("torchrl: ")
    assert why in one.path


def test_torchrl_says_what_is_wrong_with_an_environment_without_prompts():
    with pytest.raises(RuntimeError, match="ChatEnv expects a tensordict"):
        collector(env=TransformedEnv(ChatEnv(batch_size=(4,))))


def test_torchrls_way_gives_torchrls_rows():
    one = collector(env=make_env(StepCounter(max_steps=1), Seen(), TextReward(length)))
    wanted = collector(LLMCollector)
    found, wanted = next(iter(one)), next(iter(wanted))
    assert found["next", "reward"].tolist() == wanted["next", "reward"].tolist()
    assert found[0]["tokens", "full"].tolist() == wanted[0]["tokens", "full"].tolist()


@pytest.mark.parametrize(
    ("staleness", "message"),
    [
        (-1, "max_staleness must be at least 0, got -1"),
        *((one, f"max_staleness must be an integer, got {one!r}") for one in ("1", None, 0.5)),
        (1, "max_staleness=1, path 'torchrl: Seen looks at rows'"),
    ],
)
def test_another_staleness_is_refused_and_leaves_all_as_it_was(staleness, message):
    env, policy, done = make_env(Seen(), StepCounter(max_steps=1)), make_policy(), []
    settings = {"track_policy_version": True, "weight_updater": lambda: done.append("made")}
    env.close = lambda **_: done.append("closed")
    with pytest.raises(UnsupportedArgumentError, match=message):
        collector(env=env, policy=policy, max_staleness=staleness, **settings)
    gc.collect()
    assert policy._collector is None
    assert [type(one) for one in env.transform[1:]] == [Seen, StepCounter]
    assert not done


class Gated(CannedService):
    """Counts calls, and answers when it is let."""

    def __init__(self):
        super().__init__()
        self.begun, self.free = threading.Semaphore(0), threading.Semaphore(0)
        self.calls = 0

    def generate(self, *args, **kwargs):
        self.calls += 1
        self.begun.release()
        assert self.free.acquire(timeout=20)
        return super().generate(*args, **kwargs)


def test_the_next_batch_is_sampled_while_this_one_is_used():
    service = Gated()
    service.free.release(2)
    batches = iter(collector(policy=make_policy(service), max_staleness=1, total_dialog_turns=12))
    first = next(batches)
    assert service.begun.acquire(timeout=20)
    assert service.begun.acquire(timeout=20)  # the second began without being asked for
    second = next(batches)
    assert service.begun.acquire(timeout=20)
    service.free.release()
    third = next(batches)
    assert next(batches, None) is None
    assert service.calls == 3  # none beyond the last one
    seen = [{*one["query"]} for one in (first, second, third)]
    assert len(set().union(*seen)) == 6


def test_the_next_batch_is_sampled_while_this_one_is_scored():
    service = Gated()
    service.free.release(9)
    waits = []

    def slow(prompts, answers):
        waits.append(service.begun.acquire(timeout=20) and service.begun.acquire(timeout=20))
        service.begun.release()
        return [0.0] * len(prompts)

    env = make_env(StepCounter(max_steps=1), TextReward(slow))
    batches = iter(collector(env=env, policy=make_policy(service), max_staleness=1))
    next(batches)
    assert waits[0]  # scored when the second was under way


def test_without_staleness_a_batch_is_sampled_when_it_is_asked_for():
    service = Gated()
    service.free.release(9)
    batches = iter(collector(policy=make_policy(service), total_dialog_turns=12))
    for calls in (1, 2, 3):
        next(batches)
        assert service.calls == calls


def test_what_fails_ahead_fails_where_it_is_asked_for():
    def fails_later(prompts, answers, *, hard):
        if "What is 4 + 1?" in prompts:
            raise RuntimeError("no more")
        return [0.0] * len(prompts)

    env = make_env(StepCounter(max_steps=1), TextReward(fails_later))
    batches = iter(collector(env=env, max_staleness=1))
    next(batches)
    with pytest.raises(RuntimeError, match="no more"):
        next(batches)


class ByGroup(CannedService):
    """Answers the group of each question when its gate is opened, or fails as it says."""

    weight_version = 0

    def __init__(self, *shut):
        super().__init__()
        self.gates = [Future() for _ in range(20)]
        self.sent, self.cancelled = [], []
        self.begun, self.answered = threading.Semaphore(0), threading.Semaphore(0)
        for at, gate in enumerate(self.gates):
            if at not in shut:
                gate.set_result(None)

    def generate(self, *args, **kwargs):
        raise AssertionError("groups are awaited")

    async def agenerate(self, *, prompt_token_ids, sampling_params, group_id, adapter):
        assert len({*map(tuple, prompt_token_ids)}) == 1
        at = number(TOKENIZER.decode(prompt_token_ids[0]))
        self.sent.append(at)
        self.begun.release()
        try:
            await asyncio.wrap_future(self.gates[at])
        except asyncio.CancelledError:
            self.cancelled.append(at)
            raise
        finally:
            self.answered.release()
        prompts = [{"prompt_token_ids": one} for one in prompt_token_ids]
        return super().generate(prompts, sampling_params)


def number(question):
    """Of a question; an environment of four rows takes two when it is made."""
    return int(re.search(r"What is (\d+) \+", question)[1]) - 2


def by_group(service, reward=length, staleness=2, env=None, policy=None, **settings):
    """Batches of two groups of two."""
    made = collector(
        env=env or make_env(StepCounter(max_steps=1), TextReward(reward)),
        policy=policy or make_policy(service),
        max_staleness=staleness,
        yield_completed_trajectories=True,
        **settings,
    )
    assert made.path == "columns"
    return made


def groups(rows):
    """Questions of a batch, which is of whole groups, and no wider than they are."""
    assert rows["masks", "all_attention_mask"].any(0).all()
    found = [number(one) for one in rows["query"]]
    assert found[::2] == found[1::2]
    return found[::2]


def test_the_rows_of_a_group_have_seeds_of_their_own():
    seeds = []

    class Seeded(ByGroup):
        async def agenerate(self, *, sampling_params, **kwargs):
            seeds.extend(one.seed for one in sampling_params)
            return await super().agenerate(sampling_params=sampling_params[0], **kwargs)

    policy = make_policy(Seeded(), generate_kwargs={"max_tokens": 9, "seed": 0})
    assert len([*by_group(policy.model, policy=policy, total_dialog_turns=8)]) == 2
    assert len({*seeds}) == len(seeds) == 8


@pytest.mark.parametrize("name", ["masks", "policy_version", "next"])
def test_a_column_of_the_data_set_does_not_take_the_place_of_the_rows_own(name):
    prompts = [{"query": [f"What is {at} + 1?"], name: ["mine"]} for at in range(8)]
    env = tasks.make_env(TOKENIZER, prompts, TextReward(length), num_envs=4, repeats=2)
    with pytest.raises(InvalidPromptError, match=f"'{name}' is what the rows' own entry is called"):
        next(iter(collector(env=env)))


def test_a_collector_by_groups_that_was_shut_down_says_so():
    rolled = by_group(ByGroup())
    rolled.shutdown()
    with pytest.raises(PacingError, match="the collector was shut down"):
        next(iter(rolled))


def test_a_collector_by_groups_tells_its_state_and_goes_on_from_none():
    rolled = by_group(ByGroup(0, 3), total_dialog_turns=16)
    state = rolled.state_dict()
    assert "pacer" not in state
    with pytest.raises(UnsupportedArgumentError, match="yield_completed_trajectories"):
        rolled.load_state_dict(state)


def test_groups_that_end_first_are_handed_on_first():
    service = ByGroup(0, 3)
    rolled = by_group(service, total_dialog_turns=16)
    batches = iter(rolled)
    assert groups(next(batches)) == [1, 2]
    assert all(service.begun.acquire(timeout=20) for _ in range(4))
    assert service.sent == [0, 1, 2, 3]
    service.gates[3].set_result(None)
    second = groups(next(batches))
    assert 0 not in second  # the twin of the next test
    service.gates[0].set_result(None)
    rest = [one for rows in batches for one in groups(rows)]
    assert sorted([1, 2, *second, *rest]) == [*range(8)] == sorted(service.sent)


def test_a_group_that_would_be_too_old_is_waited_for():
    scored = []

    def reward(prompts, answers):
        scored.extend(map(number, prompts))
        if {1, 2, 3, 4, 5} <= {*scored} and not service.gates[0].done():
            service.gates[0].set_result(None)  # the last of all
        return [0.0] * len(prompts)

    service = ByGroup(0)
    batches = iter(by_group(service, reward, staleness=1))
    assert groups(next(batches)) == [1, 2]
    service.weight_version = 1
    assert groups(next(batches)) == [3, 0]


def test_groups_have_the_rows_of_torchrls_collector():
    theirs = collector(
        LLMCollector, make_env(num_rows=2), dialog_turns_per_batch=2, total_dialog_turns=18
    )
    wanted = {number(rows["query"][0]): rows for rows in theirs}
    batches = [*by_group(ByGroup(), total_dialog_turns=16)]
    assert [one.batch_size for one in batches] == [(4,)] * 4
    for rows in batches:
        assert type(rows) is TensorDict
        for at, name in enumerate(groups(rows)):
            for place in range(2):
                assert_same_row(rows[2 * at + place], wanted[name][place])


def test_groups_are_scored_while_others_are_sampled_and_together_when_they_wait():
    sizes = []

    def slow(prompts, answers):
        if not sizes:
            assert all(service.answered.acquire(timeout=20) for _ in range(3))
        sizes.append(len(prompts))
        return [0.0] * len(prompts)

    service = ByGroup(0)
    batches = iter(by_group(service, slow, total_dialog_turns=8))
    assert groups(next(batches)) == [1, 2]
    assert sizes == [2, 4]
    service.gates[0].set_result(None)
    assert groups(next(batches)) == [3, 0]
    assert next(batches, None) is None
    assert sizes == [2, 4, 2]


def test_a_group_that_fails_fails_where_groups_are_asked_for():
    service, seen = ByGroup(0, 2, 3), []
    service.gates[2].set_exception(GenerationError("2", "it broke"))
    rolled = by_group(service)
    with pytest.raises(GenerationError, match="it broke"):
        seen.extend(map(groups, rolled))
    assert seen == []  # where only one was answered
    assert all(service.answered.acquire(timeout=20) for _ in range(4))
    assert {*service.cancelled} == {0, 3}  # as TorchRL ends a collector that fails


def test_a_reward_that_fails_fails_where_groups_are_asked_for():
    with pytest.raises(RewardError, match="nan for row 0"):
        next(iter(by_group(ByGroup(), lambda prompts, answers: [float("nan")] * len(prompts))))


def test_groups_on_their_way_are_cancelled_at_the_end():
    service = ByGroup(0, 3)
    rolled = by_group(service)
    next(iter(rolled))
    assert all(service.begun.acquire(timeout=20) for _ in range(4))
    ends = [*rolled._groups]
    rolled.shutdown()
    assert all(service.answered.acquire(timeout=20) for _ in range(4))
    assert {*service.cancelled} == {0, 3}
    assert all(one.cancelled() for one in ends)


def test_batches_of_parts_of_groups_are_refused():
    policy = make_policy()
    with pytest.raises(UnsupportedArgumentError, match=r"4 rows .* not of whole groups of 8"):
        collector(
            env=make_env(repeats=8),
            policy=policy,
            max_staleness=1,
            yield_completed_trajectories=True,
        )
    assert policy._collector is None
    with pytest.raises(UnsupportedArgumentError, match="max_staleness must be at least 0"):
        by_group(ByGroup(), staleness=-1)


BAD_REWARDS = {
    "wrong shape": (lambda prompts, answers: [1.0], "shape \\(1,\\) for 4 rows"),
    "two a row": (lambda prompts, answers: torch.ones(4, 2), "shape \\(4, 2\\) for 4 rows"),
    "one number": (lambda prompts, answers: 1.0, "shape \\(\\) for 4 rows"),
    "nan": (lambda prompts, answers: [0.0, 1.0, float("nan"), 2.0], "nan for row 2"),
    "infinite": (lambda prompts, answers: [float("inf")] * 4, "inf for row 0"),
    "no numbers": (lambda prompts, answers: answers, "no numbers"),
    "nothing": (lambda prompts, answers: None, "no numbers"),
    "no such column": (lambda prompts, answers, wrong: [0.0] * 4, "the column 'wrong'.*'answer'"),
}


@pytest.mark.parametrize("kind", [LLMCollector, RolloutCollector])
@pytest.mark.parametrize("bad", BAD_REWARDS)
def test_bad_rewards_are_refused(bad, kind):
    function, words = BAD_REWARDS[bad]
    env = make_env(StepCounter(max_steps=1), TextReward(function))
    with pytest.raises(RewardError, match=words):
        next(iter(collector(kind, env)))


@pytest.mark.parametrize("pad_output", [False, True])
@pytest.mark.parametrize("kind", [LLMCollector, RolloutCollector])
def test_rewards_are_given_what_they_name(kind, pad_output):
    def given(prompts, answers, note="none", **columns):
        assert note == "none"
        assert sorted(columns) == ["answer", "hard"]
        assert all(isinstance(one, list) and isinstance(one[0], int) for one in answers)
        return torch.tensor([float(len(one)) for one in answers])

    env = make_env(StepCounter(max_steps=1), TextReward(given, over="ids"))
    rows = next(iter(collector(kind, env, make_policy(pad_output=pad_output), flatten_data=True)))
    lengths = rows["next", "reward"].flatten().tolist()
    rows = rows.get(("masks", "all_assistant_mask"), as_list=True)
    assert lengths == [int(one.sum()) for one in rows]
    assert len({*lengths}) > 1


@pytest.mark.parametrize("pad_output", [False, True])
def test_an_environment_without_a_data_set_has_no_columns(pad_output):
    def given(prompts, answers, **columns):
        assert (prompts, columns) == (["Why?", "How?"], {})
        return [float(len(one)) for one in answers]

    env = TransformedEnv(ChatEnv(batch_size=(2,), tokenizer=TOKENIZER))
    env = env.append_transform(TextReward(given, over="ids"))
    rows = env.reset(TensorDict({"query": ["Why?", "How?"]}, [2]))
    rows = env.step(make_policy(pad_output=pad_output)(rows))
    masks = rows.get(("masks", "all_assistant_mask"), as_list=True)
    assert rows["next", "reward"].flatten().tolist() == [int(one.sum()) for one in masks]
    env.transform[-1]._columns = {"answer": True}
    with pytest.raises(RewardError, match=r"given wants the column 'answer'; there are \[\]"):
        env.step(rows)


def test_a_function_that_does_not_take_prompts_and_answers_is_refused():
    told = r"must take \(prompts, answers, \*\*columns\), and does not: too many positional"
    with pytest.raises(UnsupportedArgumentError, match=told):
        TextReward(lambda completions, **columns: [])


def test_an_argument_that_gets_answers_and_has_a_columns_name_is_warned_of_once(caplog):
    def swapped(answers, answer):
        return [0.0] * len(answers)

    rolled = collector(env=make_env(StepCounter(max_steps=1), TextReward(swapped)))
    for _ in zip(range(2), rolled, strict=False):
        pass
    told = "swapped: argument 'answer' gets the answers' texts by position, and not the column"
    assert [one.message[: len(told)] for one in caplog.records] == [told]


def test_over_something_else_is_refused():
    with pytest.raises(UnsupportedArgumentError, match="'words'"):
        TextReward(length, over="words")


def test_chats_for_prompts_are_refused_by_name():
    rolled = collector()
    primer = rolled.env.transform[0]
    primer._queue.clear()
    primer.endless_dataloader = iter([{"query": [7], "answer": ["0"], "hard": torch.zeros(1)}] * 9)
    with pytest.raises(InvalidPromptError, match="'query' is 7"):
        next(iter(rolled))


def test_a_reward_without_an_environment_is_refused():
    rows = next(iter(collector(total_dialog_turns=4)))
    with pytest.raises(UnsupportedArgumentError, match=r"TextReward\(length\) is not part of an"):
        TextReward(length)._step(rows, rows["next"])


@pytest.mark.parametrize(
    ("over", "tokenizer"), [("text", None), ("text", TOKENIZER), ("ids", None)]
)
def test_answers_are_not_decoded_without_a_tokenizer(over, tokenizer):
    rows = next(iter(collector(total_dialog_turns=4)))
    reward = TextReward(length, over=over, tokenizer=tokenizer)
    env = make_env(StepCounter(max_steps=1), reward, tokenizer=None)
    after = rows["next"].exclude("reward")
    if over == "ids" or tokenizer:
        assert "reward" in env.transform[-1]._step(rows, after)
        return
    with pytest.raises(UnsupportedArgumentError, match=r"TextReward\(length\) needs a tokenizer"):
        env.transform[-1]._step(rows, after)
    assert "reward" not in after


def test_a_reward_that_reads_other_tokens_is_refused():
    other = retold(swap)
    other.name_or_path = "another model"
    words = r"TextReward\(length\)'s .*'another model'.*: '[ab]' is"
    for reward in (TextReward(length, tokenizer=other), TextReward(length)):
        env = make_env(StepCounter(max_steps=1), reward, tokenizer=other)
        with pytest.raises(TokenizerMismatchError, match=words):
            collector(env=env)
    env = make_env(StepCounter(max_steps=1), TextReward(length, over="ids"), tokenizer=other)
    assert collector(env=env).path == "columns"
