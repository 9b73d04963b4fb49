"""Agents that only know an address: what they asked a server and got becomes rows to train on."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import secrets
import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import IO, Any

import torch
from tensordict import TensorDict
from torchrl.envs import StepCounter
from torchrl.envs.llm import ChatEnv

from torchrl_vllm_sync.checks import Deadline, check_integer, check_seconds, in_thread
from torchrl_vllm_sync.errors import AgentError, RewardError, UnsupportedArgumentError
from torchrl_vllm_sync.requests.background import run_blocking
from torchrl_vllm_sync.requests.messages import expand_spans
from torchrl_vllm_sync.rl import conversations as turns
from torchrl_vllm_sync.rl import rows as keys
from torchrl_vllm_sync.rl.policy import _Answers, _padded, vLLMWrapper
from torchrl_vllm_sync.rl.rollouts import RolloutCollector, _column, _primer
from torchrl_vllm_sync.rl.rows import Texts
from torchrl_vllm_sync.serve.sessions import Session, SessionRow
from torchrl_vllm_sync.service.service import AsyncVLLM

KILL_S = 10.0  # for a process to end that was killed, which the kernel may hold up


def session_rows(sessions: Sequence[Session], policy: vLLMWrapper) -> TensorDict:
    """Returns what sessions asked and got as dense rows, as :class:`RolloutCollector` gives them.

    Turns that each begin with all of the turn before are one row, whose response is everything
    behind its first prompt. ``("masks", "all_assistant_mask")`` has the sampled tokens, each in one
    row; what a tool or user said between is attended to alone, with log-probability NaN and version
    -1. Another row begins where a session was shown an earlier turn in another way, ``("turns",
    "forked")``, and where it went on from one turn twice, ``("turns", "kept")``. All rows of a
    session have its reward, and the last one is done. There are no histories.

    Args:
        sessions: With rewards, such as of ``server.sessions.take()``.
        policy: Says how rows look, and what sampling they may come from. It is not called.

    Returns:
        Rows of batch size ``(num_rows,)``, session by session. ``"query"`` is the text of the
        session's first prompt, by which :class:`GroupAdvantage` finds groups.

    Raises:
        RewardError: A session has no reward.
        UnsupportedArgumentError: A session has no rows, or rows would need what is not kept:
            sampling masks, routed experts.
        UncorrectableSamplingError: Clients asked for what the loss cannot correct for.
    """
    for one in sessions:
        if one.score is None:
            raise RewardError(f"session {one.id!r} has no reward")
        if not one.rows:
            raise UnsupportedArgumentError(f"session {one.id!r} has no answers")
    if policy.return_sampling_mask or keys.ROUTED_EXPERTS[0] in policy.out_keys:
        raise UnsupportedArgumentError("sessions keep neither sampling masks nor routed experts")
    rows = [one for session in sessions for one in session.rows]
    answers = _SessionAnswers(rows, policy)
    told = zip(*((one.num_messages, one.kept, one.forked) for one in rows), strict=True)
    ids = [one.parts[0][0] for one in rows]
    text = policy._texts(answers, [one.text for one in rows], ids)
    prompts = policy._prompts(answers, ids)
    made = policy._dense_rows(answers, prompts, text, turns.stamps(*told), of_chats=True)
    each = [len(one.rows) for one in sessions]
    made["query"] = Texts.of([one.rows[0].text for one in sessions for _ in one.rows])
    scores = torch.tensor([one.score for one in sessions]).repeat_interleave(torch.tensor(each))
    is_last = torch.tensor([at == n - 1 for n in each for at in range(n)])[:, None]
    step = {"reward": scores.view(-1, 1, 1), "done": is_last, "terminated": is_last.clone()}
    never = torch.zeros_like(is_last)
    made["next"] = TensorDict({**step, "truncated": never}, [len(rows)])
    return made.update({name: never.clone() for name in ("done", "terminated", "truncated")})


class _SessionAnswers(_Answers):
    """Rows of sessions as what an engine has answered: all behind the first prompt."""

    def __init__(self, rows: Sequence[SessionRow], policy: vLLMWrapper) -> None:
        self._rows, notes = rows, dict[str, None]()
        for _, answer in (part for row in rows for part in row.parts):
            notes[policy._judge(answer.params)[1]] = None
        note = "; ".join(filter(None, notes))
        outputs = [_as_output(one) for one in rows]
        super().__init__(
            outputs, range(len(rows)), policy.sampling_params, note, policy.padding_value
        )

    def _spread(self, of_answer: Any, unknown: float) -> list[list[Any]]:
        """A value for each token of each row, ``unknown`` where it was read."""
        made: list[list[Any]] = []
        for row in self._rows:
            parts = [[unknown] * len(read) + of_answer(one) for read, one in row.parts]
            made.append([*of_answer(row.parts[0][1]), *(v for part in parts[1:] for v in part)])
        return made

    def log_probs(self) -> list[Any]:
        return self._spread(lambda one: one.log_probs, torch.nan)

    def versions(self) -> torch.Tensor:
        versions = self._spread(lambda one: expand_spans(one.spans), keys.NO_VERSION)
        return _padded(versions, torch.int64, keys.NO_VERSION)[0]


def _as_output(row: SessionRow) -> Any:
    """A row as one sample of an engine; its figures are of all its turns."""
    answers = [one for _, one in row.parts]
    first, last = answers[0], answers[-1]
    said = [*first.token_ids]
    for read, one in row.parts[1:]:
        said += read + one.token_ids
    seconds = {
        name: None
        if None in (found := [getattr(one.report, name) for one in answers])
        else sum(found)
        for name in ("queue_s", "prefill_s", "decode_s")
    }
    cached, spans = first.report.num_cached_tokens, [span for one in answers for span in one.spans]
    report = SimpleNamespace(spans=spans, num_cached_tokens=cached, **seconds)
    sample = SimpleNamespace(token_ids=said, finish_reason=last.finish_reason)
    return SimpleNamespace(outputs=[sample], sample_reports=[report], **vars(last.of))


class AgentCollector(RolloutCollector):
    """Runs agents that only know an address, and collects what they sampled there.

    An agent is any program that asks an OpenAI server, in as many turns as it likes. Each problem
    of the data set is given to ``num_samples`` runs, each with a key of its own, by which the
    server knows what that run asked. Batches are those of :func:`session_rows`, with the data set's
    columns, in its order. Otherwise it is a :class:`RolloutCollector`, by whose threads agents of
    the next batches run while the trainer works (``max_staleness``).

    Example:
        >>> def agent(base_url, api_key, problem):
        ...     client = openai.OpenAI(base_url=base_url, api_key=api_key)
        ...     asked = [{"role": "user", "content": problem["query"]}]
        ...     answer = client.chat.completions.create(model="m", messages=asked)
        ...     return float(problem["answer"] in answer.choices[0].message.content)
        >>> collector = AgentCollector(service, agent, sums, num_samples=8,
        ...     dialog_turns_per_batch=64, replay_buffer=buffer)

    Args:
        service: What the agents ask.
        agent: A function, also an ``async`` one, called in a thread of its own as ``agent(base_url,
            api_key, problem)`` with the problem's columns in a dict. It returns a reward, or
            ``None`` if one came over HTTP, ``POST {base_url}/sessions/{api_key}/reward``. Or a
            command, as a list: it finds ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY`` in its
            environment and the problem as JSON on its standard input; its reward came over HTTP, or
            is the number on the last line that it prints. Other than 0, its exit status is a
            failure. What it leaves running in its process group is ended.
        dataloader: As that of ``ChatEnv.from_dataloader``; a column of texts is ``"query"``.
        dialog_turns_per_batch: Runs of a batch. Where sessions fork there are more rows, which
            ``total_dialog_turns`` counts.
        num_samples: Runs of each problem, for :class:`GroupAdvantage`.
        policy: Says how rows look and what sampling they may come from; by default the service's
            tokenizer and sampling as the model is.
        concurrency: How many run at once.
        timeout_s: Seconds that one run may take.
        max_attempts: Runs that fail, or give no reward, are made anew so often.
        server_options: Arguments of :meth:`AsyncVLLM.serve`, such as ``tool_call_parser``.
        **kwargs: ``RolloutCollector``'s, but ``env``, ``keep`` and what yields trajectories.

    Raises:
        UnsupportedArgumentError: An argument is out of range, or not for agents.
        AgentError: While iterating: an agent has failed ``max_attempts`` times at a problem, or
            given no reward.
        UncorrectableSamplingError: While iterating: an agent asked for other sampling.
    """

    def __init__(
        self,
        service: AsyncVLLM,
        agent: Callable[[str, str, dict[str, Any]], Any] | Sequence[str],
        dataloader: Iterable[dict[str, Any]],
        *,
        dialog_turns_per_batch: int,
        num_samples: int = 1,
        policy: vLLMWrapper | None = None,
        concurrency: int = 64,
        timeout_s: float = 600.0,
        max_attempts: int = 3,
        server_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        counts = {"dialog_turns_per_batch": dialog_turns_per_batch, "num_samples": num_samples}
        counts |= {"concurrency": concurrency, "max_attempts": max_attempts}
        for name, value in counts.items():
            check_integer(name, value, 1)
        check_seconds("timeout_s", timeout_s)
        for name in ("keep", "yield_completed_trajectories", "yield_only_last_steps"):
            if kwargs.get(name):
                raise UnsupportedArgumentError(f"{name} is not for agents")
        if policy is None:
            tokenizer = service.requests.tokenizer()
            settings = {"input_mode": "history", "chat_template": tokenizer.chat_template}
            policy = vLLMWrapper(service, tokenizer=tokenizer, return_log_probs=True, **settings)
        env: Any = ChatEnv.from_dataloader(
            dataloader=dataloader,  # pyright: ignore[reportArgumentType]
            batch_size=(dialog_turns_per_batch,),
            repeats=num_samples,
            tokenizer=policy.tokenizer,
            input_mode="history",
        )
        env = env.append_transform(StepCounter(max_steps=1))
        kwargs |= {"policy": policy, "dialog_turns_per_batch": dialog_turns_per_batch}
        super().__init__(env, **kwargs)
        self.agent, self.timeout_s, self.max_attempts = agent, timeout_s, max_attempts
        self._running, self._batches = asyncio.Semaphore(concurrency), set[asyncio.Task[Any]]()
        options = {"api_key": secrets.token_hex(), **(server_options or {}), "capture": True}
        self._server = service.serve(**options)
        self._url = f"{self._server.url}/v1"

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Ends the commands that run, and the server, and with it what agents ask.

        Args:
            *args, **kwargs: ``LLMCollector``'s.
        """
        for one in [*self._batches]:
            one.get_loop().call_soon_threadsafe(one.cancel)
        self._server.close()
        super().shutdown(*args, **kwargs)

    def _answers(self, loaded: Sequence[Any], of_row: list[int], **given: Any) -> TensorDict:
        """The rows of the agents' sessions, with what the data set has of each."""
        del given
        names: list[Any] = [*_primer(self.env).primers.keys()]
        problems = [{name: _plain(one.get(name)) for name in names} for one in loaded]
        sessions = run_blocking(self._sessions([problems[at] for at in of_row]))
        rows = session_rows(sessions, self.policy)
        of = [at for at, one in zip(of_row, sessions, strict=True) for _ in one.rows]
        return rows.update({name: _column([one.get(name) for one in loaded])[of] for name in names})

    def _scored(self, rows: TensorDict) -> TensorDict:
        """The environment's step, with the sessions' rewards and ends."""
        found: Any = rows.pop("next")
        rows = super()._scored(rows)
        rows["next"] = rows.get("next").update(found)
        return rows

    async def _sessions(self, problems: Sequence[dict[str, Any]]) -> list[Session]:
        batch: Any = asyncio.current_task()
        self._batches.add(batch)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._session(one)) for one in problems]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self._batches.discard(batch)
        return [one.result() for one in tasks]

    async def _session(self, problem: dict[str, Any]) -> Session:
        """The session of an agent that has ended with a reward; those of failed ones are gone."""
        run = self._call if callable(self.agent) else self._execute
        reasons = list[str]()
        while len(reasons) < self.max_attempts:
            async with self._running:
                session = self._server.sessions.open()
                limit = asyncio.timeout(self.timeout_s)
                try:
                    async with limit:
                        given = await run(session.id, problem)
                    if session.score is None and given is not None:
                        session.reward(given)
                    if session.score is not None and session.rows:
                        return session
                    reasons.append("no reward" if session.rows else "nothing was asked for")
                except Exception as error:  # noqa: BLE001  agents may raise anything
                    is_late = limit.expired()  # else a TimeoutError is one of the agent's own
                    late = f"it took more than {self.timeout_s:g} s"
                    reasons.append(late if is_late else f"{type(error).__name__}: {error}")
                finally:
                    self._server.sessions.take(session.id)
        raise AgentError(problem, reasons)

    async def _call(self, key: str, problem: dict[str, Any]) -> Any:
        def call() -> Any:
            try:
                found: Any = self.agent(self._url, key, dict(problem))  # pyright: ignore[reportCallIssue]
                if inspect.isawaitable(found):
                    return asyncio.run(asyncio.wait_for(found, self.timeout_s))
            except (SystemExit, asyncio.CancelledError) as error:  # would end the loop, or all runs
                raise RuntimeError(repr(error)) from error
            return found

        # Left behind when its time is over; its key is not good for anything then.
        return await asyncio.shield(asyncio.wrap_future(in_thread("agent", call)))

    async def _execute(self, key: str, problem: dict[str, Any]) -> Any:
        known = {**os.environ, "OPENAI_BASE_URL": self._url, "OPENAI_API_KEY": key}
        command: Any = self.agent
        # Files, as a pipe is not at its end while something that was started has it.
        with TemporaryFile() as given, TemporaryFile() as said, TemporaryFile() as told:
            given.write(json.dumps(problem).encode())
            given.seek(0)
            files: Any = {"stdin": given, "stdout": said, "stderr": told}
            process = await asyncio.create_subprocess_exec(
                *command, **files, env=known, start_new_session=True
            )
            try:
                await process.wait()
            finally:  # with all that it has started
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                deadline = Deadline(KILL_S)
                while process.returncode is None and not deadline.passed:
                    # A run that is late is cancelled once more where another's failure ends all.
                    with suppress(asyncio.CancelledError, TimeoutError):
                        await asyncio.wait_for(process.wait(), deadline.left_s)
            if process.returncode:
                raise RuntimeError(f"exit status {process.returncode}: {_end(told)[-200:]}")
            with suppress(ValueError):
                return float(_end(said).rpartition("\n")[2])


def _end(file: IO[bytes]) -> str:
    """The last of what was written to a file."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
    return file.read().decode(errors="replace").strip()


def _plain(value: Any) -> Any:
    """A value of the data set as JSON has it."""
    return value.tolist() if isinstance(value, torch.Tensor) else getattr(value, "data", value)
