"""A run that is saved and gone on with has the rows, losses and weights of one never stopped."""

import errno
import itertools
import json
import os
import random  # noqa: TID251  its state is what is saved
import shutil
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchrl.data import ReplayBuffer, SamplerWithoutReplacement

from tests.processes import Child
from tests.unit.test_policy import CannedService, lists_are_stacks  # noqa: F401
from tests.unit.test_rollouts import (
    collector,
    make_env,
    make_policy,
    number,
    pytestmark,  # noqa: F401
    sums,
)
from tests.unit.test_sharded_source import models, succeed
from tests.unit.test_updater import Service
from torchrl_vllm_sync import RolloutStorage, RunState, WeightUpdater
from torchrl_vllm_sync.errors import (
    PacingError,
    PacingTimeoutError,
    RunStateError,
    UnsupportedArgumentError,
    WeightSyncError,
)
from torchrl_vllm_sync.rl import run_state
from torchrl_vllm_sync.rl.pacing import Pacer


class Engines(CannedService):
    """Samples each row by its seed, from what was pushed; keeps what was asked of each push."""

    def __init__(self):
        super().__init__()
        self.pushed, self.counts, self.weights_sum = [], Service(), 0
        self.fails = False

    weight_version = property(lambda self: self.counts.weight_version)
    weights = property(lambda self: self.counts.weights)

    def push_weights(self, model, *, version, audit, **options):
        if self.fails:
            raise WeightSyncError(1, {"0": "injected"})
        report = self.counts.push_weights(model, version=version, **options)
        self.weights_sum = hash(model.weight.detach().numpy().tobytes())
        self.pushed.append((report.version, audit))
        return report

    def answer(self, request, generator):
        key = abs(request.sampling_params.seed ^ self.weights_sum)
        return super().answer(request, np.random.default_rng(key))


class Program:
    """A trainer: a step samples rows, trains on them in random order, with dropout, and pushes."""

    def __init__(self, seed, *, staleness=0, data=None, size=4, parts=None, **settings):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.engines = Engines()
        self.model = torch.nn.Linear(size, size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda at: 0.5**at)
        self.updater = WeightUpdater(self.engines, source=self.model)
        self.buffer = ReplayBuffer(
            storage=RolloutStorage(8), sampler=SamplerWithoutReplacement(), batch_size=4
        )
        policy = make_policy(self.engines, generate_kwargs={"max_tokens": 9, "seed": 0})
        env = make_env(data=data)
        self.collector = collector(env=env, policy=policy, max_staleness=staleness, **settings)
        self.run = RunState(self.model, self.optimizer, **(parts or self.parts()))
        self.seen, self.rollouts = [], None

    def parts(self):
        names = ("collector", "buffer", "updater", "scheduler")
        return {name: getattr(self, name) for name in names}

    def train(self, num_steps):
        self.rollouts = self.rollouts or iter(self.collector)
        for _ in range(num_steps):
            if not self.engines.pushed:
                self.updater.push_weights()
            rows = next(self.rollouts)
            self.buffer.extend(rows)
            sampled = self.buffer.sample()
            figures = sampled["tokens", "full"].float()[:, :4] / 500
            figures = figures + np.random.rand() + random.random()
            loss = torch.nn.functional.dropout(self.model(figures)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.seen.append(
                [
                    [*rows["query"]],
                    rows["tokens", "full"].tolist(),
                    rows["log_probs", "response"].tolist(),
                    sampled["tokens", "full"].tolist(),
                    loss.item(),
                ]
            )
            for _, ahead in self.collector._ahead:
                ahead()  # by the weights before
            self.updater.push_weights()


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_goes_on_as_if_it_had_not_been_stopped(tmp_path, staleness):
    whole = Program(0, staleness=staleness)
    whole.train(6)
    stopped = Program(0, staleness=staleness)
    stopped.train(3)
    assert stopped.run.save(tmp_path, step=3) == tmp_path / "step-00000003"
    stopped.train(3)
    assert stopped.seen == whole.seen  # a save changes nothing
    other = Program(1, staleness=staleness)
    assert other.run.load(tmp_path) == 3
    other.train(3)
    assert other.seen == whole.seen[3:]
    assert torch.equal(other.model.weight, whole.model.weight)
    # The versions go on, and the first push only is audited.
    assert other.engines.pushed == [(4, True), (5, False), (6, False), (7, False)]


def left_out(program, what):
    """The program's run, of which a load leaves something out."""
    if what == "random":
        return "_set_random_states", lambda _: None
    if what == "model":
        return "state_dict_loader", SimpleNamespace(load=lambda *_, **__: None)
    part = getattr(program, what)
    part.load_state_dict = lambda _: None
    return None


@pytest.mark.parametrize("what", ["random", "model", "collector", "scheduler"])
def test_whatever_is_left_out_is_noticed(tmp_path, monkeypatch, what):
    """The negative control."""
    whole = Program(0)
    whole.train(2)
    whole.run.save(tmp_path)
    whole.train(3)
    other = Program(1)
    if patch := left_out(other, what):
        monkeypatch.setattr(run_state, *patch)
    if what == "collector":
        other.collector._pacer.load_state_dict = lambda _: None
    other.run.load(tmp_path)
    other.train(3)
    assert other.seen != whole.seen[2:]


def test_a_run_is_saved_before_its_first_step(tmp_path):
    whole = Program(0)
    whole.train(2)
    stopped = Program(0)
    stopped.run.save(tmp_path)
    stopped.train(2)
    other = Program(1)
    other.run.load(tmp_path)
    other.train(2)
    assert stopped.seen == other.seen == whole.seen


def partly_trained():
    """A model of which a part has had no gradient yet, and its optimizer."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def test_parameters_without_a_gradient_until_then_have_no_state_afterwards(tmp_path):
    model, optimizer = partly_trained()
    model[0](torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    RunState(model, optimizer).save(tmp_path)
    other, resumed = partly_trained()
    RunState(other, resumed).load(tmp_path)
    assert [one in resumed.state for one in other.parameters()] == [True, True, False, False]
    for each, whose in ((model, optimizer), (other, resumed)):
        each[1](each[0](torch.ones(2))).sum().backward()
        whose.step()
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_a_service_that_is_further_keeps_its_versions(tmp_path):
    stopped, other = Program(0), Program(1)
    stopped.train(1)
    stopped.run.save(tmp_path)
    other.engines.counts.weight_version = 9
    other.run.load(tmp_path, audit=False)
    assert other.engines.pushed == [(10, False)]


def test_the_newest_save_is_loaded_or_one_that_is_named(tmp_path):
    stopped = Program(0)
    folders = []
    for _ in range(2):
        stopped.train(1)
        folders.append(stopped.run.save(tmp_path))
    assert [one.name for one in folders] == ["step-00000000", "step-00000001"]
    with pytest.raises(RunStateError, match="step 1 is saved already, 1 is not later"):
        stopped.run.save(tmp_path, step=1)
    for directory, step in ((tmp_path, 1), (folders[0], 0)):
        other = Program(1)
        assert other.run.load(directory) == step
        other.train(1)
        assert other.seen == stopped.seen[1:] or step == 1


def snapshot(program):
    optimizer = json.dumps(program.optimizer.state_dict(), default=str)
    states = [torch.get_rng_state().tolist(), random.getstate(), program.model.weight.tolist()]
    return [*states, optimizer, len(program.buffer), program.scheduler.state_dict()]


def nothing(folder):
    return folder / "nowhere"


def foreign(folder):
    (folder / "notes.txt").write_text("not a run")
    for one in folder.glob("step-*"):
        one.rename(folder / "other")
    return folder


def no_record(folder):
    (folder / "step-00000000" / "run.json").unlink()
    return folder


def nonsense(folder):
    (folder / "step-00000000" / "run.json").write_text("[1, 2")
    return folder


def a_list(folder):
    (folder / "step-00000000" / "run.json").write_text("[1, 2]")
    return folder


def lost(folder):
    (folder / "step-00000000" / "rank-0.pt").unlink()
    return folder


def flipped(folder):
    path = folder / "step-00000000" / "rank-0.pt"
    content = bytearray(path.read_bytes())
    content[: len(content) // 2] = bytes(len(content) // 2)
    path.write_bytes(content)
    return folder


def no_files(folder):
    path = folder / "step-00000000" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": 3}))
    return folder


def short(folder):
    path = folder / "step-00000000" / "model" / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    return folder


def one_bit(folder):
    path = folder / "step-00000000" / "model" / "__0_0.distcp"
    found = bytearray(path.read_bytes())
    found[len(found) // 2] ^= 1
    path.write_bytes(found)
    return folder


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (nothing, "nowhere: there is no saved run"),
        (foreign, "there is no saved run"),
        (no_record, "run.json is not what a save has"),
        (nonsense, "run.json is not what a save has"),
        (a_list, "run.json is not what a save has"),
        (no_files, "run.json is not what a save has"),
        (flipped, r"rank-0.pt has \d+ bytes of xxh3 .*, where \d+ bytes of xxh3 .* were saved"),
        (lost, "rank-0.pt has None, where"),
        (
            short,
            r"model/__0_0.distcp has \d+ bytes of xxh3 .*, where \d+ bytes of xxh3 .* were saved",
        ),
        (
            one_bit,
            r"model/__0_0.distcp has (\d+) bytes of .*, where \1 bytes of xxh3 .* were saved",
        ),
    ],
)
def test_a_folder_that_is_no_whole_save_is_refused_and_leaves_all_as_it_was(tmp_path, spoil, told):
    stopped = Program(0)
    stopped.train(1)
    stopped.run.save(tmp_path)
    other = Program(1)
    before = snapshot(other)
    with pytest.raises(RunStateError, match=told):
        other.run.load(spoil(tmp_path))
    assert snapshot(other) == before
    assert other.engines.pushed == []


def more_rows():
    yield from itertools.islice(sums(), 1, None)


class Refuses:
    """A part that cannot be loaded."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        raise KeyError("a user's own")


OTHERS = {
    "shape": ({"size": 5}, RunStateError, r"tensors: bias is \[\[4\], 'torch.float32'\], and"),
    "data": ({"data": more_rows()}, UnsupportedArgumentError, "first 4 rows have other prompts"),
    "pace": ({"staleness": 1}, UnsupportedArgumentError, "max_staleness is 1, where it was 0"),
    "batch": (
        {"dialog_turns_per_batch": 8},
        UnsupportedArgumentError,
        "batch_size is 8, where it was 4",
    ),
    "parts": ({"parts": {"scheduler": 0}}, RunStateError, "parts: buffer is ReplayBuffer"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_run_of_another_program_is_refused_and_leaves_all_as_it_was(tmp_path, what):
    stopped = Program(0)
    stopped.train(1)
    stopped.run.save(tmp_path)
    settings, kind, told = OTHERS[what]
    if what == "parts":
        settings = {}
    other = Program(1, **settings)
    if what == "parts":
        other.run = RunState(other.model, other.optimizer, scheduler=other.scheduler)
    before = snapshot(other)
    with pytest.raises(kind, match=told):
        other.run.load(tmp_path)
    assert snapshot(other) == before
    assert other.engines.pushed == []


def test_another_optimizer_is_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    RunState(model, torch.optim.AdamW(model.parameters())).save(tmp_path)
    with pytest.raises(RunStateError, match="parts: optimizer is AdamW, and here SGD"):
        RunState(model, torch.optim.SGD(model.parameters())).load(tmp_path)
    with pytest.raises(RunStateError, match=r"groups is \[2\], and here \[1\]"):
        RunState(model, torch.optim.AdamW([model.weight])).load(tmp_path)


def test_other_settings_are_refused_by_key(tmp_path):
    model = torch.nn.Linear(2, 2)
    RunState(model, settings={"lr": 0.1, "epochs": 1}).save(tmp_path)
    with pytest.raises(RunStateError, match=r"settings: lr is 0.1, and here 0.2"):
        RunState(model, settings={"lr": 0.2, "epochs": 1}).load(tmp_path)
    assert RunState(model, settings={"lr": 0.1, "epochs": 1}).load(tmp_path) == 0
    settings = {"betas": (0.9, 0.95), "at": {1: "begin"}}  # which JSON has otherwise
    RunState(model, settings=settings).save(tmp_path / "other")
    assert RunState(model, settings=settings).load(tmp_path / "other") == 0
    path = tmp_path / "step-00000000" / "run.json"
    about = json.loads(path.read_text())
    del about["settings"]  # as it was saved before there were any
    path.write_text(json.dumps(about))
    assert RunState(model).load(tmp_path) == 0
    with pytest.raises(RunStateError, match=r"settings: lr is None, and here 0.2"):
        RunState(model, settings={"lr": 0.2}).load(tmp_path)


def test_a_part_that_cannot_be_loaded_leaves_all_as_it_was(tmp_path):
    stopped = Program(0)
    stopped.train(1)
    RunState(stopped.model, **stopped.parts(), own=Refuses()).save(tmp_path)
    other = Program(1)
    before = snapshot(other)
    with pytest.raises(KeyError, match="a user's own"):
        RunState(other.model, **other.parts(), own=Refuses()).load(tmp_path)
    assert snapshot(other) == before
    other.run = RunState(other.model, **other.parts(), own=SimpleNamespace(**METHODS))
    with pytest.raises(RunStateError, match="parts: own is Refuses"):
        other.run.load(tmp_path)


METHODS = {"state_dict": dict, "load_state_dict": lambda _: None}


def test_a_collector_that_has_begun_is_refused(tmp_path):
    stopped = Program(0)
    stopped.train(1)
    stopped.run.save(tmp_path)
    with pytest.raises(PacingError, match="a state is loaded before rows are admitted"):
        stopped.run.load(tmp_path)


def test_a_push_that_fails_may_be_done_again(tmp_path):
    stopped, other = Program(0), Program(1)
    stopped.train(2)
    stopped.run.save(tmp_path)
    stopped.train(1)
    other.engines.fails = True
    with pytest.raises(WeightSyncError, match="injected"):
        other.run.load(tmp_path)
    other.engines.fails = False
    other.updater.push_weights(version=3, audit=True)
    other.train(1)
    assert other.seen == stopped.seen[2:]


def test_parts_are_what_they_must_be():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedArgumentError, match="buffer, a list, has no state_dict"):
        RunState(model, buffer=[])
    with pytest.raises(UnsupportedArgumentError, match="collector must be a RolloutCollector"):
        RunState(model, collector=[])
    with pytest.raises(UnsupportedArgumentError, match="pacer is not that of collector"):
        RunState(model, collector=collector(), pacer=Pacer(0, 4))


@pytest.mark.parametrize("path", ["torchrl", "groups"])
def test_collectors_without_places_of_their_own_are_refused(path):
    settings = {"flatten_data": False} if path == "torchrl" else {}
    if path == "groups":
        settings = {"yield_completed_trajectories": True, "max_staleness": 1}
    with pytest.raises(UnsupportedArgumentError, match="a collector goes on by columns only"):
        RunState(torch.nn.Linear(2, 2), collector=collector(**settings))


def test_what_collectors_of_one_pacer_were_sampling_is_sampled_anew(tmp_path):
    def made():
        pacer, buffer = Pacer(1, 4), ReplayBuffer(storage=RolloutStorage(8), batch_size=4)
        run = RunState(torch.nn.Linear(2, 2), pacer=pacer, buffer=buffer)
        return pacer, buffer, run, collector(pacer=pacer, replay_buffer=buffer)

    pacer, buffer, run, first = made()
    next(iter(first))
    pacer._call("join", "one in another process", 4)
    assert pacer._call("admit", "one in another process").rows == (4, 5, 6, 7)
    run.save(tmp_path)
    pacer, buffer, run, other = made()
    run.load(tmp_path)
    assert buffer.write_count == 4  # by which the pacer knows what is written
    for at in range(3):
        assert [number(one) for one in buffer[:]["query"]] == [2 * at] * 2 + [2 * at + 1] * 2
        buffer.empty()
        pacer.trained(4)
        next(iter(other))


def test_a_save_of_an_earlier_release_is_compared_by_the_sizes_that_it_has(tmp_path):
    stopped = Program(0)
    stopped.run.save(tmp_path)
    record = tmp_path / "step-00000000" / "run.json"
    about = json.loads(record.read_text())
    for name, told in about["files"].items():
        if name.endswith(".distcp"):
            about["files"][name] = told.partition(" of ")[0]
    record.write_text(json.dumps(about))
    assert Program(1).run.load(tmp_path) == 0
    with pytest.raises(RunStateError, match=r"__0_0\.distcp has"):
        Program(1).run.load(short(tmp_path))


def test_two_that_save_to_one_folder_make_no_mixture(tmp_path, monkeypatch):
    first, other = (RunState(torch.nn.Linear(2, 2)) for _ in range(2))
    whole = run_state.state_dict_saver.save

    def save(*args, **kwargs):
        with pytest.raises(RunStateError, match=f"pid {os.getpid()} .* saves there"):
            other.save(tmp_path)
        return whole(*args, **kwargs)

    monkeypatch.setattr(run_state.state_dict_saver, "save", save)
    first.save(tmp_path)
    monkeypatch.undo()
    assert other.load(tmp_path) == 0
    assert torch.equal(other.model.weight, first.model.weight)
    assert other.save(tmp_path).name == "step-00000001"  # who has saved lets others


def test_one_that_is_ending_is_waited_for(tmp_path):
    order = []

    def first():
        with run_state.only_writer(tmp_path):
            begun.set()
            time.sleep(0.3)
            order.append("first")

    begun = threading.Event()
    running = threading.Thread(target=first)
    running.start()
    begun.wait(20)
    with run_state.only_writer(tmp_path, timeout_s=50):
        order.append("other")
    running.join()
    assert order == ["first", "other"]


def test_a_child_that_was_forked_meanwhile_keeps_nobody_out(tmp_path):
    with run_state.only_writer(tmp_path):
        child = os.fork()
        if not child:  # it has the open file, too
            signal.pause()
            os._exit(0)
    try:
        with run_state.only_writer(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_system_without_locks_is_saved_to_and_said(tmp_path, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(run_state.fcntl, "flock", flock)
    RunState(torch.nn.Linear(2, 2)).save(tmp_path)
    assert f"{tmp_path} cannot be locked" in caplog.text


def test_of_several_ranks_one_asks_the_pacer_that_they_share(tmp_path, monkeypatch):
    def made(rank):
        monkeypatch.setattr(run_state, "_place", lambda: (rank, 2))
        return RunState(torch.nn.Linear(2, 2), pacer=pacer)

    pacer = Pacer(1, 4)
    pacer._call("join", "a", 4)
    pacer._call("admit", "a")
    folder = made(0).save(tmp_path)
    shutil.copy(folder / "rank-0.pt", folder / "rank-1.pt")
    pacer = Pacer(1, 4)
    assert [made(rank).load(tmp_path) for rank in (0, 1)] == [0, 0]
    pacer._call("join", "a", 4)
    assert pacer._call("admit", "a").number == 0  # it was under way
    assert [made(rank)._led_gate for rank in (0, 1)] == [pacer, None]


def test_a_collector_goes_on_from_a_state_by_itself():
    first, other = collector(max_staleness=1), collector(max_staleness=1)
    rollouts = iter(first)
    next(rollouts)
    other.load_state_dict(first.state_dict())
    for _ in range(3):
        rows, wanted = next(iter(other)), next(rollouts)
        assert [*rows["query"]] == [*wanted["query"]]
        assert torch.equal(rows["tokens", "full"], wanted["tokens", "full"])
    with pytest.raises(UnsupportedArgumentError, match="whose pacer is shared as this one's"):
        collector(pacer=Pacer(1, 4)).load_state_dict(first.state_dict())


def test_nothing_is_handed_on_while_a_run_is_saved(tmp_path):
    pacer = Pacer(0, 4, timeout_s=0.2)
    pacer._call("join", "a", 4)
    pacer._call("admit", "a")

    class Buffer:
        """Is asked for its rows while the run is saved."""

        state_dict = partial(pacer._call, "turn", "a", 0)
        load_state_dict = print

    run = RunState(torch.nn.Linear(2, 2), pacer=pacer, buffer=Buffer())
    state = torch.load(run.save(tmp_path) / "rank-0.pt", weights_only=False)
    assert state["others"]["buffer"] is None  # it was not the rows' turn
    assert pacer._call("turn", "a", 0) is True
    with pytest.raises(PacingTimeoutError, match=r"rows on their way .* within 0.2 s"):
        run.save(tmp_path)
    pacer._call("deliver", "a", 0)
    RunState(torch.nn.Linear(2, 2), pacer=pacer).save(tmp_path)
    pacer.trained(4)
    assert pacer._call("admit", "a").number == 1
    assert pacer._call("turn", "a", 1) is True


def train_sharded(rank, directory):
    """Two steps, a save after the first; and the second again, of a model that began otherwise."""
    ids = torch.arange(12).view(2, 6) + rank

    def begin(seed):
        _, model = models("tied")
        torch.manual_seed(seed)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if seed:
            step(model, optimizer)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        return model, optimizer, RunState(model, optimizer)

    def step(model, optimizer):
        model(input_ids=ids, labels=ids + int(torch.randint(3, ()))).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return [one.to_local().clone() for one in model.parameters()]

    model, optimizer, run = begin(0)
    step(model, optimizer)
    run.save(directory)
    wanted = step(model, optimizer)
    model, optimizer, run = begin(1)
    assert run.load(directory) == 0
    found = step(model, optimizer)
    told = "rank 1: .*groups is" if rank == 0 else "groups is"
    with pytest.raises(RunStateError, match=told):  # what one rank finds ends the load on all
        RunState(model, None if rank else optimizer).load(directory)
    return all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))


@pytest.mark.slow
def test_a_sharded_model_goes_on_on_every_rank(tmp_path):
    assert succeed(train_sharded, directory=str(tmp_path)) == [True, True]
    names = {one.name for one in (tmp_path / "step-00000000").iterdir()}
    assert names == {"model", "rank-0.pt", "rank-1.pt", "run.json"}
    with pytest.raises(RunStateError, match="num_ranks is 2, and here 1"):
        RunState(torch.nn.Linear(2, 2)).load(tmp_path)


SAVES = """
import os, signal, sys, torch
from pathlib import Path
from torchrl_vllm_sync.rl import run_state
model = torch.nn.Linear(4, 4)
model.weight.data.fill_(1)
run = run_state.RunState(model)
run.save(sys.argv[1], step=1)
model.weight.data.fill_(2)
def kill(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
owner, name = {
    "state": (torch, "save"),
    "model": (torch.distributed.checkpoint.FileSystemWriter, "finish"),
    "record": (run_state.json, "dumps"),
    "rename": (run_state.Path, "rename"),
}[sys.argv[2]]
setattr(owner, name, kill)
run.save(sys.argv[1], step=2)
"""


def test_a_save_that_is_killed_leaves_the_earlier_one_whole(tmp_path):
    where = ["state", "model", "record", "rename"]
    killed = [Child(SAVES, tmp_path / one, one) for one in where]
    for one, child in zip(where, killed, strict=True):
        child.process.join(50)
        assert child.process.exitcode == -signal.SIGKILL
        child.close()
        left = sorted(each.name for each in (tmp_path / one).iterdir())
        assert left == [".step-00000002", ".writer", "step-00000001"]
        model = torch.nn.Linear(4, 4)
        run = RunState(model)
        assert run.load(tmp_path / one) == 1
        assert model.weight.unique().tolist() == [1]
        run.save(tmp_path / one, step=2)
        left = sorted(each.name for each in (tmp_path / one).iterdir())
        assert left == [".writer", "step-00000001", "step-00000002"]
