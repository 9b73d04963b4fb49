"""A module sharded by FSDP2 over real processes: what the sender reads, and who hears what."""

import base64
import contextlib
import copy
import functools
import gc
import json
import os
import signal
import time
import traceback
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.processes import PROCESSES
from torchrl_vllm_sync import PushReport, as_weight_source
from torchrl_vllm_sync.errors import (
    NonFiniteWeightsError,
    UnsupportedArgumentError,
    WeightMismatchError,
)
from torchrl_vllm_sync.weights import sharded as sharded_module
from torchrl_vllm_sync.weights.audit import refuse_nonfinite
from torchrl_vllm_sync.weights.module import ModuleSource, local
from torchrl_vllm_sync.weights.sharded import (
    CHECKS,
    CLEARS,
    MOST_BYTES,
    WRITES,
    ShardedModuleSource,
    TrainerRankError,
    TrainerRanks,
    clear_caches,
    leading,
)
from torchrl_vllm_sync.weights.source import fit_to_model

STEP_S, FOLLOW_S = 6.0, 12.0
TINY = {
    "vocab_size": 63,  # no multiple of the number of ranks
    "hidden_size": 32,
    "intermediate_size": 45,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "tied": Qwen2Config(**TINY, tie_word_embeddings=True),
    "untied": Qwen2Config(**TINY, tie_word_embeddings=False),
    "moe": Qwen3MoeConfig(
        **TINY, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=16
    ),
}


# ---------------------------------------------------------------- processes

BEGAN_AT = [0.0]


def together():
    """Waits until all ranks have been here: time limits are for pushes, and times count from now.

    Not by a collective, as some tests leave the process group out of step.
    """
    store = dist.distributed_c10d._get_default_store()
    if store.add("there", 1) == dist.get_world_size():
        store.set("all there", "")
    store.wait(["all there"], timedelta(seconds=30))
    BEGAN_AT[0] = time.monotonic()


def child(pipe, scenario, rank, world_size, port, kwargs):
    """Runs ``scenario`` as one rank, and sends its result or the exception it ended with."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    BEGAN_AT[0] = time.monotonic()
    try:
        result = scenario(rank, **kwargs)
    except Exception as error:  # noqa: BLE001  whatever it is, it is the result
        traceback.print_exc()
        result = error
    finally:
        pipe.send((result, time.monotonic() - BEGAN_AT[0]))
        with contextlib.suppress(RuntimeError):  # a peer may be gone
            dist.destroy_process_group()


def run(scenario, *, world_size=2, limit_s=40.0, **kwargs):
    """Returns each rank's ``(result, seconds)``; ``None`` for one that was killed."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = PROCESSES.Pipe()
        args = (theirs, scenario, rank, world_size, store.port, kwargs)
        process = PROCESSES.Process(target=child, args=args, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    deadline = time.monotonic() + limit_s
    results = []
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(max(0.0, deadline - time.monotonic())), f"rank {rank} hangs"
            try:
                results.append(pipe.recv())
            except EOFError:
                results.append(None)
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.join(5.0 if len(results) == world_size else 0.0)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
            pipe.close()
    return results


def succeed(scenario, **kwargs):
    """The results of a scenario that must not fail on any rank."""
    results = []
    for result, _ in run(scenario, **kwargs):
        if isinstance(result, Exception):
            raise result
        results.append(result)
    return results


def models(kind, *, wrap="layers"):
    """The same random model twice: whole, and sharded over all ranks."""
    torch.manual_seed(7)
    config = copy.deepcopy(CONFIGS[kind])
    whole = (Qwen3MoeForCausalLM if kind == "moe" else Qwen2ForCausalLM)(config)
    sharded = copy.deepcopy(whole)
    shape = (1, dist.get_world_size()) if wrap == "grid" else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :])
    if wrap in ("layers", "grid"):
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh)
    if wrap == "columns":
        for layer in sharded.model.layers:
            projection = layer.self_attn.q_proj
            fully_shard(projection, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    ignored = {sharded.model.norm.weight} if wrap == "mixed" else set()
    fully_shard(sharded, mesh=mesh, ignored_params=ignored)
    together()
    return whole, sharded


def push(source, send, *wants, is_new=True):
    """One push, as an updater does it on every rank."""
    if source.leads:
        with leading(source, *wants, is_new=is_new) as announcement:
            announcement.outcome = send(source)
        return announcement.outcome
    return source.participate(timeout_s=FOLLOW_S, is_new=is_new)


def read(source):
    return {name: tensor.clone() for name, tensor in source}


def compare(found, whole):
    """Names in order, shapes, dtypes and bits."""
    wanted = dict(ModuleSource(whole))
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name], tensor), name


# ---------------------------------------------------------------- values


def fill(part):
    if part._room is not None:
        part._room.zero_()[: len(part._mine)] = part._mine
    return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)


def read_and_compare(rank, kind, wrap="layers", train=False, lose=False):
    whole, sharded = models(kind, wrap=wrap)
    assert any(isinstance(one, DTensor) for one in sharded.parameters())
    source = as_weight_source(sharded)
    assert isinstance(source, ShardedModuleSource)
    assert source.metadata() == ModuleSource(whole).metadata()
    assert source.metadata() is as_weight_source(sharded).metadata()
    assert source.views() is None
    if lose:  # the local shard instead of the whole
        sharded_module._Sharded.launch = fill
    for turn in range(2):
        if train:
            ids = torch.arange(12).reshape(2, 6)
            for model in (whole, sharded):
                model(ids).logits.sum().backward()
        with torch.no_grad():
            for one, other in zip(whole.parameters(), sharded.parameters(), strict=True):
                one.mul_(-1.5)
                other.mul_(-1.5)
        verdict = push(
            as_weight_source(sharded),
            lambda source, turn=turn: compare(read(source), whole) or turn,
        )
        assert verdict == turn
    return True


@pytest.mark.parametrize(
    "wrap",
    [
        "layers",
        "mixed",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("columns", "root")),
    ],
)
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_sending_rank_reads_the_whole_model(kind, wrap):
    assert succeed(read_and_compare, kind=kind, wrap=wrap) == [True, True]


def test_the_sending_rank_reads_the_whole_model_after_forward_passes():
    assert succeed(read_and_compare, kind="tied", train=True) == [True, True]


def test_more_ranks_than_rows():
    assert succeed(read_and_compare, kind="moe", world_size=3) == [True] * 3


def replaced(model):
    model.model.norm.weight = torch.nn.Parameter(2 * model.model.norm.weight.detach())


def untied(model):
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())


def moved(model):
    weight = model.model.layers[0].mlp.up_proj.weight
    if isinstance(weight, DTensor):
        weight._local_tensor = weight._local_tensor + 1
    else:
        weight.data += 1


def gathered(model):
    if isinstance(model, FSDPModule):
        model.unshard()


# What is done to a model before each push, and how often its tensors are looked for then.
CHANGES = [
    (lambda _: None, {"looks": 1, "state dicts": 1}),
    (lambda _: None, {"looks": 1}),
    (moved, {"looks": 2, "state dicts": 1}),
    (gathered, {"looks": 2, "state dicts": 1}),  # which shards it again
    (torch.nn.Module.double, {"looks": 2, "state dicts": 1}),
    (replaced, {"looks": 2, "state dicts": 1}),
    (untied, {"looks": 2, "state dicts": 1}),
    (lambda _: None, {"looks": 1}),
]


def look(rank, is_blind=False):
    """Pushes after each change; a blind one takes every layout for the first one."""
    whole, sharded = models("tied")
    counts, layout_of, state_dict = Counter(), sharded_module._layout_of, sharded.state_dict

    def counted(what, found, *args, **kwargs):
        counts[what] += 1
        return found(*args, **kwargs)

    first = layout_of(sharded)
    find = (lambda _: first) if is_blind else layout_of
    sharded_module._layout_of = functools.partial(counted, "looks", find)
    sharded.state_dict = functools.partial(counted, "state dicts", state_dict)
    seen = []
    for change, _ in CHANGES:
        for model in (whole, sharded):
            change(model)
        counts.clear()
        source = as_weight_source(sharded)
        push(source, lambda source: compare(read(source), whole))
        seen.append(dict(counts))
        held = {name: local(one) for name, one in state_dict(keep_vars=True).items()}
        for name, shard in source.shards():
            assert torch.equal(shard, held[name]), name
    return seen


def test_tensors_are_looked_for_once_a_push_and_found_where_they_are():
    assert succeed(look) == [[counts for _, counts in CHANGES]] * 2


def test_the_comparison_above_notices_that_nothing_is_gathered():
    results = run(read_and_compare, kind="untied", lose=True)
    assert isinstance(results[0][0], AssertionError)
    assert isinstance(results[1][0], TrainerRankError)
    assert results[1][0].rank == 0
    assert "AssertionError" in results[1][0].reason


def look_late(rank, is_new):
    """Pushes from a source that was made before the model's tensors moved."""
    whole, sharded = models("tied")
    source = as_weight_source(sharded)
    for model in (whole, sharded):
        moved(model)
        replaced(model)
    push(source, lambda source: compare(read(source), whole), is_new=is_new)


def test_a_source_that_was_made_before_finds_them_too():
    succeed(look_late, is_new=False)


def test_the_check_above_notices_what_a_new_one_would_not_look_for():
    assert isinstance(run(look_late, is_new=True)[0][0], AssertionError)


class Held:
    """What a parameter may refer to."""


def forget(rank):
    """Drops a model of whose parameters one refers to an object that refers to the model."""
    as_weight_source(torch.nn.Linear(1, 1))  # imports, of which failed ones keep their frames
    _, sharded = models("tied")
    sharded.lm_head.weight.held = held = Held()
    held.model = sharded
    as_weight_source(sharded)
    dropped = weakref.ref(sharded)
    del sharded, held
    gc.collect()
    return dropped() is None


def test_a_model_is_let_go_of():
    assert succeed(forget) == [True, True]


def test_the_comparison_above_notices_what_has_moved():
    assert isinstance(run(look, is_blind=True)[0][0], AssertionError)


def use(rank, kind):
    """Everything else that a source is asked for."""
    whole, sharded = models(kind)
    expected = ModuleSource(whole).metadata()
    if rank:
        with pytest.raises(
            UnsupportedArgumentError, match=r"rank 1 must take part .* rank 0 sends"
        ):
            next(iter(as_weight_source(sharded)))
        time.sleep(0.3)  # the sending rank waits for who is late
        outcomes = [as_weight_source(sharded).participate(timeout_s=FOLLOW_S) for _ in range(4)]
        with pytest.raises(TrainerRankError, match="trainer rank 0: StopAsyncIteration: enough"):
            as_weight_source(sharded).participate(timeout_s=FOLLOW_S)
        return [*outcomes, as_weight_source(sharded).participate(timeout_s=FOLLOW_S)]
    # Nothing is read, as when replicas already hold the version.
    push(as_weight_source(sharded), lambda source: "unread")
    # Read twice, through what fits it to the engines' model.
    source = as_weight_source(sharded)
    with leading(source) as announcement:
        for _ in range(2):
            fitted = fit_to_model(source, expected)
            assert fitted.views() is None
            compare(read(fitted), whole)
        announcement.outcome = {"read": "twice"}
    # A reader that stops early and begins again.
    source = as_weight_source(sharded)
    with leading(source) as announcement:
        for _ in zip(source, range(3), strict=False):
            pass
        compare(read(source), whole)
        announcement.outcome = "stopped"
    compare(read(as_weight_source(sharded)), whole)  # a round of its own
    with pytest.raises(StopAsyncIteration), leading(as_weight_source(sharded)):
        raise StopAsyncIteration("enough")
    push(as_weight_source(sharded), lambda source: compare(read(source), whole) or "again")
    return None


@pytest.mark.parametrize("kind", ["tied", "moe"])
def test_readers_may_read_nothing_twice_or_a_part(kind):
    wanted = ["unread", {"read": "twice"}, "stopped", None, "again"]
    assert succeed(use, kind=kind) == [None, wanted]


def watch(rank):
    """What happens in which order on the sending rank, and how much is alive at each call."""
    _, sharded = models("untied")
    events, alive = [], []

    class Watched(sharded_module.Gather):
        def __init__(self, tensors, *, receives):
            super().__init__(tensors, receives=receives)
            alive.append(weakref.WeakSet(one._room for one in self._sharded.values()))
            self.number = len(alive) - 1

        def launch(self, *args):
            gc.collect()
            groups = sum(1 for rooms in alive if len(rooms) > 1)  # the reader holds one tensor
            events.append(("launch", self.number, groups))
            super().launch(*args)

        def result(self):
            events.append(("whole", self.number))
            return super().result()

    if rank == 0:
        sharded_module.Gather = Watched

    def send(source):
        layers = []
        for name, _ in source:
            layer = name.split("layers.")[-1][0] if "layers." in name else name.split(".")[-2]
            if layer not in layers:
                layers.append(layer)
                events.append(("read", layer))
        return True

    push(as_weight_source(sharded), send)
    return events


def test_one_group_is_gathered_ahead_and_no_more():
    assert succeed(watch)[0] == [
        ("launch", 0, 0),
        ("launch", 1, 1),
        ("whole", 0),
        ("read", "embed_tokens"),
        ("launch", 2, 2),
        ("whole", 1),
        ("read", "0"),
        ("launch", 3, 2),
        ("whole", 2),
        ("read", "1"),
        ("launch", 4, 2),
        ("whole", 3),
        ("read", "2"),
        ("whole", 4),
        ("read", "norm"),
        ("read", "lm_head"),
    ]


# ---------------------------------------------------------------- failures


def fail(rank, who, how, when, wrap="layers"):
    """A push during which rank ``who`` fails in the way ``how``, at its group ``when``."""
    _, sharded = models("untied", wrap=wrap)
    source = ShardedModuleSource(sharded, timeout_s=STEP_S)
    launched = []
    launch, prepare = sharded_module.Gather.launch, source._prepare

    def break_down(*args):
        if rank == who and len(launched) == when:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("out of luck")

    def breaking_prepare(*args):
        break_down()
        return prepare(*args)

    def breaking_launch(self, *args):
        if how != "in preparation":
            break_down()
        launched.append(1)
        launch(self, *args)

    sharded_module.Gather.launch = breaking_launch
    if how == "in preparation":
        source._prepare = breaking_prepare
    return push(source, lambda source: len(read(source)))


def ended(result):
    """Rank and reason of a typed error."""
    error, seconds = result
    assert isinstance(error, TrainerRankError), error
    assert seconds < FOLLOW_S + 5
    return error.rank, error.reason


@pytest.mark.parametrize("how", ["raises", "in preparation"])
@pytest.mark.parametrize("when", [0, 2])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_raises_ends_the_push_on_all(who, how, when):
    results = run(fail, who=who, how=how, when=when)
    assert isinstance(results[who][0], OSError)
    rank, reason = ended(results[1 - who])
    assert rank == who
    assert "OSError: out of luck" in reason
    assert all(seconds < STEP_S for _, seconds in results)


def fail_and_live_on(rank, **how):
    """As :func:`fail`; whoever failed goes on living. Then all try once more."""
    results = []
    for _ in range(2):
        begin = time.monotonic()
        try:
            fail(rank, how="raises", **how)
        except (OSError, TrainerRankError) as error:
            results.append((error, time.monotonic() - begin))
        if len(results) == 1:
            time.sleep(max(0.0, begin + STEP_S - time.monotonic()))
    return results


@pytest.mark.parametrize(
    ("wrap", "when"),
    [("layers", 2), *(pytest.param("grid", one, marks=pytest.mark.slow) for one in (0, 2))],
)
@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_nobody_stays_in_a_collective_that_a_rank_could_not_begin(who, when, wrap):
    """Those on a mesh of several dimensions are gathered by calls that block."""
    results = succeed(fail_and_live_on, who=who, when=when, wrap=wrap)
    assert isinstance(results[who][0][0], OSError)
    rank, reason = ended(results[1 - who][0])
    assert rank == who
    assert "OSError: out of luck" in reason
    assert all(first[1] < STEP_S for first, _ in results)
    for _, second in results:
        rank, reason = ended(second)
        assert rank == who
        assert "left the process group out of step" in reason
        assert second[1] < STEP_S


@pytest.mark.parametrize("who", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_ends_the_push_on_all(who):
    results = run(fail, world_size=3, who=who, how="killed", when=2)
    assert results[who] is None
    for rank in {0, 1, 2} - {who}:
        named, reason = ended(results[rank])
        assert named == who
        assert "was not ready within" in reason


@pytest.mark.slow
def test_a_sending_rank_that_is_killed_ends_the_push_on_all():
    results = run(fail, who=0, how="killed", when=2)
    assert results[0] is None
    rank, reason = ended(results[1])
    assert rank == 0
    assert "gather" in reason or "did not say what comes next within 12 s" in reason


def stay_away(rank):
    """Rank 1 takes no part, and then joins the next push."""
    whole, sharded = models("tied")
    if rank:
        dist.barrier()
        return push(as_weight_source(sharded), None)
    with pytest.raises(TrainerRankError, match=r"trainer rank 1: was not ready within 0\.5 s"):
        push(ShardedModuleSource(sharded, timeout_s=0.5), read)
    dist.barrier()
    return push(as_weight_source(sharded), lambda source: compare(read(source), whole) or "found")


def test_a_rank_that_stays_away_is_named_and_may_join_the_next_push():
    assert succeed(stay_away) == ["found", "found"]


def poison(rank, wants):
    """A part of a tensor that the sending rank does not hold is no number; what it has read."""
    _, sharded = models("untied")
    if rank:
        with torch.no_grad():
            sharded.lm_head.weight.to_local()[-1, 3] = torch.nan
    found = []
    try:
        push(as_weight_source(sharded), lambda source: found.extend(source), *wants)
    except (TrainerRankError, NonFiniteWeightsError) as error:
        return str(error), len(found)
    return "", len(found)


@pytest.mark.parametrize("wants", [[CHECKS], [CHECKS, WRITES], []], ids=["", "late", "allowed"])
def test_nan_that_another_rank_holds_is_refused(wants):
    (said, num_read), (cause, _) = succeed(poison, wants=wants)
    if not wants:
        assert (said, cause) == ("", "")
        assert num_read > 30
        return
    assert said.startswith("trainer rank 1: NonFiniteWeightsError: ")
    assert "lm_head.weight" in said
    assert "lm_head.weight" in cause
    assert num_read == 0


def differ(rank):
    """The ranks hold different models."""
    _, sharded = models("tied" if rank else "untied")
    return push(ShardedModuleSource(sharded, timeout_s=STEP_S), read)


def test_ranks_that_hold_different_models_are_told():
    for result in run(differ):
        assert ended(result) == (1, "holds other tensors than the sending rank")


# ---------------------------------------------------------------- what strangers write


def verdict(**fields):
    return "v" + json.dumps({"outcome": None, "failed_rank": None} | fields)


STRANGE = {
    "empty": "",
    "bytes": b"\xff\xfe\x00",
    "deep lists": "v" + "[" * 1_000_000,
    "deep dicts": "v" + '{"a":' * 100_000 + "1" + "}" * 100_000,
    "deep pickle": "v" + base64.b64encode(b"]" * 5_000_000).decode(),
    "huge": b"v" + b" " * MOST_BYTES,
    "huge number": "v" + "9" * 1_000_000,
    "plain": 'v"text"',
    "a field less": verdict(),
    "a field more": verdict(reason="", more=1),
    "wrong rank": verdict(reason="", failed_rank="0"),
    "wrong reason": verdict(reason=["x"]),
    "wrong report": verdict(reason="", outcome={"version": "new"}),
    "no number": "gx",
    "negative": "g-1",
    "far": "g" + "9" * 5000,
    "other digits": "g\u0663",
}


@pytest.fixture(scope="module")
def connections():
    """Three connections to a store; on some machines one in twenty takes five seconds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, store.clone(), store.clone()


@pytest.fixture
def ranks(connections, request):
    """The leading rank and another one, and a third connection to their store."""
    store, *theirs = (PrefixStore(request.node.name, one) for one in connections)
    two = [TrainerRanks([0, 1], rank, theirs[rank], timeout_s=5) for rank in (0, 1)]
    return *two, PrefixStore("torchrl_vllm_sync/0-1", store)


def put(store, key, value):
    """Writes, and returns when it can be read."""
    store.set(key, value)
    assert store.check([key])


def refused(call, *args, **kwargs):
    """The typed error that a call ends with, in time."""
    begin = time.monotonic()
    with pytest.raises(TrainerRankError) as caught:
        call(*args, **kwargs)
    assert time.monotonic() - begin < 4
    assert len(str(caught.value)) < 1000
    assert "did not" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("clears", [True, False])
def test_a_rank_clears_its_cache_before_it_has_joined(ranks, monkeypatch, clears):
    leader, follower, store = ranks
    cleared = []
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: cleared.append(store.check(["1/joined/1"]))
    )
    leading = leader.begin("digest", [CLEARS] * clears)
    follower.join(timeout_s=5).ready("digest {}")
    assert cleared == [False] * clears
    leading.reports()


def test_engines_wake_only_when_all_ranks_have_cleared_their_caches(ranks):
    leader, follower, _ = ranks
    source = ShardedModuleSource.__new__(ShardedModuleSource)
    source._ranks, source._round = leader, leader.begin("digest", [CLEARS])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clear_caches, source)
        time.sleep(0.2)
        assert not waiting.done()
        follower.join(timeout_s=5).ready('digest {"node": "", "tokens": []}')
        waiting.result(timeout=5)


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
def test_strange_words_of_the_leader_end_in_a_typed_error(ranks, strange):
    leader, follower, store = ranks
    leader.begin("digest")
    followed = follower.join(timeout_s=5, outcome=PushReport)
    followed.ready("digest")
    put(store, "1/next/0", strange)
    refused(followed.next)
    put(store, "1/next/1", strange)
    refused(followed.raise_reported)
    put(store, "broken", strange)
    refused(leader.begin, "digest")
    refused(follower.join, timeout_s=5)


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
def test_strange_words_of_a_follower_end_in_a_typed_error(ranks, strange):
    leader, _, store = ranks
    leading = leader.begin("digest")
    put(store, "1/ready/0/1", strange)
    refused(leading.call, 0)


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
def test_a_strange_number_of_rounds_ends_in_a_typed_error(ranks, strange):
    _, follower, store = ranks
    put(store, "rounds", strange)
    refused(follower.join, timeout_s=5)


def test_a_strange_number_of_steps_holds_nobody_up(ranks):
    leader, _, store = ranks
    for number in (1, 2):
        leading = leader.begin("digest")
        put(store, f"{number}/ready/0/1", "digest")
        begin = time.monotonic()
        leading.succeed(None)
        assert time.monotonic() - begin < 4
        assert store.check(["1/next/0"]) == (number == 1)
        put(store, f"{number}/over", str(10**18))


def test_errors_of_any_length_and_letters_reach_the_others(ranks):
    leader, follower, _ = ranks
    error = OSError("\ud800" + "x" * 10_000_000)
    leading = leader.begin("digest")
    followed = follower.join(timeout_s=5)
    followed.fail(error)
    with pytest.raises(TrainerRankError, match=r"trainer rank 1: OSError: \\ud800xx"):
        leading.call(0)
    leading.fail(error)
    assert followed.next().reason.startswith("OSError: \\ud800xx")


def test_a_call_for_a_group_that_is_none_is_refused():
    source = ShardedModuleSource.__new__(ShardedModuleSource)
    source._ranks = TrainerRanks([0, 1], 1, dist.HashStore(), timeout_s=5)
    assert source._called([["first"], ["second"]], 1) == ["second"]
    with pytest.raises(TrainerRankError, match="trainer rank 0: called for group 2 of 2"):
        source._called([["first"], ["second"]], 2)


def test_a_push_by_a_rank_that_does_not_send_begins_no_round():
    source = ShardedModuleSource.__new__(ShardedModuleSource)
    source._ranks = TrainerRanks([0, 1], 1, dist.HashStore(), timeout_s=5)
    source.metadata, source._round = list, None
    for begin in (lambda: leading(source).__enter__(), lambda: next(iter(source))):
        with pytest.raises(UnsupportedArgumentError, match="rank 1 must take part with partic"):
            begin()
    assert not source._ranks.store.check(["rounds"])


def wrap_adapters(rank):
    import peft

    _, sharded = models("tied")
    wrapped = peft.get_peft_model(sharded, peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(WeightMismatchError, match="adapters on a sharded model cannot be merged"):
        as_weight_source(wrapped)


def test_adapters_on_a_sharded_model_are_refused():
    succeed(wrap_adapters)


def leave_unfilled(rank):
    _, sharded = models("tied")
    sharded.to("meta")
    with pytest.raises(WeightMismatchError, match=r"embed_tokens\.weight must .* meta device"):
        as_weight_source(sharded)


def test_a_sharded_model_without_storage_is_refused_on_every_rank():
    succeed(leave_unfilled)


def alone(rank):
    whole, sharded = models("moe")
    compare(read(as_weight_source(sharded)), whole)
    refuse_nonfinite(as_weight_source(sharded))
    with torch.no_grad():
        sharded.lm_head.weight.to_local()[-1, 3] = torch.nan
    with pytest.raises(NonFiniteWeightsError, match="lm_head"):
        refuse_nonfinite(as_weight_source(sharded))


def test_one_rank_needs_no_others():
    succeed(alone, world_size=1)


def test_errors_pickle():
    import pickle

    error = pickle.loads(pickle.dumps(TrainerRankError(1, "gone")))
    assert (error.rank, error.reason, str(error)) == (1, "gone", "trainer rank 1: gone")
    assert str(TrainerRankError(None, "gone")) == "ranks of the trainer: gone"
