"""Imports point one way, room by room: a room imports only from the rooms above its own.

Inside a room no module imports one that imports it, for whatever purpose.
"""

import ast
from pathlib import Path

PACKAGE = "torchrl_vllm_sync"
SOURCE = Path(__file__).resolve().parent.parent / PACKAGE

ROOMS = "replica errors checks testing weights routing requests engine observe serve service rl cli"


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


def room(name):
    return name.partition(".")[0]


def violations(source, rooms):
    files = module_files(source)
    row = {name: i for i, name in enumerate(rooms)}
    there = {room(name) for name in files if name}
    found = [f"{name}: is not in ROOMS" for name in there - row.keys()]
    found += [f"{name}: is in ROOMS, but there is none" for name in row.keys() - there]
    uses = {name: {} for name in files if name}  # the package itself imports on demand only
    for name in uses:
        for target, line in imports(name, files[name], files):
            if not target:
                found.append(f"{name}:{line} imports {PACKAGE} as a whole")
            elif room(target) == room(name):
                uses[name][target] = line
            elif row.get(room(target), -1) >= row.get(room(name), -1):
                found.append(f"{name}:{line} imports {target}, whose room is not above")
    found += [
        f"{name}:{line} imports {target}, which imports it"
        for name, targets in uses.items()
        for target, line in targets.items()
        if target != name and name in reached(target, uses)
    ]
    return list(dict.fromkeys(found))


def reached(start, uses):
    """Modules of its room that a module imports, directly or not."""
    found, waiting = set(), [start]
    while waiting:
        new = uses[waiting.pop()].keys() - found
        found |= new
        waiting += new
    return found


def test_rooms_import_only_from_rooms_above():
    found = violations(SOURCE, ROOMS.split())
    assert not found, "\n".join(found)


def test_each_kind_of_violation_is_noticed(tmp_path):
    for name, text in {
        "__init__": "",
        "upper": "from torchrl_vllm_sync.lower import f\n",
        "lower": "def f():\n    from torchrl_vllm_sync import upper\n",
        "sub/__init__": "",
        "sub/one": "from .two import x\nfrom .. import y\n",
        "sub/two": "import torchrl_vllm_sync.upper\nfrom .one import x\n",
        "unknown": "",
    }.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert sorted(violations(tmp_path, ["upper", "lower", "sub", "gone"])) == [
        "gone: is in ROOMS, but there is none",
        "sub.one:1 imports sub.two, which imports it",
        "sub.one:2 imports torchrl_vllm_sync as a whole",
        "sub.two:2 imports sub.one, which imports it",
        "unknown: is not in ROOMS",
        "upper:1 imports lower, whose room is not above",
    ]
