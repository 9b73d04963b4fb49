"""Which models a push can fill: those whose layers take what a trainer holds."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM's configuration is needed")

from torchrl_vllm_sync.engine.plan import check_can_be_filled
from torchrl_vllm_sync.errors import UnsupportedArgumentError
from torchrl_vllm_sync.rl.local_llm import LocalLLM


def model_config(quantization=None, **fields):
    """As much of vLLM's ``ModelConfig`` as is looked at."""
    return SimpleNamespace(
        model="a/model", quantization=quantization, hf_config=SimpleNamespace(**fields)
    )


@pytest.mark.parametrize("online", [None, "fp8", "int8_per_channel_weight_only"])
def test_what_is_whole_or_quantised_on_arrival_can_be_filled(online):
    check_can_be_filled(model_config(online))
    check_can_be_filled(model_config(online, quantization_config=None))


def test_a_checkpoint_that_is_quantised_already_cannot():
    config = model_config("awq", quantization_config={"quant_method": "awq"})
    with pytest.raises(UnsupportedArgumentError, match=r"a/model .* quantised already \(awq\)"):
        check_can_be_filled(config)


@pytest.mark.parametrize("loader", ["bitsandbytes", "gguf"])
def test_what_is_quantised_while_files_are_read_cannot(loader):
    with pytest.raises(UnsupportedArgumentError, match=f"quantization='{loader}', which happens"):
        check_can_be_filled(model_config(loader))


def test_an_llm_of_this_process_is_refused_before_anything_is_set_up():
    parallel = SimpleNamespace(
        worker_extension_cls="torchrl_vllm_sync.engine.worker.SyncWorkerExtension"
    )
    config = SimpleNamespace(parallel_config=parallel, model_config=model_config("gguf"))
    engine = SimpleNamespace(vllm_config=config)
    with pytest.raises(UnsupportedArgumentError, match="gguf"):
        LocalLLM(SimpleNamespace(llm_engine=engine))
    assert vars(engine) == {"vllm_config": config}
