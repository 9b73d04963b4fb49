"""What the engines themselves say, for comparison with the trainer's model."""

import torch
from vllm import SamplingParams

from tests.fakes.versions import check_spans
from torchrl_vllm_sync.engine.answers import versions_of_labels
from torchrl_vllm_sync.testing import token_log_probs

# Both sides compute in float32 but add up in another order. Over 15 pushes the largest difference
# was 6.4e-5 on a dense model and 1.5e-4 on a mixture of experts, of values down to -17. Tests with
# one tensor lost demand a difference of more than 100 times the tolerance.
TOLERANCE = 5e-4
# Two sequences that share no prefix, longer than a block of the prefix cache.
SEQUENCES = (list(range(5, 45)), list(range(300, 250, -1)))


def engine_log_probs(service, token_ids, actor_index):
    """Log-probability of each token after the first, as one replica's engine computes it."""
    output = service.generate(
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0),
        actor_index=actor_index,
    )
    pairs = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
    return torch.tensor([entry[token].logprob for entry, token in pairs])


def distance(service, model, actor_index):
    """Largest difference between an engine's log-probabilities and those of ``model``."""
    return max(
        (engine_log_probs(service, ids, actor_index) - token_log_probs(model, ids)).abs().max()
        for ids in SEQUENCES
    ).item()


def assert_holds(service, model, replicas=None):
    """The engines of these replicas, by position, compute what ``model`` computes."""
    for index in range(service.num_replicas) if replicas is None else replicas:
        found = distance(service, model, index)
        assert found < TOLERANCE, f"replica {index} differs by {found:.2g}"


def perturbed(model, *, seed, scale=0.05):
    """Changes every parameter of ``model`` in place, as an optimizer step does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += scale * noise.to(parameter.device)
    return model


def assert_labelled(output):
    """The spans cover each finished sample, are those of vLLM's labels, and give the extremes."""
    assert len(output.version_spans) == len(output.outputs)
    versions = []
    for completion, spans in zip(output.outputs, output.version_spans, strict=True):
        check_spans(spans, len(completion.token_ids))
        native = [(one.version, one.start, one.end) for one in completion.weight_versions]
        assert versions_of_labels(native, len(completion.token_ids)) == spans
        assert [one.version for one in spans] == sorted(one.version for one in spans)
        versions += [one.version for one in spans]
    if versions:
        assert (output.min_version, output.max_version) == (min(versions), max(versions))
