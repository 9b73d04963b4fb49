"""The notes for upstream run as they stand, and say of upstream what is so."""

from tests.docs.test_guides import ROOT, blocks

PAGE = ROOT / "tutorials" / "guides" / "upstream.md"


def test_the_code_of_the_notes_runs():
    names = {}
    for line, code in blocks(PAGE, "python"):
        exec(compile("\n" * (line - 1) + code, str(PAGE), "exec"), names)
    assert names["plan"].copies
