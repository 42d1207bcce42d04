"""Comparison of actual and expected output."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.user_code.sandbox import sandbox
from streamrl.user_code.sandbox.sandbox import (
    can_be_value,
    decode_output,
    is_same_text,
    is_same_value,
    parse_value,
)

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


SAME = [
    *(("1 2\n3\n", "1 2\n3"), ("1 2\n3", "1 2  \n3\t\n\n \n"), ("1\r\n2\r\n", "1\n2\n")),
    ("", "\n\n"),
]
SAME_WITH_LOOSE_NUMBERS = [
    *(("1", " 1"), ("1\n2", "1 2"), ("1\n\n2", "1\n2"), ("0.5", "0.500")),
    *(("0.333333333", "0.333333"), ("100000", "100000.0"), ("100000", "1e5"), ("0", "-0")),
    *(("5" * 5000, "+" + "5" * 5000), ("100000.0", "100000.5"), ("0.1", "0.1000001")),
    ("3 0.5", "3 0.5000001"),
]
DIFFERENT = [
    *(("0.5 x", "0.5 y"), ("1", "2"), ("1", "1 1"), ("YES", "yes"), ("nan", "NaN")),
    *(("100000", "100000.5"), ("100000", "100001"), ("-7", "-7.00000001"), ("0", "1e-9")),
    *(("9007199254740993", "9007199254740992.0"), ("1", "1e999999999")),
    *(("1", "1e-999999999999999999999"), ("1", "sNaN"), ("1", "inf"), ("[1, 2]", "[1, 2.0]")),
    ("3 0.5", "3.0000001 0.5"),
]


@pytest.mark.parametrize(("expected", "actual"), [*SAME, *SAME_WITH_LOOSE_NUMBERS, *DIFFERENT])
def test_text_comparison_ignores_trailing_whitespace_and_optionally_number_formats(
    expected: str, actual: str
):
    texts = (expected, actual)
    assert is_same_text(*texts, loose_numbers=False) is (texts in SAME)
    assert is_same_text(*texts, loose_numbers=True) is (texts not in DIFFERENT)


SAME_VALUES = [
    *((1, 1.0), (0.1 + 0.2, 0.3), ((1, (2, 3)), [1, [2, 3]])),
    *(({1: [0.5]}, {"1": [0.5000000001]}), (math.inf, math.inf), (100_000.0, 100_000.5)),
    *((100_000.0, 100_000), (100_000.5, 100_000), (0, -0.0), (0.0, 1e-12)),
    *(([0.5, [100_000]], [0.5000001, [100_000]]), ({"a": (1, 2.5)}, {"a": [1, 2.5000001]})),
]
OTHER_VALUES = [
    *((1_000_000, 1_000_001), (0.001, 0.0011), (True, 1), (1, True), (False, None), ("1", 1)),
    *(([1, 2], [1, 2, 3]), ("ab", ["a", "b"]), ({"a": 1}, {"a": 1, "b": 2})),
    *((math.nan, math.nan), (1.5, 10**400), (100_000, 100_000.5), (100_000, 99_999.9999999)),
    *((0, 1e-12), (2**53 + 1, float(2**53)), (10**400, math.inf), (1, math.nan)),
    ([1, [2, {"a": 100_000}]], [1, [2, {"a": 100_000.5}]]),
    *(({"a": (1, 2.5)}, {"a": [1.0000001, 2.5]}), ([True, 1], [1, 1]), ([False], [0.0])),
    *((1.0, True), ("0.5", "0.50"), ("0.5", 0.5)),
]


def test_values_are_the_same_up_to_rounding_of_floats_and_no_other_type():
    assert [pair for pair in SAME_VALUES if not is_same_value(*pair)] == []
    assert [pair for pair in OTHER_VALUES if is_same_value(*pair)] == []


@given(PLAIN)
def test_a_value_equals_itself_but_not_a_list_of_itself(value: object):
    assert is_same_value(value, value)
    assert not is_same_value(value, [value])


@pytest.mark.parametrize(
    "data", [b"", b"1 2", b"[" * 100_000, b"\xff", b"1" * 10_000, b"{1: 2}"], ids=len
)
def test_invalid_json_is_a_value_error(data: bytes):
    with pytest.raises(ValueError):
        parse_value(data)


@given(st.text("1 x\n\t\r\u3000"), st.text("1 x\n\t\r\u3000"), st.integers(1, 5))
def test_long_texts_are_compared_like_short_ones(expected: str, actual: str, block: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "_BLOCK_SIZE", block)
        expected_lines, actual_lines = (
            [line.rstrip() for line in text.rstrip().split("\n")] for text in (expected, actual)
        )
        assert is_same_text(expected, actual, loose_numbers=False) is (
            expected_lines == actual_lines
        )
        assert is_same_text(expected, actual, loose_numbers=True) is (
            expected.split() == actual.split()
        )
        assert is_same_text(expected, expected + " \n", loose_numbers=False)


@given(st.binary() | st.text().map(str.encode), st.integers(1, 5))
def test_long_outputs_are_decoded_like_short_ones(data: bytes, block: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "_BLOCK_SIZE", block)
        assert decode_output(data) == data.decode(errors="replace")


@given(PLAIN)
def test_a_long_value_is_parsed_only_with_matching_structure(value: object):
    long_value = [value, "x" * (1 << 16)]
    data = json.dumps(long_value).encode()
    assert can_be_value(data, [5, long_value])
    assert not can_be_value(data, [5, [long_value], [*long_value, 5]])
    assert can_be_value(b"[[],[]]", [5])
