"""What a routing decision costs: time of ``LoadBalancer.reserve``, and memory of its prefix index.

A decision is the whole call, from the prompt as a caller has it, a list of token ids, to the place
that is counted: checking, locking, digesting the prompt, looking it up, choosing, and noting the
choice. Places are given back outside the timing, with as many in flight as an engine would have.
The garbage collector runs as it would. The cases are requests of sessions that the balancer knows
(``keyed``), and prompts of that many tokens without a key, each of some hundred coming again and
again (``2048-tokens``).

The index keeps one digest for at least 128 tokens, so that a cache of small blocks takes less
memory than one of as many large blocks, which hold more tokens.

``python -m benchmarks.routing_decisions`` takes a minute, ``--smoke`` seconds.
"""

from __future__ import annotations

import gc
import random  # noqa: TID251 - seeded
import statistics
import sys
import time
import tracemalloc
from collections import deque
from typing import TYPE_CHECKING, Any

from benchmarks.record import Recorder, parser_of, refuse_less
from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.routing.balancer import LoadBalancer
from torchrl_vllm_sync.routing.ledger import LoadTracker
from torchrl_vllm_sync.routing.strategies import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PROMPT_TOKENS = 2048
BLOCK_SIZE = 16
KV_BLOCKS = 21_875  # 350,000 tokens
IN_FLIGHT = 64
NUM_PROMPTS = 512
MIB = 2**20


class Replicas:
    """What a balancer needs of a service: it calls none of its actors."""

    def __init__(self, num: int) -> None:
        self.actors: list[Any] = [object() for _ in range(num)]
        self.load = LoadTracker(map(str, range(num)), state=ReplicaState.SERVING)
        for replica_id in self.load.replica_ids:
            self.load.describe(replica_id, block_size=BLOCK_SIZE, num_kv_blocks=KV_BLOCKS)


def microseconds(
    num_replicas: int, prompts: Sequence[list[int]], num_decisions: int, *, keyed: bool
) -> list[float]:
    """Time of each decision, after as many that are not counted as there are prompts."""
    balancer = LoadBalancer(Replicas(num_replicas))
    chance = random.Random(0)
    places: deque[Any] = deque()
    taken: list[float] = []
    for turn in range(num_decisions + len(prompts)):
        at = turn % len(prompts) if keyed else chance.randrange(len(prompts))
        prompt = prompts[at]
        begin = time.perf_counter_ns()
        place = balancer.reserve(prompt, session_id=at) if keyed else balancer.reserve(prompt)
        end = time.perf_counter_ns()
        if turn >= len(prompts):
            taken.append((end - begin) / 1000)
        places.append(place)
        if len(places) > IN_FLIGHT:
            places.popleft().release()
    return taken


def index_bytes(num_blocks: int, block_tokens: int) -> int:
    """Bytes that one replica's index holds when so many blocks of it are remembered."""
    index = PrefixIndex(block_tokens)
    index.set_capacity("0", num_blocks * block_tokens)
    blocks_a_prompt = 64
    gc.collect()
    tracemalloc.start()
    for number in range(num_blocks // blocks_a_prompt + 1):
        prompt = index.chain(f"{number:08d}".ljust(blocks_a_prompt * block_tokens * 4, "x"))
        index.insert(prompt, "0", version=1)
        del prompt
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    if len(index) != num_blocks:
        raise RuntimeError(f"the index remembers {len(index)} blocks, not {num_blocks}")
    return held


def main(argv: list[str] | None = None) -> Path:
    parser = parser_of(__doc__, "few decisions, a small index")
    parser.add_argument("--rounds", type=int, default=10, help="by default %(default)s")
    parser.add_argument(
        "--decisions", type=int, default=20_000, help="timed in each round, by default %(default)s"
    )
    arguments = parser.parse_args(argv)
    refuse_less(parser, arguments, rounds=1, decisions=2)
    rounds, num = (2, 200) if arguments.smoke else (arguments.rounds, arguments.decisions)
    recorder = Recorder("routing_decisions")
    recorder.check(smoke=arguments.smoke)
    chance = random.Random(0)
    prompts = [[chance.randrange(32_000) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    for case in ("keyed", "2048-tokens"):
        for num_replicas in (4, 8, 16):
            p50: list[float] = []
            p99: list[float] = []
            for _ in range(rounds):
                taken = microseconds(num_replicas, prompts, num, keyed=case == "keyed")
                cuts = statistics.quantiles(taken, n=100)
                p50.append(cuts[49])
                p99.append(cuts[98])
            system = f"ours, {num_replicas} replicas"
            for metric, samples in (("decision_p50", p50), ("decision_p99", p99)):
                recorder.add(case=case, system=system, metric=metric, unit="µs", samples=samples)
    num_blocks = 10_000 if arguments.smoke else 1_000_000
    for block_size in (BLOCK_SIZE, 128):
        per_index_block = max(1, 128 // block_size)
        held = index_bytes(num_blocks // per_index_block, block_size * per_index_block)
        case = f"{num_blocks} cached blocks of {block_size} tokens"
        recorder.add(case=case, system="ours", metric="memory", unit="MiB", samples=[held / MIB])
    return recorder.write(smoke=arguments.smoke, directory=arguments.out)


if __name__ == "__main__":
    main(sys.argv[1:])
