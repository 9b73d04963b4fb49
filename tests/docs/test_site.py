"""The site's pages of tutorials are their docstrings and cells, and its menu has every page."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).resolve().parents[2] / "tutorials"


@pytest.fixture(scope="module")
def site():
    """The settings that Sphinx runs with."""
    spec = importlib.util.spec_from_file_location("site", TUTORIALS / "reference" / "conf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOURCE = '''"""What it shows: in a sentence.

Usage:
    python it.py
"""

# %% [markdown]
# # The title
#
# Why it is so.

# %%
import torch

# %% Settings
# What `ROWS` means.
ROWS = 1  # of a step


# %% A sentence that is much longer than any heading of a cell
# and goes on.
if __name__ == "__main__":
    print(ROWS)
'''
PAGE = """# The title

What it shows: in a sentence.

Why it is so.

## Running it

Usage:

    python it.py

```python
import torch
```

## Settings

What `ROWS` means.

```python
ROWS = 1  # of a step
```

A sentence that is much longer than any heading of a cell
and goes on.

```python
if __name__ == "__main__":
    print(ROWS)
```"""


def test_a_tutorial_becomes_text_and_code(site):
    assert re.sub(r"\n{3,}", "\n\n", site.tutorial_page(SOURCE)) == PAGE


@pytest.mark.parametrize("path", sorted(TUTORIALS.glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_no_code_of_a_tutorial_is_left_out(site, path):
    page = site.tutorial_page(path.read_text())
    assert page.startswith("# ")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    _, *wanted = ast.parse(path.read_text()).body  # without the docstring
    assert [*map(ast.dump, ast.parse(code).body)] == [*map(ast.dump, wanted)]


def test_every_guide_is_in_the_menu_once(site):
    found = sorted(f"tutorials/guides/{one.stem}" for one in (TUTORIALS / "guides").glob("*.md"))
    assert sorted(site.guides()) == found


def test_what_runs_printed_stands_on_the_page_of_their_tutorial(site):
    runs = sorted(site.PRINTED.glob("*.txt"))
    assert runs
    stems = {path.stem for path in TUTORIALS.glob("[0-9]*.py")}
    for run in runs:
        command, *_, last = run.read_text().splitlines()
        (stem,) = (one for one in stems if run.name.startswith(f"{one}_"))
        assert command.startswith(f"$ python tutorials/{stem}.py"), run.name
        assert last.startswith("PASS "), run.name
        assert last in site.printed(stem)
    assert site.printed("no_such_tutorial") == ""
