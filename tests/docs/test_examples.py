"""Examples in docstrings give what they say, as far as they can run without an engine."""

import ast
import doctest
import importlib
import io
from pathlib import Path

import pytest

PACKAGE = "torchrl_vllm_sync"
SOURCE = Path(__file__).resolve().parents[2] / PACKAGE

# These speak of engines, trainers, collectors or GPUs that the reader has.
SPOKEN_OF = {
    "AdapterSource",
    "AgentCollector",
    "AsyncVLLM",
    "Dashboard",
    "DashboardLogger",
    "Evaluator",
    "GenerationStatistics",
    "GRPORun",
    "LoadBalancer",
    "LocalLLM",
    "log_pushes",
    "log_rollouts",
    "MetricsExporter",
    "OpenAIServer",
    "Pacer",
    "QueueLengthScaling",
    "RayReplayBuffer",
    "RolloutCorrection",
    "RunLog",
    "register_strategy",
    "RunState",
    "save_timeline",
    "ServiceStatus",
    "SnapshotReader",
    "SnapshotWriter",
    "StalenessFilter",
    "StalenessWeight",
    "TextReward",
    "TrainerPolicy",
    "VersionStamp",
    "VLLMDoubleBufferSyncScheme",
    "VLLMWeightSyncScheme",
    "vLLMWrapper",
    "WeightUpdater",
}


def docstrings(node, name):
    """Names inside the module and docstrings of a module or class, and of all that it defines."""
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield name, ast.get_docstring(node) or ""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from docstrings(child, f"{name}.{child.name}".lstrip("."))


def examples():
    """Module, name and text of each docstring with an example."""
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for name, text in docstrings(ast.parse(path.read_text()), ""):
            if ">>>" in text:
                yield module, name, text


def failures(name, text, names):
    """Runs an example; returns what doctest says of it, empty if nothing."""
    test = doctest.DocTestParser().get_doctest(text, dict(names), name, None, None)
    said = io.StringIO()
    doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS).run(test, out=said.write)
    return said.getvalue()


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [pytest.param(*one, id=".".join(one[:2])) for one in examples() if one[1] not in SPOKEN_OF],
)
def test_an_example_gives_what_it_says(module, name, text, tmp_path):
    names = vars(importlib.import_module(f"{PACKAGE}.{module}"))
    said = failures(name, text, {**names, "tmp_path": tmp_path})
    assert not said, said


def test_no_exception_is_out_of_date():
    assert {name for _, name, _ in examples()} >= SPOKEN_OF


def test_an_example_that_says_something_else_is_noticed():
    assert failures("right", ">>> 1 + one\n2\n", {"one": 1}) == ""
    assert "Expected:" in failures("wrong", ">>> 1 + one\n3\n", {"one": 1})
    assert "NameError" in failures("unknown", ">>> 1 + two\n3\n", {"one": 1})
