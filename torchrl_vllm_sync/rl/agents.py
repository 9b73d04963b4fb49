"""Agents that only know an address: what they asked a server and got becomes rows to train on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from torchrl_vllm_sync.errors import RewardError, UnsupportedArgumentError
from torchrl_vllm_sync.requests.messages import expand_spans
from torchrl_vllm_sync.rl import conversations as turns
from torchrl_vllm_sync.rl import rows as keys
from torchrl_vllm_sync.rl.policy import _Answers, _padded, vLLMWrapper
from torchrl_vllm_sync.rl.rows import Texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchrl_vllm_sync.serve.sessions import Session, SessionRow


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
    stamps = (
        [one.num_messages for one in rows],
        [one.kept for one in rows],
        [r.forked for r in rows],
    )
    made = policy._dense_rows(
        answers,
        [one.parts[0][0] for one in rows],
        [one.text for one in rows],
        np.arange(len(rows)),
        turns.stamps(*stamps),
    )
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
        super().__init__(outputs, 1, policy.sampling_params, note, policy.padding_value)

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
