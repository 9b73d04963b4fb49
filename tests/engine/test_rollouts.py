"""GRPO on dense rows over real engines: what the engines sampled is what the trainer scores."""

import asyncio
import itertools
from concurrent.futures import Future

import pytest
from tensordict import set_list_to_stack
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import StepCounter
from torchrl.envs.llm.chat import ChatEnv
from torchrl.objectives.llm.grpo import GRPOLoss

from tests.engine.checks import perturbed
from tests.engine.rollouts import QUIET, TEXTS, TOKENIZER
from tests.unit.test_policy import retold, swap
from torchrl_vllm_sync import (
    GroupAdvantage,
    RolloutCollector,
    RolloutStorage,
    TextReward,
    TrainerPolicy,
    WeightUpdater,
    vLLMWrapper,
)
from torchrl_vllm_sync.errors import TokenizerMismatchError
from torchrl_vllm_sync.testing import load_tiny_model

pytestmark = QUIET
ROWS, GROUP = 8, 4


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


def make_collector(service, reward, *, tokenizer=TOKENIZER, sampling=None, guards=None, **settings):
    questions = ({"query": [f"{text} {at}"]} for at in itertools.count() for text in TEXTS)
    env = ChatEnv.from_dataloader(
        questions, batch_size=(ROWS,), repeats=GROUP, tokenizer=tokenizer, input_mode="history"
    )
    policy = vLLMWrapper(
        service,
        tokenizer=tokenizer,
        input_mode="history",
        chat_template=TOKENIZER.chat_template,
        generate_kwargs={"max_tokens": 12, "temperature": 1.0} | (sampling or {}),
        return_log_probs=True,
        pad_output=False,
        **guards or {},
    )
    made = RolloutCollector(
        env.append_transform(StepCounter(max_steps=1)).append_transform(TextReward(reward)),
        policy=policy,
        dialog_turns_per_batch=ROWS,
        **settings,
    )
    assert made.path == "columns"
    return made


def length(prompts, answers):
    return [float(len(one)) for one in answers]


def test_a_step_scores_what_the_engines_sampled(service, checkpoint):
    model = perturbed(load_tiny_model(checkpoint), seed=3)
    trained = TrainerPolicy(model)
    loss_fn = GRPOLoss(trained, entropy_coeff=0.0, masking_strategy="sft")
    buffer = ReplayBuffer(
        storage=RolloutStorage(ROWS),
        sampler=SamplerWithoutReplacement(),
        transform=GroupAdvantage(GROUP),
        batch_size=ROWS,
    )
    updater = WeightUpdater(service, source=model)
    updater.push_weights()
    for _ in make_collector(service, length, replay_buffer=buffer, total_dialog_turns=ROWS):
        rows = buffer[:]
        assert {*rows["policy_version"].tolist()} == {service.weight_version}
        groups = rows["advantage"].flatten().view(-1, GROUP)
        assert groups.sum(-1).abs().max() < 1e-4 < groups.abs().max()
        assert float(loss_fn(rows).ESS) > 0.9999
        mask = rows["masks", "all_assistant_mask"]
        sampled = rows["log_probs", "full"].clone()
        scored = trained(rows.clone())["log_probs", "full"]
        assert (scored - sampled)[mask].abs().max() < 1e-3
        # The twin: the weights of before are not these.
        before = TrainerPolicy(load_tiny_model(checkpoint))(rows.clone())["log_probs", "full"]
        assert (before - sampled)[mask].abs().mean() > 0.05
        texts = TOKENIZER.batch_decode(rows["tokens", "response"], skip_special_tokens=True)
        assert rows["next", "reward"].flatten().tolist() == length(None, texts)


def test_equal_weights_have_a_ratio_of_1_whatever_tokens_sampling_removes(service, checkpoint):
    trained = TrainerPolicy(load_tiny_model(checkpoint), temperature=0.7)
    service.push_weights(trained.model)
    guarded = {
        "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
        "guards": {"trainer": trained, "return_sampling_mask": True},
    }
    (rows,) = make_collector(service, length, total_dialog_turns=ROWS, **guarded)
    mask, sampled = rows["masks", "all_assistant_mask"], rows["log_probs", "full"].clone()

    def apart(rows):
        scored = trained(rows.clone())["log_probs", "full"]
        return (scored - sampled)[mask].abs()

    assert apart(rows).max() < 1e-4
    assert rows["sampling_mask", "response"].ge(0).sum(-1).float().mean() > 2
    rows["advantage"] = rows["next", "reward"].view(-1, 1, 1)
    assert GRPOLoss(trained, kl_to_ref_coeff=None)(rows).ESS > 0.9999
    # The twins: without the mask, and with the temperature of others.
    assert apart(rows.exclude("sampling_mask")).mean() > 0.02
    trained.temperature = 1.0
    assert apart(rows).mean() > 0.02


def test_a_tokenizer_that_is_not_the_engines_is_refused(service, checkpoint):
    counts = service.requests.counts.totals()
    rows = make_collector(service, length, tokenizer=retold(swap), total_dialog_turns=ROWS)
    with pytest.raises(TokenizerMismatchError, match=f"engines' '{checkpoint}': 'a' is"):
        next(iter(rows))
    assert service.requests.counts.totals() == counts
    (rows,) = make_collector(service, length, total_dialog_turns=ROWS)
    assert len(rows) == ROWS


def test_a_batch_sampled_ahead_is_one_push_behind_at_most(service, checkpoint):
    model = load_tiny_model(checkpoint)
    updater = WeightUpdater(service, source=model)
    pushed, behind = service.weight_version, []
    batches = make_collector(service, length, total_dialog_turns=6 * ROWS, max_staleness=1)
    for rows in batches:
        behind.append(pushed - rows["policy_version"].min())
        updater.push_weights()
        pushed += 1
        assert service.weight_version == pushed
    assert len(behind) == 6
    assert {int(one) for one in behind} <= {0, 1}
    assert any(behind)  # sampled ahead, indeed


def test_a_long_answer_holds_up_no_other_group_until_it_would_be_too_old(
    service, checkpoint, monkeypatch
):
    sent, gate, agenerate = [], Future(), service.agenerate

    async def first_is_long(*, sampling_params, **request):
        params, is_long = sampling_params.clone(), not sent
        params.max_tokens, params.ignore_eos = (200 if is_long else 3), True
        sent.append(request["group_id"])
        outputs = await agenerate(sampling_params=params, **request)
        if is_long:
            await asyncio.wrap_future(gate)  # or it might end too soon where engines are fast
        return outputs

    monkeypatch.setattr(service, "agenerate", first_is_long)
    batches = iter(
        make_collector(
            service,
            length,
            max_staleness=1,
            yield_completed_trajectories=True,
            total_dialog_turns=4 * ROWS,
        )
    )

    def widths():
        rows = next(batches)
        behind.append(int(service.weight_version - rows["policy_version"].min()))
        assert len({*rows["query"]}) * GROUP == len(rows) == ROWS
        texts = TOKENIZER.batch_decode(rows["tokens", "response"], skip_special_tokens=True)
        assert rows["next", "reward"].flatten().tolist() == length(None, texts)
        return sorted({*rows["masks", "all_assistant_mask"].sum(-1).tolist()})

    behind = []
    assert widths() == [3]
    assert widths() == [3]  # without a push it may stay behind
    WeightUpdater(service, source=load_tiny_model(checkpoint)).push_weights()
    gate.set_result(None)
    assert widths() == [3, 200]
    assert widths() == [3]
    assert behind == [0, 0, 1, 0]
    assert len({*sent}) == len(sent) == 8
