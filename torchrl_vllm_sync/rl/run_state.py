"""A run on disk, from which another process goes on with the same rows.

A save is a folder ``step-00000012``: ``model`` (``torch.distributed.checkpoint``), a file of all
else for each rank of the trainer, and ``run.json``, which says what there is. It is written under
another name, and renamed when all of it is on the disk.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import json
import logging
import os
import random  # noqa: TID251  its state is the user's
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from torchrl_vllm_sync.checks import Deadline, check_integer
from torchrl_vllm_sync.errors import RunStateError, UnsupportedArgumentError
from torchrl_vllm_sync.rl.pacing import Pacer
from torchrl_vllm_sync.rl.rollouts import RolloutCollector
from torchrl_vllm_sync.rl.updater import WeightUpdater
from torchrl_vllm_sync.weights.snapshots.files import lock_holders, remove_folder, take_lock

logger = logging.getLogger(__name__)

FORMAT, ABOUT, MODEL = 1, "run.json", "model"
SAVED, UNFINISHED = "step-", ".step-"


class RunState:
    """All that a run is made of, saved and loaded by one call.

    A run that is loaded goes on with the rows of one that was never stopped: model, optimizer,
    states of random number generators (torch, CUDA, NumPy, Python), which rows are trained and
    which come next, and the policy version. Rows that a collector with ``max_staleness`` has
    sampled ahead are saved; those of collectors that share a pacer are sampled anew, with the same
    seeds, by the weights that are there then. The data set must give its items in the same order.

    Example:
        >>> run = RunState(model, optimizer, collector=collector, buffer=buffer, updater=updater)
        >>> if resume:
        ...     run.load("runs/sums")
        >>> for _ in collector:
        ...     train(buffer.sample())
        ...     updater.push_weights()
        ...     run.save("runs/sums")

    Args:
        model: What is trained, also sharded by FSDP2: then every rank saves and loads.
        optimizer, buffer: Its optimizer, and a replay buffer.
        collector: A collector that has the trainer's process to itself, with its pacer.
        pacer: That of several collectors, which hand nothing on while a run is saved, once it was
            told what is ``trained``. What they have handed on is sampled no more: save their buffer
            with it. Of several ranks the first one saves and loads it.
        updater: What pushes the model, and the first thing that it pushes after a load.
        settings: What a program that loads must have alike, by key: numbers, texts and the like.
        **extra: Whatever else has ``state_dict`` and ``load_state_dict``, such as a scheduler.

    Raises:
        UnsupportedArgumentError: A part has no such methods, ``pacer`` is not the collector's, or
            ``collector`` is another one than by columns, in the order of the data set.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        collector: RolloutCollector | None = None,
        buffer: Any = None,
        pacer: Pacer | None = None,
        updater: WeightUpdater | None = None,
        settings: Mapping[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        own = None
        if collector is not None:
            if not isinstance(collector, RolloutCollector):
                told = f"collector must be a RolloutCollector, got {type(collector).__name__}"
                raise UnsupportedArgumentError(told)
            collector._check_goes_on()
            own = collector._pacer
        if pacer is not None and own not in (None, pacer):
            raise UnsupportedArgumentError("pacer is not that of collector")
        self.model, self.optimizer, self.updater = model, optimizer, updater
        self.collector, self._gate = collector, own if pacer is None else pacer
        is_shared = collector is None or not collector._is_own
        self.pacer = self._gate if is_shared else None  # else it is part of the collector's state
        given = extra | {"buffer": buffer}
        self._settings = json.loads(json.dumps(dict(settings or {})))  # as a load reads them
        self._others: dict[str, Any] = {n: one for n, one in given.items() if one is not None}
        for name, one in self._others.items():
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(one, method, None)):
                    told = f"{name}, a {type(one).__name__}, has no {method}"
                    raise UnsupportedArgumentError(told)

    def save(self, directory: str | os.PathLike[str], *, step: int | None = None) -> Path:
        """Saves the run between two steps; whatever is killed meanwhile, earlier saves stay whole.

        Args:
            directory: Of the run's saves, made if need be; all ranks of a sharded model see it.
            step: Number of the save, greater than those before; by default one more.

        Returns:
            The folder of this save.

        Raises:
            RunStateError: There is a save of this or a later step, or another process saves there.
            PacingTimeoutError: What a collector was handing on did not get to its buffer in time.
        """
        root, (rank, num_ranks) = Path(directory), _place()
        with contextlib.ExitStack() as writing:
            with _together(root) as told:
                if rank == 0:
                    writing.enter_context(only_writer(root))
                    told.append(_begun(root, step))
            (number,) = told
            name = f"{number:08d}"
            folder = root / (UNFINISHED + name)
            with contextlib.ExitStack() as frozen:
                with _together(root):
                    if gate := self._led_gate:  # nothing gets into any rank's buffer meanwhile
                        frozen.callback(gate._call, "thaw")
                        gate._call("freeze")
                        gate._call("settled", waits=True)
                with _together(root):
                    torch.save(self._state(), folder / f"rank-{rank}.pt")
                    _fsync(folder / f"rank-{rank}.pt")
            self._access(state_dict_saver.save, folder)
            with _together(root):
                if rank == 0:
                    about = self._about() | {"step": number, "num_ranks": num_ranks}
                    (folder / ABOUT).write_text(json.dumps(about | {"files": _sums(folder)}))
                    for one in (folder / ABOUT, folder / MODEL, folder):
                        _fsync(one)
                    folder.rename(root / (SAVED + name))
                    _fsync(root)
        return root / (SAVED + name)

    def load(self, directory: str | os.PathLike[str], *, audit: bool = True) -> int:
        """Goes on from the newest save: call it before the first batch is asked for.

        Nothing changes until the save is found to be whole and to fit; gradients are dropped. The
        last thing is a push, under the version that was the newest, or a later one if the service
        has reached it: where that fails, all else is loaded, and it may be pushed again.

        Args:
            directory: What :meth:`save` was given, or the folder of one save. Its files are
                unpickled: load only what you trust.
            audit: Whether that push is audited, see ``AsyncVLLM.push_weights``.

        Returns:
            The step of the save.

        Raises:
            RunStateError: There is no save, it is damaged, or it is of other parts, of a model of
                other keys, shapes or dtypes, of another optimizer, or of other ranks.
            UnsupportedArgumentError: It is of another pace, data set or batch size.
            PacingError: Rows are admitted already.
            SyncError: What a push raises.
        """
        with _together(Path(directory)):
            folder, about = self._found(Path(directory))
            # Rows and a user's own parts are not only tensors.
            file = folder / f"rank-{_place()[0]}.pt"
            state = torch.load(file, map_location="cpu", weights_only=False)
            _require(folder, "parts", self._parts(), state["parts"])
            if self.pacer is not None and self._led_gate:
                self.pacer._call("check_state", state["pacer"])
            if self.collector is not None:
                self.collector._check_state(state["collector"])
        with _together(folder), contextlib.ExitStack() as undo:
            for name, one in self._others.items():
                undo.callback(one.load_state_dict, copy.deepcopy(one.state_dict()))
                one.load_state_dict(state["others"][name])
            undo.pop_all()
            if self.pacer is not None and self._led_gate:
                self.pacer.load_state_dict(state["pacer"])
            if self.collector is not None:
                self.collector.load_state_dict(state["collector"])
        self.model.zero_grad(set_to_none=True)
        self._access(state_dict_loader.load, folder, has_begun=state["has_begun"])
        if self.optimizer is not None:
            for group, saved in zip(self.optimizer.param_groups, state["groups"], strict=True):
                group.update(saved)
        _set_random_states(state["random"])
        updater: Any = self.updater
        if updater is not None:  # brings the engines to what was loaded
            service, version = updater.service, state["version"]
            is_behind = None not in (service, version) and service.weight_version < version
            weights = self.model if updater.source is None else None
            updater.push_weights(weights, version=version if is_behind else None, audit=audit)
        return about["step"]

    def _state(self) -> dict[str, Any]:
        """All but what is sharded; the collector first, which waits for what it has begun."""
        own = {"collector": self.collector, "pacer": self.pacer}
        service = None if self.updater is None else self.updater.service
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {
            "parts": self._parts(),
            **{name: None if one is None else one.state_dict() for name, one in own.items()},
            "others": {name: one.state_dict() for name, one in self._others.items()},
            "groups": [{n: v for n, v in one.items() if n != "params"} for one in groups],
            "has_begun": self._has_begun,
            "version": None if service is None else service.weight_version,
            "random": {name: state() for name, (state, _) in _RANDOM.items()},
        }

    @property
    def _led_gate(self) -> Any:
        """The pacer, if this rank is to tell it anything: of one that is shared, only the first."""
        return self._gate if self.pacer is None or _place()[0] == 0 else None

    @property
    def _has_begun(self) -> bool:
        """Whether the optimizer has a state; to get one that has none would take a step."""
        return self.optimizer is not None and bool(self.optimizer.state)

    def _access(self, how: Any, folder: Path, *, has_begun: bool | None = None) -> None:
        """Saves or loads model and optimizer."""
        begun = self._has_begun if has_begun is None else has_begun
        optimizers: Any = self.optimizer if begun else []
        model, optimizer = get_state_dict(self.model, optimizers)
        state = {"model": model, "optimizer": optimizer}
        if has_begun:  # parameters that had no gradient until then have no state there
            found = FileSystemReader(folder / MODEL).read_metadata().planner_data or {}
            saved = {path[2] for path in found.values() if path[:2] == ("optimizer", "state")}
            kept: Any = optimizer["state"]
            for name in kept.keys() - saved:
                del kept[name]
        with warnings.catch_warnings():  # which torch gives although it is told so
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            how(state, checkpoint_id=folder / MODEL, no_dist=not dist.is_initialized())
        if has_begun is not None:
            set_state_dict(
                self.model,
                optimizers,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=StateDictOptions(strict=False),  # keys and shapes were compared
            )
            if self.optimizer is not None and not begun:
                self.optimizer.state.clear()

    def _parts(self) -> dict[str, str]:
        """Of this rank, by name."""
        own = {"collector": self.collector, "pacer": self.pacer, "updater": self.updater}
        parts = own | {"optimizer": self.optimizer} | self._others
        return {name: type(one).__name__ for name, one in parts.items() if one is not None}

    def _about(self) -> dict[str, Any]:
        """What a save must have in common with the program that loads it."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {
            "format": FORMAT,
            "settings": self._settings,
            "groups": [len(one["params"]) for one in groups],
            "tensors": {
                name: [[*one.shape], str(one.dtype)]
                for name, one in self.model.state_dict().items()
                if isinstance(one, torch.Tensor)
            },
        }

    def _found(self, root: Path) -> tuple[Path, dict[str, Any]]:
        """The newest save, which is whole and of a program like this one."""
        folder, about = newest_save(root, reads=_place()[0] == 0)  # what fails there fails here
        for name, mine in ({"num_ranks": _place()[1]} | self._about()).items():
            _require(folder, name, mine, about.get(name))
        return folder, about


@contextlib.contextmanager
def only_writer(root: Path, timeout_s: float = 0.0) -> Iterator[None]:
    """Refuses others that save there at the same time; one that is there has so long to end."""
    root.mkdir(parents=True, exist_ok=True)
    path, deadline = root / ".writer", Deadline(timeout_s)
    with path.open("a") as file, contextlib.ExitStack() as locked:
        try:
            while not take_lock(file.fileno()):
                if deadline.passed:
                    raise RunStateError(str(root), f"{lock_holders(path)} saves there")
                time.sleep(0.05)
            # Said, as a child that was forked by then would keep it.
            locked.callback(fcntl.flock, file, fcntl.LOCK_UN)
        except OSError as error:  # some file systems of clusters have no locks
            logger.warning("%s cannot be locked, nor others be kept from it: %s", root, error)
        yield


def newest_save(root: Path, *, reads: bool = True) -> tuple[Path, dict[str, Any]]:
    """The folder of the newest save, which is whole, and what its ``run.json`` says."""
    saves = [root] if (root / ABOUT).exists() else [*root.glob(f"{SAVED}*")]
    if not saves:
        raise RunStateError(str(root), "there is no saved run")
    folder = max(saves, key=_step_of)
    try:
        about = json.loads((folder / ABOUT).read_text())
        files, _ = dict(about["files"]), int(about["step"])
        about["settings"] = dict(about.get("settings", {}))  # earlier saves have none
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{ABOUT} is not what a save has: {error!r}"
        raise RunStateError(str(folder), reason) from error
    there = _sums(folder, reads=reads)
    for name, saved_as in files.items():
        # Without a checksum it was saved so, or another rank reads it.
        known = min(there.get(name, ""), saved_as, key=len)
        if not known or not (there[name].startswith(known) and saved_as.startswith(known)):
            reason = f"{name} has {there.get(name)}, where {saved_as} were saved"
            raise RunStateError(str(folder), reason)
    return folder, about


def _begun(root: Path, step: int | None) -> int:
    """The number of a save, for which there is a folder now."""
    newest = max(map(_step_of, root.glob(f"{SAVED}*")), default=-1)
    number = newest + 1 if step is None else step
    check_integer("step", number, 0)
    if number <= newest:
        raise RunStateError(str(root), f"step {newest} is saved already, {number} is not later")
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{UNFINISHED}*"):  # by one that was killed
        remove_folder(left)
    (root / f"{UNFINISHED}{number:08d}").mkdir()
    return number


def _require(folder: Path, name: str, mine: Any, saved: Any) -> None:
    """Raises if something of this program is not as in the one that saved."""
    if isinstance(mine, dict) and isinstance(saved, dict):
        for key in sorted({*mine} | {*saved}):
            _require(folder, f"{name}: {key}", mine.get(key), saved.get(key))
    elif mine != saved:
        raise RunStateError(str(folder), f"{name} is {saved}, and here {mine}")


@contextlib.contextmanager
def _together(root: Path) -> Iterator[list[Any]]:
    """What fails on one rank fails on all; what the first puts into the list, all get."""
    problem, given = None, list[Any]()
    try:
        yield given
    except Exception as error:  # noqa: BLE001  raised below
        problem = error
    if dist.is_initialized():
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (problem and str(problem), given))
        for rank, (one, _) in enumerate(told):
            if one is not None and problem is None:
                raise RunStateError(str(root), f"rank {rank}: {one}")
        given[:] = told[0][1]
    if problem is not None:
        raise problem


def _place() -> tuple[int, int]:
    """This rank of the trainer, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _step_of(folder: Path) -> int:
    number = folder.name.removeprefix(SAVED)
    return int(number) if number.isdecimal() else -1


def _sums(folder: Path, *, reads: bool = True) -> dict[str, str]:
    """Of each file its size and a checksum; without reading, of what is unpickled alone."""

    def of(path: Path) -> str:
        told = f"{path.stat().st_size} bytes"
        if path.suffix == ".distcp" and not reads:
            return told
        with path.open("rb") as file:
            made: Any = xxhash.xxh3_64
            return f"{told} of xxh3 {hashlib.file_digest(file, made).hexdigest()}"

    paths = [one for one in folder.rglob("*") if one.is_file() and one.name != ABOUT]
    with ThreadPoolExecutor() as pool:
        told = pool.map(of, paths)
        return {
            one.relative_to(folder).as_posix(): sum_ for one, sum_ in zip(paths, told, strict=True)
        }


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# What gives the state of random numbers, and what sets it.
_RANDOM: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "cuda": (
        lambda: torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        lambda states: torch.cuda.set_rng_state_all(states[: torch.cuda.device_count()]),
    ),
    "numpy": (np.random.get_state, np.random.set_state),
    "python": (random.getstate, random.setstate),
}


def _set_random_states(states: dict[str, Any]) -> None:
    for name, state in states.items():
        _RANDOM[name][1](state)
