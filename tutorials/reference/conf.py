"""Sphinx's settings for the reference; ``make docs`` builds it."""

import ast
from importlib import metadata
from pathlib import Path
from typing import Any

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
    """Resolves a name as docstrings and annotations have it: without its module.

    Args:
        app: Sphinx.
        env: Its environment.
        node: The reference.
        content: What it shows.

    Returns:
        A link to the only object of that name; plain text for what the sources define or import
        and no page shows; ``None``, which Sphinx warns of, for what is nowhere.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].lstrip(".~")
    domain = env.domains["py"]
    # An object found under a second name, such as a class's home, is the same one.
    found = {
        entry.node_id: (entry.docname, name)
        for name, entry in domain.objects.items()
        if name.endswith(f".{target}") and not entry.aliased
    }
    if len(found) == 1:
        ((node_id, (docname, name)),) = found.items()
        return domain_link(app, node["refdoc"], docname, node_id, content, name)
    last = target.rpartition(".")[2]
    return content if last in DEFINED | IMPORTED or found else None


def domain_link(app: Any, source: str, docname: str, node_id: str, content: Any, title: str) -> Any:
    """Makes a link inside the reference.

    Args:
        app: Sphinx.
        source: Page of the link.
        docname: Page of its target.
        node_id: The target.
        content: What it shows.
        title: What is shown when it is pointed at.
    """
    from sphinx.util.nodes import make_refnode

    return make_refnode(app.builder, source, docname, node_id, content, title)


def setup(app: Any) -> None:
    """Registers what this file adds to Sphinx."""
    app.connect("missing-reference", find_by_last_name)
