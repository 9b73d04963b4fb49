"""Rollouts of one turn as columns: prompts go in and dense rows come out, with their rewards."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import ray
import torch
import xxhash
from ray.exceptions import RayTaskError
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.data import RayReplayBuffer, ReplayBuffer, Unbounded
from torchrl.envs import StepCounter, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv, DataLoadingPrimer
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.envs.transforms import Compose
from torchrl.modules.llm.policies import ChatHistory

from torchrl_vllm_sync.checks import Deadline, check_integer
from torchrl_vllm_sync.errors import (
    InvalidPromptError,
    PacingError,
    PacingTimeoutError,
    RewardError,
    UnsupportedArgumentError,
)
from torchrl_vllm_sync.requests.background import start
from torchrl_vllm_sync.rl.guards import check_tokenizers, named
from torchrl_vllm_sync.rl.pacing import Pacer, Ticket
from torchrl_vllm_sync.rl.policy import vLLMWrapper
from torchrl_vllm_sync.rl.rows import ATTENTION, Columns, Padding, Texts, joined

logger = logging.getLogger(__name__)

_NUMBERS = itertools.count()


class TextReward(Transform):
    """Reward of an answer: what a function says of a whole batch of prompts and answers.

    Append it to a ``ChatEnv``, of this library's :class:`RolloutCollector` or of any collector.

    Example:
        >>> def right(prompts, answers, *, answer):
        ...     return [float(wanted in said) for wanted, said in zip(answer, answers)]
        >>> env = env.append_transform(TextReward(right))

    Args:
        fn: Called once a batch as ``fn(prompts, answers, **columns)``. ``prompts`` are the data
            set's questions (the environment's ``data_key``) and ``answers`` the texts, without
            special tokens; of the data set's other columns it gets those that it names, or all if
            it takes ``**columns``, each a list with a value a row. Returns a number for each row,
            as a sequence or a tensor of shape ``(num_rows,)``.
        over: ``"text"``, or ``"ids"``: then ``answers`` are lists of token ids, the ended ones with
            their end.
        tokenizer: Decodes the answers; the environment's if left out.

    Raises:
        UnsupportedArgumentError: ``over`` is another word, ``fn`` does not take two arguments, or
            there is no tokenizer to decode with.
        RewardError: When a batch is scored: not one number for each row, a number that is not
            finite, or a column that the data set lacks.
    """

    def __init__(
        self, fn: Callable[..., Any], *, over: str = "text", tokenizer: Any = None
    ) -> None:
        if over not in ("text", "ids"):
            raise UnsupportedArgumentError(f"over must be 'text' or 'ids', got {over!r}")
        super().__init__()
        self._fn, self._over, self._tokenizer = fn, over, tokenizer
        self._name = getattr(fn, "__name__", type(fn).__name__)
        self._told = f"TextReward({self._name})"
        signature = inspect.signature(fn)
        parameters = signature.parameters.values()
        self._takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        given = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        try:
            signature.bind_partial("prompts", "answers")
        except TypeError as error:
            told = f"{self._name} must take (prompts, answers, **columns)"
            raise UnsupportedArgumentError(f"{told}, and does not: {error}") from error
        self._second = given[1].name if given[1:] else ""
        self._columns = {one.name: one.default is one.empty for one in given[2:]}

    def _check_decodes(self, chat: ChatEnv, policy: vLLMWrapper) -> None:
        """Refuses a tokenizer that reads the policy's tokens as others."""
        tokenizer = self._tokenizer or chat.tokenizer
        if self._over == "text" and tokenizer is not None:
            mine, its = named(tokenizer), named(policy.tokenizer)
            names = f"{self._told}'s {mine}", f"the policy's {its}"
            check_tokenizers(tokenizer, policy.tokenizer, names)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rewards = self._rewards(tensordict if tensordict.ndim == 1 else tensordict.reshape(-1))
        next_tensordict["reward"] = rewards.view(*next_tensordict.batch_size, 1, 1)
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        """Returns the environment's specification with a float32 of ``(*batch_size, 1, 1)``.

        Args:
            reward_spec: The environment's, which is changed.
        """
        shape = torch.Size((*reward_spec.shape, 1, 1))
        reward_spec["reward"] = Unbounded(shape=shape, dtype=torch.float32)
        return reward_spec

    def _rewards(self, rows: Any) -> torch.Tensor:
        env: Any = self.parent
        if env is None:
            raise UnsupportedArgumentError(f"{self._told} is not part of an environment")
        chat = env.base_env
        answers: Any = _arrays(rows.get(("tokens", "response"), as_list=True))
        masks = rows.get(ATTENTION, None, as_list=True)
        if masks is not None:  # where answers may be padded
            pairs = zip(answers, _arrays(masks), strict=True)
            answers = [one[mask[len(mask) - len(one) :]] for one, mask in pairs]
        if self._over == "text":
            tokenizer = self._tokenizer or chat.tokenizer
            if tokenizer is None:
                told = f"{self._told} needs a tokenizer, as the environment has none"
                raise UnsupportedArgumentError(told)
            # Arrays, as of a list each number would be looked at in Python.
            answers = tokenizer.batch_decode(answers, skip_special_tokens=True)
        else:
            answers = [one.tolist() for one in answers]
        primers = [one.primers for one in _transforms(env) if isinstance(one, DataLoadingPrimer)]
        known: list[Any] = [name for one in primers for name in one.keys()]  # noqa: SIM118
        missing = [one for one, needed in self._columns.items() if needed and one not in known]
        if missing:
            raise RewardError(f"{self._name} wants the column {missing[0]!r}; there are {known}")
        if self._second in {*known} - {chat.data_key}:
            told = "gets the answers' texts by position, and not the column of its name"
            logger.warning("%s: argument %r %s", self._name, self._second, told)
            self._second = ""  # once
        names = {*known} - {chat.data_key} if self._takes_all else {*known} & {*self._columns}
        columns = {one: _listed(rows.get(one)) for one in names}
        given = self._fn(_listed(rows.get(chat.data_key)), answers, **columns)
        try:
            rewards = torch.as_tensor(given, dtype=torch.float32).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise RewardError(f"{self._name} returned no numbers: {error}") from error
        if (shape := tuple(rewards.shape)) != (len(rows),):
            raise RewardError(f"{self._name} returned shape {shape} for {len(rows)} rows")
        if bad := (~rewards.isfinite()).nonzero().flatten().tolist():
            raise RewardError(f"{self._name} returned {rewards[bad[0]]} for row {bad[0]}")
        return rewards


def _arrays(entry: Any) -> Any:
    """The values of each row, dense or ragged, as an array."""
    is_dense = isinstance(entry, torch.Tensor)
    return entry.cpu().numpy() if is_dense else [one.cpu().numpy() for one in entry]


def _listed(column: Any) -> list[Any]:
    return column if isinstance(column, list) else column.tolist()


def _transforms(env: TransformedEnv) -> list[Transform]:
    return [*env.transform] if isinstance(env.transform, Compose) else [env.transform]


def _primer(env: TransformedEnv) -> DataLoadingPrimer:
    return next(one for one in _transforms(env) if isinstance(one, DataLoadingPrimer))


class RolloutCollector(LLMCollector):
    """TorchRL's ``LLMCollector``, which gives rows of one turn dense: as tensors of the batch.

    Of a ``ChatEnv.from_dataloader`` with ``StepCounter(max_steps=1)`` and :class:`TextReward` the
    rows are those of TorchRL's collector, key by key, in one ``TensorDict`` of batch size
    ``(num_rows,)``: prompts are padded on the left, answers on the right, and text and histories
    are made when they are looked at. All other environments and policies are collected as TorchRL
    does it.

    Attributes:
        path: ``"columns"``, or ``"torchrl: ..."`` and why.
        name: What errors of a pacer call this collector; one whose Ray actor began anew has it
            again.

    Args:
        env: The environment, or a function that makes it.
        max_staleness: How many pushes the weights that sample a row may be behind those that the
            trainer has when it gets the row, if it pushes at most once a batch. 0 samples when it
            is asked for; with ``k`` up to ``k`` batches are sampled while one is scored and the
            trainer works on another, by threads. Batches come in the order of the data set, none of
            their rows is discarded, and a long answer goes on across pushes until its batch is
            due: see :class:`Pacer`. With ``yield_completed_trajectories=True``, unless it is 0,
            batches are of those whole groups (rows of one item of the data set) that finish first
            instead. They are scored as they finish, one or several at a time, while as many rows
            are sampled for the next batch. What would be too old for that is waited for.
        pacer: One that several collectors share, instead of ``max_staleness``. Each samples one
            batch at a time, of which its ``replay_buffer`` gets the rows when those of all earlier
            batches are there. All read the same data set, and ask for the rows that are theirs;
            where :attr:`path` is TorchRL's, each has a data set of its own.
        keep: Called with the scored rows of each group, of batch size ``(group_size,)``. If it
            returns false, the group is replaced by the next of the data set.
        **kwargs: ``LLMCollector``'s arguments; ``flatten_data`` is ``True`` unless said otherwise.

    Raises:
        UnsupportedArgumentError: ``max_staleness`` is none of these, or it is not 0, or ``keep`` is
            given, where only TorchRL's way serves, or where batches would not be of whole groups;
            or the pacer's batches and this collector's do not go together.
        TokenizerMismatchError: Answers would be decoded otherwise than the policy encodes.
        RewardError: While iterating, see :class:`TextReward`.
        PacingError: While iterating, see :class:`Pacer`. Whatever fails ends a collector, as
            TorchRL's; what it was sampling is then sampled by another of its pacer.
    """

    env: Any
    policy: Any

    def __init__(
        self,
        env: Any,
        *,
        max_staleness: int = 0,
        pacer: Pacer | None = None,
        keep: Callable[[TensorDict], bool] | None = None,
        **kwargs: Any,
    ) -> None:
        by_group = bool(kwargs.get("yield_completed_trajectories"))
        check_integer("max_staleness", max_staleness, 0)
        if pacer is not None and (max_staleness or by_group):
            given = "yield_completed_trajectories" if by_group else "max_staleness"
            raise UnsupportedArgumentError(f"{given} is not for a collector with a pacer")
        if not kwargs.get("yield_only_last_steps") and kwargs.get("flatten_data") is None:
            kwargs["flatten_data"] = True
        is_flat = kwargs.get("flatten_data") and (max_staleness or not by_group)
        self.path, self.max_staleness, self._is_flat = "", max_staleness, bool(is_flat)
        self.name, self._keep, self._stop = _own_name(), keep, False
        self._pacer: Any = pacer
        self._is_own, self._threads = pacer is None, list[ThreadPoolExecutor]()
        # Batches that are under way, the one that is being handed on, and rows that were.
        self._ahead: deque[tuple[Ticket, Callable[[], Any]]] = deque()
        self._ticket: Ticket | None = None
        self._num_untrained = 0
        self._items: dict[int, Any] = {}  # of the data set, by row
        self._num_loaded, self._loading = 0, threading.Lock()
        self._prompts_sum = 0  # of all rows that were loaded, in their order
        self._last_asked: tuple[Any, bytes] = None, b""
        # Groups that are not handed on, each with the version when it was sent: none of its tokens
        # is of an older one. As they end, they become ready.
        self._groups: dict[Future[Any], int] = {}
        self._ended: SimpleQueue[Future[Any]] = SimpleQueue()
        self._ready: list[Future[Any]] = []
        self._unscored, self._scoring = SimpleNamespace(groups=[], rows=None), asyncio.Lock()
        self._by_group, self._turns = by_group, kwargs.get("dialog_turns_per_batch") or 1
        with warnings.catch_warnings():  # TorchRL 0.14 announces what 0.15 will do instead
            for notice in ("The env passed to LLMCollector", "Using WeightUpdaterBase"):
                warnings.filterwarnings("ignore", notice)
            super().__init__(env, **kwargs)
        if keep is not None:
            _primer(self.env)._queue.clear()  # what is left of a group that was taken in part
        if max_staleness:
            at_once = 1 if self.policy._model_type == "sync_vllm" else max_staleness + 1
            names = {"answers": at_once, "rewards": 1}
            self._threads = [ThreadPoolExecutor(n, f"rollouts-{name}") for name, n in names.items()]

    @property
    def rollout(self) -> Callable[[], TensorDictBase]:
        """What gives the next batch."""
        if self._pacer is not None:
            return self._rollout_paced
        return self._rollout_groups if self.path == "columns" else super().rollout

    def iterator(self) -> Iterator[TensorDictBase]:
        """Yields batches, or None for each that went into the buffer."""
        try:
            yield from self._handed_on()
        except (RuntimeError, CancelledError):
            own = getattr(self, "_thread", None)  # in which what :meth:`shutdown` ends fails
            if not self._stop or threading.current_thread() is not own:
                raise

    def _handed_on(self) -> Iterator[TensorDictBase]:
        for batch in self._written():
            if self._ticket is not None:
                self._deliver()
            if self._sleeps:
                self.policy.model.sleep(2, "keep")
            yield batch
            if self._sleeps:
                self.policy.model.wake_up()  # as a push has; or says that none came
        if self._ahead and not self._is_own:  # what it took over from another was its last
            self._ahead.clear()
            self._pacer._call("leave", self.name)

    def _written(self) -> Iterator[TensorDictBase]:
        """Batches once they are in the buffer; the pacer is told of one that this has refused."""
        try:
            yield from super().iterator()
        except Exception as error:
            # What an actor has done that does not answer, only its count says.
            is_away = isinstance(self.replay_buffer, RayReplayBuffer)
            if self._ticket is not None and (isinstance(error, RayTaskError) or not is_away):
                self._pacer._tell("unwrite", self.name, self._ticket.number)
            raise

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Ends the collector; what is being sampled ahead is not waited for, groups are cancelled.

        Args:
            *args, **kwargs: ``LLMCollector``'s.
        """
        self._stop = True
        for group in [*self._groups]:
            group.cancel()
        for one in self._threads:
            one.shutdown(wait=False, cancel_futures=True)
        if self._pacer is not None:
            self._pacer._tell("leave", self.name)
        super().shutdown(*args, **kwargs)

    def async_shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Ends the collector once its thread has handed its batch on; with a pacer, at once.

        Args:
            *args, **kwargs: ``LLMCollector``'s.
        """
        (super().async_shutdown if self._is_own else self.shutdown)(*args, **kwargs)

    def state_dict(self) -> Any:
        """Returns TorchRL's state; where :attr:`path` is ``"columns"``, also which rows come next.

        Batches that are sampled ahead are waited for, and are part of it. Those of a pacer that is
        shared are not: they are sampled anew.
        """
        state = super().state_dict()
        if self.path == "columns":
            ahead = [(one.number, rows().clone()) for one, rows in self._ahead if self._is_own]
            with self._loading:
                state["num_loaded"], state["prompts_sum"] = self._num_loaded, self._prompts_sum
            state["num_untrained"], state["ahead"] = self._num_untrained, ahead
            state["dialog_turns_per_batch"] = self.dialog_turns_per_batch
            if self._is_own and not self._by_group:  # which has none, and is refused by a load
                state["pacer"] = self._pacer.state_dict()
        return state

    def load_state_dict(self, state_dict: Any, **kwargs: Any) -> None:
        """Goes on from the state of another collector; a pacer that is shared has its own.

        Args:
            state_dict: The state.
            **kwargs: ``LLMCollector``'s.

        Raises:
            UnsupportedArgumentError: The state is of another data set or of other batches, or
                where either :attr:`path` is TorchRL's; the collector is as it was, as after the
                next.
            PacingError: The collector has begun.
        """
        if self.path == "columns" or "num_loaded" in state_dict:
            self._check_state(state_dict)
            if self._is_own:
                self._pacer.load_state_dict(state_dict["pacer"])
            for number, rows in state_dict["ahead"]:
                ticket = self._pacer._call("admit", self.name)
                if ticket is None or ticket.number != number:
                    raise PacingError(f"batch {number} was under way, and the pacer has {ticket}")
                self._ahead.append((ticket, lambda rows=rows: rows))
            self._num_untrained = state_dict["num_untrained"]
        super().load_state_dict(state_dict, **kwargs)

    def _check_goes_on(self) -> None:
        """Refuses ways of collecting in which no row has a place of its own."""
        if self.path != "columns" or self._by_group:
            how = "yield_completed_trajectories" if self._by_group else f"path {self.path!r}"
            raise UnsupportedArgumentError(f"a collector goes on by columns only, not with {how}")

    def _check_state(self, state: Any) -> None:
        """Refuses a state that this collector cannot go on from; reads the data set up to it."""
        self._check_goes_on()
        if "num_loaded" not in state or self._is_own != ("pacer" in state):
            raise UnsupportedArgumentError(
                "a state of a collector by columns is wanted, whose pacer is shared as this one's"
            )
        if self._is_own:
            self._pacer._call("check_state", state["pacer"])
        if self._frames or self._ahead:
            raise PacingError(f"a state is loaded before the first batch, not by {self.name}")
        its, mine = state["dialog_turns_per_batch"], self.dialog_turns_per_batch
        if its != mine:
            told = f"dialog_turns_per_batch is {mine}, where it was {its} in the state"
            raise UnsupportedArgumentError(told)
        with self._loading:
            self._load(num_rows := state["num_loaded"])
            found = 0
            for row in range(num_rows):
                found = self._summed(self._items[row], found)
        if found != state["prompts_sum"]:
            told = f"the data set's first {num_rows} rows have other prompts than in the state"
            raise UnsupportedArgumentError(told)

    def _load(self, end: int) -> None:
        """Reads the data set up to a row."""
        primer = _primer(self.env)
        for row in range(self._num_loaded, end):
            self._items[row] = item = primer._load_from_dataloader()
            self._num_loaded, self._prompts_sum = row + 1, self._summed(item, self._prompts_sum)

    def _summed(self, item: Any, before: int) -> int:
        """A checksum of an item's prompt, and of all before it."""
        if item is not self._last_asked[0]:  # a group's rows are one object
            asked = item[self.env.base_env.data_key]
            if not isinstance(asked, str):
                (asked,) = _listed(_column([asked]))
            self._last_asked = item, str(asked).encode()
        return xxhash.xxh3_64_intdigest(self._last_asked[1], before)

    def _maybe_setup_policy_env_transforms(self, env: Any, policy: Any) -> Any:
        # Before LLMCollector holds anything of the caller's. As it does, no InitTracker is added,
        # which Collector warns that a later TorchRL will do.
        why_not = self._why_not(env, policy)
        self.path = "columns" if why_not is None else f"torchrl: {why_not}"
        if (self.max_staleness or self._keep) and why_not:
            given = f"max_staleness={self.max_staleness}" if self.max_staleness else "keep"
            raise UnsupportedArgumentError(f"{given}, path {self.path!r}")
        for one in _transforms(env) if why_not is None else ():
            if isinstance(one, TextReward):
                one._check_decodes(env.base_env, policy)
        self._sleeps = isinstance(policy, vLLMWrapper) and getattr(policy.model, "colocated", False)
        if self._sleeps and (self.max_staleness or not self._is_own):
            told = (
                "colocate=True has engines sleep while the trainer works: max_staleness must be 0"
            )
            raise UnsupportedArgumentError(f"{told}, and no pacer be shared")
        if self._keep and self._by_group:
            raise UnsupportedArgumentError("keep is not for yield_completed_trajectories=True")
        num_envs = env.batch_size.numel()
        num_rows = -(-self._turns // num_envs) * num_envs  # as TorchRL rounds
        if (self._by_group or self._keep) and why_not is None and num_rows % _group_size(env):
            told = f"batches of {num_rows} rows (dialog_turns_per_batch)"
            raise UnsupportedArgumentError(f"{told} are not of whole groups of {_group_size(env)}")
        if self._is_own and why_not is None and not self._by_group:
            self._pacer = Pacer(self.max_staleness, num_rows)
        if self._pacer is not None:
            self._pacer._call("join", self.name, num_rows, 0 if why_not else num_envs)
        return env

    def _why_not(self, env: Any, policy: Any) -> str | None:
        """Why there is no fast way for the environment and the policy."""
        base = getattr(env, "base_env", env)
        if not isinstance(env, TransformedEnv) or type(base) is not ChatEnv:
            return f"the environment is no ChatEnv but {type(base).__name__}"
        if env.base_env.input_mode != "history" or len(env.batch_size) != 1:
            return f"input_mode={env.base_env.input_mode!r}, batch_size={tuple(env.batch_size)}"
        first, *others = _transforms(env) or [None]
        if type(first) is not DataLoadingPrimer:
            return f"prompts come from {type(first).__name__}"
        for one in others:
            if not isinstance(one, (StepCounter, TextReward, PolicyVersion)):
                return f"{type(one).__name__} looks at rows"
        if not any(isinstance(one, StepCounter) and one.max_steps == 1 for one in others):
            return "there may be several turns, as there is no StepCounter(max_steps=1)"
        if not isinstance(policy, vLLMWrapper):
            return f"the policy is no torchrl_vllm_sync.vLLMWrapper but {type(policy).__name__}"
        settings = {"generate": True, "input_mode": "history", "num_samples": None}
        settings |= {"prefer_tokens": False, "batching": False, "inplace": True}
        for name, wanted in settings.items():
            if getattr(policy, name) != wanted:
                return f"the policy has {name}={getattr(policy, name)!r}"
        if policy.sampling_params.prompt_logprobs is not None:
            return "the policy asks for log-probabilities of prompts"
        if not self._is_flat:
            return "whole trajectories are asked for with max_staleness=0, or rows by step"
        return None

    def _rollout_groups(self) -> TensorDict:
        """A batch of the groups that end first, while as many others are on their way."""
        if self._stop:
            raise PacingError("the collector was shut down")
        number = self.dialog_turns_per_batch // _group_size(self.env)
        is_last = self._frames + self.dialog_turns_per_batch >= self.total_frames
        self._send_groups((1 if is_last else 2) * number - len(self._groups))
        while True:
            oldest = self.policy.model.weight_version - self.max_staleness
            # Those that would be too old after one more push.
            due = {one for one, version in self._groups.items() if version <= oldest}
            if len(self._ready) >= number and due <= {*self._ready}:
                break
            self._ready.append(one := self._ended.get())
            one.result()  # or what has failed
        chosen = sorted(self._ready, key=lambda one: one not in due)[:number]
        for one in chosen:
            del self._groups[one]
            self._ready.remove(one)
        rows = joined([Columns.of(one.result()()) for one in chosen], self._padding())
        return rows.trimmed(torch.arange(len(rows))).rows()

    def _padding(self) -> Padding:
        padding = Padding(self.policy.padding_value)
        padding.answers = {(self.policy.log_probs_key, name): 0.0 for name in ("response", "full")}
        return padding

    def _send_groups(self, number: int) -> None:
        primer, size = _primer(self.env), _group_size(self.env)
        loaded = [primer._load_from_dataloader() for _ in range(number * size)][::size]
        version = self.policy.model.weight_version
        sent = self.policy._asked(self._chats(loaded), size) if loaded else ()
        for item, asked in zip(loaded, sent, strict=True):
            group = start(self._group(item, asked))
            self._groups[group] = version
            group.add_done_callback(self._ended.put)

    async def _group(self, item: Any, asked: Any) -> Callable[[], TensorDict]:
        """What gives the rows of a group, once it is answered and scored."""
        outputs, together = await asked, self._unscored
        at, size = len(together.groups), len(outputs)
        together.groups.append((item, outputs))
        async with self._scoring:
            if together.rows is None:  # with all that were answered while others were scored
                self._unscored = SimpleNamespace(groups=[], rows=None)
                run = asyncio.get_running_loop().run_in_executor
                together.rows = run(self._threads[-1], self._score_groups, together.groups)
                await asyncio.gather(together.rows, return_exceptions=True)
        rows = await together.rows
        return lambda: rows[at * size : (at + 1) * size]

    def _score_groups(self, groups: list[tuple[Any, list[Any]]]) -> TensorDict:
        loaded, outputs = zip(*groups, strict=True)
        of_row = [at for at, each in enumerate(outputs) for _ in each]
        answers = [one for each in outputs for one in each]
        return self._scored(self._answers(loaded, of_row, outputs=answers))

    def _rollout_paced(self) -> TensorDictBase:
        """The next batch of those that the pacer admits."""
        pacer, ahead = self._pacer, self._ahead
        if self._is_own:
            pacer.trained(self._num_untrained)  # as it asks for more
            self._num_untrained, num_rows = 0, self.dialog_turns_per_batch
            while self._frames + len(ahead) * num_rows < self.total_frames:
                if (ticket := pacer._call("admit", self.name)) is None:
                    break
                ahead.append((ticket, self._begun(ticket)))
        elif not ahead:
            ticket = pacer._call("admit", self.name, waits=True)
            ahead.append((ticket, self._begun(ticket)))
        while True:
            ticket, rows = ahead[0][0], None
            if not ticket.may_be_written or self._has_to_write(ticket):
                rows = ahead[0][1]()
                ahead[0] = ticket, lambda rows=rows: rows
            turn = pacer._call("turn", self.name, ticket.number, waits=True)
            if turn is True:
                self._ticket = ahead.popleft()[0]
                if rows is not None and self._has_to_write(ticket):
                    return rows
                self._deliver()
                return self._rollout_paced()
            ahead.appendleft((turn, self._begun(turn)))  # given back by another

    def _has_to_write(self, ticket: Ticket) -> bool:
        """Whether the rows are not in the buffer already, of a collector that died thereafter."""
        buffer = self.replay_buffer
        if self._is_own or not isinstance(buffer, ReplayBuffer):
            return True
        return self._pacer._call("write", self.name, ticket.number, buffer.write_count)

    def _deliver(self) -> None:
        assert self._ticket is not None
        self._pacer._call("deliver", self.name, self._ticket.number)
        self._num_untrained, self._ticket = len(self._ticket.rows), None

    def _begun(self, ticket: Ticket) -> Callable[[], TensorDictBase]:
        """What gives a batch that is under way, if there are threads for it."""
        if self.path != "columns":
            return super().rollout
        with self._loading:
            items = self._items.items()
            self._items = {row: item for row, item in items if row >= ticket.oldest}
        # TorchRL lays steps of the environment out side by side.
        each = self.env.batch_size[0]
        rows = [one for at in range(each) for one in ticket.rows[at::each]]

        def scored(answered: Callable[[], TensorDict]) -> TensorDict:
            return self._kept(ticket, rows, self._scored(answered()))

        if not self._threads:
            return partial(scored, partial(self._answered, rows))
        answering, scoring = self._threads
        return scoring.submit(scored, answering.submit(self._answered, rows).result).result

    def _answered(self, rows: Sequence[int]) -> TensorDict:
        """Prompts and answers; several steps of the environment, which are independent, are one."""
        with self._loading:
            self._load(max(rows) + 1)
            loaded = [self._items[row] for row in rows]
        distinct = list({id(one): one for one in loaded}.values())  # a group's rows are one object
        places = {id(one): at for at, one in enumerate(distinct)}
        return self._answers(distinct, [places[id(one)] for one in loaded], numbers=rows)

    def _kept(self, ticket: Ticket, numbers: Sequence[int], rows: TensorDict) -> TensorDict:
        """A batch's rows, with other groups in place of those that are not kept."""
        if self._keep is None:
            return rows
        size, deadline = _group_size(self.env), Deadline(self._pacer.timeout_s)
        where, unseen = {row: at for at, row in enumerate(numbers)}, ticket.rows
        while True:
            columns, dropped = Columns.of(rows), list[int]()
            for at in range(0, len(unseen), size):
                group = unseen[at : at + size]
                index = torch.tensor([where[row] for row in group])
                dropped += () if self._keep(columns.take(index).rows()) else group
            if not dropped:
                return rows
            if deadline.passed:
                raise PacingTimeoutError("keep", self._pacer.timeout_s, f"row {dropped[0]}")
            unseen = self._pacer._call("replace", self.name, ticket.number, dropped)
            more = Columns.of(self._scored(self._answered(unseen)))
            index = torch.arange(len(rows))
            for at, (old, new) in enumerate(zip(dropped, unseen, strict=True)):
                where[new] = where.pop(old)
                index[where[new]] = len(rows) + at
            rows = joined([columns, more], self._padding()).trimmed(index).rows()

    def _chats(self, loaded: Sequence[Any]) -> list[list[dict[str, Any]]]:
        """What is asked with each item of the data set."""
        chat = self.env.base_env
        asked = _listed(_column([one.get(chat.data_key) for one in loaded]))
        if strange := [one for one in asked if not isinstance(one, str)]:
            told = f"{chat.data_key!r} is {strange[0]!r}; LLMCollector takes chats, too"
            raise InvalidPromptError(f"RolloutCollector takes texts for prompts, {told}")
        before = [] if chat.system_prompt is None else [(chat.system_role, chat.system_prompt)]
        return [
            [{"role": role, "content": said} for role, said in (*before, (chat.user_role, query))]
            for query in asked
        ]

    def _answers(self, loaded: Sequence[Any], of_row: list[int], **given: Any) -> TensorDict:
        """The policy's rows, with what the data set has of each."""
        rows = self.policy.answer_chats(self._chats(loaded), of_row, **given)
        for name in _primer(self.env).primers.keys():  # noqa: SIM118  a Composite
            if name in {*rows.keys(), "next"}:
                told = "is what the rows' own entry is called: give the data set's another name"
                raise InvalidPromptError(f"{name!r} {told}")
            rows[name] = _column([one.get(name) for one in loaded])[of_row]
        return rows

    def _scored(self, rows: TensorDict) -> TensorDict:
        """The environment's step, by its own transforms."""
        env, num_rows = self.env, rows.numel()
        step = rows.select(*_primer(env).primers.keys())
        if (history := rows.get("history", None)) is not None:  # which agents have none of
            full = TensorDict({"prompt": history.full}, num_rows)
            step["history"] = ChatHistory._from_tensordict(full)
        for of in (rows, step):
            for name, spec in env.full_done_spec.items(True, True):
                of[name] = torch.zeros(num_rows, *spec.shape[1:], dtype=spec.dtype)
        for transform in _transforms(env)[1:]:
            for name in transform.step_count_keys if isinstance(transform, StepCounter) else ():
                rows[name] = torch.zeros(num_rows, 1, dtype=torch.int64)
            step = transform._step(rows, step)
        rows["next"] = step
        return rows


def _own_name() -> str:
    """The name of a collector: the same again where Ray restarts its actor."""
    actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id()
    place = f"actor {actor}" if actor else f"process {os.getpid()} of {os.uname().nodename}"
    return f"collector {next(_NUMBERS)} of {place}"


def _group_size(env: Any) -> int:
    return max(1, _primer(env).repeats)


def _column(values: list[Any]) -> Any:
    """One value a row, texts and others that are no tensors as they are."""
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    return Texts.of([one.data if isinstance(one, NonTensorData) else one for one in values])
