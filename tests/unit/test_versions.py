"""Version spans: building, slicing, expanding, checking, and what is refused."""

import logging
import pickle
import random  # noqa: TID251  seeded below
from types import SimpleNamespace

import pytest

from tests.fakes.versions import check_spans
from torchrl_vllm_sync import VersionSpan, expand_spans, max_version, min_version
from torchrl_vllm_sync.checks import check_version
from torchrl_vllm_sync.engine.answers import SampleVersions, SpanChecker, versions_of_labels
from torchrl_vllm_sync.errors import UnsupportedArgumentError, VersionSpanError
from torchrl_vllm_sync.requests.messages import SampleReport, marks, slice_spans, spans_from_starts


def spans(*triples):
    return tuple(VersionSpan(*one) for one in triples)


@pytest.mark.parametrize(
    ("starts", "num_tokens", "wanted"),
    [
        ([(3, 0)], 5, [(3, 0, 5)]),
        ([(3, 0), (4, 2)], 5, [(3, 0, 2), (4, 2, 5)]),
        ([(3, 0)], 0, []),
        ([], 0, []),
        ([(3, 0), (4, 0)], 5, [(4, 0, 5)]),  # the first sampled nothing
        ([(3, 0), (4, 2), (5, 2), (6, 4)], 5, [(3, 0, 2), (5, 2, 4), (6, 4, 5)]),
        ([(3, 0), (3, 2), (3, 4)], 5, [(3, 0, 5)]),  # pushed again
        ([(3, 0), (4, 2), (3, 2)], 5, [(3, 0, 5)]),
        ([(3, 0), (4, 9)], 5, [(3, 0, 5)]),  # a stop string cut behind the switch
        ([(3, 0), (4, 5)], 5, [(3, 0, 5)]),  # none since the switch
    ],
)
def test_spans_are_built_from_where_versions_began(starts, num_tokens, wanted):
    found = spans_from_starts(starts, num_tokens)
    assert found == spans(*wanted)
    check_spans(found, num_tokens)


def test_random_switches_give_spans_that_cover_and_agree_with_each_token():
    rng = random.Random(3)
    for _ in range(500):
        num_tokens = rng.randrange(0, 30)
        positions = sorted(rng.randrange(0, 32) for _ in range(rng.randrange(0, 8)))
        starts = [(0, 0), *((rng.randrange(4), at) for at in positions)]
        found = spans_from_starts(starts, num_tokens)
        check_spans(found, num_tokens)
        wanted = [[v for v, start in starts if start <= at][-1] for at in range(num_tokens)]
        assert expand_spans(found) == wanted
        begin = rng.randrange(0, num_tokens + 1)
        end = rng.randrange(begin, num_tokens + 1)
        assert expand_spans(slice_spans(found, begin, end)) == wanted[begin:end]
        check_spans(slice_spans(found, begin, end), end - begin)


def test_tokens_without_a_version_and_disorder_are_refused():
    with pytest.raises(VersionSpanError, match="5 tokens must have a version"):
        spans_from_starts([], 5)
    with pytest.raises(VersionSpanError, match="one after the other"):
        spans_from_starts([(1, 0), (2, 4), (3, 2)], 5)


@pytest.mark.parametrize(
    "triples",
    [
        [(1, 0, 4)],
        [(1, 0, 6)],
        [(1, 1, 5)],
        [(1, 0, 2), (2, 3, 5)],
        [(1, 0, 3), (2, 2, 5)],
        [(1, 0, 2), (2, 2, 2), (3, 2, 5)],
        [(1, 0, 2), (1, 2, 5)],
        [],
    ],
)
def test_spans_that_do_not_cover_are_refused(triples):
    with pytest.raises(VersionSpanError):
        check_spans(spans(*triples), 5)


def test_extremes_and_their_default():
    found = spans((4, 0, 2), (7, 2, 3), (5, 3, 9))
    assert (min_version(found, default=1), max_version(found, default=1)) == (4, 7)
    assert (min_version((), default=6), max_version((), default=6)) == (6, 6)


@pytest.mark.parametrize("version", [-1, True, 1.0, "1", None])
def test_what_is_no_version_is_refused_by_name(version):
    with pytest.raises(UnsupportedArgumentError, match="min_version must be a policy version"):
        check_version("min_version", version)
    check_version("min_version", 0)


def test_spans_pickle():
    found = spans((1, 0, 2))
    assert pickle.loads(pickle.dumps(found)) == found
    assert type(pickle.loads(pickle.dumps(found))[0]) is VersionSpan


# ---------------------------------------------------------------- counted in the engine


class State:
    """A sample as ``internals.SampleState`` shows it."""

    engine_id, yields_only_new, is_finished = "r~1", False, False
    num_cached_tokens, queue_s, prefill_s, decode_s = 32, 0.1, None, 0.2
    num_tokens = 0


def completion(num_tokens, labels=None, reason="length"):
    return SimpleNamespace(
        token_ids=list(range(num_tokens)),
        finish_reason=reason,
        weight_versions=labels
        and [SimpleNamespace(version=v, start=s, end=e) for v, s, e in labels],
    )


def test_a_sample_counts_at_each_switch():
    sample = SampleVersions(State(), 5)
    sample.switch(6)  # before its first token
    sample.state.num_tokens = 4
    sample.switch(7)
    sample.state.num_tokens = 9
    assert sample.spans(9) == spans((6, 0, 4), (7, 4, 9))
    report = sample.report(completion(9), SpanChecker("0"))
    assert report == SampleReport(
        spans=spans((6, 0, 4), (7, 4, 9)), num_cached_tokens=32, queue_s=0.1, decode_s=0.2
    )


def test_a_step_on_its_way_belongs_to_the_version_before():
    from vllm.outputs import WeightVersionSpan

    sample, checker = SampleVersions(State(), 1), SpanChecker("0")
    sample.state.num_sampled = lambda computed: computed.get("r", 0)
    sample.switch(2, {})  # it was not in the last step, and has no token
    assert not sample.has_begun
    sample.switch(3, {"r": 1})
    assert sample.has_begun
    sample.state.num_tokens = 4
    sample.switch(4, {"r": 5})
    sample.switch(5, {})  # the step is still on its way
    sample.state.num_tokens = 9
    wrong = [("1", 0, 3), ("3", 3, 6), ("5", 6, 9)]  # as the engine labels steps that have ended
    answer = completion(9, wrong)
    answer.weight_versions = [WeightVersionSpan(*one) for one in wrong]
    found = sample.report(answer, checker).spans
    assert found == spans((2, 0, 1), (3, 1, 5), (5, 5, 9))
    assert answer.weight_versions == [
        WeightVersionSpan(*one) for one in (("2", 0, 1), ("3", 1, 5), ("5", 5, 9))
    ]
    assert checker.num_disagreements == 0


def test_outputs_that_hold_only_what_is_new_have_spans_of_it():
    sample, checker = SampleVersions(State(), 1), SpanChecker("0")
    sample.state.yields_only_new = True
    sample.state.num_tokens = 3
    assert sample.report(completion(3, reason=None), checker).spans == spans((1, 0, 3))
    sample.state.num_tokens = 5
    sample.switch(2)
    sample.state.num_tokens = 8
    last = sample.report(completion(5, [("1", 0, 5), ("2", 5, 8)]), checker)
    assert last.spans == spans((1, 0, 2), (2, 2, 5))
    assert checker.num_disagreements == 0


@pytest.mark.parametrize(
    ("labels", "wanted"),
    [
        ([("default", 0, 2), ("1", 2, 5)], [(0, 0, 2), (1, 2, 5)]),
        ([("01", 0, 5)], [(1, 0, 5)]),
        ([("1", 0, 2), ("1", 2, 5)], [(1, 0, 5)]),
        ([("mine", 0, 5)], None),
        (None, None),
    ],
)
def test_labels_of_vllm_are_versions(labels, wanted):
    assert versions_of_labels(labels, 5) == (wanted and spans(*wanted))


def test_a_disagreement_is_logged_counted_and_decided_for_vllm(caplog):
    checker, counted = SpanChecker("3"), spans((1, 0, 5))
    with caplog.at_level(logging.ERROR):
        assert checker.agreed("r", counted, [("1", 0, 5)], 5) == counted
        assert checker.agreed("r", counted, [("mine", 0, 5)], 5) == counted
        assert checker.agreed("r", counted, None, 5) == counted
        assert checker.num_disagreements == 0
        assert not caplog.records
        theirs = checker.agreed("r", counted, [("1", 0, 4), ("2", 4, 5)], 5)
    assert theirs == spans((1, 0, 4), (2, 4, 5))
    assert checker.num_disagreements == 1
    assert "replica 3, request r" in caplog.text


def test_marked_outputs_say_all_of_it():
    output = SimpleNamespace()
    reports = [
        SampleReport(spans=spans((2, 0, 4), (4, 4, 5))),
        SampleReport(spans=spans((3, 0, 1))),
    ]
    vars(output).update(marks(reports, replica_id="1", version=9))
    assert output.version_spans == tuple(one.spans for one in reports)
    assert (output.min_version, output.max_version, output.replica_id) == (2, 4, "1")
    vars(output).update(marks([SampleReport()], replica_id="1", version=9))
    assert (output.version_spans, output.min_version, output.max_version) == (((),), 9, 9)
