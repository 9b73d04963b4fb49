"""What users can call, and what importing the package costs.

``public_api.txt`` lists every public name with its signature. A change there is a change for users:
``make public-api`` writes the file anew, and its diff says what to put into the release notes.
"""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import get_origin
from unittest.mock import MagicMock

import pytest

PACKAGE = "torchrl_vllm_sync"
MODULES = (PACKAGE, f"{PACKAGE}.errors", f"{PACKAGE}.testing")
METHODS = (classmethod, staticmethod)
LISTING = Path(__file__).resolve().parent / "public_api.txt"


def describe(name, value):
    """Lines for one public name: its signature and, for a class, those of its public members."""
    if inspect.isclass(value):
        bases = ", ".join(base.__name__ for base in value.__bases__)
        yield f"class {name}({bases})"
        yield from (f"    {line}" for line in members(value))
    elif inspect.isfunction(value):
        yield f"{name}{signature(value)}"
    elif get_origin(value) is not None:
        yield f"{name} = {value}"
    else:
        assert inspect.ismodule(value) or name == "__version__", name


def members(cls):
    """Constructor and public methods that this project defines, those of base classes included.

    A class may carry a foreign ``__module__``, for TorchRL to recognise it; its functions do not.
    """
    found = {}
    for base in reversed(cls.__mro__):
        found |= {
            name: value
            for name, value in vars(base).items()
            if getattr(function_of(value), "__module__", "").startswith(PACKAGE)
        }
    if "__init__" in found:
        yield f"__init__{signature(found['__init__'])}"
    for name, value in sorted(found.items()):
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield f"{name}: property"
        else:
            function = function_of(value)
            kind = f"{type(value).__name__} " if isinstance(value, METHODS) else ""
            if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
                kind += "async "
            yield f"{kind}{name}{signature(function)}"


def function_of(value):
    """The function behind a method, a property or a class attribute; None if there is none."""
    if isinstance(value, METHODS):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return value if inspect.isfunction(value) else None


def signature(function):
    """Without annotations, which type checkers hold to, and without addresses in defaults."""
    found = inspect.signature(function)
    empty = inspect.Parameter.empty
    parameters = [p.replace(annotation=empty) for p in found.parameters.values()]
    text = str(found.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def listing():
    lines = []
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        lines.append(f"# {module_name}")
        for name in sorted(module.__all__):
            lines.extend(describe(name, getattr(module, name)))
        lines.append("")
    return "\n".join(lines)


def run(code):
    """Runs ``code`` in a fresh interpreter and returns what it prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_names_and_signatures_are_those_listed():
    assert listing() == LISTING.read_text(), (
        "the public API changed; if on purpose: make public-api"
    )


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("push_weights", [{}]),
        ("get_model_metadata", []),
        ("pause_generation", []),
        ("add_replicas", []),
    ],
)
def test_arguments_that_a_service_does_not_know_are_refused_by_the_name_that_was_called(
    name, given
):
    """And not by that of the part that does it."""
    service = importlib.import_module(PACKAGE).AsyncVLLM
    told = rf"^AsyncVLLM\.{name}\(\) got an unexpected keyword argument 'unknown'$"
    with pytest.raises(TypeError, match=told):
        getattr(service, name)(MagicMock(), *given, unknown=3)


def test_importing_the_package_imports_nothing_heavy():
    loaded = (
        f"import sys, {PACKAGE}; print({{'vllm', 'ray', 'torch', 'torchrl'}} & {{*sys.modules}})"
    )
    assert run(loaded) == "set()"


def test_importing_the_package_takes_next_to_no_time():
    timed = (
        f"import time; start = time.process_time(); import {PACKAGE}; "
        "print(time.process_time() - start)"
    )
    assert float(run(timed)) < 0.3


def test_testing_needs_neither_vllm_nor_ray():
    loaded = f"import sys, {PACKAGE}.testing; print({{'vllm', 'ray'}} & {{*sys.modules}})"
    assert run(loaded) == "set()"


def test_every_name_is_found_and_others_are_not():
    package = importlib.import_module(PACKAGE)
    assert {*package.__all__} <= {*dir(package)}
    assert {"__version__", *package._homes()} == {*package.__all__}
    assert not hasattr(package, "no_such_name")


if __name__ == "__main__":
    LISTING.write_text(listing())
