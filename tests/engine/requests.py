"""What the tests of the request side share."""

import contextlib
import time

# Seconds that each step takes inside ``slowed``: a request of 200 tokens outlasts what a test does
# meanwhile on any machine.
STEP_S = 0.05


@contextlib.contextmanager
def slowed(service, step_s=STEP_S):
    """Has the steps of engines that live last ``step_s`` longer inside; by ``PacedWorker``."""
    set_pace = service.replicas.call_replicas
    assert set_pace("collective_rpc", "sync_pace", None, (step_s,)).good
    try:
        yield
    finally:
        set_pace("collective_rpc", "sync_pace")


def sampling(**fields):
    from vllm import SamplingParams

    return SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **fields})


def endless(**fields):
    """Parameters of a request that fills the context of the test engines: 256 tokens."""
    return sampling(max_tokens=250, ignore_eos=True, **fields)


def eventually(condition, timeout_s=60.0):
    """Waits until ``condition()`` is true and returns its value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)
    return value


def num_running(service):
    """Samples that the engines have given tokens, as of their last steps."""
    reports = service.replicas.call_replicas("report").values()
    return sum(one.num_running or 0 for one in reports)


def is_idle(service):
    """Whether neither this process nor any engine has a request in flight."""
    unfinished = service.get_num_unfinished_requests()
    return service.load.total_in_flight == 0 and set(unfinished) == {0}


def token_ids(output):
    return list(output.outputs[0].token_ids)
