"""What both programs share, in the shape of ``grpo_utils.py`` of TorchRL's GRPO implementation.

Same calls with the same keyword arguments; a tiny model in the place of Qwen2.5-3B, questions made
here in the place of GSM8K's download, and a CPU.

The imports that differ from TorchRL's script::

    from torchrl.modules.llm import TransformersWrapper, vLLMWrapper
    from torchrl.modules.llm.backends.vllm import AsyncVLLM
    from torchrl.weight_update.llm import VLLMWeightSyncScheme
"""

import argparse
import json
import os
import sys
import time
import warnings
from types import SimpleNamespace

import torch
from peft import LoraConfig, get_peft_model
from torchrl.data import Unbounded
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm.chat import ChatEnv
from torchrl.modules.llm import TransformersWrapper
from transformers import AutoModelForCausalLM, AutoTokenizer

from torchrl_vllm_sync import AsyncVLLM, VLLMWeightSyncScheme, vLLMWrapper

# TorchRL's and torch's notes about themselves.
for message in (
    "Response history should have one more batch dimension",
    "The PyTorch API of nested tensors is in prototype stage",
    "User provided device_type of 'cuda', but CUDA is not available",
):
    warnings.filterwarnings("ignore", message)


def configuration(program: str, argv: list[str] | None = None) -> SimpleNamespace:
    """Returns what TorchRL's script reads from its YAML files, by the same names."""
    parser = argparse.ArgumentParser(program)
    parser.add_argument("checkpoint", help="folder of the tiny model")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps and pushes")
    parser.add_argument("--passes", type=int, default=8, help="passes of four rows in each step")
    parser.add_argument("--replicas", type=int, default=2, help="engines")
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    parser.add_argument("--skip-pushes", action="store_true", help="push once only, to be caught")
    args = parser.parse_args(argv)
    # As config/grpo_gsm8k.yaml and config/mode/{sync,async}.yaml have them.
    spaces = {
        "env": {"num_envs": 32, "repeats": 16, "max_steps": 2, "reasoning": False},
        "model": {"compile": False},
        "train": {
            "total_dialog_turns": 100_000,
            "dialog_turns_per_batch": 32,
            "gradient_accumulation_steps": args.passes,
            "optim_batch_size": 4 * args.passes,
            "epochs": 1,
            "kl_coef_in_loss": True,
            "use_kl_to_ref": False,
            "kl_to_ref_coeff": 0.0,
            "kl_to_inference_coeff": 1e-2,
            "entropy_coeff": 1e-4,
            "mixed_precision": True,
            "packing": False,
            "buffer_size": 128 if program == "grpo_async_shape" else None,
            "sync_iter": True,
            "empty_replay_buffer": True,
        },
        "train_model": {},
        "inference_model": {
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "include_stop_str_in_output": True,
        },
        "optimizer": {"eps": 1e-5, "weight_decay": 0.0, "clip_grad_norm": 1.0},
        "ray": {"replay_buffer_config": {"num_gpus": 0.0}, "collector_config": {}},
    }
    # What a tiny model, two CPU cores and a few steps have otherwise or besides.
    own = {
        "model": {"name": args.checkpoint},
        "train": {
            "weight_update_frequency": 1, "steps": args.steps, "skip_pushes": args.skip_pushes,
        },
        "train_model": {"lora": SimpleNamespace(enabled=args.lora, r=8, alpha=16), "num_devices": 0,
                        "torch_dtype": "float32"},
        "inference_model": {
            "num_devices": args.replicas,
            "gpu_memory_utilization": 0.1,
            "enforce_eager": True,
            "verbose": False,
            "enable_fp32_output": True,
            "torch_dtype": "float32",
            "trust_remote_code": False,
            "seed": 0,
            "max_model_len": 256,
            "cpu_offload_gb": 0,
            "pipeline_parallel_size": 1,
            "max_tokens": 12,
        },
        "optimizer": {"lr": 5e-3},
        "ray": {
            "init_config": {
                "address": "local",
                "num_cpus": 4,
                "num_gpus": 0,
                "include_dashboard": False,
                "runtime_env": {"env_vars": {"LIST_TO_STACK": "1"}},
            },
            "collector_config": {"num_cpus": 0},
            "train_handler_config": {"num_cpus": 0},
            "replay_buffer_config": {"num_cpus": 0, "num_gpus": 0.0},
        },
    }  # fmt: skip
    spaces = {name: given | own.get(name, {}) for name, given in spaces.items()}
    return SimpleNamespace(**{name: SimpleNamespace(**value) for name, value in spaces.items()})


def get_tokenizer(cfg):
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.name)
    if tokenizer.pad_token == tokenizer.eos_token:
        tokenizer.pad_token = "PAD"
    tokenizer.padding_side = "left"
    return tokenizer


def get_train_model(cfg, devices=None):
    del devices
    model = AutoModelForCausalLM.from_pretrained(
        cfg.model.name, dtype=getattr(torch, cfg.train_model.torch_dtype)
    )
    if cfg.train_model.lora.enabled:
        model = get_peft_model(
            model,
            LoraConfig(
                r=cfg.train_model.lora.r,
                lora_alpha=cfg.train_model.lora.alpha,
                target_modules="all-linear",
                lora_dropout=0.0,
                bias="none",
                task_type="CAUSAL_LM",
            ),
        )
    tokenizer = get_tokenizer(cfg)
    policy_training = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="tokens" if not cfg.env.reasoning else "history",
        generate=False,
        return_log_probs=True,
        pad_output=False,
        device=torch.device("cpu"),
        pad_model_input=not cfg.train.packing,
    )
    policy_training.model.eval()
    policy_training.model.train(False)
    return policy_training, tokenizer


def get_inference_model(cfg, devices=None):
    del devices
    inference_params = {
        "model_name": cfg.model.name,
        "num_devices": 1,
        "num_replicas": cfg.inference_model.num_devices,
        "gpu_memory_utilization": cfg.inference_model.gpu_memory_utilization,
        "enforce_eager": cfg.inference_model.enforce_eager,
        "verbose": getattr(cfg.inference_model, "verbose", True),
        "compile": getattr(cfg.inference_model, "compile", False),
        "enable_prefix_caching": getattr(cfg.inference_model, "enable_prefix_caching", False),
    }
    if cfg.inference_model.enable_fp32_output:
        os.environ["VLLM_ENABLE_FP32_OUTPUT"] = "1"
    inference_params["enable_fp32_output"] = cfg.inference_model.enable_fp32_output
    optional_vllm_params = [
        "max_model_len",
        "dtype",
        "trust_remote_code",
        "seed",
        "swap_space",
        "cpu_offload_gb",
        "tensor_parallel_size",
        "pipeline_parallel_size",
    ]
    for param in optional_vllm_params:
        value = getattr(cfg.inference_model, param, None)
        if value is not None:
            inference_params[param] = value
    inference_params["dtype"] = getattr(torch, cfg.inference_model.torch_dtype)

    inference_server = AsyncVLLM.from_pretrained(**inference_params)
    assert inference_server is not None
    policy = vLLMWrapper(
        inference_server,
        input_mode="history",
        chat_template_name="qwen",
        return_log_probs=not cfg.env.reasoning,
        tokenizer=get_tokenizer(cfg),
        pad_output=False,
        generate_kwargs={
            "max_tokens": cfg.inference_model.max_tokens,
            "include_stop_str_in_output": cfg.inference_model.include_stop_str_in_output,
            "temperature": cfg.inference_model.temperature,
            "top_p": cfg.inference_model.top_p,
        },
    )
    assert policy.model is not None
    return policy


def make_weight_sync_scheme(engine, cfg, device=None):
    del cfg, device
    return VLLMWeightSyncScheme(
        master_address=engine.get_master_address(),
        master_port=engine.get_master_port(),
        gpus_per_replica=engine.get_tp_size(),
        num_replicas=getattr(engine, "num_replicas", 1),
        strategy="state_dict",
    )


class LowTokenReward(Transform):
    """Reward: the share of a response's tokens whose id is below 128."""

    def _step(self, tensordict, next_tensordict):
        responses = tensordict.view(-1).get(("tokens", "response"), as_list=True)
        shares = [float((ids < 128).float().mean()) if ids.numel() else 0.0 for ids in responses]
        reward = torch.tensor(shares).view(*next_tensordict.batch_size, 1, 1)
        return next_tensordict.set("reward", reward)

    def transform_reward_spec(self, spec):
        spec["reward"] = Unbounded(shape=(*spec.shape, 1, 1), dtype=torch.float32)
        return spec


def questions():
    number = 0
    while True:
        number += 1
        yield {"query": [f"What is {number % 10} + {number % 7}?"]}


def make_env(cfg, single_env=False):
    common_kwargs = {
        "repeats": cfg.env.repeats,
        "tokenizer": get_tokenizer(cfg),
        "num_envs": cfg.env.num_envs if not single_env else 1,
        "max_steps": cfg.env.max_steps if cfg.env.reasoning else 1,
        "device": torch.device("cpu"),
    }
    return local_questions_env(**common_kwargs, ray_backend=True)


def local_questions_env(*, repeats, tokenizer, num_envs, max_steps, device, ray_backend):
    """Stands for ``GSM8KEnv``, which downloads its questions, with the same keywords."""
    del ray_backend
    env = ChatEnv.from_dataloader(
        dataloader=questions(),
        batch_size=(num_envs,),
        repeats=repeats,
        tokenizer=tokenizer,
        input_mode="history",
        device=device,
    )
    env = env.append_transform(StepCounter(max_steps=max_steps))
    return env.append_transform(LowTokenReward())


def training_metrics(replay_buffer, batch, loss, collector, start_time, global_step):
    """The figures that TorchRL's ``log_training_metrics`` logs, read the same way."""
    with torch.no_grad():
        rb_content = replay_buffer[:]
        batch_policy_version = batch["next", "policy_version"].view(-1).min()
        buffer_policy_versions = rb_content.get(("next", "policy_version")).view(-1).float()
        staleness = collector.policy_version - buffer_policy_versions
        lengths = [one.numel() for one in rb_content.get(("tokens", "response"), as_list=True)]
        rewards = torch.cat(rb_content.get(("next", "reward"), as_list=True))
        return {
            "loss_objective": float(loss.loss_objective),
            "clip_fraction": float(loss.clip_fraction),
            "ESS": float(loss.ESS),
            "kl_approx_to_inference": float(loss.kl_approx),
            "kl_to_inference": float(loss.kl_to_inference.mean()),
            "policy_version": collector.policy_version,
            "batch_policy_age": int(collector.policy_version - batch_policy_version),
            "sampled_by": sorted(set(batch["policy_version"].view(-1).tolist())),
            "staleness_max": float(staleness.max()),
            "write_count": int(replay_buffer.write_count),
            "reward_mean": float(rewards.mean()),
            "seq_length_mean": sum(lengths) / len(lengths),
            "step_count_mean": float(rb_content.get(("next", "step_count")).float().mean()),
            "rows": batch.numel(),
            "batch": len(batch),
            "gradient_steps_per_second": global_step / (time.time() - start_time),
        }


def far_side(service, model, tokenizer):
    """Largest difference of log-probabilities between each replica and the trainer's model."""
    from vllm import SamplingParams

    ids = tokenizer("The engines compute what the trainer computes.")["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    wanted = logits.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    differences = []
    for index in range(service.num_replicas):
        output = service.generate(
            prompt_token_ids=ids,
            sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0),
            actor_index=index,
        )
        pairs = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
        found = torch.tensor([entry[token].logprob for entry, token in pairs])
        differences.append(float((found - wanted).abs().max()))
    return differences


def report(**results):
    """Prints what a test reads, in one line."""
    sys.stdout.write("RESULT " + json.dumps(results) + "\n")
    sys.stdout.flush()
