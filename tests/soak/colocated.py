"""Training steps on the GPUs of engines that sleep meanwhile: what is where, cycle by cycle.

``python -m tests.soak.colocated`` trains random weights of a shape by AdamW, with FSDP2 over
``--ranks`` processes. After each step all replicas are woken by a push, which is audited, generate,
and compute the log-probabilities that the trainer computes; then they fall asleep. It fails if an
audit names a tensor, if log-probabilities are not those after the step, if a GPU holds 16 MiB more
in the last cycles than in the first, or if sleeping engines leave more than 0.5 GiB on a GPU, their
contexts included.

With ``--shared`` engines keep their memory, the parameters of a trainer of one rank are in it, and
its optimizer keeps copies in float32.

``--smoke`` runs a tiny shape on CPUs, where engines keep their memory. ``--draw RECORD`` makes a
picture of the last cycle of a record.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.live_engines import engine_options, local_ray, record_name, start
from benchmarks.record import Recorder, parser_of, picture
from benchmarks.shapes import SHAPES, save_shape
from torchrl_vllm_sync import MasterWeights, WeightUpdater
from torchrl_vllm_sync.testing import token_log_probs
from torchrl_vllm_sync.weights.broadcast.group import free_port

MIB, SLACK_MIB, MOST_RESIDUE_MIB = 2**20, 16.0, 512.0
NUM_WARM = 5  # cycles that do not count
PROMPT = list(range(5, 69))
TOLERANCE = 0.5  # nats a token, in bfloat16; and a quarter of what the step moved them by
LOOK_S, LOOKS = 0.02, ("time", "used", "trainer")
PARTS = ("step", "push", "sample", "sleep")  # of a cycle
ON_GPUS = torch.cuda.is_available()


def used_mib():
    """What is taken of each GPU that this process sees."""
    gpus = [torch.cuda.mem_get_info(device) for device in range(torch.cuda.device_count())]
    return [(total - free) / MIB for free, total in gpus]


def context_mib():
    """What a process takes of the first GPU that does nothing there."""
    before = used_mib()
    code = "import torch; torch.ones(1, device='cuda').add_(1).item(); print(); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        process.stdout.readline()
        taken = used_mib()[0] - before[0]
        process.communicate(b"\n")
    return taken


class Watch:
    """Looks at the first GPU meanwhile: when, all that is taken, and what PyTorch has."""

    def __enter__(self):
        self.looks, self._ended = [], threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def _look(self):
        while ON_GPUS and not self._ended.wait(LOOK_S):
            looks = used_mib()[0], torch.cuda.memory_reserved(0) / MIB
            self.looks.append((time.perf_counter(), *looks))

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()


class Trainer:
    """One rank's part of a model that is trained on random tokens."""

    def __init__(self, checkpoint, rank, num_ranks, *, shared):
        self.device = torch.device("cuda", rank) if ON_GPUS else torch.device("cpu")
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(checkpoint)
        with self.device:
            self.model = AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()
        if num_ranks > 1:
            for layer in self.model.model.layers:
                fully_shard(layer)
            fully_shard(self.model)
        kind = MasterWeights if shared else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-3)

    def step(self):
        ids = torch.randint(5, self.model.config.vocab_size, (4, 256), device=self.device)
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def log_probs(self):
        return token_log_probs(self.model, PROMPT)


def log_probs_of(service, replica):
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    output = service.generate(prompt_token_ids=PROMPT, sampling_params=params, actor_index=replica)
    pairs = zip(output.prompt_logprobs[1:], PROMPT[1:], strict=True)
    return torch.tensor([entry[token].logprob for entry, token in pairs])


def sample(service):
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=64, ignore_eos=True)
    outputs = service.generate([PROMPT] * 32, params, use_tqdm=False)
    assert all(len(one.outputs[0].token_ids) == 64 for one in outputs)


def options(args):
    """The engines' arguments."""
    shared = engine_options(execution="graphs", max_model_len=1024, max_num_seqs=64)
    shared |= {"num_replicas": args.replicas, "tensor_parallel_size": args.tensor_parallel}
    if ON_GPUS:
        return shared | {"gpu_memory_utilization": args.share}
    plain = "tests.engine.plain_worker.PlainWorker"  # which keeps weights as they were sent
    return shared | {"load_format": "dummy", "worker_extension_cls": plain}


def run(rank, args, checkpoint, port):
    """What one rank does: the first has the service."""
    if ON_GPUS:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if ON_GPUS else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=args.ranks,
        timeout=timedelta(minutes=5),
    )
    if rank == 0:
        sys.exit(lead(args, checkpoint))
    dist.barrier()  # what engines that sleep leave is looked at without a trainer
    trainer = Trainer(checkpoint, rank, args.ranks, shared=args.shared)
    updater = WeightUpdater(None, source=trainer.model, timeout_s=120)
    for _ in range(NUM_WARM + args.cycles):
        cycle(trainer, updater, None)


def lead(args, checkpoint):
    """Launches the service, goes through all cycles, and records them; whether all was well."""
    before = used_mib()  # with this process's contexts
    context = context_mib() if ON_GPUS else 0.0
    how = options(args) | {"colocate": True, "share_weights": args.shared}
    with local_ray(), start(checkpoint, **how) as service:
        held = {"awake": used_mib()}
        service.sleep(2, "keep")
        held["asleep, without the trainer"] = used_mib()
        dist.barrier()
        trainer = Trainer(checkpoint, 0, args.ranks, shared=args.shared)
        updater = WeightUpdater(service, source=trainer.model, timeout_s=120, audit=True)
        cycles = [cycle(trainer, updater, service) for _ in range(NUM_WARM + args.cycles)]
    found = cycles[NUM_WARM:]
    recorder = Recorder(record_name("colocated", args.case), args.argv)

    def add(system, metric, samples):
        mib = system.startswith("GPU") or metric in ("used", "trainer")
        unit = "MiB" if mib else "nats" if system == "log-probabilities" else "s"
        recorder.add(case=args.case, system=system, metric=metric, unit=unit, samples=samples)

    if ON_GPUS:
        add("GPU 0", "context of any process", [context])
    wrong = []
    for gpu, then in enumerate(before):
        for metric, values in held.items():
            add(f"GPU {gpu}", metric, [values[gpu] - then])
        if values[gpu] - then > MOST_RESIDUE_MIB and not args.shared:
            wrong.append(f"GPU {gpu}: engines that sleep hold {values[gpu] - then:.0f} MiB")
        looks = [one["asleep"][gpu] for one in found]
        add(f"GPU {gpu}", "asleep", looks)
        first, last = statistics.median(looks[:5]), statistics.median(looks[-5:])
        if last > first + SLACK_MIB:
            wrong.append(f"GPU {gpu}: {first:.0f} MiB at first, {last:.0f} at last")
    for part in PARTS:
        add("cycle", part, [one["times"][part] for one in found])
    for phase in (one for one in found[-1]["phases"] if one.endswith("_s")):
        add("push", phase.removesuffix("_s"), [one["phases"].get(phase, 0.0) for one in found])
    for metric in ("off", "moved"):
        add("log-probabilities", metric, [one[metric] for one in found])
    for metric, samples in zip(LOOKS, zip(*found[-1]["looks"], strict=True), strict=False):
        add("last cycle", metric, samples)
    bound = [min(TOLERANCE, one["moved"] / 4) for one in found]
    off = [one["off"] for one, most in zip(found, bound, strict=True) if not one["off"] < most]
    wrong += [f"log-probabilities are {one:.3g} off" for one in off]
    recorder.notes.append(f"{len(cycles)} pushes were audited, and none was named")
    recorder.write(smoke=args.smoke, directory=args.out)
    sys.stdout.write("\n".join(wrong or ["PASS"]) + "\n")
    return bool(wrong)


def cycle(trainer, updater, service):
    """Takes a step, brings it to the engines, samples, and lets them sleep again."""
    stamps = [time.perf_counter()]
    with Watch() as watch:
        old = trainer.log_probs()
        trainer.step()
        new = trainer.log_probs()
        stamps.append(time.perf_counter())
        report = updater.push_weights()
        stamps.append(time.perf_counter())
        off = 0.0
        if service is not None:
            sample(service)
            stamps.append(time.perf_counter())
            found = [log_probs_of(service, at) for at in range(service.num_replicas)]
            off = max((one - new).abs().mean().item() for one in found)
            begin = time.perf_counter()
            service.sleep(2, "keep")
            stamps.append(stamps[-1] + time.perf_counter() - begin)
        dist.barrier()
    times = [after - before for before, after in itertools.pairwise(stamps)]
    return {
        "times": dict(zip(PARTS, times, strict=False)),
        "phases": report.phases,
        "off": off,
        "moved": (old - new).abs().mean().item(),
        "asleep": used_mib(),
        "looks": [(at - stamps[0], *looks) for at, *looks in watch.looks],
    }


def draw(path):
    """A picture of who has the first GPU's memory in the last cycle of a record."""
    run = json.loads(path.read_text())
    found = {(one["system"], one["metric"]): one["samples"] for one in run["records"]}
    at, used, trainer = (found["last cycle", one] for one in LOOKS)
    rest = [both - own for both, own in zip(used, trainer, strict=True)]
    contexts = min(rest)
    engine = [one - contexts for one in rest]
    with picture(path.with_suffix(".png"), figsize=(8, 4)) as (_, axes):
        labels = "contexts, graphs", "trainer", "engine: weights, then keys and values"
        gib = [[one / 1024 for one in part] for part in ([contexts] * len(at), trainer, engine)]
        axes.stackplot(at, *gib, labels=labels)
        begin = 0.0
        for part in PARTS[:3]:
            end = begin + found["cycle", part][-1]
            axes.axvline(end, color="grey", linewidth=0.5)
            axes.annotate(part, ((begin + end) / 2, 1.02), xycoords=("data", "axes fraction"))
            begin = end
        axes.set(xlabel=f"seconds, {run['records'][0]['case']} on {run['hardware']}", ylabel="GiB")
        axes.legend(loc="lower right")


def main():
    parser = parser_of(__doc__, "a tiny shape on CPUs")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer, a GPU each")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--share", type=float, default=0.4, help="of a GPU, for the engine")
    parser.add_argument("--shared", action="store_true", help="one memory for the weights of both")
    parser.add_argument("--draw", type=Path, metavar="RECORD")
    args = parser.parse_args()
    if args.draw:
        return draw(args.draw)
    if args.smoke:
        args.shape, args.cycles = "tiny", 3
    args.case = f"{args.shape}-{args.replicas}" + (f"-fsdp{args.ranks}" if args.ranks > 1 else "")
    args.case += f"-tp{args.tensor_parallel}" if args.tensor_parallel > 1 else ""
    args.case += "-shared" if args.shared else ""
    args.argv = sys.orig_argv[1:]
    Recorder("colocated").check(smoke=args.smoke)
    with tempfile.TemporaryDirectory() as directory:
        dtype = "bfloat16" if ON_GPUS else "float32"
        checkpoint = save_shape(args.shape, Path(directory), dtype=dtype)
        given = args, str(checkpoint), free_port("127.0.0.1")
        torch.multiprocessing.spawn(run, given, nprocs=args.ranks)
    return None


if __name__ == "__main__":
    main()
