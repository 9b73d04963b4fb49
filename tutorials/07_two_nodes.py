"""A trainer on one node and replicas on another, and what crosses between them.

Usage:
    python tutorials/07_two_nodes.py                        # tiny random model, no GPU, a minute
    python tutorials/07_two_nodes.py --smoke                # the same, as CI runs it
    python tutorials/07_two_nodes.py --shape 8b             # Qwen3-8B's shape, three GPUs
    python tutorials/07_two_nodes.py --address auto         # on the node of a real cluster

Without ``--address`` both nodes are on this machine: two of Ray's node processes, the first with
the trainer and no room for replicas. What that shows is placement and the path of the weights, not
the speed of a network; the output and the record say so.

The last line is ``PASS tokens_equal <fraction> push_ms <milliseconds>``, or ``FAIL`` with the first
token that differs, and a non-zero exit status.

What PASS claims: no replica is on the trainer's node, and after the push every token of every
answer of every replica is that of an engine which loaded the trainer's checkpoint from disk.
"""

# %% [markdown]
# # Two nodes
#
# A Ray cluster is one pool of resources, whichever node they are on. The trainer runs where it was
# started; replicas go where there is room. Shared memory ends at a node's border, so that the
# weights go by `broadcast`: NCCL between GPUs, Gloo between CPUs, over the network where there is
# one.
#
# With two real nodes: `ray start --head --num-gpus 0` on the trainer's, `ray start --address=...`
# on the other, and this program with `--address auto` on the first. `NCCL_SOCKET_IFNAME` names the
# network interface, if NCCL finds the wrong one.

# %%
import contextlib
import sys

import common.quiet  # noqa: F401  sets what the libraries below read

# isort: split
import ray
from common.checkpoints import SHAPES, load_trainer, make_checkpoint
from common.engines import end_on_sigterm, ray_running, scenario, small_service
from common.equality import compare, conclude, greedy_answers, random_prompts
from common.settings import finish_push, make_push_parser
from ray.cluster_utils import Cluster

from torchrl_vllm_sync import BroadcastTransport


# %% Settings
def parse_args(argv=None):
    """Reads the command line and finds the devices."""
    parser = make_push_parser(__doc__, SHAPES)
    parser.add_argument("--address", help="of a Ray cluster with replicas' GPUs on other nodes")
    parser.add_argument("--replicas", type=int, help="vLLM engines; one for each GPU there is")
    args = parser.parse_args(argv)
    num_gpus = finish_push(parser, args)
    if args.address is None and (num_gpus == 1 or (not num_gpus and args.shape != "tiny")):
        parser.error(f"one GPU for the trainer and one for each replica are needed, got {num_gpus}")
    # Here the trainer has the last one; on a cluster the replicas' are on other nodes.
    args.engine_gpus = max(0, num_gpus - 1)
    args.replicas = args.replicas or args.engine_gpus or 2
    if args.replicas < 1:
        parser.error("--replicas must be at least 1")
    return args


# %% The nodes
@contextlib.contextmanager
def nodes(args):
    """Joins the cluster, or starts one of two nodes on this machine and ends it."""
    with contextlib.ExitStack() as cleanup:
        end_on_sigterm()
        address = args.address
        if address is None:
            cluster = Cluster()
            cleanup.callback(cluster.shutdown)
            cluster.add_node(num_cpus=0, num_gpus=0, include_dashboard=False)
            cluster.add_node(num_cpus=args.replicas, num_gpus=args.engine_gpus)
            address = cluster.address
        cleanup.enter_context(ray_running(address=address))
        yield


# %% The push
# The replicas are asked one by one (`actor_index`), so that each has to show what it holds.
def run(args, directory):
    """Everything in order; returns whether all was as it should be."""
    old, new = (
        make_checkpoint(args.shape, directory, seed=seed, dtype=args.dtype, device=args.device)
        for seed in (args.seed, args.seed + 1)
    )
    trained = load_trainer(new, dtype=args.dtype, device=args.device)
    prompts = random_prompts(args.prompts, args.seed)
    cpus = 0 if args.on_gpus else 1  # without GPUs, a CPU of Ray's is what only the other node has
    here = ray.get_runtime_context().get_node_id()
    where = "two Ray nodes" if args.address else "two Ray nodes on one machine"
    print(f"Starting {args.replicas} replicas; {where}", flush=True)
    engines = {"num_replicas": args.replicas, "num_cpus_per_replica": cpus}
    with small_service(old, args.dtype, **engines) as service:
        described = service.replicas.call_replicas("describe")
        found = {name: one.processes.node_id for name, one in described.items()}
        print(f"  nodes: the trainer's {here[:8]}, replicas' {[one[:8] for one in found.values()]}")
        before = greedy_answers(service, prompts, args.num_tokens)
        print("Pushing the trainer's weights into all of them", flush=True)
        report = service.push_weights(trained, transport=BroadcastTransport())
        after = []
        for index in range(args.replicas):
            after += greedy_answers(service, prompts, args.num_tokens, actor_index=index)
    print("Starting an engine that reads the trainer's checkpoint", flush=True)
    with small_service(new, args.dtype, num_cpus_per_replica=cpus) as service:
        expected = greedy_answers(service, prompts, args.num_tokens)

    compared = compare({"before the push": before, "after the push": after}, expected)
    failure = ""
    if here in found.values():
        failure = "a replica is on the trainer's node"
    elif compared["before the push"].equal == args.prompts:
        failure = "the answers were right before the push: it proves nothing"
    return conclude(
        "two_nodes",
        f"{args.shape}, {args.replicas} replicas, {where}",
        compared,
        {"after the push": report},
        smoke=args.smoke,
        failure=failure,
    )


def main(argv=None):
    """Runs the tutorial; what was started is ended, also on Ctrl-C."""
    args = parse_args(argv)
    with scenario("two-nodes", nodes(args)) as directory:
        return 0 if run(args, directory) else 1


if __name__ == "__main__":
    sys.exit(main())
