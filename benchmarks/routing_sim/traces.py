"""The traces: kinds of rollout traffic, each made of a seed alone.

* ``grpo``: groups of 8 samples of one prompt, routers see the group. ``grpo-unkeyed``: they see
  the prompt alone. ``grpo-long``: answers so long that caches fill up. ``grpo-updates``: new
  weights by the clock.
* ``agents``: conversations with tools, in groups that share a task, all with one system prompt;
  routers see session and group. ``agents-unkeyed``, ``agents-updates``: as above. ``agents-open``:
  sessions arrive by the clock, whether others have ended or not.
* ``shared-prompt``: strangers behind one long system prompt, without keys.
* ``hot-group``: half of all sessions share one prompt, and a few are very long.
* ``routers-100ms``, ``-1000ms``: ``agents-unkeyed`` through four routers that share
  nothing and hear of engines so late. ``routers-lost``: 100 ms late, and half of it never.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from benchmarks.routing_sim.scenario import Reports, Scenario, Session, Turn, Updates

if TYPE_CHECKING:
    from collections.abc import Callable

TraceFactory: TypeAlias = "Callable[[int, bool], Scenario]"

_VOCABULARY = 32_000


def grpo(
    seed: int,
    *,
    num_groups: int = 128,
    group_size: int = 8,
    concurrency: int = 768,
    num_replicas: int = 8,
    header_len: int = 64,
    prompt_median: float = 500.0,
    output_median: float = 900.0,
    output_sigma: float = 0.8,
    max_output: int = 8192,
    keys: Literal["session", "group", "none"] = "group",
    name: str = "grpo",
) -> Scenario:
    """Single-turn GRPO: groups of samples of one prompt, all prompts with a short common header.

    Prompt lengths are lognormal with a sigma of 0.6 over ``prompt_median``, output lengths with
    ``output_sigma`` over ``output_median``, cut at ``max_output`` tokens.
    """
    generator = np.random.default_rng([seed, 10])
    header = _tokens(generator, header_len)
    sessions = []
    for group in range(num_groups):
        prompt = np.concatenate(
            [header, _tokens(generator, _length(generator, prompt_median, 0.6))]
        )
        for number in range(group_size):
            output_len = _length(generator, output_median, output_sigma, max_output)
            text = np.concatenate([prompt, _tokens(generator, output_len)])
            turns = (Turn(len(prompt), output_len),)
            sessions.append(Session(group * group_size + number, group, text, turns))
    return Scenario(
        name=name,
        sessions=tuple(sessions),
        num_replicas=num_replicas,
        concurrency=concurrency,
        keys=keys,
    )


def agents(
    seed: int,
    *,
    num_groups: int = 48,
    group_size: int = 8,
    concurrency: int = 160,
    num_replicas: int = 8,
    system_len: int = 3000,
    task_median: float = 400.0,
    mean_turns: float = 10.0,
    output_median: float = 500.0,
    tool_median: float = 500.0,
    tool_s_median: float = 2.0,
    max_context: int = 15_000,
    keys: Literal["session", "group", "none"] = "session",
    name: str = "agents",
) -> Scenario:
    """Multi-turn agents: groups of sessions that share a task, all with one system prompt.

    Turns are Poisson about ``mean_turns``; a turn's answer, its tool's answer and the tool's time
    are lognormal with a sigma of 0.7, 0.9 and 1 over their medians. A session that comes to
    ``max_context`` tokens ends.
    """
    generator = np.random.default_rng([seed, 11])
    system = _tokens(generator, system_len)
    sessions = []
    for group in range(num_groups):
        task = _tokens(generator, _length(generator, task_median, 0.6))
        prompt = np.concatenate([system, task])
        for number in range(group_size):
            num_turns = max(int(generator.poisson(mean_turns)), 1)
            sessions.append(
                _conversation(
                    generator,
                    group * group_size + number,
                    group,
                    prompt,
                    num_turns,
                    output_median=output_median,
                    tool_median=tool_median,
                    tool_s_median=tool_s_median,
                    max_context=max_context,
                )
            )
    return Scenario(
        name=name,
        sessions=tuple(sessions),
        num_replicas=num_replicas,
        concurrency=concurrency,
        keys=keys,
    )


def open_agents(
    seed: int,
    *,
    rate: float = 1.6,
    name: str = "agents-open",
    **settings: Any,
) -> Scenario:
    """The sessions of :func:`agents` by the clock: ``rate`` of them start a second (Poisson)."""
    scenario = agents(seed, name=name, **settings)
    generator = np.random.default_rng([seed, 14])
    arrivals = np.cumsum(generator.exponential(1 / rate, len(scenario.sessions))).tolist()
    sessions = tuple(
        replace(session, arrival_s=arrival_s)
        for session, arrival_s in zip(scenario.sessions, arrivals, strict=True)
    )
    return replace(scenario, sessions=sessions, concurrency=None)


def shared_prompt(
    seed: int,
    *,
    num_sessions: int = 2000,
    concurrency: int = 512,
    num_replicas: int = 8,
    system_len: int = 6000,
    question_median: float = 150.0,
    output_median: float = 300.0,
    name: str = "shared-prompt",
) -> Scenario:
    """Many strangers behind one long system prompt: single turns that share nothing else.

    Nobody has a key, so a router sees only that all prompts begin alike.
    """
    generator = np.random.default_rng([seed, 12])
    system = _tokens(generator, system_len)
    sessions = []
    for number in range(num_sessions):
        question = _tokens(generator, _length(generator, question_median, 0.8))
        output_len = _length(generator, output_median, 0.8, 4096)
        text = np.concatenate([system, question, _tokens(generator, output_len)])
        turns = (Turn(system_len + len(question), output_len),)
        sessions.append(Session(number, number, text, turns))
    return Scenario(
        name=name,
        sessions=tuple(sessions),
        num_replicas=num_replicas,
        concurrency=concurrency,
        keys="none",
    )


def hot_group(
    seed: int,
    *,
    num_sessions: int = 600,
    share: float = 0.5,
    concurrency: int = 240,
    num_replicas: int = 8,
    prompt_len: int = 4000,
    max_turns: int = 40,
    max_context: int = 30_000,
    name: str = "hot-group",
) -> Scenario:
    """One hot group, and sessions with heavy tails, made to hurt what pins or follows prefixes.

    ``share`` of the sessions belong to one group with one long prompt, the others to groups of
    four. The number of turns is Pareto with exponent 1.2, from 2 on, so a few sessions last many
    times as long as the rest.
    """
    generator = np.random.default_rng([seed, 13])
    hot = _tokens(generator, prompt_len)
    other = hot
    sessions = []
    members = generator.permutation(num_sessions) < share * num_sessions
    cold = 0
    for number in range(num_sessions):
        if members[number]:
            group, prompt = 0, hot
        else:
            if cold % 4 == 0:
                other = _tokens(generator, prompt_len // 4)
            group, prompt = 1 + cold // 4, other
            cold += 1
        num_turns = min(int(2 * (1 + generator.pareto(1.2))), max_turns)
        sessions.append(
            _conversation(
                generator,
                number,
                group,
                prompt,
                num_turns,
                output_median=250.0,
                tool_median=150.0,
                tool_s_median=1.0,
                max_context=max_context,
            )
        )
    return Scenario(
        name=name,
        sessions=tuple(sessions),
        num_replicas=num_replicas,
        concurrency=concurrency,
    )


def _conversation(
    generator: np.random.Generator,
    session_id: int,
    group_id: int,
    prompt: np.ndarray,
    num_turns: int,
    *,
    output_median: float,
    tool_median: float,
    tool_s_median: float,
    max_context: int,
) -> Session:
    turns = []
    length = len(prompt)
    for _ in range(num_turns):
        output_len = _length(generator, output_median, 0.7, 4096)
        tool_len = _length(generator, tool_median, 0.9, 4096)
        tool_s = tool_s_median * float(generator.lognormal(0.0, 1.0))
        if turns and length + output_len > max_context:
            break
        turns.append(Turn(length, output_len, tool_s))
        length += output_len + tool_len
    end = turns[-1].prompt_len + turns[-1].output_len
    text = np.concatenate([prompt, _tokens(generator, end - len(prompt))])
    return Session(session_id, group_id, text, tuple(turns))


def _tokens(generator: np.random.Generator, count: int) -> np.ndarray:
    return generator.integers(0, _VOCABULARY, count, np.int32)


def _length(generator: np.random.Generator, median: float, sigma: float, most: int = 16_384) -> int:
    """A lognormal length, at least 1."""
    return int(min(max(median * generator.lognormal(0.0, sigma), 1.0), most))


def _sized(make: Callable[..., Scenario], small: dict[str, Any], **fixed: Any) -> TraceFactory:
    """The trace with these settings, and with ``small`` ones if it is to be small."""

    def factory(seed: int, smoke: bool) -> Scenario:
        return make(seed, **(fixed | (small if smoke else {})))

    return factory


def _with_updates(make: TraceFactory, every_s: float, small_every_s: float) -> TraceFactory:
    """That trace while the weights change every now and then."""

    def factory(seed: int, smoke: bool) -> Scenario:
        scenario = make(seed, smoke)
        updates = Updates(every_s=small_every_s if smoke else every_s, pause_s=0.5)
        return replace(scenario, name=f"{scenario.name}-updates", updates=updates)

    return factory


def _with_routers(make: TraceFactory, name: str, delay_s: float, loss: float) -> TraceFactory:
    """That trace through four routers, each request through a random one, with late reports."""

    def factory(seed: int, smoke: bool) -> Scenario:
        return replace(
            make(seed, smoke),
            name=name,
            num_routers=4,
            reports=Reports(interval_s=0.5, delay_s=delay_s, loss=loss),
        )

    return factory


_SMALL_GRPO = {
    "num_groups": 12,
    "group_size": 4,
    "concurrency": 32,
    "num_replicas": 3,
    "output_median": 60.0,
}
_SMALL_AGENTS = {
    "num_groups": 6,
    "group_size": 4,
    "concurrency": 12,
    "num_replicas": 3,
    "system_len": 1000,
    "mean_turns": 4.0,
    "output_median": 60.0,
    "tool_s_median": 0.3,
}
_SMALL_SHARED = {"num_sessions": 60, "concurrency": 24, "num_replicas": 3, "output_median": 60.0}
_SMALL_HOT = {"num_sessions": 24, "concurrency": 12, "num_replicas": 3, "max_turns": 12}

_LONG = {"output_median": 8000.0, "max_output": 24_000, "name": "grpo-long"}
_SMALL_LONG = _SMALL_GRPO | {"output_median": 600.0}

_GRPO = _sized(grpo, _SMALL_GRPO)
_GRPO_UNKEYED = _sized(grpo, _SMALL_GRPO, keys="none", name="grpo-unkeyed")
_AGENTS = _sized(agents, _SMALL_AGENTS)
_AGENTS_UNKEYED = _sized(agents, _SMALL_AGENTS, keys="none", name="agents-unkeyed")

TRACES: dict[str, TraceFactory] = {
    "grpo": _GRPO,
    "grpo-unkeyed": _GRPO_UNKEYED,
    "grpo-long": _sized(grpo, _SMALL_LONG, **_LONG, num_groups=80, concurrency=640),
    "grpo-updates": _with_updates(_GRPO, 15.0, 0.8),
    "agents": _AGENTS,
    "agents-unkeyed": _AGENTS_UNKEYED,
    "agents-updates": _with_updates(_AGENTS, 30.0, 3.0),
    "agents-open": _sized(open_agents, _SMALL_AGENTS | {"rate": 4.0}),
    "shared-prompt": _sized(shared_prompt, _SMALL_SHARED),
    "hot-group": _sized(hot_group, _SMALL_HOT),
    "routers-100ms": _with_routers(_AGENTS_UNKEYED, "routers-100ms", 0.1, 0.0),
    "routers-1000ms": _with_routers(_AGENTS_UNKEYED, "routers-1000ms", 1.0, 0.0),
    "routers-lost": _with_routers(_AGENTS_UNKEYED, "routers-lost", 0.1, 0.5),
}
"""By name; called with the seed and whether it is to be small."""


def make_trace(name: str, seed: int, *, smoke: bool = False) -> Scenario:
    """The trace of that name.

    Raises:
        ValueError: There is none.
    """
    if name not in TRACES:
        raise ValueError(f"trace must be one of {', '.join(TRACES)}, got {name!r}")
    return TRACES[name](seed, smoke)
