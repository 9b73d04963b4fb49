"""Version spans: pushes at random moments, and each token has its version's log-probability."""

import asyncio
import random  # noqa: TID251  seeded below
from dataclasses import dataclass, field

import pytest
import torch
from vllm import SamplingParams

from tests.engine.checks import TOLERANCE, assert_labelled
from tests.engine.requests import eventually
from torchrl_vllm_sync.testing import load_tiny_model

pytestmark = pytest.mark.timeout(300)

NUM_USERS = 24
MAX_LENGTH = 250


class Weights:
    """The launched weights and noise that each version alone has."""

    def __init__(self, checkpoint):
        self.model = load_tiny_model(checkpoint)
        self.base = [parameter.detach().clone() for parameter in self.model.parameters()]

    def at(self, version):
        """The model, holding ``version``; valid until the next call."""
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter, base in zip(self.model.parameters(), self.base, strict=True):
                noise = torch.randn(base.shape, generator=generator)
                parameter.copy_(base + 0.05 * noise)
        return self.model


@pytest.fixture
def weights(service, checkpoint):
    """The trainer's weights of every version from the present one on, which is pushed here."""
    weights = Weights(checkpoint)
    service.push_weights(weights.at(service.weight_version + 1))
    return weights


def replicas_disagreements(service):
    return [one.num_span_disagreements for one in service.replicas.call_replicas("report").values()]


@dataclass
class Scored:
    """Tokens of one version, with the log-probabilities that an engine returned for them."""

    sequence: list[int]
    start: int
    engine: list[float]
    later: list[float] = field(default_factory=list)  # one token more, which a later one sampled


def scored_spans(outputs, *, first_only):
    """All spans of ``outputs`` by version."""
    found = {}
    for output in outputs:
        prompt = list(output.prompt_token_ids)
        for completion, spans in zip(output.outputs, output.version_spans, strict=True):
            tokens = list(completion.token_ids)
            values = [
                entry[token].logprob
                for token, entry in zip(tokens, completion.logprobs, strict=True)
            ]
            for span in spans[:1] if first_only else spans:
                found.setdefault(span.version, []).append(
                    Scored(
                        prompt + tokens[: span.end + 1],
                        len(prompt) + span.start,
                        values[span.start : span.end],
                        values[span.end : span.end + 1],
                    )
                )
    return found


@torch.no_grad()
def compare(model, scored):
    """Largest difference on the tokens of ``model``'s version, and those on each token after."""
    own, foreign = 0.0, []
    for at in range(0, len(scored), 64):
        batch = scored[at : at + 64]
        longest = max(len(one.sequence) for one in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, one in enumerate(batch):
            ids[row, : len(one.sequence)] = torch.tensor(one.sequence)
        log_probs = model(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        log_probs = log_probs.gather(-1, ids[:, 1:, None])[..., 0]
        for row, one in enumerate(batch):
            begin = one.start - 1
            end = begin + len(one.engine)
            own = max(own, (log_probs[row, begin:end] - torch.tensor(one.engine)).abs().max())
            foreign += [abs(float(log_probs[row, end]) - value) for value in one.later]
    return float(own), foreign


def await_tokens(service, number):
    """Waits until so many more are sampled."""

    def sampled():
        reports = service.replicas.call_replicas("report").values()
        return sum(one.counters.num_generated_tokens for one in reports)

    wanted = sampled() + number
    eventually(lambda: sampled() >= wanted)


async def pushes_under_load(service, weights, *, num_pushes, seed, **options):
    """Pushes at random moments while users generate; returns every output.

    However busy the machine is, a token a user lies between two pushes.
    """
    rng = random.Random(seed)
    outputs, done = [], asyncio.Event()

    async def user(number):
        mine = random.Random(1000 * seed + number)
        while not done.is_set():
            prompt = [mine.randrange(3, 500) for _ in range(mine.randrange(4, 60))]
            params = SamplingParams(
                n=mine.choice((1, 1, 1, 2)),
                max_tokens=mine.randrange(20, 180),
                ignore_eos=True,
                temperature=1.0,
                logprobs=0,
            )
            outputs.append(await service.agenerate(prompt, params, timeout_seconds=120))

    users = [asyncio.ensure_future(user(number)) for number in range(NUM_USERS)]
    for _ in range(num_pushes):
        await asyncio.sleep(rng.uniform(0, 0.12))
        await asyncio.to_thread(await_tokens, service, NUM_USERS)
        model = weights.at(service.weight_version + 1)
        await asyncio.to_thread(service.push_weights, model, **options)
    done.set()
    await asyncio.gather(*users)
    return outputs


@pytest.mark.parametrize(
    ("clear_cache", "num_pushes"),
    [
        pytest.param(True, 30, id="cleared"),
        pytest.param(False, 30, id="kept", marks=pytest.mark.slow),
        pytest.param(True, 100, id="cleared-long", marks=pytest.mark.long),
        pytest.param(False, 100, id="kept-long", marks=pytest.mark.long),
    ],
)
async def test_each_span_has_its_versions_log_probs(service, weights, clear_cache, num_pushes):
    first, disagreements = service.weight_version, replicas_disagreements(service)
    outputs = await pushes_under_load(
        service,
        weights,
        num_pushes=num_pushes,
        seed=7 + clear_cache,
        clear_cache=clear_cache,
    )
    assert service.weight_version == first + num_pushes
    for output in outputs:
        assert_labelled(output)
        assert {one.finish_reason for one in output.outputs} == {"length"}
    assert replicas_disagreements(service) == disagreements

    # Keys that are kept are the old weights', so that only the first span can be compared.
    scored = scored_spans(outputs, first_only=not clear_cache)
    assert first <= min(scored)
    switches = sum(len(spans) - 1 for output in outputs for spans in output.version_spans)
    assert switches > 5 * num_pushes
    worst, foreign = 0.0, []
    for version, spans in scored.items():
        own, after = compare(weights.at(version), spans)
        worst = max(worst, own)
        foreign += after
    assert worst < TOLERANCE
    # The twin: a boundary one token later would be noticed.
    noticed = sum(one > 10 * TOLERANCE for one in foreign)
    assert len(foreign) > 2 * num_pushes
    assert noticed > 0.95 * len(foreign)


async def test_a_sample_that_has_not_begun_begins_under_the_new_weights(service, weights):
    """Its sibling has: the engine has room for one of the two only."""
    places = 32 - 1
    options = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    prompt = list(range(5, 45))  # a block and more, which the first sample leaves in the cache
    long, both = (
        SamplingParams(max_tokens=240, **options),
        SamplingParams(n=2, max_tokens=120, **options),
    )
    old, target = service.weight_version, service.load.replica_ids[0]

    async def queued(running, waiting):
        async with asyncio.timeout(30):
            while True:
                report = (await asyncio.to_thread(service.replicas.call_replicas, "report"))[target]
                if (report.num_running, report.num_waiting) == (running, waiting):
                    return
                await asyncio.sleep(0.005)

    def send(requests):
        return asyncio.gather(
            *(service.agenerate(*one, actor_index=0, timeout_seconds=100) for one in requests)
        )

    # In this order: requests sent together arrive in any.
    others = send([([number, 7, 9], long) for number in range(5, 5 + places)])
    await queued(places, 0)
    last = send([(prompt, both)])
    await queued(places + 1, 1)
    await asyncio.to_thread(service.push_weights, weights.at(old + 1), clear_cache=False)
    output = (await last)[0]
    for one in [*(await others), output]:
        assert_labelled(one)
    begun, waited = output.version_spans
    assert [one.version for one in begun] == [old, old + 1]
    assert [one.version for one in waited] == [old + 1]
    scored = scored_spans([output], first_only=True)
    for version in (old, old + 1):
        assert compare(weights.at(version), scored[version])[0] < TOLERANCE
