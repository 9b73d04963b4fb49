"""Whatever a caller passes as prompts, keys or versions: the right token ids, or a typed error."""

import collections
import fractions

import numpy as np
import pytest
import torch
from fuzz_examples import bounded
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from torchrl_vllm_sync.checks import check_version
from torchrl_vllm_sync.errors import InvalidPromptError, UnsupportedArgumentError
from torchrl_vllm_sync.requests.prompts import as_requests, check_sampling_params
from torchrl_vllm_sync.routing.balancer import as_keys, key_per_prompt

MAX_LEN, VOCAB_SIZE = 6, 300
HUGE = 10**5000  # more digits than Python turns into text


class Params:
    n, max_tokens = 1, 16


class Unshowable:
    def __repr__(self):
        raise RuntimeError("no words for it")


def itself():
    loop = []
    loop.append(loop)
    return loop


def deep(levels=10_000):
    nested = 5
    for _ in range(levels):
        nested = [nested]
    return nested


integers = st.one_of(
    st.integers(0, VOCAB_SIZE - 1),
    st.integers(0, VOCAB_SIZE - 1),
    st.integers(),
    st.sampled_from([True, False, 2**31, 2**31 - 1, 2**63, 2**64, -(2**70)]),
    st.builds(np.int64, st.integers(-5, 400)),
    st.builds(np.uint8, st.integers(0, 255)),
)
scalars = st.one_of(
    integers,
    st.none(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["\ud800", "a\0", b"ab", bytearray(b"a"), 1j, fractions.Fraction(1, 2)]),
    st.sampled_from([np.bool_(True), np.float32(1), np.str_("ab"), np.datetime64("2020")]),
    st.builds(object),
)
DTYPES = [
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.float32,
    torch.bool,
]
tensors = st.builds(
    lambda values, dtype, shape: torch.tensor(values).to(dtype).reshape(shape),
    st.lists(st.integers(0, 400), min_size=4, max_size=4),
    st.sampled_from(DTYPES),
    st.sampled_from([(4,), (4,), (4,), (2, 2), (1, 4), (4, 1)]),
)
odd_tensors = st.sampled_from(
    [
        torch.tensor(5),
        torch.tensor([], dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64, device="meta"),
        torch.tensor([1, 2]).to_sparse(),
        torch.zeros(1, dtype=torch.int64).expand(2**45),
        torch.tensor([1 + 1j]),
    ]
)
arrays = st.one_of(
    hnp.arrays(
        st.sampled_from(["<i8", ">i4", "u1", "f4", "?", "O", "U2", "m8[s]"]),
        hnp.array_shapes(min_dims=0, max_dims=2, max_side=4),
        elements=None,
        fill=st.nothing(),
    ).filter(lambda one: one.dtype != object or one.ndim > 0),
    hnp.arrays("i8", st.integers(1, 4), elements=st.integers(0, VOCAB_SIZE - 1)),
)
token_lists = st.lists(integers, max_size=7).map(list) | st.lists(integers, max_size=7).map(tuple)
odd = st.sampled_from(
    [
        itself,
        lambda: deep(50),
        lambda: range(3),
        lambda: (each for each in (1, 2)),
        lambda: {1, 2},
        dict,
    ]
).map(lambda make: make()) | st.builds(collections.deque, st.lists(integers, max_size=3))
KEYS = ["prompt", "prompt_token_ids", "multi_modal_data", "cache_salt", "promt", 1, None, 0.5, ()]
KEYS += [np.str_("prompt"), torch.tensor(1), float("nan")]
leaves = st.one_of(scalars, token_lists, token_lists, tensors, odd_tensors, arrays, odd)
prompts = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.sampled_from(KEYS[:4]), inner, max_size=3),
        st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    ),
    max_leaves=12,
)


def encode(text):
    return [ord(letter) % 500 for letter in text]


class RefusedError(Exception):
    """The model below says no."""


def ids_of(value):
    """What is right, said as plainly as possible."""
    if isinstance(value, torch.Tensor):
        plain = value.dtype in DTYPES[:5] and value.layout == torch.strided
        if not plain or value.is_meta or value.dim() != 1 or len(value) > MAX_LEN:
            raise RefusedError
        value = value.tolist()
    elif isinstance(value, np.ndarray):
        if value.ndim != 1 or not np.issubdtype(value.dtype, np.integer):
            raise RefusedError
        value = value.tolist()
    if type(value) not in (list, tuple) or not 0 < len(value) < MAX_LEN:
        raise RefusedError
    for one in value:
        if isinstance(one, (bool, np.bool_)) or not isinstance(one, (int, np.integer)):
            raise RefusedError
        if not 0 <= one < VOCAB_SIZE:
            raise RefusedError
    return tuple(int(one) for one in value)


def text_ids(text):
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise RefusedError
    return ids_of(encode(text))


def record_of(value):
    """``(ids, text, extras)`` of one prompt."""
    if isinstance(value, str):
        return text_ids(value), value, {}
    if not isinstance(value, dict):
        return ids_of(value), None, {}
    if not all(isinstance(key, str) and key in KEYS[:4] for key in value):
        raise RefusedError
    given = {key: one for key, one in value.items() if one is not None}
    text, salt = given.pop("prompt", None), given.get("cache_salt", "")
    if not isinstance(salt, str) or not (text is None or isinstance(text, str)):
        raise RefusedError
    if any("\ud800" <= letter <= "\udfff" for letter in salt + (text or "")):
        raise RefusedError
    if "prompt_token_ids" in given:
        return ids_of(given.pop("prompt_token_ids")), text, given
    if text is None:
        raise RefusedError
    return text_ids(text), text, given


def expected(value, read):
    """``(records, is_batch)``."""
    if not isinstance(value, (list, tuple)):
        return [read(value)], False
    if value and isinstance(value[0], (int, float, np.number, np.bool_)):
        return [read(value)], False
    if not value:
        raise RefusedError
    return [read(one) for one in value], True


def as_plain(found):
    plain = []
    for one in map(dict, found[0]):
        ids, text = tuple(one.pop("prompt_token_ids")), one.pop("prompt", None)
        plain.append((ids, text, one))
    return plain, found[1]


def same(found, wanted):
    """Compares extras by identity: they travel unread."""
    (records, is_batch), (others, other_batch) = found, wanted
    return (
        is_batch == other_batch
        and len(records) == len(others)
        and all(
            left[:2] == right[:2]
            and all(type(token) is int for token in left[0])
            and left[2].keys() == right[2].keys()
            and all(left[2][key] is right[2][key] for key in left[2])
            for left, right in zip(records, others, strict=True)
        )
    )


def check(value, wanted, **arguments):
    limits = {"encode": encode, "max_model_len": MAX_LEN, "vocab_size": VOCAB_SIZE}
    if value is None:
        return  # stands for "not given"
    try:
        right = wanted(value)
    except RefusedError:
        with pytest.raises(InvalidPromptError):
            as_requests(**arguments, **limits)
        return
    found = as_plain(as_requests(**arguments, **limits))
    assert same(found, right), f"{found} instead of {right}"


@bounded(400)
@given(prompts)
def test_prompts_become_the_right_ids_or_a_typed_error(value):
    check(value, lambda given: expected(given, record_of), prompts=value)


# Python cannot even show these, and neither can Hypothesis.
HOSTILE = {
    "huge": HUGE,
    "huge and negative": -HUGE,
    "unshowable": Unshowable(),
    "deep": deep(),
    "itself": itself(),
    "surrogate": "\udfff",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda one: one,
        lambda one: [one],
        lambda one: [1, one],
        lambda one: [[1, 2], [one]],
        lambda one: [[1], one],
        lambda one: {"prompt": one},
        lambda one: {"prompt_token_ids": [1, one]},
        lambda one: {"prompt_token_ids": [1], "cache_salt": one},
        lambda one: {"prompt_token_ids": [1], "promt": one},
    ],
)
def test_what_cannot_be_shown_is_refused_all_the_same(name, wrap):
    value = wrap(HOSTILE[name])
    limits = {"encode": encode, "max_model_len": MAX_LEN, "vocab_size": VOCAB_SIZE}
    with pytest.raises(InvalidPromptError):
        as_requests(value, **limits)
    with pytest.raises(InvalidPromptError):
        as_requests(prompt_token_ids=value, **limits)
    with pytest.raises(InvalidPromptError):
        as_requests({"prompt": value, HUGE: value}, **limits)
    with pytest.raises(InvalidPromptError):
        check_sampling_params(value, 1)
    with pytest.raises(InvalidPromptError):
        check_sampling_params([value, value], 2)
    with pytest.raises(UnsupportedArgumentError):
        key_per_prompt("session_id", [[value]], 1)
    with pytest.raises(UnsupportedArgumentError):
        check_version("version", value if value != HUGE else -value)


def test_huge_integers_are_no_versions():
    with pytest.raises(UnsupportedArgumentError, match="an integer of 16610 bits"):
        check_version("version", HUGE)


@bounded(200)
@given(prompts)
def test_token_ids_become_the_right_ids_or_a_typed_error(value):
    check(
        value,
        lambda given: expected(given, lambda one: (ids_of(one), None, {})),
        prompt_token_ids=value,
    )


def test_the_check_above_notices_a_wrong_id_and_a_missing_error():
    with pytest.raises(AssertionError, match="instead of"):
        check([1, 2], lambda given: ([((1, 3), None, {})], False), prompts=[1, 2])

    def refuse(given):
        raise RefusedError

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check([1, 2], refuse, prompts=[1, 2])


@bounded(150)
@given(
    st.one_of(prompts, st.lists(st.builds(Params) | prompts, max_size=3), st.builds(Params)),
    st.integers(0, 3),
)
def test_sampling_params_are_paired_or_refused(given_params, num_prompts):
    is_many = isinstance(given_params, collections.abc.Sequence)
    entries = list(given_params) if is_many else [given_params] * num_prompts
    if given_params is None or (
        len(entries) == num_prompts
        and (not is_many or all(isinstance(one, Params) for one in entries))
        and (is_many or isinstance(given_params, Params))
    ):
        assert check_sampling_params(given_params, num_prompts) == entries
    else:
        with pytest.raises(InvalidPromptError):
            check_sampling_params(given_params, num_prompts)


def key_of(one):
    if isinstance(one, str) and one:
        return one
    if isinstance(one, (int, np.integer)) and not isinstance(one, (bool, np.bool_)):
        return int(one)
    raise RefusedError


@bounded(150)
@given(prompts, st.integers(0, 3))
def test_keys_are_spread_or_refused(value, num_prompts):
    try:
        if isinstance(value, (list, tuple)):
            wanted = [None if one is None else key_of(one) for one in value]
        else:
            wanted = [None if value is None else key_of(value)] * num_prompts
    except RefusedError:
        wanted = None
    if wanted is None or len(wanted) != num_prompts:
        with pytest.raises(UnsupportedArgumentError):
            key_per_prompt("session_id", value, num_prompts)
        return
    found = key_per_prompt("session_id", value, num_prompts)
    assert found == wanted
    assert all(one is None or isinstance(one, str) or type(one) is int for one in found)


@bounded(150)
@given(scalars)
def test_one_key_is_taken_or_refused(value):
    try:
        wanted = key_of(value)
    except RefusedError:
        if isinstance(value, (np.str_, bytearray)) or not hasattr(value, "__iter__"):
            with pytest.raises(UnsupportedArgumentError):
                as_keys("session_id", value)
        return
    assert as_keys("session_id", value) == [wanted]


@bounded(150)
@given(prompts)
def test_versions_are_integers_of_64_bits(value):
    if type(value) is int and 0 <= value < 2**63:
        check_version("version", value)
    else:
        with pytest.raises(UnsupportedArgumentError, match=r"^version must be a policy version"):
            check_version("version", value)
