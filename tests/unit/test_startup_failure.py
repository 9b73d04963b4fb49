"""Why vLLM did not start, from what its processes printed."""

import os

from torchrl_vllm_sync.engine import internals


def test_of_several_causes_the_first_and_the_last_are_told(capfd):
    printed = internals.output_sizes()  # pytest captures into files, as Ray does
    os.write(2, b"(Worker pid=7) ERROR 11-22 13:22:13 [a.py:1] ValueError: no room: 3\n")
    assert internals.startup_failure(printed) == "ValueError: no room: 3"
    os.write(2, b"(Worker pid=8) ERROR 11-22 13:22:14 [a.py:1] ConnectionError: peer closed\n")
    os.write(2, b"(Worker pid=9) ERROR 11-22 13:22:15 [a.py:1] RuntimeError: gloo: reset\n")
    os.write(2, b"Exception: initialization failed. See stack trace for root cause.\n")
    told = internals.startup_failure(printed)
    assert told == "ValueError: no room: 3; and at last RuntimeError: gloo: reset"


def test_what_cannot_be_read_hides_no_failure():
    assert internals.startup_failure({10**6: 0}) == ""
