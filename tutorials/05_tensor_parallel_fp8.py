"""A quantised engine on two GPUs, started with no weights at all, and filled by a push.

Usage:
    python tutorials/05_tensor_parallel_fp8.py               # tiny random model, no GPU, a minute
    python tutorials/05_tensor_parallel_fp8.py --smoke       # the same, as CI runs it
    python tutorials/05_tensor_parallel_fp8.py --shape 8b    # Qwen3-8B's shape, three GPUs, fp8
    python tutorials/05_tensor_parallel_fp8.py --model Qwen/Qwen3-8B

With two GPUs the trainer shares one with the engine, and the weights go through shared memory; with
``--tensor-parallel 1`` each has its own, and they go by NCCL.

The last line is ``PASS tokens_equal <fraction> push_ms <milliseconds>``, or ``FAIL`` with the first
token that differs, and a non-zero exit status.

What PASS claims: after the push every token of every answer is that of an engine which loaded the
same checkpoint from disk, with the same quantisation and tensor parallelism; before the push no
answer was. A checkpoint that is itself quantised is refused when the engine is launched, with the
reason: what a trainer holds does not fit into it.
"""

# %% [markdown]
# # Tensor parallelism and fp8
#
# The trainer holds one whole copy of the model in bfloat16. The engine holds half of each matrix on
# each of its two GPUs, in eight bits. Nothing about that concerns the trainer: it sends its tensors
# under the names that checkpoints have, and vLLM's loader cuts, packs and quantises them on
# arrival, as it does with files.
#
# The engine need not read a checkpoint first. `load_format="dummy"` fills it with anything, and the
# first push brings the model. You will see
#
# - gibberish before the push;
# - the trainer's model after it, token by token that of an engine which read the files.
#
# The CPU has no fp8; there the tiny engine is quantised to int8 instead, on two processes.

# %%
import sys

import torch
from common.checkpoints import SHAPES, load_trainer, make_checkpoint
from common.engines import ray_running, scenario, small_service
from common.equality import compare, conclude, greedy_answers, random_prompts
from common.settings import finish_push, make_push_parser


# %% Settings
def parse_args(argv=None):
    """Reads the command line and finds the devices."""
    parser = make_push_parser(__doc__, SHAPES)
    parser.add_argument("--model", help="checkpoint of the trainer, instead")
    parser.add_argument("--quantization", help="vLLM's name of it; fp8, on a CPU int8")
    parser.add_argument("--tensor-parallel", type=int, default=2, help="workers")
    args = parser.parse_args(argv)
    num_gpus = finish_push(parser, args, "tensor_parallel")
    needs_gpus = args.model or args.shape != "tiny"
    if num_gpus < args.tensor_parallel if num_gpus else needs_gpus:
        parser.error(f"{args.tensor_parallel} GPUs for the engine are needed, got {num_gpus}")
    args.shared = num_gpus == args.tensor_parallel
    args.engine_gpus = min(num_gpus, args.tensor_parallel)
    # vLLM's CPU backend quantises from float16.
    args.engine_dtype = torch.bfloat16 if num_gpus else torch.float16
    args.quantization = args.quantization or ("fp8" if num_gpus else "int8_per_channel_weight_only")
    return args


# %% The engine
# One replica with two workers, or as many as you say. `quantization` is vLLM's own argument:
# *online* quantisation, of weights that arrive in full precision.
def make_service(args, checkpoint, **engine):
    """Starts one engine; leaving the service's ``with`` block ends it."""
    engine |= {"num_devices": args.tensor_parallel, "quantization": args.quantization}
    engine["stage_weights"] = args.quantization == "fp8"
    return small_service(checkpoint, args.engine_dtype, shared=args.shared, **engine)


# %% Before, after, and what is right
def run(args, directory):
    """Everything in order; returns whether all was as it should be."""
    checkpoint = args.model or make_checkpoint(
        args.shape, directory, seed=args.seed, dtype=args.dtype, device=args.device
    )
    trained = load_trainer(checkpoint, dtype=args.dtype, device=args.device)
    prompts = random_prompts(args.prompts, args.seed)

    print(f"Starting an engine with {args.quantization} and no weights", flush=True)
    with make_service(args, checkpoint, load_format="dummy") as service:
        before = greedy_answers(service, prompts, args.num_tokens)
        print("Pushing the trainer's weights into it", flush=True)
        report = service.push_weights(trained)
        after = greedy_answers(service, prompts, args.num_tokens)
    print("Starting an engine that reads the checkpoint", flush=True)
    with make_service(args, checkpoint) as service:
        expected = greedy_answers(service, prompts, args.num_tokens)

    compared = compare({"before the push": before, "after the push": after}, expected)
    gibberish = compared["before the push"].equal
    case = f"{args.model or args.shape}, tp {args.tensor_parallel}, {args.quantization}"
    failure = f"{gibberish} answers were right before the push: it proves nothing"
    return conclude(
        "tensor_parallel_fp8" + "_shared" * args.shared,
        f"{case}, {report.transport}" + (", trainer on a GPU of the engine" * args.shared),
        compared,
        {"after the push": report},
        smoke=args.smoke,
        failure=failure if gibberish else "",
    )


def main(argv=None):
    """Runs the tutorial; what was started is ended, also on Ctrl-C."""
    args = parse_args(argv)
    with scenario("tensor-parallel", ray_running(args.engine_gpus)) as directory:
        return 0 if run(args, directory) else 1


if __name__ == "__main__":
    sys.exit(main())
