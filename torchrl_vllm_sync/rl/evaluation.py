"""Evaluation beside training: a held-out set on one replica that keeps its version meanwhile."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensordict import set_list_to_stack

from torchrl_vllm_sync.checks import DEFAULT_TIMEOUT_S, check_wait
from torchrl_vllm_sync.errors import UnsupportedArgumentError, VersionSpanError
from torchrl_vllm_sync.rl.rollouts import RolloutCollector, TextReward
from torchrl_vllm_sync.rl.rows import NO_VERSION
from torchrl_vllm_sync.rl.tasks import make_env

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Future

    from tensordict import TensorDictBase

    from torchrl_vllm_sync.rl.policy import vLLMWrapper
    from torchrl_vllm_sync.service.service import AsyncVLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What one version of the weights is worth.

    Attributes:
        version: Policy version that sampled every answer.
        reward: Mean reward of the rows.
        num_rows, seconds: Answers, and how long they took, with the replica pinned already.
        rows: As a :class:`RolloutCollector` gives them, of batch size ``(num_rows,)``.
    """

    version: int
    reward: float
    num_rows: int
    seconds: float
    rows: TensorDictBase


class Evaluator:
    """Evaluates versions of a policy on a held-out set while training goes on.

    On a replica that is pinned (:meth:`AsyncVLLM.pinned`): pushes and rollouts use the others.

    Example:
        >>> greedy = functools.partial(vLLMWrapper, tokenizer=tokenizer, input_mode="history")
        >>> evaluator = Evaluator(service, problems, right, greedy, logger=logger)
        >>> evaluator.start()       # with the weights that are served now
        >>> train_on(next(batches)); updater.push_weights()
        >>> evaluator.result(timeout_s=300).reward

    Args:
        service: Whose replicas are evaluated, in the process that launched it.
        problems: Rows of a data set, as ``ChatEnv.from_dataloader`` takes them one at a time, such
            as ``{"query": ["What is 2 + 3?"], "answer": ["5"]}``.
        reward: A :class:`TextReward`, or the function for one.
        make_policy: Makes the policy of the pinned service, with its sampling parameters and
            tokenizer and ``input_mode="history"``.
        repeats: Answers to each problem, at least 1.
        logger: A TorchRL logger, which gets the mean reward as ``name`` with the version as step.
        name: What the logger gets it as.
        **pinning: ``timeout_s`` and ``allow_last`` of :meth:`AsyncVLLM.pinned`.

    Raises:
        UnsupportedArgumentError: There are no problems.
    """

    def __init__(
        self,
        service: AsyncVLLM,
        problems: Iterable[Mapping[str, Any]],
        reward: TextReward | Callable[..., Any],
        make_policy: Callable[[AsyncVLLM], vLLMWrapper],
        *,
        repeats: int = 1,
        logger: Any = None,
        name: str = "evaluation/reward",
        **pinning: Any,
    ) -> None:
        self._service, self._problems, self._make_policy = service, [*problems], make_policy
        if not self._problems:
            raise UnsupportedArgumentError("problems must be at least one, got none")
        self._reward = reward if isinstance(reward, TextReward) else TextReward(reward)
        self._repeats, self._logger, self._name, self._pinning = repeats, logger, name, pinning
        self._running: Future[Evaluation] | None = None

    def start(self, version: int | None = None) -> int:
        """Pins a replica, and goes on in a thread.

        Args:
            version: That of :meth:`AsyncVLLM.pinned`, whose errors this raises.

        Returns:
            The version that is evaluated.

        Raises:
            UnsupportedArgumentError: An evaluation is under way, or its result was not taken.
        """
        if self._running is not None:
            raise UnsupportedArgumentError("start() must follow the result() of the one before")
        with contextlib.ExitStack() as stack:
            pinned = stack.enter_context(self._service.pinned(version, **self._pinning))
            held = pinned.weight_version
            thread = ThreadPoolExecutor(1, "evaluation")
            self._running = thread.submit(self._run, stack.pop_all(), pinned)
            thread.shutdown(wait=False)
        return held

    def result(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Evaluation:
        """Returns what :meth:`start` began, once the replica is handed back.

        Args:
            timeout_s: Seconds to wait; after a ``TimeoutError`` it may be asked for again.

        Raises:
            UnsupportedArgumentError: Nothing was started.
            TimeoutError: It has not ended within that time.
            RequestLostError, NoReplicaAvailableError: The pinned replica died.
            RewardError: See :class:`TextReward`.
            VersionSpanError: The replica has taken other weights by itself, from a folder that it
                follows.
        """
        check_wait("timeout_s", timeout_s)
        if (running := self._running) is None:
            raise UnsupportedArgumentError("result() must follow start()")
        running.exception(timeout_s)
        self._running = None
        return self._log(running.result())

    def evaluate(self, version: int | None = None) -> Evaluation:
        """Evaluates in this thread; requests have the service's time limit.

        Arguments and errors are those of :meth:`start` and :meth:`result`.

        Returns:
            What the version is worth.
        """
        with self._service.pinned(version, **self._pinning) as pinned:
            found = self._evaluate(pinned)
        return self._log(found)

    def _log(self, found: Evaluation) -> Evaluation:
        """In the caller's thread, as loggers need not be safe for several."""
        if self._logger is not None:
            self._logger.log_scalar(self._name, found.reward, step=found.version)
        return found

    def _run(self, stack: contextlib.ExitStack, pinned: AsyncVLLM) -> Evaluation:
        with stack:
            return self._evaluate(pinned)

    @set_list_to_stack(True)  # as TorchRL's ChatEnv asks for
    def _evaluate(self, pinned: AsyncVLLM) -> Evaluation:
        began, version = time.perf_counter(), pinned.weight_version
        policy, num_rows = self._make_policy(pinned), len(self._problems) * self._repeats
        env = make_env(
            policy.tokenizer,
            self._problems,
            self._reward.clone(),
            num_envs=num_rows,
            repeats=self._repeats,
        )
        collector = RolloutCollector(env, policy=policy, dialog_turns_per_batch=num_rows)
        try:
            rows: Any = next(iter(collector))
        finally:
            collector.shutdown()
        names = ("policy_version", "max_policy_version")
        sampled_by = {int(one) for name in names for one in rows[name].flatten()} - {NO_VERSION}
        if sampled_by - {version}:
            told = f"version {version} was evaluated, and its rows are of {sorted(sampled_by)}"
            raise VersionSpanError(told)
        return Evaluation(
            version=version,
            reward=float(rows["next", "reward"].mean()),
            num_rows=num_rows,
            seconds=time.perf_counter() - began,
            rows=rows,
        )
