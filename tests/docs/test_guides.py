"""What the guides, the README and the tutorials' list say is there: names, files, errors, links."""

import ast
import dataclasses
import inspect
import re
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import pytest

import torchrl_vllm_sync
from tests.docs.test_docstrings import sections
from tests.test_public_api import METHODS
from torchrl_vllm_sync import AsyncVLLM, PushReport, WeightUpdater, errors
from torchrl_vllm_sync.engine.args import make_engine_args
from torchrl_vllm_sync.routing.ledger import LoadSnapshot
from torchrl_vllm_sync.weights.auto import Place, choose_transport

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = torchrl_vllm_sync.__name__
GUIDES = sorted((ROOT / "tutorials" / "guides").glob("*.md"))
PAGES = [*GUIDES, *sorted(ROOT.glob("*.md")), ROOT / "tutorials" / "README.md"]

# What names stand for in every snippet, whoever made them.
KNOWN = {
    "report": PushReport,
    "service": AsyncVLLM,
    "snapshot": LoadSnapshot,
    "updater": WeightUpdater,
}


def blocks(page, language):
    """Fenced blocks of a language, with the line they begin in."""
    text = page.read_text()
    for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, found.start()) + 2, found[1]


def snippets():
    for page in PAGES:
        for line, code in blocks(page, "python"):
            yield pytest.param(code, id=f"{page.parent.name}/{page.name}:{line}")


# ---------------------------------------------------------------- snippets


def names_of(tree):
    """Names that stand for something of the package in a snippet."""
    names = dict(KNOWN)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            for alias in node.names:
                names[alias.asname or alias.name] = resolve_name(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    names[PACKAGE] = resolve_name(PACKAGE)
    return names


def chain_of(node):
    """The name and the attributes of ``a.b.c``; ``None`` for what is no such chain."""
    attributes = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return (node.id, attributes[::-1]) if isinstance(node, ast.Name) else None


def attribute(owner, name):
    """An attribute of a class or module; ``None`` for one whose kind only an instance knows.

    Raises:
        AttributeError: There is none.
    """
    try:
        value = inspect.getattr_static(owner, name)
    except AttributeError:
        text = inspect.cleandoc(owner.__doc__ or "") if inspect.isclass(owner) else ""
        if name in sections(text).get("Attributes", []):
            return None
        raise
    known = callable(value) or inspect.ismodule(value) or isinstance(value, METHODS)
    return getattr(owner, name) if known else None


def resolved(node, names):
    """What a chain stands for; ``None`` if that cannot be known from the snippet alone."""
    chain = chain_of(node)
    if chain is None or chain[0] not in names:
        return None
    value = names[chain[0]]
    for name in chain[1]:
        if value is None:
            return None
        value = attribute(value, name)
    return value


def accepted(function):
    """Keyword arguments that a call may have; ``None`` for any."""
    parameters = inspect.signature(function).parameters
    names = {one.name for one in parameters.values() if one.kind is not one.VAR_KEYWORD}
    if len(names) == len(parameters):
        return names
    if getattr(function, "__func__", function) in (
        AsyncVLLM.from_pretrained.__func__,
        torchrl_vllm_sync.make_async_vllm_engine,
    ):
        from vllm import AsyncEngineArgs

        engine = {one.name for one in dataclasses.fields(AsyncEngineArgs)}
        return (
            names
            | engine
            | {*inspect.signature(AsyncVLLM.__init__).parameters} - {"self", "engine_args"}
            | {*inspect.signature(make_engine_args).parameters}
        )
    if getattr(function, "__name__", "") == "create_load_balancer":
        return names | accepted(torchrl_vllm_sync.LoadBalancer)
    return None


def snippet_faults(code):
    """What a snippet says of the package that is not so."""
    tree = ast.parse(code)
    names = names_of(tree)
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Attribute):
                resolved(node, names)
            elif isinstance(node, ast.Call):
                function = resolved(node.func, names)
                if callable(function):
                    known = accepted(function)
                    given = [one.arg for one in node.keywords if one.arg is not None]
                    yield from (
                        f"{ast.unparse(node.func)} has no argument {one}"
                        for one in given
                        if known is not None and one not in known
                    )
        except AttributeError as error:
            yield str(error)


@pytest.mark.parametrize("code", [*snippets()])
def test_a_snippet_says_what_is_so(code):
    compile(code, "snippet", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    found = [*snippet_faults(code)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("service.generate_text('a')", "generate_text"),
        ("service.generate('a', length=3)", "length"),
        (
            "from torchrl_vllm_sync import AsyncVLLM\nAsyncVLLM.from_pretrained('m', replicas=2)",
            "replicas",
        ),
        ("service.create_load_balancer('requests', bound=2)", "bound"),
        ("print(report.newest)", "newest"),
    ],
)
def test_what_is_not_so_in_a_snippet_is_noticed(code, fault):
    assert any(fault in one for one in snippet_faults(code))


def test_an_import_of_what_is_not_there_is_noticed():
    with pytest.raises(AttributeError):
        names_of(ast.parse("from torchrl_vllm_sync import AsyncVLM"))


# ---------------------------------------------------------------- errors


def templates(node):
    """Texts that an expression can make, with a blank character where something is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [
            "".join(one.value if isinstance(one, ast.Constant) else "\0" for one in node.values)
        ]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [a + b for a in templates(node.left) for b in templates(node.right)]
    if isinstance(node, ast.IfExp):
        return templates(node.body) + templates(node.orelse)
    return ["\0"]


def source_texts():
    """Every text of the package's sources that a message can consist of, blanks in one."""
    found = set()
    for path in (ROOT / PACKAGE).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                found |= {re.sub("\0+", "\0", text) for text in templates(node)}
    return found - {"\0"}


def quoted_errors(page):
    for _, block in blocks(page, "text"):
        for line in block.splitlines():
            yield line, re.sub(r"<[^<>]*>", "\0", line)


def test_quoted_errors_are_those_of_the_code():
    known = source_texts()
    quoted = [*quoted_errors(ROOT / "tutorials" / "guides" / "troubleshooting.md")]
    unknown = [line for line, text in quoted if text not in known]
    assert len(quoted) > 20
    assert not unknown, "\n".join(unknown)


def test_headings_are_texts_of_errors_or_their_beginnings():
    page = ROOT / "tutorials" / "guides" / "troubleshooting.md"
    headings = re.findall(r"^### `(.*)`$", page.read_text(), re.MULTILINE)
    assert len(headings) > 10
    found = [(one, re.sub(r"<[^<>]*>", "\0", one)) for one in headings]
    known = source_texts()
    unknown = [one for one, start in found if not any(text.startswith(start) for text in known)]
    assert not unknown, "\n".join(unknown)


def test_named_errors_exist():
    text = (ROOT / "tutorials" / "guides" / "troubleshooting.md").read_text()
    named = set(re.findall(r"`(\w+Error)`", text)) - {"RuntimeError", "TimeoutError", "ValueError"}
    assert len(named) > 10
    assert named <= {*errors.__all__}


def test_how_texts_are_compared():
    expression = ast.parse("f'version {v} of ' + (f'{n} rows' if n else 'none')").body[0].value
    assert templates(expression) == ["version \0 of \0 rows", "version \0 of none"]
    assert "version \0 did not reach every replica: \0" in source_texts()
    assert "version \0 did not arrive at every replica: \0" not in source_texts()


# ---------------------------------------------------------------- the choice of a transport


def place(node, kind, *uuids):
    return Place(node_id=node, device_type=kind, device_uuids=uuids)


def chosen(trainer, engine):
    try:
        return f"`{choose_transport(trainer, {'0': engine})}`"
    except errors.UnsupportedArgumentError:
        return "none: an error"


def test_the_choice_of_a_transport_is_that_of_the_code():
    text = (ROOT / "tutorials" / "guides" / "choose_a_transport.md").read_text()
    (rows,) = re.findall(
        r"^\| the trainer and all engines \|.*\n\|.*\n((?:\|.*\n)+)", text, re.MULTILINE
    )
    first, second = (place("a", "cuda", one) for one in ("GPU-1", "GPU-2"))
    cpu, far_cpu = place("a", "cpu"), place("b", "cpu")
    spare = replace(second, why_not_written="")
    cases = [(first, spare), (first, first), (first, second)]
    cases += [(first, cpu), (cpu, far_cpu), (first, far_cpu)]
    told = [row.split("|")[2].strip() for row in rows.splitlines()]
    assert told == [chosen(*one) for one in cases]


# ---------------------------------------------------------------- files and links


def test_named_tests_exist():
    named = set()
    for page in PAGES:
        named |= set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()))
    assert len([one for _, one in named if one]) > 20
    for path, function in sorted(named):
        assert (ROOT / path).is_file(), path
        assert not function or f"def {function}(" in (ROOT / path).read_text(), (
            f"{path}::{function}"
        )


def test_named_modules_exist():
    names = {path.relative_to(ROOT / PACKAGE).as_posix() for path in (ROOT / PACKAGE).rglob("*.py")}
    short = {name.rpartition("/")[2] for name in names}
    text = (ROOT / "tutorials" / "guides" / "architecture.md").read_text()
    for name in re.findall(r"`(?!tests/)((?:\w+/)*\w+\.py)(?:::\w+)?`", text):
        assert name in names or name in short, name


def headings(page):
    """Anchors of a page, as GitHub makes them of headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), link
        if anchor:
            assert anchor in {*headings(found)}, link


def test_every_guide_is_listed():
    listed = (ROOT / "tutorials" / "README.md").read_text()
    assert all(f"](guides/{page.name})" in listed for page in GUIDES)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_guides_are_short_and_name_no_machine(page):
    text = page.read_text()
    assert len(text.splitlines()) <= 150
    assert not re.search(r"/(?:home|root|work|tmp)/", text)
