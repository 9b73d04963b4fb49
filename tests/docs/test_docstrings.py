"""Every public name says in Google style what it takes, gives and raises.

Public is what ``tests/public_api.txt`` lists, and what the pages of ``tutorials/reference/`` show
beside it.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap

import pytest

from tests.test_public_api import MODULES, PACKAGE, function_of

# Not in public_api.txt, but part of what users hold in their hands: shown in the reference.
BESIDE = (
    "routing.ledger.LoadSnapshot",
    "engine.args.end_replica",
    "weights.auto.choose_transport",
)

SECTION = re.compile(r"(Args|Attributes|Example|Raises|Returns|Yields):")
ENTRY = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*):")
# What a function or method shares with a method is written once, there.
SHARED = re.compile(r"Arguments\b[^.]* those\s+of\s+:meth:`(?:(\w+)\.)?(\w+)`")


def sections(text):
    """Names that each section of a docstring has an entry for; a section without any is empty."""
    found, current = {}, None
    for line in text.splitlines():
        if heading := SECTION.fullmatch(line):
            current = found.setdefault(heading[1], [])
        elif line and not line.startswith(" "):
            current = None
        elif current is not None and (entry := ENTRY.match(line)):
            current += [name.lstrip("*") for name in entry[1].split(", ")]
    return found


def own_nodes(function):
    """Nodes of a function's body, without those of functions and classes inside it."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    waiting = list(tree.body[0].body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def raised(function):
    """Names of the error classes that a function's own body raises."""
    names = set()
    for node in own_nodes(function):
        if isinstance(node, ast.Raise) and node.exc is not None:
            error = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            name = error.attr if isinstance(error, ast.Attribute) else getattr(error, "id", "")
            if name.endswith(("Error", "Exception")):
                names.add(name)
    return names - {"NotImplementedError"}


def gives(function):
    """``"Returns"`` or ``"Yields"``, for a function that does; otherwise empty."""
    nodes = list(own_nodes(function))
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes):
        return "Yields"
    returns = (node.value for node in nodes if isinstance(node, ast.Return))
    values = (value for value in returns if value is not None)
    return "Returns" if any(getattr(value, "value", ...) is not None for value in values) else ""


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def summary_faults(text):
    summary = text.splitlines()[0]
    if not re.match(r"[A-Z`:*]", summary) or not re.search(r"[.?!](?:\s|$)", summary):
        yield f"its first line is no sentence: {summary!r}"


def function_faults(function, owner=None, *, has_section_for_result=True):
    """What the docstring of a function or method does not say."""
    text = inspect.cleandoc(function.__doc__ or "")
    if not text:
        return ["it has no docstring"]
    found = sections(text)
    shared = SHARED.search(text)
    if shared:
        elsewhere = {path.rpartition(".")[2]: value for path, value in public_values()}
        other = sections(
            inspect.cleandoc(getattr(elsewhere.get(shared[1], owner), shared[2]).__doc__)
        )
        found = {name: found.get(name, []) + other.get(name, []) for name in {*found, *other}}
    faults = list(summary_faults(text))
    taken = parameters(function)
    faults += [f"Args: has no {name}" for name in taken if name not in found.get("Args", [])]
    if not shared:
        faults += [f"Args: has {name}" for name in found.get("Args", []) if name not in taken]
    faults += [f"Raises: has no {name}" for name in raised(function) - {*found.get("Raises", [])}]
    result = gives(function)
    says_it = re.match(r"(Returns|Yields|Whether)\b", text) or not has_section_for_result
    if result and result not in found and not says_it:
        faults.append(f"{result}: is missing")
    return faults


def class_faults(cls):
    """What the docstring of a class and of its constructor do not say."""
    text = inspect.cleandoc(vars(cls).get("__doc__") or "")
    if not text:
        return ["it has no docstring"]
    found = sections(text)
    known = {*found.get("Args", []), *found.get("Attributes", [])}
    faults = list(summary_faults(text))
    if dataclasses.is_dataclass(cls):
        names = [one.name for one in dataclasses.fields(cls)]
        return faults + [f"Attributes: has no {name}" for name in names if name not in known]
    init = vars(cls).get("__init__")
    if inspect.isfunction(init) and not getattr(cls, "_is_protocol", False):
        faults += [f"Args: has no {name}" for name in parameters(init) if name not in known]
        faults += [f"Raises: has no {name}" for name in raised(init) - {*found.get("Raises", [])}]
    return faults


def own_members(cls):
    """Public methods and properties that this project defines, inherited ones included."""
    found = {}
    for base in reversed(cls.__mro__):
        found |= {
            name: value
            for name, value in vars(base).items()
            if getattr(function_of(value), "__module__", "").startswith(PACKAGE)
        }
    return {name: value for name, value in found.items() if not name.startswith("_")}


def public_values():
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in sorted(module.__all__):
            yield f"{module_name}.{name}", getattr(module, name)
    for path in BESIDE:
        module_name, _, name = f"{PACKAGE}.{path}".rpartition(".")
        yield f"{PACKAGE}.{path}", getattr(importlib.import_module(module_name), name)


def all_faults():
    for path, value in public_values():
        if inspect.isclass(value):
            yield from ((path, fault) for fault in class_faults(value))
            for name, member in sorted(own_members(value).items()):
                faults = function_faults(
                    function_of(member),
                    value,
                    has_section_for_result=not isinstance(member, property),
                )
                yield from ((f"{path}.{name}", fault) for fault in faults)
        elif inspect.isfunction(value):
            yield from ((path, fault) for fault in function_faults(value))


def test_every_public_name_says_what_it_takes_gives_and_raises():
    found = [f"{path}: {fault}" for path, fault in all_faults()]
    assert not found, "\n".join(found)


def undocumented():
    pass


def no_sentence():
    """thing"""


def silent_about_everything(first, *others, **rest):
    """Does something."""
    if first:
        raise ValueError(first)
    return others, rest


def speaks_of_what_is_not_there(first):
    """Does something.

    Args:
        first: Is there.
        second: Is not.
    """


def silent_generator():
    """Does something."""
    yield 1


def complete(first, *others):
    """Does something.

    Args:
        first: One.
        *others: More.

    Returns:
        All of them.

    Raises:
        ValueError: There is no first one.
    """

    def inner():
        raise KeyError(first)

    if not first:
        raise ValueError(first)
    return first, others, inner


def returns_by_its_summary():
    """Returns one."""
    return 1


def returns_nothing(first):
    """Does something.

    Args:
        first: One.
    """
    if first:
        return
    return None  # noqa: RET501


@pytest.mark.parametrize(
    ("function", "faults"),
    [
        (undocumented, ["it has no docstring"]),
        (no_sentence, ["its first line is no sentence: 'thing'"]),
        (
            silent_about_everything,
            [
                "Args: has no first",
                "Args: has no others",
                "Args: has no rest",
                "Raises: has no ValueError",
                "Returns: is missing",
            ],
        ),
        (speaks_of_what_is_not_there, ["Args: has second"]),
        (silent_generator, ["Yields: is missing"]),
        (complete, []),
        (returns_by_its_summary, []),
        (returns_nothing, []),
    ],
)
def test_each_kind_of_silence_is_noticed(function, faults):
    assert function_faults(function) == faults


def test_a_class_speaks_for_its_constructor():
    class Silent:
        """Is something."""

        def __init__(self, first, second):
            if not first:
                raise TypeError(second)

    class Complete:
        """Is something.

        Attributes:
            first: One.
        """

        def __init__(self, first):
            self.first = first

    assert class_faults(Silent) == [
        "Args: has no first",
        "Args: has no second",
        "Raises: has no TypeError",
    ]
    assert class_faults(Complete) == []
