"""Rollouts of one turn as columns: prompts go in and dense rows come out, with their rewards."""

from __future__ import annotations

import inspect
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorData, TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Unbounded
from torchrl.envs import StepCounter, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv, DataLoadingPrimer
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.envs.transforms import Compose
from torchrl.modules.llm.policies import ChatHistory

from torchrl_vllm_sync.errors import InvalidPromptError, RewardError, UnsupportedArgumentError
from torchrl_vllm_sync.rl.policy import check_tokenizers, named, vLLMWrapper
from torchrl_vllm_sync.rl.rows import ATTENTION
from torchrl_vllm_sync.rl.texts import Texts

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from tensordict import TensorDictBase


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
        UnsupportedArgumentError: ``over`` is another word, or there is no tokenizer to decode with.
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
        parameters = inspect.signature(fn).parameters.values()
        self._takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        given = [one for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        self._columns = {one.name: one.default is one.empty for one in given[2:]}

    def _check_decodes(self, chat: ChatEnv, policy: vLLMWrapper) -> None:
        """Refuses a tokenizer that reads the policy's tokens as others."""
        tokenizer = self._tokenizer or chat.tokenizer
        if self._over == "text" and tokenizer is not None:
            mine, its = named(tokenizer), named(policy.tokenizer)
            names = f"TextReward({self._name})'s {mine}", f"the policy's {its}"
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
            raise UnsupportedArgumentError(
                f"TextReward({self._name}) is not part of an environment"
            )
        chat = env.base_env
        answers: Any = _arrays(rows.get(("tokens", "response"), as_list=True))
        masks = rows.get(ATTENTION, None, as_list=True)
        if masks is not None:  # where answers may be padded
            pairs = zip(answers, _arrays(masks), strict=True)
            answers = [one[mask[len(mask) - len(one) :]] for one, mask in pairs]
        if self._over == "text":
            tokenizer = self._tokenizer or chat.tokenizer
            if tokenizer is None:
                raise UnsupportedArgumentError(
                    f"TextReward({self._name}) needs a tokenizer, as the environment has none"
                )
            # Arrays, as of a list each number would be looked at in Python.
            answers = tokenizer.batch_decode(answers, skip_special_tokens=True)
        else:
            answers = [one.tolist() for one in answers]
        primers = [one.primers for one in _transforms(env) if isinstance(one, DataLoadingPrimer)]
        known: list[Any] = [name for one in primers for name in one.keys()]  # noqa: SIM118
        missing = [one for one, needed in self._columns.items() if needed and one not in known]
        if missing:
            raise RewardError(f"{self._name} wants the column {missing[0]!r}; there are {known}")
        names: set[str] = (
            {*known} - {chat.data_key} if self._takes_all else {*known} & {*self._columns}
        )
        columns = {one: _listed(rows.get(one)) for one in names}
        given = self._fn(_listed(rows.get(chat.data_key)), answers, **columns)
        try:
            rewards = torch.as_tensor(given, dtype=torch.float32).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise RewardError(f"{self._name} returned no numbers: {error}") from error
        if rewards.shape != (len(rows),):
            shape = tuple(rewards.shape)
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

    Args:
        env: The environment, or a function that makes it.
        max_staleness: How many pushes the weights that sample a batch may be behind those that the
            trainer has when it gets the batch. 0 samples when it is asked for; with 1 the next
            batch is sampled while this one is scored and the trainer works on it, by threads.
        **kwargs: ``LLMCollector``'s arguments; ``flatten_data`` is ``True`` unless said otherwise.

    Raises:
        UnsupportedArgumentError: ``max_staleness`` is neither 0 nor 1, or it is 1 where only
            TorchRL's way serves.
        TokenizerMismatchError: Answers would be decoded otherwise than the policy encodes.
        RewardError: While iterating, see :class:`TextReward`.
    """

    def __init__(self, env: Any, *, max_staleness: int = 0, **kwargs: Any) -> None:
        if max_staleness not in (0, 1):
            raise UnsupportedArgumentError(f"max_staleness must be 0 or 1, got {max_staleness!r}")
        if not kwargs.get("yield_only_last_steps") and kwargs.get("flatten_data") is None:
            kwargs["flatten_data"] = True
        is_flat = kwargs.get("flatten_data") and not kwargs.get("yield_completed_trajectories")
        self.path, self.max_staleness, self._is_flat = "", max_staleness, bool(is_flat)
        names = ("answers", "rewards") if max_staleness else ()
        self._threads = [ThreadPoolExecutor(1, f"rollouts-{one}") for one in names]
        self._ahead: tuple[Future[TensorDict], Future[TensorDict]] | None = None
        with warnings.catch_warnings():  # TorchRL 0.14 announces what 0.15 will do instead
            for notice in ("The env passed to LLMCollector", "Using WeightUpdaterBase"):
                warnings.filterwarnings("ignore", notice)
            super().__init__(env, **kwargs)

    @property
    def rollout(self) -> Callable[[], TensorDictBase]:
        """What gives the next batch."""
        return self._rollout_columns if self.path == "columns" else super().rollout

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Ends the collector; what is being sampled ahead is not waited for.

        Args:
            *args, **kwargs: ``LLMCollector``'s.
        """
        for one in self._threads:
            one.shutdown(wait=False, cancel_futures=True)
        super().shutdown(*args, **kwargs)

    def _maybe_setup_policy_env_transforms(self, env: Any, policy: Any) -> Any:
        # Before LLMCollector holds anything of the caller's. As it does, no InitTracker is added,
        # which Collector warns that a later TorchRL will do.
        why_not = self._why_not(env, policy)
        self.path = "columns" if why_not is None else f"torchrl: {why_not}"
        if self.max_staleness and why_not:
            given = f"max_staleness={self.max_staleness}"
            raise UnsupportedArgumentError(f"{given}, path {self.path!r}")
        for one in _transforms(env) if why_not is None else ():
            if isinstance(one, TextReward):
                one._check_decodes(env.base_env, policy)
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
            return "whole trajectories are asked for, or rows by step"
        return None

    def _rollout_columns(self) -> TensorDict:
        if not self._threads:
            return self._scored(self._answered())
        answered, scored = self._ahead or self._sent()
        num_rows = answered.result().numel()
        # The trainer is waiting: the next may begin, and be answered while these are scored.
        goes_on = self._frames + num_rows < self.total_frames
        self._ahead = self._sent() if goes_on else None
        return scored.result()

    def _sent(self) -> tuple[Future[TensorDict], Future[TensorDict]]:
        answering, scoring = self._threads
        answered = answering.submit(self._answered)
        return answered, scoring.submit(lambda: self._scored(answered.result()))

    def _answered(self) -> TensorDict:
        """Prompts and answers; several steps of the environment, which are independent, are one."""
        env: Any = self.env
        policy: Any = self.policy
        chat = env.base_env
        num_steps = -(-self.dialog_turns_per_batch // env.batch_size[0])
        num_rows = num_steps * env.batch_size[0]
        primer = _primer(env)
        # TorchRL lays steps out side by side.
        loaded: list[Any] = [primer._load_from_dataloader() for _ in range(num_rows)]
        each = env.batch_size[0]
        loaded = [one for at in range(each) for one in loaded[at::each]]
        distinct = list({id(one): one for one in loaded}.values())  # a group's rows are one object
        places = {id(one): at for at, one in enumerate(distinct)}
        of_row = [places[id(one)] for one in loaded]
        asked = _listed(_column([one.get(chat.data_key) for one in distinct]))
        if strange := [one for one in asked if not isinstance(one, str)]:
            told = f"{chat.data_key!r} is {strange[0]!r}; LLMCollector takes chats, too"
            raise InvalidPromptError(f"RolloutCollector takes texts for prompts, {told}")
        before = [] if chat.system_prompt is None else [(chat.system_role, chat.system_prompt)]
        chats = [
            [{"role": role, "content": said} for role, said in (*before, (chat.user_role, query))]
            for query in asked
        ]
        rows = policy.answer_chats(chats, of_row)
        for name in primer.primers.keys():  # noqa: SIM118  a Composite
            rows[name] = _column([one.get(name) for one in distinct])[of_row]
        return rows

    def _scored(self, rows: TensorDict) -> TensorDict:
        """The environment's step, by its own transforms."""
        env: Any = self.env
        num_rows = rows.numel()
        step = rows.select(*_primer(env).primers.keys())
        step["history"] = ChatHistory._from_tensordict(
            TensorDict({"prompt": rows.get("history").full}, num_rows)
        )
        for of in (rows, step):
            for name, spec in env.full_done_spec.items(True, True):
                of[name] = torch.zeros(num_rows, *spec.shape[1:], dtype=spec.dtype)
        for transform in _transforms(env)[1:]:
            for name in transform.step_count_keys if isinstance(transform, StepCounter) else ():
                rows[name] = torch.zeros(num_rows, 1, dtype=torch.int64)
            step = transform._step(rows, step)
        rows["next"] = step
        return rows


def _column(values: list[Any]) -> Any:
    """One value a row, texts and others that are no tensors as they are."""
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    return Texts.of([one.data if isinstance(one, NonTensorData) else one for one in values])
