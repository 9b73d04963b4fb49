"""The reference shows every public name, on one page, and nothing that has gone."""

import importlib
import inspect
import re
from pathlib import Path
from pkgutil import resolve_name

from tests.docs.test_docstrings import BESIDE, own_members
from tests.test_public_api import MODULES, PACKAGE, function_of

PAGES = Path(__file__).resolve().parents[2] / "tutorials" / "reference"
DIRECTIVE = re.compile(
    r"^\.\. (auto(?:class|function|method|property|module)|py:class):: (\S+)\n((?:   +\S.*\n)*)",
    re.MULTILINE,
)


def shown():
    """Names that the pages show, members of classes included, each as often as it is shown."""
    names = []
    for page in sorted(PAGES.glob("*.rst")):
        for kind, name, options in DIRECTIVE.findall(page.read_text()):
            names.append(name)
            members = re.search(r":members:(.*(?:\n {6,}.*)*)", options)
            if members is None:
                continue
            if kind == "automodule":
                module = importlib.import_module(name)
                names += [f"{name}.{one}" for one in module.__all__]
            elif listed := members[1].replace(",", " ").split():
                names += [f"{name}.{one}" for one in listed]
            else:
                names += [f"{name}.{one}" for one in own_members(resolve_name(name))]
    return names


def public_names():
    for module_name in MODULES:
        for name in importlib.import_module(module_name).__all__:
            path = f"{module_name}.{name}"
            if inspect.ismodule(value := resolve_name(path)) or name == "__version__":
                continue
            yield path
            if inspect.isclass(value) and name != "WeightSyncScheme":  # another name of a class
                yield from (f"{path}.{one}" for one in own_members(value))


def test_every_public_name_is_shown():
    assert not {*public_names()} - {*shown()}


def test_no_name_is_shown_twice():
    names = shown()
    assert len(names) == len(set(names)), sorted({one for one in names if names.count(one) > 1})


def test_what_is_shown_exists():
    assert all(resolve_name(name) is not None for name in shown())


def test_what_is_shown_beside_has_its_docstrings_checked():
    beside = {
        name.removeprefix(f"{PACKAGE}.")
        for name in shown()
        if name not in {*public_names(), *MODULES}
        and (inspect.isclass(value := resolve_name(name)) or function_of(value) is value)
        and not inspect.isclass(resolve_name(name.rpartition(".")[0]))
    }
    assert beside == {*BESIDE}


def test_every_page_is_in_the_contents():
    contents = (PAGES / "index.rst").read_text().split()
    pages = {page.stem for page in PAGES.glob("*.rst")} - {"index"}
    assert pages <= {*contents}
