"""Synchronous GRPO in the shape of TorchRL's ``sota-implementations/grpo/grpo-sync.py``.

Same calls, with the same keyword arguments, in the same order of life: an engine and a policy, a
buffer in an actor, a collector in an actor, and a trainer in a Ray task to which all of them are
handed. Written here; only the imports below differ from TorchRL's, see ``grpo_shape_utils`` too::

    from torchrl.data.replay_buffers.ray_buffer import RayReplayBuffer

Usage: ``python tests/programs/grpo_sync_shape.py CHECKPOINT [--steps N] [--lora]``
"""

import contextlib
import gc
import time
from functools import partial

import ray
import torch
from grpo_shape_utils import (
    configuration,
    far_side,
    get_inference_model,
    get_train_model,
    make_env,
    make_weight_sync_scheme,
    report,
    training_metrics,
)
from tensordict import set_list_to_stack
from torch.amp.autocast_mode import autocast
from torchrl import merge_ray_runtime_env
from torchrl._utils import timeit
from torchrl.collectors.llm import RayLLMCollector
from torchrl.data import LazyStackStorage, SamplerWithoutReplacement
from torchrl.objectives.llm.grpo import GRPOLoss, MCAdvantage
from torchrl.weight_update.llm import get_model_metadata

from torchrl_vllm_sync import RayReplayBuffer


def train(replay_buffer, cfg, collector, inference_policy, devices=None):
    """Trains, and returns what the test looks at."""
    policy_training, train_tokenizer = get_train_model(cfg, devices=devices)
    train_device = torch.device("cpu")
    loss_fn = GRPOLoss(
        actor_network=policy_training,
        kl_to_ref_coeff=0.0,
        kl_to_inference_coeff=cfg.train.kl_to_inference_coeff,
        entropy_coeff=cfg.train.entropy_coeff,
        masking_strategy="rlhf" if cfg.env.reasoning else "sft",
        device=train_device,
    )
    inference_engine = inference_policy.model
    weight_sync_scheme = make_weight_sync_scheme(engine=inference_engine, cfg=cfg)
    sender = weight_sync_scheme.create_sender()
    sender.register_model(policy_training.model)
    metadata = get_model_metadata(policy_training.model)
    sender.init_all_workers_group(metadata, vllm_engine=inference_engine)
    sender.register_collector(collector)

    with timeit("update_policy_weights"):
        sender.update_weights()
    pushes = 1

    optimizer = torch.optim.Adam(
        policy_training.parameters(),
        lr=cfg.optimizer.lr,
        weight_decay=cfg.optimizer.weight_decay,
        eps=getattr(cfg.optimizer, "eps", 1e-8),
        fused=False,
    )
    metrics = []
    global_step = 0
    start_time = time.time()
    for data in collector:
        if not len(replay_buffer):
            continue
        if data is not None:
            raise ValueError("Data is not None")
        for _ in range(cfg.train.epochs):
            for batch in replay_buffer:
                batch = batch.to(train_device)
                global_step += 1
                history = batch.view(-1)[0]["next", "history"].prompt
                history_str = history.apply_chat_template(tokenizer=train_tokenizer)
                while not isinstance(history_str, str):
                    history_str = "\n".join(history_str)
                dtype = getattr(torch, cfg.train_model.torch_dtype)
                enabled = cfg.train.mixed_precision
                with timeit("forward_pass"), autocast("cuda", enabled=enabled, dtype=dtype):
                    loss = loss_fn(batch)
                    loss_val = loss.mean(reduce=True) / cfg.train.gradient_accumulation_steps
                with timeit("backward_pass"):
                    loss_val.backward()
                # A pass before the batch's last, as TorchRL's script has it.
                if (global_step + 1) % cfg.train.gradient_accumulation_steps == 0:
                    with timeit("optim_step"):
                        torch.nn.utils.clip_grad_norm_(
                            policy_training.parameters(), cfg.optimizer.clip_grad_norm
                        )
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=True)
                del loss_val
                gc.collect()
                metrics.append(
                    training_metrics(replay_buffer, batch, loss, collector, start_time, global_step)
                )
        with timeit("update_policy_weights"):
            if not cfg.train.skip_pushes:
                sender.update_weights()
                pushes += 1
        if cfg.train.empty_replay_buffer:
            replay_buffer.empty(empty_write_count=False)
        if global_step >= cfg.train.steps * cfg.train.gradient_accumulation_steps:
            break

    results = {
        "metrics": metrics,
        "pushes": pushes,
        "collector_versions": [collector.policy_version],
        "service_version": inference_engine.weight_version,
        "differences": far_side(inference_engine, policy_training.model, train_tokenizer),
    }
    with contextlib.suppress(Exception):
        collector.shutdown()
    shutdown = getattr(sender, "shutdown", None)
    if shutdown is not None:
        shutdown()
    return results


def main():
    cfg = configuration("grpo_sync_shape")
    if not ray.is_initialized():
        ray.init(**merge_ray_runtime_env(dict(cfg.ray.init_config)))
    inference_policy = get_inference_model(cfg, devices=[1])
    rb = RayReplayBuffer(
        storage=partial(
            LazyStackStorage,
            cfg.train.buffer_size or cfg.env.repeats * cfg.env.num_envs,
        ),
        sampler=SamplerWithoutReplacement,
        transform_factory=partial(MCAdvantage, grpo_size=cfg.env.repeats),
        batch_size=max(1, cfg.train.optim_batch_size // cfg.train.gradient_accumulation_steps),
        remote_config=dict(cfg.ray.replay_buffer_config),
    )
    collector_config = dict(cfg.ray.collector_config)
    collector_config["num_gpus"] = 0
    collector = RayLLMCollector(
        env=partial(make_env, cfg),
        policy=inference_policy,
        dialog_turns_per_batch=cfg.train.dialog_turns_per_batch,
        total_dialog_turns=cfg.train.total_dialog_turns,
        replay_buffer=rb,
        ray_init_config=None,
        weight_updater=None,
        track_policy_version=True,
        remote_config=collector_config,
        sync_iter=cfg.train.sync_iter,
        verbose=False,
        yield_only_last_steps=cfg.env.reasoning,
    )
    ray.get(collector._collector.is_initialized.remote())
    train_handler_config = {
        "num_cpus": cfg.ray.train_handler_config.get("num_cpus", 1),
        "num_gpus": cfg.train_model.num_devices,
    }
    train_handler = ray.remote(**train_handler_config)(train)
    try:
        report(**ray.get(train_handler.remote(rb, cfg, collector, inference_policy, devices=[0])))
    finally:
        if ray.is_initialized():
            ray.shutdown()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float32)
    set_list_to_stack(True).set()
    main()
