"""The cost model is found again in steps that were made by one, and its limits are kept."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.routing_calibrate import SMOKE, checks
from benchmarks.routing_sim.calibration import (
    CalibrationError,
    Limits,
    Measurement,
    fit,
    prefill,
    without_free,
)
from benchmarks.routing_sim.costs import EngineCosts
from benchmarks.routing_sim.job import Job
from benchmarks.routing_sim.model import Replica

LIMITS = Limits(token_budget=2048, max_num_seqs=256, num_kv_blocks=1000, block_size=32)
TERMS = (
    "base_step_s",
    "per_sequence_s",
    "per_context_token_s",
    "prefill_tokens_per_s",
    "per_prefill_context_s2",
)


def made_by(costs, noise=0.0):
    """What an engine of these costs would have been measured to take."""
    generator = np.random.default_rng(0)
    found = [
        Measurement(kind="decode", seconds=1, decoding=batch, context=batch * context)
        for batch in (1, 8, 64, 256)
        for context in (128, 1000, 4000)
    ]
    found += [prefill("prefill", 1, length, costs.token_budget) for length in (32, 500, 2000, 9000)]
    for length in (100, 1700):
        pairs = length * (length - 1) / 2
        found.append(
            Measurement(
                kind="mixed",
                seconds=1,
                decoding=32,
                context=32 * 500,
                prefill_tokens=length,
                prefill_pairs=pairs,
            )
        )
    return [
        dataclasses.replace(one, seconds=seconds_of(costs, one) * (1 + noise * generator.normal()))
        for one in found
    ]


def seconds_of(costs, one):
    return (
        one.steps * costs.base_step_s
        + one.decoding * costs.per_sequence_s
        + one.context * costs.per_context_token_s
        + one.prefill_tokens / costs.prefill_tokens_per_s
        + one.prefill_pairs * costs.per_prefill_context_s2
    )


def costs(**fields):
    return EngineCosts(**{**dataclasses.asdict(LIMITS), **fields})


@settings(max_examples=50, deadline=None)
@given(
    base=st.floats(1e-3, 2e-2),
    sequence=st.sampled_from([0.0, 1e-5, 1e-4]),
    context=st.sampled_from([0.0, 1e-8, 1e-7]),
    rate=st.floats(5e3, 1e5),
    square=st.sampled_from([0.0, 1e-9, 1e-8]),
)
def test_costs_are_found_again(base, sequence, context, rate, square):
    wanted = costs(
        base_step_s=base,
        per_sequence_s=sequence,
        per_context_token_s=context,
        prefill_tokens_per_s=rate,
        per_prefill_context_s2=square,
    )
    found = fit(made_by(wanted), LIMITS)
    for name in TERMS:
        assert getattr(found.costs, name) == pytest.approx(getattr(wanted, name), 1e-6, 1e-15)
    assert found.mean_error < 1e-9
    assert dataclasses.asdict(found.costs) == {
        **dataclasses.asdict(found.costs),
        **dataclasses.asdict(LIMITS),
    }


def test_noise_shows_in_the_residuals_and_no_term_is_negative():
    wanted = costs(base_step_s=5e-3, prefill_tokens_per_s=2e4)
    found = fit(made_by(wanted, noise=0.1), LIMITS)
    assert 0.01 < found.mean_error < 0.2
    assert all(getattr(found.costs, name) >= 0 for name in TERMS)
    assert found.costs.prefill_tokens_per_s == pytest.approx(2e4, rel=0.2)


def test_tokens_that_cost_nothing_show():
    """An engine whose first 64 prompt tokens of a step are free is described with that alone."""
    wanted = costs(base_step_s=5e-3, prefill_tokens_per_s=2e4)
    made = [
        dataclasses.replace(one, seconds=seconds_of(wanted, fewer))
        for one in made_by(wanted)
        for fewer in without_free([one], 64)
    ]
    assert fit(made, LIMITS).mean_error > 0.01
    assert fit(without_free(made, 64), LIMITS).mean_error < 1e-9


def test_a_simulated_engine_takes_what_was_measured():
    """A prompt in chunks, by the model's own arithmetic."""
    wanted = costs(base_step_s=5e-3, prefill_tokens_per_s=2e4, per_prefill_context_s2=1e-8)
    engine = Replica(wanted)
    length = 5000
    engine.add(Job(None, range(length // LIMITS.block_size), length, 1), 0.0)
    now = 0.0
    while True:
        engine.begin(now)
        now = engine.end
        if engine.settle():
            break
    assert now == pytest.approx(seconds_of(wanted, prefill("prefill", 1, length, 2048)))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda found: found[:4], "at least 5"),
        (lambda found: [dataclasses.replace(found[0], seconds=0), *found[1:]], "take time"),
        (lambda found: [one for one in found if one.kind == "decode"], "undetermined"),
    ],
    ids=["few", "no time", "no prompts"],
)
def test_measurements_that_say_too_little_are_refused(broken, message):
    found = made_by(costs(base_step_s=5e-3, prefill_tokens_per_s=2e4))
    with pytest.raises(CalibrationError, match=message):
        fit(broken(found), LIMITS)


def test_traces_in_the_engines_words_keep_their_shape():
    """Answers of one token each, prompts in the vocabulary, what is too long left out."""
    for scenario in checks(SMOKE, 320):
        assert scenario.num_replicas == 1
        assert scenario.sessions
        for session in scenario.sessions:
            assert session.tokens.min() >= 8
            assert session.tokens.max() < 320
            for turn in session.turns:
                end = turn.prompt_len + turn.output_len
                assert end <= SMOKE.max_model_len
                assert len(set(session.tokens[turn.prompt_len : end].tolist())) == 1
