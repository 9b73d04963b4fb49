"""The processes of the weight-sync benchmark: a trainer, a replica under load, raw broadcasts."""

from __future__ import annotations

import asyncio
import functools
import itertools
import statistics
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import ray
import torch
import torch.distributed as dist
from ray.util import get_node_ip_address
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import torchrl_vllm_sync as tvs
from benchmarks.peers.torchrl_vllm import TorchRLUpdater, engine_class
from benchmarks.peers.vllm_nccl import VLLMNCCLTransport
from torchrl_vllm_sync.testing import token_log_probs
from torchrl_vllm_sync.weights.broadcast.group import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TRANSPORTS: dict[str, Any] = {
    "broadcast": tvs.BroadcastTransport,
    "vllm-nccl": VLLMNCCLTransport,
    "ipc": tvs.IPCTransport,
    "memmap": tvs.MemmapTransport,
    "p2p": tvs.P2PTransport,
    "p2p-handed-on": functools.partial(tvs.P2PTransport, hand_on=True),
    "adapter": tvs.MemmapTransport,
}
LORA_RANK = 16
RAW_PIECE_BYTES = 4 * 2**30
TIMEOUT = timedelta(seconds=60)


class RawRank:
    """One rank of a bare ``torch.distributed.broadcast`` of as many bytes as the model has."""

    def run(
        self, where: tuple[str, int], rank: int, world_size: int, num_bytes: int, rounds: int
    ) -> list[float]:
        """Takes part in every round; returns this rank's seconds of each."""
        device = own_device()
        meet(where, rank, world_size)
        data = torch.ones(min(num_bytes, RAW_PIECE_BYTES), dtype=torch.uint8, device=device)
        sizes = [RAW_PIECE_BYTES] * (num_bytes // RAW_PIECE_BYTES) + [num_bytes % RAW_PIECE_BYTES]
        samples: list[float] = []
        synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        for _ in range(rounds + 2):  # two to warm up
            dist.barrier()
            synchronize()
            begin = time.perf_counter()
            for size in sizes:
                dist.broadcast(data[:size], 0)
            synchronize()
            samples.append(time.perf_counter() - begin)
        dist.destroy_process_group()
        return samples[2:]


def meet(where: tuple[str, int], rank: int, world_size: int) -> None:
    """Makes a process group of actors that have a GPU each, or none."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"tcp://{where[0]}:{where[1]}",
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
    )


def address_of(actor: Any) -> tuple[str, int]:
    """An actor's node's address and a port that is free on it."""
    here = get_node_ip_address
    return ray.get(actor.__ray_call__.remote(lambda _: (here(), free_port(here()))), timeout=120)


def spawn(kind: type, *args: Any, num_gpus: int, sees_all: bool = True) -> Any:
    """Starts an actor that has some GPUs, and sees all of them as a driver does, or its own."""
    all_of_them = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
    env = {"env_vars": all_of_them if sees_all else {}}
    actor: Any = ray.remote(num_gpus=num_gpus, num_cpus=0, runtime_env=env)(kind)
    return actor.remote(*args)


def own_device(beside: int = 0) -> torch.device:
    """Returns the GPU of this actor, else another's, which is the current one from now on."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int((ray.get_gpu_ids() or [beside])[0]))
    torch.cuda.set_device(device)
    return device


def raw_broadcast(num_bytes: int, num_receivers: int, rounds: int, num_gpus: int) -> list[float]:
    """Seconds of each broadcast from one rank to ``num_receivers``, on the slowest rank."""
    ranks = [spawn(RawRank, num_gpus=num_gpus) for _ in range(num_receivers + 1)]
    where, number = address_of(ranks[0]), len(ranks)
    runs = [one.run.remote(where, at, number, num_bytes, rounds) for at, one in enumerate(ranks)]
    samples = ray.get(runs, timeout=300)
    for one in ranks:
        ray.kill(one)
    return [max(of_one_round) for of_one_round in zip(*samples, strict=True)]


class Trainer:
    """A model of the engines' architecture, and the pushes of it."""

    def __init__(
        self, checkpoint: str, dtype: str, has_adapter: bool = False, rank: int = 0
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.device = own_device(rank)
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(checkpoint)
        with self.device:
            self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        if has_adapter:
            from peft import LoraConfig, get_peft_model

            lora: Any = {"r": LORA_RANK, "target_modules": "all-linear", "init_lora_weights": False}
            self.model: Any = get_peft_model(self.model, LoraConfig(**lora))
        self.model.eval()
        self._rank = 0
        self._updaters: dict[str, Any] = {}
        # By name: another copy would get to know the replicas anew.
        self._services: dict[str, tvs.AsyncVLLM] = {}

    def shard(self, where: tuple[str, int], rank: int, num_ranks: int) -> None:
        """Keeps one rank's part of the model, by FSDP2; what follows is called on all ranks."""
        meet(where, rank, num_ranks)
        mesh, self._rank = init_device_mesh(self.device.type, (num_ranks,)), rank
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    @torch.no_grad()
    def train(self, seed: int) -> None:
        """Changes every parameter, as an optimizer step does; matrices do not get larger."""
        generator = torch.Generator(self.device).manual_seed(seed + 1000 * self._rank)
        for parameter in (one for one in self.model.parameters() if one.requires_grad):
            parameter = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            noise = torch.randn(
                parameter.shape, generator=generator, device=self.device, dtype=parameter.dtype
            )
            if parameter.dim() > 1:
                spread = parameter.std()
                parameter.mul_(0.8).add_(noise.mul_(0.6 * spread))
            else:
                parameter.add_(noise, alpha=0.02)

    def push(
        self, service: tvs.AsyncVLLM, system: str, options: dict[str, Any], rounds: int
    ) -> list[dict[str, float]]:
        """Pushes ``rounds`` times and returns each report, in seconds."""
        updater: Any = self._updaters.get(system)
        if updater is None and system == "torchrl":
            updater = self._updaters[system] = TorchRLUpdater(service, self.model)
        elif updater is None:
            service = self._services.setdefault(service.name, service)
            kind = TRANSPORTS[system.removesuffix("-staged").removesuffix("-audited")]
            transport, keeps = kind(**options), system == "adapter"
            if keeps:  # which goes its own way, and adds to these
                named = self.model.get_base_model().state_dict().items()
                base = {n.replace(".base_layer", ""): w for n, w in named if "lora_" not in n}
                service.push_weights(base, transport=transport)
            updater = self._updaters[system] = tvs.WeightUpdater(
                None if self._rank else service,
                self.model,
                adapters="keep" if keeps else "merge",
                transport=transport,
                timeout_s=120,
                audit=system.endswith("-audited"),
            )
        reports = []
        for number in range(rounds):
            report = updater.push_weights()
            phases = {f"trainer_{name}": value for name, value in report.phases.items()}
            for name in report.replicas[0].phases:
                phases[name] = max(one.phases[name] for one in report.replicas)
            seconds = {name: value for name, value in phases.items() if name.endswith("_s")}
            if number == 0:
                print(f"{system}: {[(one.path, one.path_reason) for one in report.replicas]}")
            reports.append(
                {"push_s": report.seconds, **seconds}
                | {"plan": float(all(one.path == "plan" for one in report.replicas))}
            )
        return reports

    def end(self, system: str) -> None:
        self._updaters.pop(system).disconnect()

    def log_probs(self, token_ids: list[int]) -> list[float]:
        """Log-probability of each token after the first, by the trainer's model."""
        return token_log_probs(self.model, token_ids).flatten()[1 - len(token_ids) :].tolist()


class Trainers:
    """A trainer of one or more ranks, an actor each, that are called together."""

    def __init__(self, num_ranks: int, *args: Any, num_gpus: int) -> None:
        self._ranks = [spawn(Trainer, *args, one, num_gpus=num_gpus) for one in range(num_ranks)]
        if num_ranks > 1:
            where, number = address_of(self._ranks[0]), len(self._ranks)
            parts = [one.shard.remote(where, at, number) for at, one in enumerate(self._ranks)]
            ray.get(parts, timeout=300)

    def call(self, name: str, *args: Any, timeout: float = 100) -> Any:
        """Returns the first rank's answer."""
        calls = [getattr(one, name).remote(*args) for one in self._ranks]
        return ray.get(calls, timeout=timeout)[0]


# Begin and end, in seconds of ``time.perf_counter()``.
Window = tuple[float, float]


@dataclass(slots=True)
class TokenLog:
    """What one engine's requests produced, and when; times are ``time.perf_counter()``."""

    # When each request's output came, and how many tokens it had by then.
    requests: list[list[tuple[float, int]]] = field(default_factory=list)
    # Of each staged push, from the trainer's word to begin to the start of the pause.
    arrivals: list[Window] = field(default_factory=list)
    # When requests ended: of their own, or because a push aborted them.
    ends: list[float] = field(default_factory=list)

    def rate(self, window: Window) -> float:
        """Tokens per second of all requests within ``window``.

        A step that only partly falls into the window counts by that part: windows may be as short
        as a few steps.
        """
        begin, end = window
        return sum(_produced(one, end) - _produced(one, begin) for one in self.requests) / (
            end - begin
        )

    def rates(self, when: float, around_ms: range) -> list[float]:
        """Tokens per second of each of these milliseconds from ``when`` on to the next."""
        starts = [when + one / 1e3 for one in around_ms]
        return [self.rate((begin, begin + around_ms.step / 1e3)) for begin in starts]

    def step_s(self) -> float:
        """Median seconds between two outputs of a request."""
        return statistics.median(later - sooner for sooner, later in self._steps())

    def longest_gap_s(self, window: Window) -> float:
        """Most seconds between two outputs of a request, of gaps that touch ``window``."""
        begin, end = window
        steps = (one for one in self._steps() if one[1] > begin and one[0] < end)
        return max((later - sooner for sooner, later in steps), default=0.0)

    def ended(self, window: Window) -> int:
        """How many requests ended within ``window``."""
        return sum(window[0] <= one <= window[1] for one in self.ends)

    def _steps(self) -> Iterator[Window]:
        for (sooner, _), (later, _) in itertools.chain(*map(itertools.pairwise, self.requests)):
            yield sooner, later


def _produced(request: Sequence[tuple[float, int]], when: float) -> float:
    """Tokens of ``request`` by then, with a share of those of the step under way."""
    for (sooner, before), (later, after) in itertools.pairwise(request):
        if sooner <= when <= later:
            return before + (after - before) * (when - sooner) / (later - sooner)
    raise ValueError(
        f"a request ran from {request[0][0]:.3f} to {request[-1][0]:.3f} s, not at {when:.3f} s: "
        "run fewer rounds or longer requests"
    )


class UnderLoad:
    """Of an actor with an ``engine``: puts it under load and times every token."""

    engine: Any
    _log = TokenLog()

    async def begin_load(self, num_requests: int, max_tokens: int, lora: Any = None) -> None:
        """Starts requests inside the actor; one that ends makes way for another."""
        from vllm import SamplingParams

        self._log = TokenLog(requests=[[] for _ in range(num_requests)])
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=1.0)

        async def run(index: int) -> None:
            prompt = {"prompt_token_ids": [5 + index, 7, 9, 11] * 16}
            total = 0
            while True:
                name, before = f"load-{time.monotonic_ns()}-{index}", total
                async for output in self.engine.generate(prompt, params, name, lora_request=lora):
                    count = before + len(output.outputs[0].token_ids)
                    if count > total:
                        total = count
                        self._log.requests[index].append((time.perf_counter(), total))
                self._log.ends.append(time.perf_counter())

        self._load = [asyncio.create_task(run(index)) for index in range(num_requests)]
        while not all(len(one) > 5 for one in self._log.requests):  # noqa: ASYNC110  vLLM is silent
            await asyncio.sleep(0.01)

    def mark(self) -> float:
        return time.perf_counter()

    async def end_load(self) -> TokenLog:
        """Ends the load and returns what it produced."""
        for task in self._load:
            task.cancel()
        await asyncio.gather(*self._load, return_exceptions=True)
        return self._log


def loaded_actor() -> type:
    """The replica's class, which can also put itself under load and time every token."""
    from torchrl_vllm_sync.engine.actor import EngineActor

    class LoadedActor(UnderLoad, EngineActor):
        async def begin_load(self, num_requests: int, max_tokens: int, lora: Any = None) -> None:
            lora = next((one[-1].request for one in self._adapters._held.values()), lora)
            await super().begin_load(num_requests, max_tokens, lora)

        async def receive_broadcast(self, *args: Any, **options: Any) -> dict[str, Any]:
            """Receives one version, and notes when staged weights were on their way."""
            report = await super().receive_broadcast(*args, **options)
            if report["stage_s"]:
                pause = time.perf_counter() - report["whole_pause_s"]
                begin = pause - report["stage_s"] + report["ready_s"]
                self._log.arrivals.append((begin, pause))
            return report

    return LoadedActor


def torchrl_actor() -> type:
    """The same of TorchRL's engine."""
    return type("TorchRLActor", (UnderLoad, engine_class()), {})
