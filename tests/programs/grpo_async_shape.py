"""Asynchronous GRPO in the shape of TorchRL's ``sota-implementations/grpo/grpo-async.py``.

Same calls, with the same keyword arguments, in the same order of life: collectors that sample in
actors of their own, a buffer in an actor that they fill, and a trainer in a Ray task that samples
from it and pushes while they go on. Written here; only the imports below differ from TorchRL's, see
``grpo_shape_utils`` too::

    from torchrl.data.replay_buffers.ray_buffer import RayReplayBuffer

Usage: ``python tests/programs/grpo_async_shape.py CHECKPOINT [--steps N] [--lora]``
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
from torchrl.data import LazyStackStorage
from torchrl.objectives.llm.grpo import GRPOLoss, MCAdvantage
from torchrl.weight_update.llm import get_model_metadata

from torchrl_vllm_sync import RayReplayBuffer

NUM_COLLECTORS = 2
FILL_TIMEOUT_S = 120.0


def train(replay_buffer, cfg, collectors, inference_policy, devices=None):
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
    weight_sync_scheme = make_weight_sync_scheme(
        engine=inference_engine, cfg=cfg, device=train_device
    )
    sender = weight_sync_scheme.create_sender()
    sender.register_model(policy_training.model)
    metadata = get_model_metadata(policy_training.model)
    sender.init_all_workers_group(metadata, vllm_engine=inference_engine)

    with timeit("update_policy_weights"):
        sender.update_weights()
    pushes = 1

    for collector in collectors:
        collector.start()
    if hasattr(sender, "register_collector"):
        for collector in collectors:
            sender.register_collector(collector)

    deadline = time.monotonic() + FILL_TIMEOUT_S
    while not replay_buffer.write_count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"nothing was sampled in {FILL_TIMEOUT_S:g} s")
        time.sleep(0.2)

    optimizer = torch.optim.Adam(
        policy_training.parameters(),
        lr=cfg.optimizer.lr,
        weight_decay=cfg.optimizer.weight_decay,
        eps=getattr(cfg.optimizer, "eps", 1e-8),
        fused=False,
    )
    total_steps = -(cfg.train.total_dialog_turns // -cfg.train.optim_batch_size) * cfg.train.epochs
    metrics = []
    optim_steps = 0
    start_time = time.time()
    try:
        num_passes = cfg.train.steps * cfg.train.gradient_accumulation_steps
        for step in range(min(total_steps, num_passes)):
            if not any(collector.is_running() for collector in collectors):
                raise RuntimeError(f"Collectors stopped before step {step}/{total_steps}.")
            with timeit("sampling"):
                batch_size_per_step = (
                    cfg.train.optim_batch_size // cfg.train.gradient_accumulation_steps
                )
                batch = replay_buffer.sample(batch_size_per_step).to(train_device)
                history = batch.view(-1)[0]["history", "full"]
                history_str = history.apply_chat_template(tokenizer=train_tokenizer)
                while not isinstance(history_str, str):
                    history_str = "\n".join(history_str)
            dtype, enabled = getattr(torch, cfg.train_model.torch_dtype), cfg.train.mixed_precision
            with timeit("forward_pass"), autocast("cuda", enabled=enabled, dtype=dtype):
                loss = loss_fn(batch)
                loss_val = loss.mean(reduce=True) / cfg.train.gradient_accumulation_steps
                if not torch.isfinite(loss_val.detach()).all():
                    raise RuntimeError(f"loss is {loss_val.detach()}")
            with timeit("backward_pass"):
                loss_val.backward()
            if (step + 1) % cfg.train.gradient_accumulation_steps == 0:
                with timeit("optim_step"):
                    torch.nn.utils.clip_grad_norm_(
                        policy_training.parameters(), cfg.optimizer.clip_grad_norm
                    )
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    optim_steps += 1
                is_due = optim_steps % cfg.train.weight_update_frequency == 0
                if is_due and not cfg.train.skip_pushes:
                    with timeit("update_policy_weights"):
                        sender.update_weights()
                        pushes += 1
                        gc.collect()
            metrics.append(
                training_metrics(replay_buffer, batch, loss, collectors[0], start_time, step + 1)
            )
            del loss_val
            gc.collect()
        return {
            "metrics": metrics,
            "pushes": pushes,
            "collector_versions": [collector.policy_version for collector in collectors],
            "service_version": inference_engine.weight_version,
            "differences": far_side(inference_engine, policy_training.model, train_tokenizer),
        }
    finally:
        for collector in collectors:
            with contextlib.suppress(Exception):
                collector.shutdown()
        shutdown = getattr(sender, "shutdown", None)
        if shutdown is not None:
            shutdown()


def main():
    cfg = configuration("grpo_async_shape")
    if not ray.is_initialized():
        ray.init(**merge_ray_runtime_env(dict(cfg.ray.init_config)))
    inference_policy = get_inference_model(cfg, devices=[1])
    rb = RayReplayBuffer(
        storage=partial(
            LazyStackStorage,
            cfg.train.buffer_size or cfg.env.repeats * cfg.env.num_envs,
        ),
        transform_factory=partial(MCAdvantage, grpo_size=cfg.env.repeats),
        batch_size=max(1, cfg.train.optim_batch_size // cfg.train.gradient_accumulation_steps),
        remote_config=dict(cfg.ray.replay_buffer_config),
    )
    collector_config = dict(cfg.ray.collector_config)
    collector_config["num_gpus"] = 0
    collectors = []
    for i in range(NUM_COLLECTORS):
        collector = RayLLMCollector(
            env=partial(make_env, cfg, single_env=True),
            policy=inference_policy,
            dialog_turns_per_batch=cfg.train.dialog_turns_per_batch,
            total_dialog_turns=cfg.train.total_dialog_turns,
            replay_buffer=rb,
            ray_init_config=None,
            weight_updater=None,
            track_policy_version=True,
            remote_config=collector_config,
            yield_only_last_steps=cfg.env.reasoning,
            verbose=False,
        )
        collectors.append(collector)
        if i == 0:
            ray.get(collector._collector.is_initialized.remote())
    ray.get([collector._collector.is_initialized.remote() for collector in collectors[1:]])
    train_handler_config = {
        "num_cpus": cfg.ray.train_handler_config.get("num_cpus", 1),
        "num_gpus": cfg.train_model.num_devices,
    }
    train_handler = ray.remote(**train_handler_config)(train)
    try:
        report(**ray.get(train_handler.remote(rb, cfg, collectors, inference_policy, devices=[0])))
    finally:
        if ray.is_initialized():
            ray.shutdown()


if __name__ == "__main__":
    torch.set_default_dtype(torch.float32)
    set_list_to_stack(True).set()
    main()
