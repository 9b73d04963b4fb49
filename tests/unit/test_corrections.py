"""Weights and masks for tokens whose probability in the engine was another than in the trainer."""

import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.objectives.llm import GRPOLoss

from tests.fakes.rl import Service
from torchrl_vllm_sync import RolloutCorrection, TrainerPolicy, log_rollouts
from torchrl_vllm_sync.errors import RowLayoutError, UnsupportedArgumentError
from torchrl_vllm_sync.testing import load_tiny_model, make_tiny_checkpoint

TRAINER = ("trainer_log_probs", "full")
PROMPT, WIDTH = 3, 9
LENGTHS = [6, 2, 4]  # of answers; the last row's begins with a turn that the engine has not sampled


@pytest.fixture
def rows():
    """Rows of which each answer's tokens are far apart in their own way."""
    rng = np.random.default_rng(0)
    answer = np.zeros((3, WIDTH), bool)
    for at, length in enumerate(LENGTHS):
        answer[at, PROMPT : PROMPT + length] = True
    trainer = -rng.uniform(0.1, 3.0, answer.shape)
    engine = trainer - rng.normal(0.0, 1.0, answer.shape)
    engine[~answer] = math.nan
    engine[2] += 0.5  # an answer that the trainer finds unlikely
    engine[2, PROMPT] = math.nan
    versions = np.where(answer, 4, -1)
    versions[:, PROMPT + 1 :][answer[:, PROMPT + 1 :]] = 5
    return TensorDict(
        {
            "tokens": {"full": torch.arange(3 * WIDTH).reshape(3, WIDTH)},
            "masks": {
                "all_assistant_mask": torch.from_numpy(answer),
                "all_attention_mask": torch.ones(3, WIDTH, dtype=torch.bool),
            },
            "log_probs": {"full": torch.from_numpy(engine).float()},
            "trainer_log_probs": {"full": torch.from_numpy(trainer).float()},
            "policy_versions": {"full": torch.from_numpy(versions)},
            "advantage": torch.tensor([-1.5, -2.0, 0.5])[:, None, None],
        },
        [3],
    )


def ratios(rows):
    """By row, of the tokens that the engine sampled."""
    engine, trainer = (rows[key].double().numpy() for key in (("log_probs", "full"), TRAINER))
    return [np.exp((b - a)[~np.isnan(a)]) for a, b in zip(engine, trainer, strict=True)]


# The published formulas, each of the ratios of one answer's tokens and its advantage: the weights
# of the tokens, and which of them stay in the loss.
FORMULAS = {
    "TIS": (
        {"weigh": "token", "cap": 2.0},
        lambda r, _: (np.minimum(r, 2.0), np.full(r.shape, True)),
    ),
    "TIS of sequences": (
        {"weigh": "sequence", "cap": 3.0},
        lambda r, _: (np.full(r.shape, min(r.prod(), 3.0)), np.full(r.shape, True)),
    ),
    "MIS": (
        {"weigh": "token", "cap": 2.0, "reject": "token", "bounds": (None, 2.0)},
        lambda r, _: (r * (r <= 2.0), r <= 2.0),
    ),
    "MIS of sequences": (
        {"weigh": "sequence", "cap": None, "reject": "sequence", "bounds": (None, 1.1)},
        lambda r, _: (
            np.full(r.shape, r.prod() * (r.prod() <= 1.1)),
            np.full(r.shape, r.prod() <= 1.1),
        ),
    ),
    "IcePop": (
        {"weigh": "token", "cap": None, "reject": "token", "bounds": (0.5, 5.0)},
        lambda r, _: (np.where((r >= 0.5) & (r <= 5.0), r, 0.0), (r >= 0.5) & (r <= 5.0)),
    ),
    "geometric": (
        {"reject": "geometric", "bounds": (0.9, 1.2)},
        lambda r, _: both(r, 0.9 <= r.prod() ** (1 / len(r)) <= 1.2),
    ),
    "sequences by KL": (
        {"reject": "geometric", "bounds": (math.exp(-0.04), None), "only_negative": True},
        lambda r, advantage: both(r, not (advantage < 0 and -np.log(r).mean() > 0.04)),
    ),
}


def both(r, kept):
    return np.full(r.shape, float(kept)), np.full(r.shape, kept)


@pytest.mark.parametrize("name", FORMULAS)
def test_weights_and_masks_are_the_published_ones(rows, name):
    arguments, formula = FORMULAS[name]
    correct = RolloutCorrection(**arguments)
    before = rows.clone()
    out = correct(rows)
    is_sampled = ~rows["log_probs", "full"].isnan()
    advantages = rows["advantage"].flatten().tolist()
    some_kept = some_rejected = False
    for at, (r, advantage) in enumerate(zip(ratios(rows), advantages, strict=True)):
        weights, kept = formula(r, advantage)
        mine = out["advantage"][at, is_sampled[at], 0]
        np.testing.assert_allclose(mine, advantage * weights, rtol=1e-4)
        given = out["log_probs", "full"][at]
        np.testing.assert_array_equal(given[is_sampled[at]].isnan(), ~kept)
        expected = rows[TRAINER][at, is_sampled[at]][torch.from_numpy(kept)]
        assert torch.equal(given[is_sampled[at]][torch.from_numpy(kept)], expected)
        assert given[~is_sampled[at]].isnan().all()
        some_kept, some_rejected = some_kept | kept.any(), some_rejected | ~kept.all()
    assert some_kept
    assert some_rejected == ("reject" in arguments)
    assert torch.equal(out["engine_log_probs"][is_sampled], before["log_probs", "full"][is_sampled])
    for key in (("log_probs", "full"), TRAINER, "advantage"):  # the batch itself is left alone
        assert torch.equal(rows[key].nan_to_num(), before[key].nan_to_num())


def test_equal_weights_are_left_as_they_are(rows):
    rows[TRAINER] = rows["log_probs", "full"].nan_to_num(-1.0)
    correct = RolloutCorrection(weigh="sequence", reject="token", bounds=(0.999, 1.001))
    out = correct(rows)
    assert torch.equal(out["advantage"], rows["advantage"].expand(3, WIDTH, 1) * sampled(rows))
    found = correct.summary()
    assert (found["abs_log_ratio"], found["kl"], found["rejected"], found["ess"]) == (0, 0, 0, 1)


def sampled(rows):
    return ~rows["log_probs", "full"].isnan()[..., None]


@pytest.mark.parametrize("version", [None, 5, Service(5)], ids=["none", "number", "service"])
def test_what_the_engine_rounds_is_told_from_what_is_old(rows, version):
    correct = RolloutCorrection(reject="token", bounds=(0.5, 2.0), version=version)
    correct(rows)
    correct(rows)
    assert correct(rows[:0]).batch_size == (0,)
    found = correct.summary()
    d = [np.log(one) for one in ratios(rows)]
    parts = {"": np.concatenate(d)}
    if version is not None:
        parts["stale_"] = np.concatenate([d[0][:1], d[1][:1]])
        parts["noise_"] = np.concatenate([d[0][1:], d[1][1:], d[2]])
    for name, values in parts.items():
        assert found[f"{name}tokens"] == 2 * len(values)
        assert found[f"{name}abs_log_ratio"] == pytest.approx(np.abs(values).mean(), rel=1e-5)
        assert found[f"{name}abs_log_ratio_max"] == pytest.approx(np.abs(values).max(), rel=1e-5)
        kl = (np.exp(values) - 1 - values).mean()
        assert found[f"{name}kl"] == pytest.approx(kl, rel=1e-4)
        rejected = (np.abs(values) > math.log(2)).mean()
        assert found[f"{name}rejected"] == pytest.approx(rejected)
    assert len(found) == 5 * len(parts) + 1
    correct.reset_summary()
    assert correct.summary() == {"ess": None}


def test_rows_are_logged_as_far_apart_after_their_correction_as_before(rows):
    logger = SimpleNamespace(log_metrics=lambda *_, **__: None)
    correct = RolloutCorrection(weigh="token", reject="token", bounds=(0.5, 5.0))
    found = log_rollouts(logger, rows)
    assert found["abs_log_ratio"] > 0.5
    assert log_rollouts(logger, correct(rows)) == found


def test_the_effective_sample_size_is_of_the_weights(rows):
    correct = RolloutCorrection(weigh="token", cap=2.0)
    correct(rows)
    weights = np.minimum(np.concatenate(ratios(rows)), 2.0)
    expected = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
    assert correct.summary()["ess"] == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------- in the loss


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_tiny_model(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


def test_the_loss_is_the_corrected_one(rows, model):
    """Of one step, where the trainer's ratio is 1: minus the mean of weight times advantage."""
    policy = TrainerPolicy(model)
    del rows["trainer_log_probs"]
    with torch.no_grad():
        scored = policy(rows.copy())["log_probs", "full"]
    jitter = torch.randn(scored.shape, generator=torch.Generator().manual_seed(1))
    rows["log_probs", "full"] = torch.where(sampled(rows)[..., 0], scored - jitter, math.nan)
    correct = RolloutCorrection(policy, weigh="token", cap=2.0, reject="token", bounds=(0.3, None))
    assert not list(correct.parameters())
    loss_fn = GRPOLoss(policy, entropy_coeff=0.0, masking_strategy="sft", clip_epsilon=0.1)
    out = loss_fn(correct(rows))
    loss = float(out.loss_objective.detach())
    ratio = jitter.double().exp()
    kept = sampled(rows)[..., 0] & (ratio >= 0.3)
    weighed = ratio.clamp(max=2.0) * rows["advantage"][..., 0]
    assert 0 < kept.sum() < sampled(rows).sum()
    assert loss == pytest.approx(-float(weighed[kept].mean()), rel=1e-4)
    assert float(out.ESS.detach()) == pytest.approx(1.0, abs=1e-5)
    assert abs(float(loss_fn(rows).loss_objective.detach()) - loss) > 0.01
    gradients = torch.autograd.grad(out.loss_objective, [*model.parameters()])
    assert all(one.isfinite().all() for one in gradients)
    log_probs, _, _ = loss_fn._get_cur_log_prob(rows)
    expected = torch.autograd.grad(-(weighed * log_probs)[kept].mean(), [*model.parameters()])
    for one, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@pytest.fixture
def scored_rows(rows, model):
    with torch.no_grad():
        scored = TrainerPolicy(model)(rows.copy())["log_probs", "full"]
    jitter = torch.randn(scored.shape, generator=torch.Generator().manual_seed(1))
    rows["log_probs", "full"] = torch.where(sampled(rows)[..., 0], scored - jitter, math.nan)
    return rows


@pytest.fixture
def passes(scored_rows, model):
    """Which of the model's forward passes wanted gradients."""
    seen = []
    hook = model.model.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    yield seen
    hook.remove()


def corrected(model, rows, passes, *, shared_pass, between=lambda policy, rows: rows):
    """Loss, gradients and summary of one step."""
    policy = TrainerPolicy(model)
    assert policy.path == "head"  # which it finds out by a pass of its own
    passes.clear()
    correct = RolloutCorrection(policy, weigh="token", shared_pass=shared_pass)
    loss_fn = GRPOLoss(policy, entropy_coeff=0.0, masking_strategy="sft", clip_epsilon=0.1)
    loss = loss_fn(between(policy, correct(rows))).loss_objective
    return loss.detach(), torch.autograd.grad(loss, [*model.parameters()]), correct.summary()


def test_the_loss_takes_the_corrections_pass_for_its_own(scored_rows, model, passes):
    loss, gradients, told = corrected(model, scored_rows, passes, shared_pass=False)
    assert passes == [False, True]
    shared = corrected(model, scored_rows, passes, shared_pass=True)
    assert passes == [True]
    assert torch.equal(shared[0], loss)
    assert all(map(torch.equal, shared[1], gradients))
    assert shared[2] == pytest.approx(told)


def step(policy, rows):
    with torch.no_grad():
        for one in policy.model.parameters():
            one.add_(0.01)
    return rows


def fused_step(policy, rows):
    """By an optimizer that tensors do not count."""
    for one in policy.model.parameters():
        one.grad = torch.ones_like(one)
    torch.optim.AdamW(policy.model.parameters(), 1e-3, fused=True).step()
    policy.model.zero_grad()
    return rows


def train_mode(policy, rows):
    policy.model.train()
    return rows


def others(_, rows):
    tokens = rows["tokens", "full"]
    rows["tokens", "full"] = torch.where(sampled(rows)[..., 0], tokens + 1, tokens)
    return rows


def copied(policy, rows):
    assert copy.deepcopy(policy)._ahead is None
    return rows.clone()


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (step, [True, True]),
        (fused_step, [True, True]),
        (train_mode, [True, True]),
        (others, [True, True]),
        (copied, [True]),
    ],
)
def test_a_pass_is_shared_only_for_the_same_rows_and_weights(
    scored_rows, model, passes, between, expected
):
    corrected(model, scored_rows, passes, shared_pass=True, between=between)
    model.eval()
    assert passes == expected


def test_a_pass_is_not_shared_with_another_precision(scored_rows, model, passes):
    policy = TrainerPolicy(model)
    rows = RolloutCorrection(policy, weigh="token", shared_pass=True)(scored_rows)
    passes[:] = [True]
    with torch.autocast("cpu", torch.bfloat16):
        GRPOLoss(policy, entropy_coeff=0.0, masking_strategy="sft")(rows)
    assert passes == [True, True]


def test_the_entropy_without_gradients_is_there_before_the_log_probabilities(scored_rows, model):
    policy = TrainerPolicy(model)
    policy.score_ahead(scored_rows)
    ahead = policy.get_dist(scored_rows, mask_key=("masks", "all_assistant_mask"))
    with torch.no_grad():
        fresh = policy.get_dist(scored_rows, mask_key=("masks", "all_assistant_mask"))
        assert torch.equal(ahead.entropy(), fresh.entropy())


def test_a_pass_is_taken_once(scored_rows, model, passes):
    policy = TrainerPolicy(model)
    rows = RolloutCorrection(policy, weigh="token", shared_pass=True)(scored_rows)
    passes[:] = [True]
    loss_fn = GRPOLoss(policy, entropy_coeff=0.01, masking_strategy="sft")
    for _ in range(2):
        loss_fn(rows).mean(reduce=True).backward()
    assert passes == [True, True]


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "weigh or reject"),
        ({"weigh": "geometric"}, "weigh must be one of"),
        ({"reject": "all", "bounds": (0.5, 2.0)}, "reject must be one of"),
        ({"weigh": "token", "cap": 0}, "cap must be above 0"),
        ({"weigh": "token", "cap": math.inf}, "cap must be above 0, got inf"),
        ({"weigh": "token", "cap": "2"}, "cap must be a number"),
        ({"reject": "token"}, r"reject='token' with bounds=\(None, None\)"),
        ({"weigh": "token", "bounds": (0.5, 2.0)}, r"reject=None with bounds"),
        ({"reject": "token", "bounds": (2.0, 0.5)}, "in order"),
        ({"reject": "token", "bounds": (-1.0, None)}, r"bounds\[0\] must be"),
        ({"weigh": "token", "version": True}, "version must not be a truth value"),
        ({"weigh": "token", "shared_pass": True}, "shared_pass wants a TrainerPolicy, got NoneTy"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused_by_name(arguments, message):
    with pytest.raises(UnsupportedArgumentError, match=message):
        RolloutCorrection(**arguments)


def set_to(key, value):
    def change(rows):
        rows[key] = value(rows[key])
        return rows

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows.exclude(("log_probs", "full")), r"log_probs.*dense rows"),
        (lambda rows: rows.exclude(TRAINER), r"trainer_log_probs.*dense rows"),
        (lambda rows: rows.exclude("advantage"), "advantage.*must be a tensor"),
        (set_to("advantage", lambda one: one[..., 0]), "advantage.*must be a tensor"),
        (set_to(TRAINER, lambda one: one[:, :-1]), r"trainer_log_probs.*\[3, 8\].*\[3, 9\]"),
        (
            set_to(TRAINER, lambda one: one.index_fill(0, torch.tensor([1]), math.nan)),
            "trainer_log_probs.*row 1 has a token without",
        ),
        (
            set_to(
                ("log_probs", "full"), lambda one: one.index_fill(0, torch.tensor([1]), -math.inf)
            ),
            "log_probs.*row 1 has a token without",
        ),
        (
            set_to(
                ("log_probs", "full"), lambda one: one.index_fill(0, torch.tensor([1]), math.nan)
            ),
            "log_probs.*row 1 has no sampled token",
        ),
        (lambda rows: lazy_stack(list(rows.unbind(0))), "dense TensorDict, got a lazy stack"),
    ],
    ids=str,
)
def test_rows_that_cannot_be_corrected_are_refused_uncounted(rows, change, message):
    correct = RolloutCorrection(weigh="token")
    with pytest.raises(RowLayoutError, match=message):
        correct(change(rows))
    assert correct.summary() == {"ess": None}
