"""A client whose replicas say what they are, or fail to, and nothing else."""

from torchrl_vllm_sync import ReplicaState
from torchrl_vllm_sync.weights.transport import Standing


class DescribingClient:
    """Answers ``describe`` with ``answers``, one for each replica, and refuses everything else."""

    service_name, rendezvous = "fake", ("127.0.0.1", None)

    def __init__(self, *answers):
        self.described = 0
        self._answers = {str(index): one for index, one in enumerate(answers)}
        self.known = {}

    def standings(self):
        serving = Standing(state=ReplicaState.SERVING)
        return {name: self.known.get(name, serving) for name in self._answers}

    def start_calls(self, method, calls, **kwargs):
        assert method == "describe"
        self.described += 1
        return Answered({name: self._answers[name] for name in calls})


class Answered:
    """Calls that have ended."""

    def __init__(self, answers):
        self._answers = answers

    def failures(self):
        failed = self._answers.items()
        return {name: one for name, one in failed if isinstance(one, BaseException)}

    def answers(self, deadline_s):
        return self._answers
