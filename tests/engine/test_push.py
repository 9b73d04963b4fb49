"""After a push the engines compute what the trainer's model computes, on every replica."""

import copy
import subprocess
import sys
import time
from subprocess import PIPE

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tensordict import TensorDict

from tests.engine.checks import TOLERANCE, assert_holds, distance, perturbed
from tests.engine.trainers import broadcast
from torchrl_vllm_sync import AdapterSource, MemmapTransport, TrainerPolicy
from torchrl_vllm_sync.errors import (
    StaleVersionError,
    UnsupportedArgumentError,
    WeightMismatchError,
)
from torchrl_vllm_sync.testing import load_tiny_model


@pytest.fixture
def pushed(service, model):
    """A service whose replicas hold ``model``, and that model."""
    service.push_weights(model)
    return service, model


def test_pushes_one_after_another_reach_every_replica(service, model, other_model):
    before = service.weight_version
    assert min(distance(service, other_model, index) for index in range(2)) > 1
    for step in range(1, 6):
        trained = perturbed(other_model, seed=step)
        report = service.push_weights(trained)
        assert report.version == service.weight_version == before + step
        assert {one.replica_id for one in report.replicas} == {"0", "1"}
        assert all(one.version == report.version for one in report.replicas)
        assert all(one.phases["num_tensors"] == 50 for one in report.replicas)
        assert {(one.path, one.path_reason) for one in report.replicas} == {
            ("layerwise", "snapshots are always loaded that way")
        }
        assert_holds(service, trained)
    assert min(distance(service, model, index) for index in range(2)) > 1


def test_one_step_of_an_optimizer_is_far_above_the_tolerance(pushed):
    service, model = pushed
    perturbed(model, seed=0, scale=1e-3)
    assert distance(service, model, 0) > 5 * TOLERANCE
    with pytest.raises(AssertionError, match="replica 0 differs by"):
        assert_holds(service, model)


def test_a_policy_finer_than_the_engines_that_it_was_pushed_to_says_so(service, model, caplog):
    ids, mask = torch.arange(5, 13)[None], torch.ones(1, 8, dtype=torch.bool)
    masks = {"all_attention_mask": mask, "all_assistant_mask": mask}
    rows = TensorDict({"tokens": {"full": ids}, "masks": masks}, [1])
    for dtype, told in ((torch.float32, 0), (torch.float64, 1)):
        policy = TrainerPolicy(copy.deepcopy(model).to(dtype))
        service.push_weights(policy)
        policy(rows)
        assert caplog.text.count("computed in torch.float64, by engines in torch.float32") == told


def test_adapters_are_refused_by_engines_that_hold_none(pushed):
    service, model = pushed
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(WeightMismatchError, match="launched with enable_lora"):
        service.push_weights(AdapterSource(adapted))
    service.push_weights(model)
    assert_holds(service, model)


FORMS = {
    "state dict": lambda model: model.state_dict(),
    "generator of pairs": lambda model: model.named_parameters(),
    "nested TensorDict": lambda model: TensorDict.from_module(model).data,
    "TensorDictParams": lambda model: TensorDict.from_module(model, as_module=True),
    "flat TensorDict": lambda model: TensorDict(model.state_dict()),
    "names with a prefix": lambda model: {f"actor.{n}": p for n, p in model.named_parameters()},
    "half precision": lambda model: {n: p.half() for n, p in model.named_parameters()},
}


@pytest.mark.parametrize("form", FORMS)
def test_whatever_the_trainer_holds_arrives(service, model, form):
    perturbed(model, seed=len(form))
    weights = FORMS[form](model)
    service.push_weights(weights)
    if form == "half precision":
        for parameter in model.parameters():
            parameter.data = parameter.half().float()
    assert_holds(service, model)


def test_a_version_that_all_hold_is_not_loaded_again(pushed):
    service, model = pushed
    version = service.weight_version
    again = service.push_weights(model, version=version)
    assert again.version == version
    assert [one.phases["loaded"] for one in again.replicas] == [0, 0]
    assert "publish_s" not in again.phases
    assert_holds(service, model)


@pytest.mark.parametrize("kind", [MemmapTransport, broadcast])
def test_a_version_that_all_hold_does_not_take_other_weights(service, model, kind):
    version = service.push_weights(model, transport=kind()).version
    held = copy.deepcopy(model)
    with pytest.raises(StaleVersionError, match=f"version {version} was pushed already"):
        service.push_weights(perturbed(model, seed=31), version=version)
    assert_holds(service, held)
    transport = MemmapTransport()  # which the other tests use
    assert service.push_weights(model, transport=transport).version == version + 1
    assert_holds(service, model)


def test_versions_may_skip_but_not_go_back(pushed):
    service, model = pushed
    version = service.weight_version + 10
    assert service.push_weights(model, version=version).version == version
    for older in (version - 1, 0):
        with pytest.raises(StaleVersionError, match=f"version must be at least {version}, got"):
            service.push_weights(model, version=older)
    assert service.push_weights(model).version == service.weight_version == version + 1


BAD = {
    "part of a fused module": (
        lambda sd: sd.pop("model.layers.1.self_attn.k_proj.weight"),
        r"1 missing: model\.layers\.1\.self_attn\.k_proj\.weight",
    ),
    "many missing": (
        lambda sd: [sd.pop(name) for name in list(sd) if "layers.2" in name],
        r"12 missing: .* and 7 more",
    ),
    "unknown": (lambda sd: sd.update({"model.norm2.weight": torch.ones(64)}), "1 unknown"),
    "wrong shape": (
        lambda sd: sd.update({"model.norm.weight": torch.ones(63)}),
        r"model\.norm\.weight \[63\] instead of \[64\]",
    ),
    "transposed": (
        lambda sd: sd.update({"model.embed_tokens.weight": torch.ones(64, 512)}),
        r"of another shape: model\.embed_tokens\.weight \[64, 512\]",
    ),
    "integers": (
        lambda sd: sd.update({"model.norm.weight": torch.ones(64, dtype=torch.int64)}),
        r"torch\.int64 instead of torch\.float32",
    ),
    "a head of its own": (
        lambda sd: sd.update({"lm_head.weight": torch.ones(512, 64)}),
        r"lm_head\.weight differs from model\.embed_tokens\.weight",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_push_that_does_not_fit_changes_nothing(pushed, other_model, kind):
    service, model = pushed
    version, directory = service.weight_version, service.weights.pusher.transport.directory
    stored = {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}
    weights = dict(other_model.state_dict())
    break_it, message = BAD[kind]
    break_it(weights)
    with pytest.raises(WeightMismatchError, match=message):
        service.push_weights(weights)
    assert service.weight_version == version
    assert stored == {
        path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()
    }
    assert_holds(service, model)
    assert service.push_weights(model).version == version + 1  # no number was used up


def test_what_is_no_weights_is_refused(service):
    for weights in ("model.safetensors", 3, None):
        with pytest.raises(TypeError, match="weights must be a module"):
            service.push_weights(weights)
    with pytest.raises(TypeError, match="weights must be tensors, got dict for 'model'"):
        service.push_weights({"model": {"norm": torch.ones(64)}})


def test_a_directory_of_the_users_outlives_the_service_and_goes_on(service, model, tmp_path):
    first = MemmapTransport(tmp_path / "policy", layout="versions")
    perturbed(model, seed=1)
    version = service.push_weights(model, transport=first).version
    assert first.last_version == version
    first.close()
    perturbed(model, seed=2)
    again = MemmapTransport(tmp_path / "policy", layout="versions")
    # The same number is stored there already, with other weights: they must not be taken for these.
    with pytest.raises(StaleVersionError, match=f"version {version} was pushed already"):
        service.push_weights(model, transport=again, version=version)
    assert service.push_weights(model).version > version
    assert_holds(service, model)
    service.use_transport(MemmapTransport())
    assert (tmp_path / "policy").exists()


WRITER = """
import sys
from torchrl_vllm_sync.testing import load_tiny_model
from torchrl_vllm_sync import ParamMeta
from torchrl_vllm_sync import SnapshotWriter

directory, run_id, *jobs = sys.argv[1:]
with SnapshotWriter(directory, run_id=run_id) as writer:
    for checkpoint, version in zip(jobs[::2], jobs[1::2]):
        model = load_tiny_model(checkpoint)
        metadata = [ParamMeta.of(name, p) for name, p in model.named_parameters()]
        writer.publish(model.named_parameters(), metadata, int(version))
        print(version, flush=True)
        sys.stdin.readline()
"""


def test_replicas_follow_a_writer_in_another_process(
    service, checkpoint, other_checkpoint, tmp_path
):
    directory = tmp_path / "followed"
    first = service.weight_version + 1
    jobs = [checkpoint, first, other_checkpoint, first + 1, checkpoint, first + 2]
    command = [sys.executable, "-c", WRITER, directory, "run-a", *jobs]
    service.follow_snapshots(directory, run_id="run-a", interval_s=0.05)
    with subprocess.Popen(
        [str(word) for word in command], stdin=PIPE, stdout=PIPE, text=True
    ) as writer:
        for version, path in zip(range(first, first + 3), jobs[::2], strict=True):
            assert writer.stdout.readline().strip() == str(version)
            if version < first + 2:
                wait_for_version(service, version)
                assert_holds(service, load_tiny_model(path))
            else:
                service.stop_following()
            writer.stdin.write("\n")
            writer.stdin.flush()
    # What was published after the end of following is not loaded, nor is anything loaded twice.
    # (The last version may have come in just before.)
    held = {report.weight_version for report in service.replicas.call_replicas("report").values()}
    assert held <= {first + 1, first + 2}
    model = load_tiny_model(other_checkpoint)
    assert service.push_weights(model).version > first
    assert_holds(service, model)


def test_following_needs_a_positive_interval(service, tmp_path):
    with pytest.raises(UnsupportedArgumentError, match="interval_s must be greater than 0, got 0"):
        service.follow_snapshots(tmp_path, interval_s=0)


def wait_for_version(service, version):
    deadline = time.monotonic() + 60
    ask = service.replicas.call_replicas
    while {one.weight_version for one in ask("report").values()} != {version}:
        assert time.monotonic() < deadline
        time.sleep(0.02)
