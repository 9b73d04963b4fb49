"""What tutorials claim: tokens compared one by one, and the first difference told."""

from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "tutorials"


@pytest.fixture
def comparison(monkeypatch):
    monkeypatch.syspath_prepend(str(TUTORIALS))
    from common.equality import Comparison

    return Comparison


def test_equal_answers(comparison):
    compared = comparison.of([[1, 2], [3]], [(1, 2), (3,)])
    assert (compared.equal, compared.total, compared.fraction, compared.first) == (2, 2, 1.0, "")


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ([[1, 2], [3, 5]], "prompt 1, position 1: expected 4, got 5"),
        ([[0, 2], [3, 5]], "prompt 0, position 0: expected 1, got 0"),
        ([[1, 2], [3]], "prompt 1, position 1: expected 4, got the end"),
        ([[1, 2, 9], [3, 4]], "prompt 0, position 2: expected the end, got 9"),
    ],
)
def test_the_first_difference_is_told(comparison, got, words):
    compared = comparison.of(got, [[1, 2], [3, 4]])
    assert compared.first == words
    assert compared.equal < 2


@pytest.mark.parametrize("got", [[], [[1], []]])
def test_nothing_is_never_equal(comparison, got):
    with pytest.raises(ValueError, match="no tokens to compare"):
        comparison.of(got, got)


def test_answers_must_not_be_missing(comparison):
    with pytest.raises(ValueError, match="longer"):
        comparison.of([[1]], [[1], [2]])
