"""A sharded trainer and a mixture-of-experts engine with data and expert parallelism.

Usage:
    python tutorials/06_fsdp_expert_parallel.py             # tiny random model, no GPU, a minute
    python tutorials/06_fsdp_expert_parallel.py --smoke     # the same, as CI runs it
    python tutorials/06_fsdp_expert_parallel.py --shape 30b-a3b    # Qwen3-30B-A3B's shape, GPUs

On GPUs half of them are the trainer's and half the engine's, four of each with eight; with two,
both are on both of them, and the weights go through shared memory instead of by NCCL. The program
starts itself once for each rank of the trainer, as ``torchrun`` does.

The last line is ``PASS tokens_equal <fraction> push_ms <milliseconds>``, or ``FAIL`` with the first
token that differs, and a non-zero exit status.

What PASS claims: after a first push, a training step and a second push, every token of every answer
is that of an engine which loaded the trainer's checkpoint of that moment from disk; and the step
has changed the answers, so that the first push's weights would not have passed.
"""

# %% [markdown]
# # FSDP2 and expert parallelism
#
# The model does not fit on one GPU of the trainer, so *FSDP2* cuts each parameter into shards, one
# on each rank. It does not fit on one GPU of the engine either: attention runs on all of them with
# different requests (*data parallelism*), and each holds some of the experts (*expert
# parallelism*).
#
# Neither side has the model in one piece, and none is needed: the first rank gathers one layer
# while it sends the one before, every rank takes part, and each worker of the engine keeps what is
# its own. In code that is one line on every rank, `updater.push_weights()`, with a service on the
# first rank and `None` on the others.
#
# The CPU build of vLLM runs expert parallelism with one worker only; the tiny engine has that.

# %%
import contextlib
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from common.quiet import keep_quiet  # sets what the libraries below read

# isort: split
import ray
import torch
import torch.distributed as dist
from common.checkpoints import MOE_SHAPES, save_shape
from common.engines import ray_running, scenario, small_service
from common.equality import compare, conclude, greedy_answers, random_prompts
from common.settings import finish_push, make_push_parser
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from torchrl_vllm_sync import WeightUpdater

# %% Settings
CPU_RANKS = 2
LEARNING_RATE = 0.3  # of one step of plain SGD, large enough to change answers
DIRECTORY = "TUTORIAL_DIRECTORY"  # names it to the ranks
END_TIMEOUT_S = 90.0  # for ranks and engines that are told to end
JOIN_TIMEOUT = timedelta(minutes=10)  # for a rank that waits while the first one starts engines


def parse_args(argv=None):
    """Reads the command line and finds the devices."""
    parser = make_push_parser(__doc__, MOE_SHAPES, "tiny-moe")
    args = parser.parse_args(argv)
    num_gpus = finish_push(parser, args)
    if num_gpus % 2 or (not num_gpus and args.shape != "tiny-moe"):
        parser.error(f"two, four or eight GPUs are needed, got {num_gpus}")
    args.shared = num_gpus == 2
    args.engine_gpus = num_gpus if args.shared else num_gpus // 2
    args.num_ranks = args.engine_gpus or CPU_RANKS
    # The trainer has the last ones. Its ranks see them first: DTensor takes rank 0 to be on GPU 0.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus)))).split(",")
    args.seen_by_ranks = ",".join(visible[-args.num_ranks :] + visible[: -args.num_ranks])
    return args


# %% The trainer
# Each rank makes its shards where they belong: the whole model is never anywhere. A tiny step of
# SGD on random tokens stands for training.
def make_model(args, checkpoint, device):
    """Returns this rank's part of a random model."""
    config = AutoConfig.from_pretrained(checkpoint)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=args.dtype)
    mesh = init_device_mesh(device.type, (args.num_ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    # On GPUs DTensor gives each rank its own part of one stream; equal shards would tie tokens.
    torch.manual_seed(args.seed if args.on_gpus else args.seed + dist.get_rank())
    with torch.no_grad():
        model.apply(model._init_weights)  # the buffers of rotary embeddings too
    return model


def wait_for_all():
    """Returns when every rank is here. A tensor on the CPU, since waiting would occupy GPUs."""
    dist.all_reduce(torch.zeros(1))


def train_step(model, device, seed):
    """One step on tokens that differ from rank to rank; returns the loss."""
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    ids = torch.randint(5, 500, (1, 64), generator=generator).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def save(model, checkpoint):
    """Writes the whole model to the checkpoint's directory; every rank takes part."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        model.save_pretrained(checkpoint, state_dict=whole)
    wait_for_all()


# %% The engine
def make_service(args, checkpoint, **engine):
    """Starts one engine; leaving the service's ``with`` block ends it."""
    parallel = {"data_parallel_size": args.engine_gpus or 1, "enable_expert_parallel": True}
    return small_service(checkpoint, args.dtype, shared=args.shared, **parallel, **engine)


# %% All ranks
# What only the first rank does stands behind `if service`. `push_weights` is called by all of them.
@contextlib.contextmanager
def first_rank_service(args, checkpoint, **engine):
    """Starts an engine on the first rank; the others get ``None`` when it is there."""
    if dist.get_rank():
        wait_for_all()
        yield None
        return
    with make_service(args, checkpoint, **engine) as service:
        wait_for_all()
        yield service


def ask(args, service):
    """The engine's answers, on the first rank."""
    if service is None:
        return []
    return greedy_answers(service, random_prompts(args.prompts, args.seed), args.num_tokens)


def say(step):
    """Tells of a step, once for all ranks."""
    if dist.get_rank() == 0:
        print(step, flush=True)


def run(args, directory, device):
    """Everything in order, on every rank; returns whether all was as it should be."""
    first = dist.get_rank() == 0
    checkpoint = directory / args.shape
    if first:
        save_shape(args.shape, directory, dtype=str(args.dtype).removeprefix("torch."))
    say(f"Starting an engine with no weights, and {args.num_ranks} ranks")
    wait_for_all()
    model = make_model(args, checkpoint, device)
    with first_rank_service(args, checkpoint, load_format="dummy") as service:
        updater = WeightUpdater(service, source=model)
        answers = [ask(args, service)]
        say("A first push, by all ranks")
        updater.push_weights()
        answers.append(ask(args, service))
        say("A training step, and a second push")
        loss = train_step(model, device, args.seed)
        report = updater.push_weights()
        answers.append(ask(args, service))
    save(model, checkpoint)
    if not first:
        return True
    say("Starting an engine that reads the trainer's checkpoint")
    with make_service(args, checkpoint) as service:
        expected = ask(args, service)
    shown = dict(zip(("dummy weights", "first push", "second push"), answers, strict=True))
    compared = compare(shown, expected)
    print(f"loss {loss:.3f}")
    case = f"{args.shape}, {args.num_ranks} ranks, dp {args.engine_gpus or 1} with experts"
    failure = "the training step changed no answer: the second push proves nothing"
    return conclude(
        "fsdp_expert_parallel" + "_shared" * args.shared,
        f"{case}, {report.transport}" + (", both on both GPUs" * args.shared),
        compared,
        {"second push": report},
        smoke=args.smoke,
        failure=failure if compared["first push"].equal == args.prompts else "",
    )


# %% Starting the ranks
def as_rank(args, directory):
    """One rank of the trainer; the first one has the engine."""
    keep_quiet()
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if args.on_gpus else torch.device("cpu")
    if args.on_gpus:
        torch.cuda.set_device(device)
    with contextlib.ExitStack() as cleanup:
        if rank == 0:
            cleanup.enter_context(ray_running(address=os.environ["RAY_ADDRESS"]))
        backend, own = ("cpu:gloo,cuda:nccl", device) if args.on_gpus else ("gloo", None)
        dist.init_process_group(backend, timeout=JOIN_TIMEOUT, device_id=own)
        cleanup.callback(dist.destroy_process_group)
        return 0 if run(args, directory, device) else 1


def start_ranks(args, directory):
    """Runs this file once for each rank, and returns how that ended."""
    torchrun = [
        "-m", "torch.distributed.run", "--standalone", f"--log-dir={directory / 'ranks'}",
        f"--nproc-per-node={args.num_ranks}",
    ]  # fmt: skip
    shared = {"OMP_NUM_THREADS": "1", DIRECTORY: str(directory)}
    shared["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    if args.on_gpus:
        shared["CUDA_VISIBLE_DEVICES"] = args.seen_by_ranks
    ranks = subprocess.Popen(
        [sys.executable, *torchrun, __file__, *sys.argv[1:]],
        env=os.environ | shared,
        start_new_session=True,  # Ctrl-C reaches it once, from here
    )
    try:
        return ranks.wait()
    except KeyboardInterrupt:
        ranks.terminate()
        ranks.wait(END_TIMEOUT_S)
        raise


def main():
    """Runs the tutorial; what was started is ended, also on Ctrl-C.

    Ray and the directory belong to the process that starts the ranks: ``torchrun`` ends each rank
    with all that it has started.
    """
    args = parse_args()
    if DIRECTORY in os.environ:
        return as_rank(args, Path(os.environ[DIRECTORY]))
    with scenario("fsdp", ray_running(args.engine_gpus)) as directory:
        return start_ranks(args, directory)


if __name__ == "__main__":
    sys.exit(main())
