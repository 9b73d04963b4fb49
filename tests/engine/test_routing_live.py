"""The live routing benchmark's core: siblings' prompts are computed once, unless they are spread.

What was computed is read from vLLM's counters; each test has a twin that takes turns.
"""

import pytest
from torchrl.modules.llm.backends.vllm.vllm_async import LoadBalancer as TorchRLBalancer

from benchmarks import live_engines
from benchmarks.live_systems import SYSTEMS, WRAPPED, TorchRLRule, group_rows, run_wrapped
from benchmarks.live_traffic import CASES, Scale
from benchmarks.routing_live import run_case
from tests.engine.requests import eventually, is_idle, sampling
from tests.engine.rollouts import QUIET

pytestmark = [pytest.mark.slow, *QUIET]
BLOCK = 32
# Whole blocks and one token: a sibling that finds them computes that one token.
PROMPT = 20 * BLOCK + 1
SMALL = Scale(
    vocab_size=320,
    max_model_len=1024,
    groups=4,
    sessions=6,
    turns=3,
    concurrent=5,
    strangers=4,
    prompt=(PROMPT, PROMPT),
    opening=4 * BLOCK,
    reply=BLOCK,
    answer=(4, 8),
)


@pytest.fixture(scope="module")
def service(cluster, tmp_path_factory):
    """Two replicas that count."""
    options = live_engines.engine_options(execution="eager", max_model_len=1024, max_num_seqs=32)
    directory = tmp_path_factory.mktemp("live")
    with live_engines.launch(directory, None, 2, options) as service:
        yield service


@pytest.fixture(autouse=True)
def fresh(service):
    """No cached prefix of an earlier test, and nothing in flight."""
    service.create_load_balancer()
    eventually(lambda: is_idle(service))
    live_engines.reset(service)


def computed_over_once(service, **kwargs):
    """Prompt tokens computed for a batch of 4 groups of 8, over those of the 4 prompts."""
    prompts = [[10 + group] * PROMPT for group in range(4) for _ in range(8)]
    before = live_engines.counts(service)
    outputs = service.generate(prompts, sampling(ignore_eos=True), **kwargs)
    counted = live_engines.counts(service) - before
    assert counted.prompt == 32 * PROMPT
    assert counted.cached == counted.hits == sum(one.num_cached_tokens for one in outputs)
    assert counted.computed == counted.prompt - counted.cached
    return counted.computed / (4 * PROMPT)


def test_siblings_of_a_batch_are_computed_once(service):
    assert computed_over_once(service) <= 1.1


def test_named_siblings_of_a_batch_are_computed_once(service):
    assert computed_over_once(service, group_id=[at // 8 for at in range(32)]) <= 1.1


def test_siblings_that_take_turns_are_computed_by_both(service):
    service.create_load_balancer("round-robin")
    assert computed_over_once(service) >= 1.9


@pytest.fixture(scope="module")
def rows():
    """What a collector's policy gets: 4 groups of 8."""
    return group_rows(4, 850)


def through_wrapper(service, rows, system):
    strategy, find_sessions = WRAPPED[system]
    return run_wrapped(service, rows, 4, strategy=strategy, find_sessions=find_sessions)


def test_siblings_found_by_the_wrapper_are_computed_once(service, rows):
    found = through_wrapper(service, rows, "ours")
    assert found["prefilled_over_least"] == 1.0
    assert found["prefilled_over_once"] < 1.25  # the prompt's last block is not whole
    assert found["imbalance"] <= 1.5


def test_siblings_that_the_wrapper_does_not_name_may_take_turns(service, rows):
    found = through_wrapper(service, rows, "round-robin")
    assert found["prefilled_over_least"] > 1.5


@pytest.mark.parametrize("case", ["grpo", "grpo-update"])
def test_every_system_is_asked_the_same(service, case):
    """``run_case`` itself compares answers and counters; after an update nothing old is found."""
    made = CASES[case](SMALL)
    ours = run_case(service, SYSTEMS["ours"](service), made)
    turns = run_case(service, SYSTEMS["round-robin"](service), made)
    assert ours["prefilled_over_least"] <= 1.1
    assert turns["prefilled_over_least"] >= 1.5
    assert ours["hit_rate"] > turns["hit_rate"]
    assert service.weight_version == (case == "grpo-update") * 2


def test_sessions_keep_their_cache_and_those_that_take_turns_do_not(service):
    made = CASES["multi-turn"](SMALL)
    ours = run_case(service, SYSTEMS["ours"](service), made)
    turns = run_case(service, SYSTEMS["round-robin"](service), made)
    assert ours["prefilled_over_least"] < turns["prefilled_over_least"]
    assert ours["prefilled_over_least"] <= 1.5


def test_torchrls_rule_is_torchrls_own(service):
    """All prompts that begin alike go to one replica; through its wrapper it sees no prompt."""
    made = CASES["grpo"](SMALL)
    rule = TorchRLRule(service)
    assert type(rule._balancer) is TorchRLBalancer
    found = run_case(service, rule, made)
    assert found["imbalance"] == 2.0
    assert len(rule.decision_s) == 32
    wrapped = run_case(service, SYSTEMS["torchrl, wrapper"](service), made)
    assert wrapped["imbalance"] < 1.5
    assert wrapped["prefilled_over_least"] > 1.3
