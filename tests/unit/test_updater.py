"""The updater by itself: whose version moves when, over a service that only counts pushes."""

import gc
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
from torchrl.collectors import BaseCollector
from torchrl.collectors.weight_update import WeightUpdaterBase
from torchrl.envs.llm.transforms import PolicyVersion

from torchrl_vllm_sync import MemmapTransport, WeightUpdater
from torchrl_vllm_sync.errors import UnsupportedArgumentError, WeightSyncError


class Report:
    def __init__(self, version):
        self.version = version


class Service:
    """Counts pushes; fails the next ones on demand, after which survivors hold the version."""

    def __init__(self):
        self.weight_version, self.pushes, self.failures, self.opened = 0, [], 0, []
        self.listeners = []

    def push_weights(self, weights, *, version, transport, mode, **options):
        version = self.weight_version + 1 if version is None else version
        self.weight_version = version
        self.pushes.append((weights, version))
        self.mode = mode
        if self.failures:
            self.failures -= 1
            raise WeightSyncError(version, {"1": "injected"})
        for listener in self.listeners:
            listener(version)
        return Report(version)

    @property
    def weights(self):
        return SimpleNamespace(hooks=self)

    def listen(self, listener):
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def use_transport(self, transport):
        self.transport = transport

    def init_weight_update_group(self, **meeting_point):
        self.opened.append(meeting_point)


class Collector(BaseCollector):
    """Moves its version as TorchRL's do: on request, and after ``update_policy_weights_``."""

    def __init__(self, updater=None, version_type=int):
        self.policy_version_tracker = self.stamp = PolicyVersion(version_type)
        self.updater = updater

    @property
    def policy_version(self):
        return self.policy_version_tracker.version

    def increment_version(self):
        self.policy_version_tracker.increment_version()

    def update_policy_weights_(self, weights=None):
        self.updater(policy_or_weights=weights, worker_ids=None)
        self.increment_version()

    def iterator(self): ...
    def set_seed(self, seed, static_seed=False): ...
    def load_state_dict(self, state_dict): ...
    def state_dict(self): ...
    def shutdown(self, *args, **kwargs): ...


def versions(*collectors):
    """What they say, once it is sure that their environments stamp the same."""
    for collector in collectors:
        assert collector.stamp.version == collector.policy_version
    return [collector.policy_version for collector in collectors]


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def updater(service):
    return WeightUpdater(service, source="the source")


@pytest.fixture
def collector(updater):
    collector = Collector(updater)
    updater.register_collector(collector)
    return collector


def test_it_passes_for_torchrls(updater):
    assert isinstance(updater, WeightUpdaterBase)


def test_either_way_moves_the_version_once(updater, collector, service):
    updater.push_weights()
    assert versions(collector) == [1]
    collector.update_policy_weights_("given")
    assert versions(collector) == [2]
    updater.push_weights("other")
    assert versions(collector) == [service.weight_version] == [3]
    assert service.pushes == [("the source", 1), ("given", 2), ("other", 3)]
    assert updater.last_report.version == 3


def test_versions_are_the_services_from_the_start_and_may_skip(service, updater):
    service.weight_version = 7
    collector = Collector(updater)
    updater.register_collector(collector)
    assert versions(collector) == [7]
    updater.push_weights(version=12)
    assert versions(collector) == [12]
    collector.update_policy_weights_()
    assert versions(collector) == [13]


def test_pushing_a_version_again_moves_nothing(updater, collector):
    updater.push_weights(version=4)
    updater.push_weights(version=4)
    assert versions(collector) == [4]


def test_a_push_that_failed_moves_nothing_until_it_is_repaired(updater, collector, service):
    service.failures = 2
    for _ in range(2):
        with pytest.raises(WeightSyncError):
            updater.push_weights(version=1)
        assert versions(collector) == [0]
    updater.push_weights(version=1)
    assert versions(collector) == [1]
    service.failures = 1
    with pytest.raises(WeightSyncError):
        collector.update_policy_weights_()
    assert versions(collector) == [1]


def test_several_collectors_move_together_whoever_pushes(updater, collector):
    second = Collector(updater)
    updater.register_collector(second)
    updater.register_collector(second)
    updater.push_weights()
    assert versions(collector, second) == [1, 1]
    assert updater.collector is second
    assert updater.collectors == [collector, second]
    second.update_policy_weights_()
    assert versions(collector, second) == [2, 2]
    collector.update_policy_weights_()
    assert versions(collector, second) == [3, 3]


def test_an_announcement_that_comes_late_brings_no_collector_back(updater, collector, service):
    """Two threads push: the first is overtaken between its commit and what it announces."""
    push = service.push_weights

    def overtaken(*args, **kwargs):
        report = push(*args, **kwargs)
        service.push_weights = push
        other = threading.Thread(target=updater.push_weights)
        other.start()
        other.join()
        return report

    service.push_weights = overtaken
    report = updater.push_weights()
    assert report.version == 1
    assert service.weight_version == 2
    assert versions(collector) == [2]
    updater.push_weights()
    assert versions(collector) == [3]


def test_hooks_that_unregister_themselves_leave_the_others_called(updater):
    called = []

    def once():
        called.append("once")
        updater.post_hooks.remove(once)

    updater.register_post_hook(once)
    updater.register_post_hook(lambda: called.append("always"))
    updater.push_weights()
    updater.push_weights()
    assert called == ["once", "always", "always"]


def test_hooks_that_count_too_do_not_make_it_twice(updater, collector, service):
    updater.register_post_hook(collector.increment_version)
    updater.register_post_hook(updater.increment_version)
    updater.push_weights()
    collector.update_policy_weights_()
    assert versions(collector) == [service.weight_version] == [2]


def test_a_collector_that_nobody_registered_does_count_twice(updater):
    """What the test above would see without the collector being registered."""
    collector = Collector(updater)
    updater.register_post_hook(collector.increment_version)
    collector.update_policy_weights_()
    assert versions(collector) == [2]


def test_made_up_versions_change_once_a_push(updater):
    collector = Collector(updater, "uuid")
    updater.register_collector(collector)
    seen = [collector.policy_version]
    updater.push_weights()
    seen.append(collector.policy_version)
    collector.update_policy_weights_()
    seen.append(collector.policy_version)
    assert len(set(seen)) == 3

    updater.increment_version()
    assert collector.policy_version == seen[-1]


def test_a_collector_without_versions_is_left_alone(updater):
    collector = Collector(updater)
    collector.policy_version_tracker = None
    updater.register_collector(collector)
    updater.push_weights()
    assert collector.policy_version_tracker is None


def test_what_is_no_collector_is_refused(updater):
    with pytest.raises(UnsupportedArgumentError, match=r"must be one of TorchRL's .*, got dict"):
        updater.register_collector({})
    assert updater.collectors == []


def test_collectors_that_are_gone_are_forgotten_with_a_warning(updater, collector, caplog):
    updater.register_collector(Collector())
    gc.collect()
    updater.push_weights()
    assert versions(collector) == [1]
    assert [record.message for record in caplog.records] == ["1 registered collector(s) are gone"]
    assert updater.collectors == [collector]
    assert len(caplog.records) == 1


def test_a_collector_that_registers_while_others_are_forgotten_is_kept(updater, collector):
    late, registered = Collector(), threading.Event()

    def register():
        updater.register_collector(late)
        registered.set()

    def gone():
        """The reference of one that is gone, which is looked at, and then dropped."""
        asked.append(None)
        if len(asked) == 2:
            thread.start()
            registered.wait(0.5)

    asked, thread = [], threading.Thread(target=register)
    updater._versions._collectors.append(gone)
    assert updater.collectors == [collector]
    thread.join(10)
    assert updater.collectors == [collector, late]


class FakeRay:
    """Calls of collectors in actors, which take them when they are free."""

    def __init__(self):
        self.is_free, self.calls, self.num_waits = True, [], 0
        self.get = self.calls.index

    def remote(self, function, version):
        self.calls.append(SimpleNamespace(version=version, is_done=False))
        return self.calls[-1]

    def wait(self, refs, *, num_returns=1, timeout):
        self.num_waits += timeout > 0
        for one in self.calls if timeout else ():
            one.is_done = self.is_free
        return [one for one in refs if one.is_done], None


def test_a_collector_that_was_busy_is_waited_for_again_once_it_is_free(
    updater, caplog, monkeypatch
):
    fake, remote = FakeRay(), Collector()
    remote._collector = SimpleNamespace(__ray_call__=fake)
    monkeypatch.setattr("torchrl_vllm_sync.rl.updater.ray", fake)
    monkeypatch.setattr("torchrl_vllm_sync.rl.updater.RayLLMCollector", Collector)
    updater.register_collector(remote)
    assert (fake.num_waits, fake.calls[-1].is_done) == (1, True)
    for fake.is_free, num_waits, num_warnings in [
        (False, 2, 1),
        (False, 2, 1),  # it has not taken the one before
        (True, 2, 1),
        (True, 3, 1),
        (False, 4, 2),
    ]:
        updater.push_weights()
        assert (fake.num_waits, len(caplog.records)) == (num_waits, num_warnings)
        for one in fake.calls if fake.is_free else ():
            one.is_done = True
    assert [one.version for one in fake.calls] == [0, 1, 2, 3, 4, 5]


def test_hooks_run_after_each_push_that_succeeded(updater, collector, service):
    calls = []
    updater.register_post_hook(lambda: calls.append(collector.policy_version))
    updater.push_weights()
    collector.update_policy_weights_()
    service.failures = 1
    with pytest.raises(WeightSyncError):
        updater.push_weights()
    assert calls == [1, 2]
    assert len(updater.post_hooks) == 1
    assert service.weight_version == 3


def test_pushes_that_pass_the_updater_by_are_heard_until_it_disconnects(
    updater, collector, service
):
    options = {"transport": None, "timeout_s": 1, "clear_cache": False, "mode": "keep"}
    options["strict"] = None
    service.push_weights("by hand", version=None, **options)
    assert versions(collector) == [1]
    updater.disconnect()
    updater.disconnect()
    assert updater.collectors == service.listeners == []
    service.push_weights("by hand", version=None, **options)
    assert versions(collector) == [1]


def test_a_push_after_disconnecting_says_what_is_wrong(updater):
    updater.push_weights()
    updater.disconnect()
    with pytest.raises(UnsupportedArgumentError, match=r"disconnected .* make a new WeightUpdater"):
        updater.push_weights()


def test_a_pickled_copy_knows_the_service_only(updater, collector):
    updater.register_post_hook(print)
    updater.push_weights()
    copy = pickle.loads(pickle.dumps(updater))
    assert (copy.collectors, copy.collector, copy.post_hooks, copy.source) == ([], None, [], None)
    with pytest.raises(UnsupportedArgumentError, match="nothing to send"):
        copy.push_weights()
    assert copy.push_weights("given").version == 2


def test_what_cannot_be_honoured_is_refused(updater, service):
    with pytest.raises(UnsupportedArgumentError, match="worker_ids must be None, got 0"):
        updater.push_weights(worker_ids=0)
    with pytest.raises(UnsupportedArgumentError, match="transport must be one of"):
        WeightUpdater(service, transport="carrier pigeon")
    with pytest.raises(UnsupportedArgumentError, match=r"mode must be one of .*, got 'kep'"):
        WeightUpdater(service, mode="kep")
    with pytest.raises(UnsupportedArgumentError, match="a model is the source, got Linear"):
        WeightUpdater(torch.nn.Linear(1, 1))
    with pytest.raises(UnsupportedArgumentError, match="no service"):
        WeightUpdater(None).open()
    assert service.pushes == []


def test_init_opens_the_transport_and_takes_any_arguments(service):
    service.weight_version = 5
    transport = MemmapTransport()
    updater = WeightUpdater(service, transport=transport)
    collector = Collector(updater)
    updater.register_collector(collector)
    collector.policy_version_tracker.version = 0
    updater.init("whatever", a="collector passes")
    assert (service.transport, service.opened) == (transport, [{}])
    assert versions(collector) == [5]


def test_the_mode_of_the_pause_is_handed_on():
    service = Service()
    WeightUpdater(service, {}).push_weights()
    assert service.mode == "keep"
    WeightUpdater(service, {}, mode="wait").push_weights()
    assert service.mode == "wait"
