"""The thinnest path: launch, generate, push, and the engines answer with the new weights."""

import psutil
import ray
import torch

from tests.engine.faults import engine_core_pid
from torchrl_vllm_sync.testing import token_log_probs


def engine_log_probs(service, token_ids, actor_index):
    """Log-probability of each token after the first, as one replica's engine computes it."""
    from vllm import SamplingParams

    output = service.generate(
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0),
        actor_index=actor_index,
    )
    pairs = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
    return torch.tensor([entry[token].logprob for entry, token in pairs])


def test_push_reaches_every_replica(service, other_model):
    token_ids = list(range(5, 45))
    wanted = token_log_probs(other_model, token_ids).flatten()[-39:]
    before = service.weight_version
    for index in range(2):
        assert (engine_log_probs(service, token_ids, index) - wanted).abs().max() > 1

    report = service.push_weights(other_model)

    assert report.version == service.weight_version == before + 1
    for index in range(2):
        # float32 sums in another order: tiny models agree to about 1e-5.
        torch.testing.assert_close(
            engine_log_probs(service, token_ids, index), wanted, atol=1e-3, rtol=0
        )


def test_these_engines_were_forked_and_not_started_cold(service):
    """Else all tests pass, but take twice as long."""
    for actor in service.actors:
        process = psutil.Process(ray.get(actor.describe.remote()).pid)
        core = psutil.Process(engine_core_pid(actor))
        assert "tests.warm" in process.parent().cmdline()
        assert core.parent() == process
        assert core.create_time() - process.create_time() < 1  # before the actor knew of an engine
