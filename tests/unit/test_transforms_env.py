"""Version stamp and statistics in environments and collectors, with a policy made by hand."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayTaskError
from tensordict import NonTensorStack, TensorDict, set_list_to_stack
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors.llm import LLMCollector, RayLLMCollector
from torchrl.data.llm import History
from torchrl.data.tensor_specs import Composite, NonTensor, Unbounded
from torchrl.envs import AsyncEnvPool, EnvBase, StepCounter
from torchrl.envs.llm.chat import ChatEnv
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.envs.utils import check_env_specs
from torchrl.modules.llm.policies import ChatHistory

from tests.fakes.rl import Service
from torchrl_vllm_sync import GenerationStatistics, VersionStamp, WeightUpdater
from torchrl_vllm_sync.errors import UnstampedRowsError, UnsupportedArgumentError
from torchrl_vllm_sync.rl import rows as keys
from torchrl_vllm_sync.rl.updater import move_collector
from torchrl_vllm_sync.testing import make_tiny_tokenizer

TOKENIZER = make_tiny_tokenizer()


@pytest.fixture(autouse=True)
def lists_are_stacks():
    with set_list_to_stack(True):
        yield


class Policy(TensorDictModuleBase):
    """Answers every prompt, stamped as the wrapper does, and may be pushed to meanwhile."""

    in_keys = [("history", "prompt")]  # noqa: RUF012
    out_keys = [("history", "full")]  # noqa: RUF012

    def __init__(self, service, *, stamp=True, pushed=lambda: None):
        super().__init__()
        self.service, self.stamp, self.pushed = service, stamp, pushed

    def forward(self, tensordict):
        rows, shape = tensordict.batch_size.numel(), tensordict.batch_size
        prompt = tensordict["history"].prompt
        answer = History.from_chats([[{"role": "assistant", "content": "hi"}]] * rows)
        full = prompt.extend(answer.reshape(*shape, 1), inplace=False, dim=-1)
        tensordict.set("history", ChatHistory(prompt=prompt, full=full, batch_size=shape))
        version = self.service.weight_version
        self.pushed()
        if not self.stamp:
            return tensordict
        versions = torch.full((*shape, 2), version)
        versions[..., 1] = self.service.weight_version
        stamps = {
            keys.POLICY_VERSION: versions[..., 0],
            keys.MAX_POLICY_VERSION: versions[..., 1],
            keys.RESPONSE_VERSIONS: versions,
            keys.NUM_CACHED_TOKENS: torch.zeros(shape, dtype=torch.int64),
            keys.QUEUE_TIME: torch.zeros(shape),
            keys.DECODE_TIME: torch.full(shape, 0.5),
        }
        for key, value in stamps.items():
            tensordict.set(key, value)
        return tensordict.set(keys.FINISH_REASON, NonTensorStack(*["stop"] * rows).reshape(shape))


def queries():
    while True:
        yield {"query": ["Hello"]}


def make_env(rows=2, max_steps=1):
    env = ChatEnv.from_dataloader(
        dataloader=queries(), batch_size=(rows,), tokenizer=TOKENIZER, input_mode="history"
    )
    return env.append_transform(StepCounter(max_steps=max_steps))


def make_collector(policy, stamp, *, env=None, **kwargs):
    return LLMCollector(
        env or make_env(),
        policy=policy,
        dialog_turns_per_batch=2,
        total_dialog_turns=-1,
        track_policy_version=stamp,
        **{"yield_only_last_steps": False, **kwargs},
    )


def collected(collector, batches=3):
    """Root and next stamps of some batches."""
    found = []
    for number, batch in enumerate(collector):
        found.append((batch["policy_version"].tolist(), batch["next", "policy_version"].tolist()))
        if number == batches - 1:
            break
    collector.shutdown()
    return [tuple(one[0][0] if isinstance(one[0], list) else one[0] for one in a) for a in found]


# ---------------------------------------------------------------- the stamp in a collector


def pushing(stamp):
    """A service and policy; each call of the policy is overtaken by a push."""
    service = Service()
    collector = []

    def pushed():
        service.weight_version += 1
        collector[0].increment_version()

    collector.append(make_collector(Policy(service, pushed=pushed), stamp(service)))
    return service, collector[0]


@pytest.mark.parametrize("stamp", [lambda _: VersionStamp(), VersionStamp], ids=["count", "follow"])
def test_a_push_while_sampling_does_not_make_the_stamp_too_new(stamp):
    service, collector = pushing(stamp)
    assert collected(collector) == [(0, 0), (1, 1), (2, 2)]
    assert collector.policy_version == service.weight_version == 3


def test_the_one_above_notices_torchrls_stamp():
    _, collector = pushing(lambda _: True)
    assert collected(collector) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("stamp", [lambda _: VersionStamp(), VersionStamp], ids=["count", "follow"])
def test_rows_that_no_policy_stamped_carry_the_version_of_the_step(stamp):
    service = Service()
    collector = []

    def pushed():
        service.weight_version += 1
        collector[0].increment_version()

    policy = Policy(service, stamp=False, pushed=pushed)
    collector.append(make_collector(policy, stamp(service)))
    assert [after for _, after in collected(collector[0])] == [1, 2, 3]


def test_rows_of_one_batch_are_told_apart():
    stamp = VersionStamp()
    stamp.version = 7
    root = TensorDict(
        {
            keys.POLICY_VERSION: torch.tensor([3, -1]),
            keys.MAX_POLICY_VERSION: torch.tensor([4, -1]),
        },
        [2],
    )
    assert stamp._step(root, TensorDict(batch_size=[2]))["policy_version"].tolist() == [3, 7]
    root = TensorDict({keys.POLICY_VERSION: torch.tensor([3, 3])}, [2])  # from a reset
    assert stamp._step(root, TensorDict(batch_size=[2]))["policy_version"].tolist() == [7, 7]


def test_a_collector_that_yields_trajectories():
    service = Service(5)
    collector = make_collector(
        Policy(service),
        VersionStamp(service),
        env=make_env(max_steps=2),
        yield_completed_trajectories=True,
    )
    batch = next(iter(collector))
    assert batch["next", "policy_version"].tolist() == [5, 5]
    collector.shutdown()


def test_a_collector_that_hears_of_a_version_twice_moves_once():
    service = Service()
    following, counting = VersionStamp(WeightUpdater(service)), VersionStamp()
    collectors = [make_collector(Policy(service), one) for one in (following, counting)]
    for version in (1, 2):
        service.weight_version = version
        for one in [*collectors, *collectors]:
            move_collector(one, version)
        assert [one.policy_version for one in collectors] == [version, version]
    for one in collectors:
        one.shutdown()


# TorchRL's LLMCollector takes no schemes, and is told to take no updater.
with_updater = pytest.mark.filterwarnings(
    "ignore:Using WeightUpdaterBase is dep:DeprecationWarning"
)


class Announced(Service):
    """A service that says when it has a new version."""

    @property
    def weights(self):
        return SimpleNamespace(hooks=self)

    def listen(self, listener):
        self.announce = listener
        return lambda: None


@with_updater
@pytest.mark.parametrize("stamp", [True, PolicyVersion, VersionStamp], ids=["own", "int", "stamp"])
def test_a_collector_begins_with_the_version_that_its_updaters_service_has(stamp):
    service = Announced(7)
    policy = Policy(service, stamp=False)
    updater = WeightUpdater(service)
    collector = make_collector(policy, stamp if stamp is True else stamp(), weight_updater=updater)
    assert type(collector) is LLMCollector
    assert collector.policy_version == 7
    batches = iter(collector)
    assert set(next(batches)["next", "policy_version"].flatten().tolist()) == {7}
    collector.increment_version()  # nobody pushed
    assert collector.policy_version == 7
    service.weight_version = 8
    service.announce(8)
    assert set(next(batches)["next", "policy_version"].flatten().tolist()) == {8}
    collector.shutdown()


@with_updater
def test_a_collector_that_tracks_no_version_stays_without_one():
    service = Announced(7)
    updater = WeightUpdater(service)
    collector = make_collector(Policy(service), False, weight_updater=updater)
    assert isinstance(collector, LLMCollector)
    assert updater.collector is collector
    service.announce(8)
    assert collector.policy_version is None
    collector.shutdown()


class RemoteCollector(RayLLMCollector):
    """One whose actor answers each call with what the next of ``answers`` is, or raises it."""

    def __init__(self, *answers):
        self.answers, self.heard = list(answers), []
        self._collector = SimpleNamespace(__ray_call__=SimpleNamespace(remote=self.call))

    def call(self, function, version):
        self.heard.append(version)
        return self.answers.pop(0)

    def shutdown(self):
        pass


def test_a_collector_that_ray_killed_is_forgotten(monkeypatch, caplog):
    def get(answer):
        if isinstance(answer, Exception):
            raise answer

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    service = Announced(1)
    updater = WeightUpdater(service)
    lives = RemoteCollector(None, ActorUnavailableError("no route", None), None)
    dies = [
        RemoteCollector(None, error) for error in (OutOfMemoryError("killed"), ActorDiedError())
    ]
    for one in (lives, *dies):
        updater.register_collector(one)
    service.announce(2)
    assert [one.message for one in caplog.records if "is forgotten: killed" in one.message]
    assert updater.collectors == [lives]
    service.announce(3)
    assert lives.heard == [1, 2, 3]
    raised = RayTaskError("hear", "trace", OutOfMemoryError("of a task")).as_instanceof_cause()
    lives.answers = [raised]
    with pytest.raises(RayTaskError):
        service.announce(4)
    assert updater.collectors == [lives]


# ---------------------------------------------------------------- specs


@pytest.mark.parametrize("transform", [VersionStamp, GenerationStatistics])
def test_rollouts_keep_what_the_specs_announce(transform):
    env = make_env(max_steps=2).append_transform(transform())
    rollout = env.rollout(2, Policy(Service(3)))
    name = "policy_version" if transform is VersionStamp else "statistics"
    for data in (rollout[..., 0], rollout[..., 1].get("next")):
        assert env.observation_spec[name].is_in(data.get(name))
    assert isinstance(VersionStamp(), PolicyVersion)


class Plain(EnvBase):
    """An environment of tensors only, which TorchRL can check."""

    def __init__(self):
        super().__init__(batch_size=(2,))
        self.observation_spec = Composite(seen=Unbounded((2, 1)), shape=(2,))
        self.action_spec = Unbounded((2, 1))
        self.reward_spec = Unbounded((2, 1))

    def _reset(self, tensordict=None, **kwargs):
        return TensorDict({"seen": torch.zeros(2, 1)}, [2])

    def _step(self, tensordict):
        reward, done = torch.zeros(2, 1), torch.zeros(2, 1, dtype=torch.bool)
        return TensorDict({"seen": torch.zeros(2, 1), "reward": reward, "done": done}, [2])

    def _set_seed(self, seed):
        return seed


def test_torchrls_check_of_specs_finds_nothing():
    check_env_specs(Plain().append_transform(VersionStamp(Service(3))))


# ---------------------------------------------------------------- statistics in an environment


def test_statistics_of_each_step():
    statistics = GenerationStatistics()
    env = make_env(max_steps=2).append_transform(statistics)
    rollout = env.rollout(2, Policy(Service(3)))
    assert rollout["next", "statistics", "response_length"].tolist() == [[2, 2], [2, 2]]
    assert rollout["next", "statistics", "tokens_per_second"].tolist() == [[2.0, 2.0]] * 2
    assert rollout["next", "statistics", "response_length"].dtype == torch.int64
    assert rollout[:, 0]["statistics", "response_length"].tolist() == [-1, -1]
    assert rollout[:, 0]["statistics", "queue_time"].isnan().all()
    assert rollout[:, 1]["statistics", "response_length"].tolist() == [2, 2]
    assert statistics.summary()["rows"] == 4
    assert statistics.summary()["response_length"] == 2.0


def test_statistics_refuse_a_policy_that_stamps_nothing():
    env = make_env().append_transform(GenerationStatistics())
    with pytest.raises(UnstampedRowsError, match="2 of 2 rows"):
        env.rollout(1, Policy(Service(), stamp=False))


# ---------------------------------------------------------------- a pool of environments


def pooled():
    return make_env(rows=1).append_transform(VersionStamp())


def test_a_pool_whose_environments_stamp():
    service = Service(4)
    pool = AsyncEnvPool([pooled] * 2, backend="threading")
    collector = LLMCollector(
        pool,
        policy=Policy(service),
        dialog_turns_per_batch=2,
        total_dialog_turns=4,
        yield_completed_trajectories=True,
    )
    try:
        batch = next(iter(collector))
        assert set(batch["next", "policy_version"].flatten().tolist()) == {4}
    finally:
        collector.shutdown()


# ---------------------------------------------------------------- the stamp by itself


def test_it_counts_or_is_set():
    stamp = VersionStamp()
    stamp.increment_version()
    assert stamp.version == 1
    stamp.version = 5
    stamp.increment_version()
    assert stamp.version == 6
    for value in (-1, "7f", True):
        with pytest.raises(UnsupportedArgumentError, match="int of at least 0"):
            stamp.version = value
    assert stamp.version == 6


def test_what_follows_reads_anew_and_counts_nothing():
    service = Service(2)
    stamp = VersionStamp(service)
    assert stamp.version == 2
    stamp.increment_version()
    assert stamp.version == 2
    service.weight_version = 9
    assert stamp.version == 9
    stamp.increment_version()
    changes = [(one.old_version, one.new_version) for one in stamp.version_history]
    assert changes == [(None, 2), (2, 2), (2, 9)]


def test_what_follows_may_hear_first_and_never_goes_back():
    service = Service(2)
    stamp = VersionStamp(service)
    for told, known in ((4, 4), (3, 4)):
        stamp.version = told
        assert stamp.version == known
    service.weight_version = 5
    assert stamp.version == 5
    with pytest.raises(UnsupportedArgumentError, match="int of at least 0"):
        stamp.version = -1


def test_a_collectors_copy_hears_of_a_push_before_its_service_does():
    behind = Service(1)  # a copy of the service, in a collector's actor
    for version in (2, 3, 7):
        collector = make_collector(Policy(behind), VersionStamp(behind))
        move_collector(collector, version)
        assert collector.policy_version == version
        collector.shutdown()


@pytest.mark.parametrize("version", [3, "7f", object()], ids=str)
def test_what_cannot_be_followed_is_refused(version):
    with pytest.raises(UnsupportedArgumentError, match="version must be"):
        VersionStamp(version)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_go_on(duplicate):
    counting = VersionStamp()
    counting.increment_version()
    counting = duplicate(counting)
    counting.increment_version()
    assert counting.version == 2
    following = duplicate(VersionStamp(Service(4)))
    assert following.version == 4


def test_text_versions_are_torchrls_business():
    spec = PolicyVersion("uuid").transform_observation_spec(Composite())
    assert isinstance(spec["policy_version"], NonTensor)
