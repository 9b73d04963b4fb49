"""The updater over a plain ``vllm.LLM``, which starts its engine in this process."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torchrl.weight_update.llm import get_model_metadata
from vllm import LLM, SamplingParams

from tests.engine.checks import SEQUENCES, TOLERANCE, assert_labelled, perturbed
from torchrl_vllm_sync import (
    VLLMDoubleBufferSyncScheme,
    VLLMWeightSyncScheme,
    WeightUpdater,
)
from torchrl_vllm_sync.errors import (
    StaleVersionError,
    UnsupportedArgumentError,
    WeightMismatchError,
    WeightSyncError,
)
from torchrl_vllm_sync.rl.local_llm import LocalLLM
from torchrl_vllm_sync.testing import token_log_probs

EXTENSION = "torchrl_vllm_sync.engine.worker.SyncWorkerExtension"
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


@pytest.fixture(scope="module")
def llm(checkpoint):
    """An ``LLM`` whose worker lives inside its engine core, as replicas' do on a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        llm = LLM(
            str(checkpoint),
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
            block_size=32,
            kv_cache_memory_bytes=64 * 2**20,
            gpu_memory_utilization=0.05,
            enable_prefix_caching=True,
            worker_extension_cls=EXTENSION,
            weight_transfer_config={"backend": "torchrl_broadcast"},
        )
        yield llm
        client = llm.llm_engine.engine_core
        client.shutdown()
        client.ctx.destroy()  # vLLM leaves that to the garbage collector, and a warning


@pytest.fixture(params=["memmap", "broadcast"])
def updater(request, llm):
    updater = WeightUpdater(llm, transport=request.param)
    updater.name = request.param
    yield updater
    updater.service.close()


def generate(llm, token_ids, **options):
    params = SamplingParams(temperature=0.0, max_tokens=1, **options)
    (output,) = llm.generate({"prompt_token_ids": list(token_ids)}, params, use_tqdm=False)
    return output


def distance(llm, model):
    """Largest difference between the engine's log-probabilities and those of ``model``."""
    found = 0.0
    for ids in SEQUENCES:
        output = generate(llm, ids, prompt_logprobs=0)
        pairs = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
        engine = torch.tensor([entry[token].logprob for entry, token in pairs])
        found = max(found, (engine - token_log_probs(model, ids)).abs().max().item())
    return found


def test_pushes_reach_the_llm(llm, updater, model):
    for step in (1, 2):
        perturbed(model, seed=400 + step + len(updater.name))
        assert distance(llm, model) > 100 * TOLERANCE
        before = updater.service.weight_version
        report = updater.push_weights(model)
        assert report.transport == updater.name
        assert report.version == updater.service.weight_version == before + 1
        assert distance(llm, model) < TOLERANCE


def test_one_step_of_an_optimizer_is_noticed(llm, updater, model):
    updater.push_weights(perturbed(model, seed=410))
    assert distance(llm, perturbed(model, seed=0, scale=1e-3)) > 5 * TOLERANCE


def test_cached_prefixes_of_old_weights_are_gone(llm, updater, model):
    prompt = [*SEQUENCES[0], *SEQUENCES[1]]
    updater.push_weights(perturbed(model, seed=420))
    generate(llm, prompt)
    assert generate(llm, prompt).num_cached_tokens > 0
    updater.push_weights(perturbed(model, seed=421, scale=0.2))
    output = generate(llm, prompt, logprobs=0)
    ((token, entry),) = output.outputs[0].logprobs[0].items()
    assert output.num_cached_tokens == 0
    wanted = token_log_probs(model, [*prompt, token])[-1].item()
    assert abs(entry.logprob - wanted) < TOLERANCE


def test_prefixes_that_cannot_be_dropped_fail_the_push_until_they_can(
    llm, updater, model, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(WeightSyncError, match="did not drop its cached prefixes"):
            updater.push_weights(perturbed(model, seed=430))
    updater.push_weights(perturbed(model, seed=431))
    assert distance(llm, model) < TOLERANCE


def test_what_does_not_fit_changes_nothing(llm, updater, model):
    updater.push_weights(perturbed(model, seed=440))
    version = updater.service.weight_version
    weights = dict(perturbed(model, seed=441).state_dict())
    weights.pop("model.norm.weight")
    with pytest.raises(WeightMismatchError, match=r"1 missing: model\.norm\.weight"):
        updater.push_weights(weights)
    with pytest.raises(StaleVersionError):
        updater.push_weights(model, version=version - 1)
    assert updater.service.weight_version == version
    assert distance(llm, model) > 100 * TOLERANCE


def test_without_a_choice_it_is_memmap(llm, model):
    updater = WeightUpdater(llm, source=perturbed(model, seed=450))
    assert updater.push_weights().transport == "memmap"
    assert distance(llm, model) < TOLERANCE
    updater.service.close()


def test_adapters_are_refused(llm, model):
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    updater = WeightUpdater(llm, source=adapted, adapters="keep")
    with pytest.raises(UnsupportedArgumentError, match=r"merged for a vllm\.LLM"):
        updater.push_weights()


def test_an_llm_without_the_extension_is_refused(llm, monkeypatch):
    parallel = llm.llm_engine.vllm_config.parallel_config
    for given in ("", "torchrl_vllm_sync.replica.Replica"):
        monkeypatch.setattr(parallel, "worker_extension_cls", given)
        with pytest.raises(UnsupportedArgumentError, match=r"worker_extension_cls='torchrl_"):
            LocalLLM(llm)


def test_torchrls_schemes_push_and_poll(llm, model, tmp_path):
    """TorchRL 0.14.1's double buffer takes an ``LLM`` for a Ray service, and fails."""
    broadcast = VLLMWeightSyncScheme(transport="broadcast")
    sender = broadcast.create_sender()
    sender.register_model(perturbed(model, seed=21))
    sender.init_all_workers_group(get_model_metadata(model), vllm_engine=llm)
    version = sender.update_weights().version
    assert distance(llm, model) < TOLERANCE
    broadcast.shutdown()

    stored = VLLMDoubleBufferSyncScheme(tmp_path)
    sender = stored.create_sender()
    sender.register_model(perturbed(model, seed=22))
    receiver = stored.create_receiver(llm)
    assert not receiver.poll_and_apply()
    sender.update_weights(version=version + 1)
    assert distance(llm, model) > 100 * TOLERANCE
    assert receiver.poll_and_apply()
    assert distance(llm, model) < TOLERANCE
    assert not receiver.poll_and_apply()
    stored.shutdown()


def test_outputs_say_which_version_sampled_them(llm, updater, model):
    params = SamplingParams(n=2, temperature=1.0, max_tokens=6, ignore_eos=True)
    for step in (1, 2):
        version = updater.push_weights(perturbed(model, seed=470 + step)).version
        for output in llm.generate([{"prompt_token_ids": [5, 6, 7]}] * 3, params, use_tqdm=False):
            assert_labelled(output)
            assert output.version_spans == (((version, 0, 6),),) * 2
            assert output.replica_id == "0"
            # vLLM's LLM keeps no statistics unless it is asked to.
            assert {one.decode_s for one in output.sample_reports} == {None}
    assert updater.service.weight_versions == {"0": version}


def test_a_second_updater_counts_on(llm, model):
    first = WeightUpdater(llm)
    heard, version = [], first.push_weights(perturbed(model, seed=480)).version
    second = WeightUpdater(llm)
    assert second.service.weight_version == version
    second.service.register_version_hook(lambda report: heard.append(report.version))
    assert second.push_weights(perturbed(model, seed=481)).version == version + 1
    assert heard == [version + 1]
    assert first.service.weight_version == version + 1
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)
    assert_labelled(output)
    assert output.min_version == version + 1
    assert distance(llm, model) < TOLERANCE
    first.service.close()
    second.service.close()
