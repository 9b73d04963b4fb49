"""Sphinx's settings for the reference; ``make docs`` builds it."""

import ast
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx.util.nodes import make_refnode

PACKAGE = "torchrl_vllm_sync"

project = PACKAGE
release = metadata.version("torchrl-vllm-sync")
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = PACKAGE
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
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


def setup(app: Any) -> None:
    """Registers what this file adds to Sphinx."""
    app.connect("missing-reference", find_by_last_name)
