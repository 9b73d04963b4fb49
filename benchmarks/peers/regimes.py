"""Regimes: scripts that put a router where one of its rules decides."""

from __future__ import annotations

import numpy as np

from benchmarks.peers.script import End, EndSession, Leave, Script, Send, Wait

__all__ = ["conversations", "groups", "leaving", "mixed", "phases", "strangers"]


def conversations(seed: int, *, num_sends: int, concurrent: int, turns: int = 6) -> Script:
    """Sessions that begin alike and grow by turns; at most one request of each is in flight.

    Args:
        seed: Of the order.
        num_sends: Requests in all.
        concurrent: Sessions at a time.
        turns: Requests of a session, at most.
    """
    generator = np.random.default_rng(seed)
    script = Script()
    idle = [(session, -1, 0) for session in range(concurrent)]  # session, last request, turn
    busy: list[tuple[int, int, int]] = []
    next_session, sent = concurrent, 0
    while sent < num_sends:
        if busy and (not idle or generator.random() < 0.45):
            session, request, turn = busy.pop(int(generator.integers(len(busy))))
            script.add(End(request))
            if turn >= generator.integers(2, turns + 1):
                script.add(EndSession(session))
                session, request, turn = next_session, -1, 0
                next_session += 1
            idle.append((session, request, turn))
            continue
        session, last, turn = idle.pop(int(generator.integers(len(idle))))
        fresh = int(generator.integers(1, 5))
        if last < 0:  # half of the sessions have the first one's system prompt of six blocks
            alike = sent > 0 and generator.random() < 0.5
            send = Send(0, 6, fresh, session) if alike else Send(-1, 0, 6 + fresh, session)
        else:
            send = Send(last, len(script.prompts[last]), fresh, session)
        script.add(send)
        busy.append((session, sent, turn + 1))
        sent += 1
    return script


def groups(seed: int, *, num_sends: int, size: int = 8, in_flight: int = 64) -> Script:
    """Groups of equal prompts, sent one right after the other; ends come at random.

    Args:
        seed: Of the order.
        num_sends: Requests in all.
        size: Requests of a group.
        in_flight: Requests in flight, at most.
    """
    generator = np.random.default_rng(seed)
    script, busy = Script(), []
    for request in range(num_sends):
        group, sample = divmod(request, size)
        while len(busy) >= in_flight or (busy and generator.random() < 0.4):
            script.add(End(busy.pop(int(generator.integers(len(busy))))))
        if sample:
            first = request - sample
            script.add(Send(first, len(script.prompts[first]), 0, -1, group))
        else:
            script.add(Send(-1, 0, int(generator.integers(2, 12)), -1, group))
        busy.append(request)
    return script


def strangers(seed: int, *, num_sends: int, in_flight: int) -> Script:
    """A shared beginning of random length and an end of one's own; requests pile up on its owner.

    None ends before ``in_flight`` have been sent.

    Args:
        seed: Of the order.
        num_sends: Requests in all.
        in_flight: Requests in flight, at most.
    """
    generator = np.random.default_rng(seed)
    script, busy = Script(), []
    script.add(Send(-1, 0, 16))
    busy.append(0)
    for request in range(1, num_sends):
        while len(busy) >= in_flight or (request > in_flight and generator.random() < 0.35):
            script.add(End(busy.pop(int(generator.integers(len(busy))))))
        shared = int(generator.integers(0, 17))
        fresh = int(generator.integers(1, 12))
        script.add(Send(0, shared, fresh) if shared else Send(-1, 0, fresh))
        busy.append(request)
    return script


def mixed(seed: int, *, num_sends: int, in_flight: int) -> Script:
    """Prompts that branch off any earlier one anywhere, some of them equal to it.

    Args:
        seed: Of the order.
        num_sends: Requests in all.
        in_flight: Requests in flight, at most.
    """
    generator = np.random.default_rng(seed)
    script, busy = Script(), []
    for request in range(num_sends):
        while len(busy) >= in_flight or (busy and generator.random() < 0.4):
            script.add(End(busy.pop(int(generator.integers(len(busy))))))
        if request and generator.random() < 0.8:
            base = int(generator.integers(request))
            length = len(script.prompts[base])
            shared = int(generator.integers(1, length + 1))
            fresh = int(generator.integers(0, 6)) if shared == length else 1
            send = Send(base, shared, min(fresh, max(1, 40 - shared)))
        else:
            send = Send(-1, 0, int(generator.integers(1, 9)))
        script.add(send)
        busy.append(request)
    return script


def phases(seed: int, *, num_phases: int, sends: int, wait_s: float) -> Script:
    """Bursts of requests that branch off earlier ones, and rests between, in which all have ended.

    Args:
        seed: Of the prompts.
        num_phases: Bursts.
        sends: Requests of a burst.
        wait_s: Seconds of a rest.
    """
    generator = np.random.default_rng(seed)
    script = Script()
    for request in range(num_phases * sends):
        if request and not request % sends:
            for one in range(request - sends, request):
                script.add(End(one))
            script.add(Wait(wait_s))
        if request and generator.random() < 0.6:
            base = int(generator.integers(max(0, request - 4 * sends), request))
            length = len(script.prompts[base])
            shared = int(generator.integers(1, length + 1))
            script.add(Send(base, shared, int(generator.integers(1, 4))))
        else:
            script.add(Send(-1, 0, int(generator.integers(2, 12))))
    return script


def leaving(seed: int, *, sends: int, replicas: int) -> Script:
    """Bursts of requests that branch off any earlier one; a replica leaves between two bursts.

    Args:
        seed: Of the prompts.
        sends: Requests of a burst.
        replicas: Replicas at the start, of which two stay.
    """
    generator = np.random.default_rng(seed)
    script, request = Script(), 0
    for gone in range(replicas - 1):
        if gone:
            script.add(Leave(gone - 1))
        busy: list[int] = []
        for _ in range(sends):
            while len(busy) >= 12:
                script.add(End(busy.pop(int(generator.integers(len(busy))))))
            if request and generator.random() < 0.6:
                base = int(generator.integers(request))
                script.add(Send(base, len(script.prompts[base]), 1, request % 40))
            else:
                script.add(Send(-1, 0, int(generator.integers(2, 6)), request % 40))
            busy.append(request)
            request += 1
        for one in busy:
            script.add(End(one))
    return script
