"""Imports point one way: a module imports only from rows above its own."""

import ast
from pathlib import Path

PACKAGE = "torchrl_vllm_sync"
SOURCE = Path(__file__).resolve().parent.parent / PACKAGE

# A new module goes into the first row that lies below everything it imports, in its own section.
LAYERS = """
# words that everything else uses
push_status
replica wire background weights.metadata keys silence shown
errors token_rates
ray_errors load_snapshot settings request_counts
reaping
load
versions
requests
attempts continuation

# tiny checkpoints for tests
testing.outputs testing.tokenizer
testing.checkpoint
testing

# weights on their way
weights
weights.buckets weights.rendezvous weights.nccl_environment weights.bounded_store
weights.phase_times
weights.broadcast_group
weights.start_signal weights.bucket_stream weights.whole_tensors weights.direct_stream
weights.module_tensors weights.published weights.gathering weights.trainer_ranks
weights.private_files weights.module_source
weights.storage weights.sharded weights.data_file
weights.source
weights.lease weights.head weights.writer_lock weights.transport
weights.manifest weights.tensor_writer
weights.marker weights.slot_store weights.snapshot_reader
weights.version_store
weights.snapshot_writer
weights.packer weights.trainer_device
weights.vllm_nccl_api weights.watched weights.choice weights.reachable weights.push_deadlines
weights.silent_replicas weights.peer_catch_up
weights.broadcast_members
weights.memmap_transport weights.broadcast_transport
weights.vllm_nccl_transport weights.ipc_transport
weights.auto_transport
weights.push

# inside a replica
engine_args
engine
engine.internals engine.reload engine.checkpoint engine.planned_writes engine.parallel_samples
engine.resumption
engine.plan_coverage engine.copy_regions engine.samples
engine.admission
engine.health engine.plan_recorder
engine.load_plan
engine.checksums engine.staging engine.broadcast_info
engine.load_path engine.peer_copy
engine.broadcast_receiver
engine.native_worker engine.updates
engine.pausable_updates engine.worker
engine.native_updates
engine.chunked_loads
engine.native
engine.snapshot_loads engine.broadcast_loads engine.peer_loads
prompts
engine.answers
engine.actor

# requests on their way
ray_connection
routing.prompt routing.blocks load_monitor
routing.prefix_index
routing.request
routing.strategies
routing.chain
routing bare_actors
sessions
placer
reservation
balancer
replica_watch
replica_access
stream_dispatch
dispatch
generation

# the service
placement replica_calls membership scaling
registry supervisor
launch
fleet service_replicas version_hooks status_log
status service_requests service_versions service_members
status_text
service_weights status_html status_terminal dashboard metrics
service_status metrics_exporter
service_native service_metrics
service
local_llm cli

# TorchRL's side
collector_versions conversations ray_buffer
updater policy
sync_sender
sync_receiver
service_scheme
sync_scheme
transforms.version_source transforms.stamps
transforms.version_stamp transforms.staleness_filter transforms.staleness_weight
transforms.generation_statistics
transforms

# what others are shown
timeline loggers
"""


def rows():
    lines = (line.partition("#")[0].split() for line in LAYERS.splitlines())
    return [row for row in lines if row]


def module_files(source):
    """Every module below ``source``, by its name inside the package."""
    files = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        files[".".join(parts).removesuffix("__init__").removesuffix(".")] = path
    return files


def imports(name, path, known):
    """Modules of the package that ``path`` imports, wherever and for whatever purpose."""
    package = [PACKAGE, *name.split(".")] if name else [PACKAGE]
    if path.stem != "__init__":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            first, _, inside = target.partition(".")
            if first == PACKAGE:
                yield inside if inside in known else inside.rpartition(".")[0], node.lineno


def violations(source, rows):
    files = module_files(source)
    row_of = {module: i for i, row in enumerate(rows) for module in row}
    found = [f"{name}: has no row in LAYERS" for name in files if name and name not in row_of]
    found += [
        f"{name}: has a row in LAYERS, but there is no such module"
        for name in row_of.keys() - files.keys()
    ]
    for name, path in files.items():
        if name not in row_of:  # the package itself: attributes only, which it imports on demand
            continue
        for target, line in imports(name, path, files):
            if not target:
                found.append(f"{name}:{line} imports {PACKAGE} as a whole")
            elif target != name and row_of.get(target, -1) >= row_of[name]:
                found.append(f"{name}:{line} imports {target}, which is not in a row above")
    return list(dict.fromkeys(found))


def test_no_module_is_named_twice():
    names = [name for row in rows() for name in row]
    assert len(names) == len(set(names))


def test_modules_import_only_from_rows_above():
    found = violations(SOURCE, rows())
    assert not found, "\n".join(found)


def test_weights_and_engines_know_nothing_of_the_service():
    files = module_files(SOURCE)
    banned = {"service", "updater", "policy", "balancer", "generation"}
    for name, path in files.items():
        if name.startswith(("weights", "engine.")):
            assert not banned & {target for target, _ in imports(name, path, files)}, name


def test_each_kind_of_violation_is_noticed(tmp_path):
    for name, text in {
        "__init__": "",
        "upper": "from torchrl_vllm_sync.lower import f\n",
        "lower": "def f():\n    from torchrl_vllm_sync import upper\n",
        "sub/__init__": "from .leaf import x\n",
        "sub/leaf": "import torchrl_vllm_sync.upper\nfrom .. import y\n",
        "unknown": "",
    }.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    found = violations(tmp_path, [["upper"], ["lower"], ["sub"], ["sub.leaf"], ["gone"]])
    assert sorted(found) == [
        "gone: has a row in LAYERS, but there is no such module",
        "sub.leaf:2 imports torchrl_vllm_sync as a whole",
        "sub:1 imports sub.leaf, which is not in a row above",
        "unknown: has no row in LAYERS",
        "upper:1 imports lower, which is not in a row above",
    ]
