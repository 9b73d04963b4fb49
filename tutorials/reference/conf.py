"""Sphinx's settings for the site, which ``make docs`` builds from the root of the repository.

Its pages are the README, the guides, the tutorials, the reference and the files beside the README,
where they are, so that links between them are the same here and there.
"""

import ast
import inspect
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx.util.inspect import stringify_signature
from sphinx.util.nodes import make_refnode

PACKAGE = "torchrl_vllm_sync"
PRINTED = Path(__file__).resolve().parents[1] / "printed"

project = PACKAGE
release = metadata.version("torchrl-vllm-sync")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
source_suffix = {".rst": "restructuredtext", ".md": "markdown", ".py": "markdown"}
include_patterns = [
    "*.md",
    "tutorials/README.md",
    "tutorials/[0-9]*.py",
    "tutorials/guides/*.md",
    "tutorials/reference/*.rst",
]
exclude_patterns = [".*", "build", "dist", "tutorials/output"]  # folders that are not looked into
highlight_language = "none"  # of blocks that name none
myst_heading_anchors = 4

# The menu, whose first page is the README.
CONTENTS = """
```{toctree}
:hidden:
:caption: Tutorials
:glob:

tutorials/README
tutorials/0*
tutorials/1*
```

```{toctree}
:hidden:
:caption: Guides

GUIDES
```

```{toctree}
:hidden:
:caption: Reference

tutorials/reference/index
CHANGELOG
CONTRIBUTING
```
"""
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
html_title = PACKAGE
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
maximum_signature_line_length = 90  # longer ones have a line for each argument
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Annotations name classes of others, whose references are elsewhere.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|tensordict|torchrl|vllm|transformers|collections|typing|os)\..*"),
    # A dataclass's default_factory is "<factory>" in its signature, which Sphinx cannot parse.
    (r"py:class", r"dict\[str"),
]


def names_of_the_sources() -> tuple[set[str], set[str]]:
    """Returns the names that the package defines, and those that it imports for annotations."""
    defined: set[str] = set()
    imported: set[str] = set()
    for path in sorted((Path(__file__).resolve().parents[2] / PACKAGE).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                defined.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                defined.add(node.target.id)
            elif isinstance(node, ast.Assign):
                defined |= {one.id for one in node.targets if isinstance(one, ast.Name)}
            elif isinstance(node, ast.ImportFrom | ast.Import):
                imported |= {alias.asname or alias.name for alias in node.names}
    return defined, imported


DEFINED, IMPORTED = names_of_the_sources()


def find_by_last_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Resolves a name as docstrings and annotations have it, without its module: to a link if it is
    shown once, to plain text if the sources define or import it; else Sphinx warns of it."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].lstrip(".~")
    objects = env.domains["py"].objects
    # An object found under a second name, such as a class's home, is the same one.
    names = [one for one, entry in objects.items() if one.endswith(f".{target}")]
    homes = [one for one in names if not objects[one].aliased]
    if len(homes) == 1:
        entry = objects[homes[0]]
        return make_refnode(
            app.builder, node["refdoc"], entry.docname, entry.node_id, content, homes[0]
        )
    return content if names or target.rpartition(".")[2] in DEFINED | IMPORTED else None


def guides() -> list[str]:
    """Returns the pages of guides, in the order of the list in ``tutorials/README.md``."""
    listed = Path(__file__).resolve().parents[1] / "README.md"
    return [f"tutorials/{one}" for one in re.findall(r"\]\((guides/\w+)\.md\)", listed.read_text())]


def tutorial_page(source: str) -> str:
    """Returns a tutorial as Markdown: its docstring, and its ``# %%`` cells as text and code."""
    docstring, *cells = re.split(r"^# %%", source, flags=re.MULTILINE)
    title, _, usage = (ast.get_docstring(ast.parse(docstring)) or "").partition("\n\n")
    heading, parts = title.partition(":")[0].rstrip("."), []
    for cell in cells:
        head, _, body = cell.partition("\n")
        comment = re.match(r"(?:#.*\n?)*", body)[0]
        text, code = re.sub(r"^# ?", "", comment, flags=re.MULTILINE), body[len(comment) :].strip()
        head = head.strip()
        if head == "[markdown]":
            if text.startswith("# "):
                heading, _, text = text[2:].partition("\n")
            head = ""
        elif 0 < len(head) < 40:  # a heading; otherwise a sentence that the comment ends
            head = f"## {head}\n"
        parts.append(f"{head}\n{text}")
        if code:
            parts.append(f"```python\n{code}\n```")
    # What is indented is a block of its own in Markdown only after an empty line.
    usage = re.sub(r"^(\S.*\n)(?=    )", r"\1\n", usage, flags=re.MULTILINE)
    parts.insert(1, f"## Running it\n\n{usage}")
    return "\n\n".join([f"# {heading}", title, *parts])


def printed(stem: str) -> str:
    """Returns what recorded runs of a tutorial printed and drew, as Markdown."""
    runs = sorted(PRINTED.glob(f"{stem}_*.txt"))
    parts = ["## What it prints"] if runs else []
    for run in runs:
        parts.append(f"```\n{run.read_text().strip()}\n```")
        if run.with_suffix(".png").exists():
            parts.append(f"![What this run drew](printed/{run.stem}.png)")
    return "\n\n".join(parts)


def prepare_page(_app: Any, name: str, source: list[str]) -> None:
    """Makes a tutorial Markdown, with its recorded runs; adds the menu to the README."""
    if name.startswith(("tutorials/0", "tutorials/1")):
        stem = name.removeprefix("tutorials/")
        source[0] = f"{tutorial_page(source[0])}\n\n{printed(stem)}\n"
    elif name == root_doc:
        source[0] += CONTENTS.replace("GUIDES", "\n".join(guides()))


def escape_stars(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: Any) -> None:
    """Keeps the stars of arguments that are described together, before napoleon reads them."""
    lines[:] = [one.replace("*args, **kwargs:", r"\*args, \*\*kwargs:") for one in lines]


def arguments_of_a_class(
    _app: Any, what: str, _name: str, value: Any, _options: Any, signature: str, _result: Any
) -> tuple[str, None] | None:
    """Shows what a class's own constructor takes where its ``__new__`` takes anything."""
    if what != "class" or "__init__" not in vars(value) or not signature.startswith("(*args"):
        return None
    taken = inspect.signature(value.__init__)
    own = taken.replace(parameters=[*taken.parameters.values()][1:])
    return stringify_signature(own, show_return_annotation=False, unqualified_typehints=True), None


def write_entrance(app: Any, error: Exception | None) -> None:
    """Leads from ``index.html`` to the README's page."""
    if error is None:
        page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        Path(app.outdir, "index.html").write_text(page)


def setup(app: Any) -> None:
    """Registers what this file adds to Sphinx."""
    app.connect("missing-reference", find_by_last_name)
    app.connect("source-read", prepare_page)
    app.connect("autodoc-process-docstring", escape_stars, priority=400)
    app.connect("autodoc-process-signature", arguments_of_a_class)
    app.connect("build-finished", write_entrance)
