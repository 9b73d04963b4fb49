"""Child processes, stopped for sure."""

import os
import signal


def stop(pid):
    """Stops a child of this process; a SIGSTOP is not in force yet when ``os.kill`` returns."""
    os.kill(pid, signal.SIGSTOP)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), f"process {pid} ended by itself"
