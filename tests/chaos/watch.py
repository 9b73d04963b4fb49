"""What the harness's own process knows of the replicas over time, and where it sends requests."""

import threading
import time

POLL_S = 0.05


class Watch:
    """Keeps every state of every replica, as the balancer sees it, and every choice it makes.

    Args:
        service: The service to watch; its balancer must not be replaced.
    """

    def __init__(self, service):
        self._service = service
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._lock = threading.Lock()
        self._history = []
        self.bad_choices = []
        balancer = service.requests.balancer
        choose = balancer._choose

        def watched(*args):
            candidates, chosen = choose(*args)
            now = {one.replica_id: one for one in balancer.load.snapshots()}[chosen.replica_id]
            if not now.state.admits_requests:
                self.bad_choices.append((time.monotonic(), now))
            return candidates, chosen

        balancer._choose = watched

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _run(self):
        while not self._stop.wait(POLL_S):
            self._look()

    def _look(self):
        states = {one.replica_id: one.state for one in self._service.load.snapshots()}
        with self._lock:
            if not self._history or self._history[-1][1] != states:
                self._history.append((time.monotonic(), states))

    def forget(self):
        """Begins anew with the states as they are now."""
        with self._lock:
            self._history = self._history[-1:]
        self.bad_choices = []

    def out_of_service_at(self, replica_id, since):
        """When, from ``since`` on, a replica was first seen to take no requests; else ``None``."""
        with self._lock:
            history = list(self._history)
        for (at, states), (until, _) in zip(
            history, [*history[1:], (time.monotonic(), None)], strict=True
        ):
            state = states.get(replica_id)
            if until > since and (state is None or not state.admits_requests):
                return max(at, since)
        return None

    def outages(self):
        """``(begin, end)`` of each time when no replica took requests."""
        with self._lock:
            history = list(self._history)
        ends = [*(at for at, _ in history[1:]), time.monotonic()]
        return [
            (begin, end)
            for (begin, states), end in zip(history, ends, strict=True)
            if not any(state.admits_requests for state in states.values())
        ]

    def told(self):
        """The states since :meth:`forget`, in words, seconds from the first."""
        with self._lock:
            history = list(self._history)
        start = history[0][0] if history else 0.0
        return "; ".join(
            f"{at - start:.1f} s {', '.join(f'{name} {state}' for name, state in states.items())}"
            for at, states in history
        )


def wait_until(condition, seconds, what, *, poll_s=0.05):
    """Waits until ``condition()`` is true and returns its value, or fails with ``what()``."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what()}")
        time.sleep(poll_s)
    return value


class Patience:
    """True once ``condition`` has been true each time that it was looked at, for ``seconds``."""

    def __init__(self, condition, seconds):
        self._condition, self._seconds = condition, seconds
        self._since = None

    def __call__(self):
        if not self._condition():
            self._since = None
            return False
        self._since = self._since or time.monotonic()
        return time.monotonic() - self._since > self._seconds
