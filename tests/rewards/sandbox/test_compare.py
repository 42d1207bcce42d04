"""Comparison of actual and expected output."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.rewards.sandbox import compare
from streamrl.rewards.sandbox.compare import (
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


@pytest.mark.parametrize(
    ("expected", "actual", "is_same", "is_same_loosely"),
    [
        ("1 2\n3\n", "1 2\n3", True, True),
        ("1 2\n3", "1 2  \n3\t\n\n \n", True, True),
        ("1\r\n2\r\n", "1\n2\n", True, True),
        ("", "\n\n", True, True),
        ("1", " 1", False, True),
        ("1\n2", "1 2", False, True),
        ("1\n\n2", "1\n2", False, True),
        ("0.5", "0.500", False, True),
        ("0.333333333", "0.333333", False, True),
        ("0.5 x", "0.5 y", False, False),
        ("1", "2", False, False),
        ("1", "1 1", False, False),
        ("YES", "yes", False, False),
        ("nan", "NaN", False, False),
        ("100000", "100000.5", False, False),
        ("100000", "100001", False, False),
        ("100000", "100000.0", False, True),
        ("100000", "1e5", False, True),
        ("-7", "-7.00000001", False, False),
        ("0", "1e-9", False, False),
        ("0", "-0", False, True),
        ("9007199254740993", "9007199254740992.0", False, False),
        ("5" * 5000, "+" + "5" * 5000, False, True),
        ("1", "1e999999999", False, False),
        ("1", "1e-999999999999999999999", False, False),
        ("1", "sNaN", False, False),
        ("1", "inf", False, False),
        ("100000.0", "100000.5", False, True),
        ("0.1", "0.1000001", False, True),
        ("[1, 2]", "[1, 2.0]", False, False),
        ("3 0.5", "3 0.5000001", False, True),
        ("3 0.5", "3.0000001 0.5", False, False),
    ],
)
def test_text_comparison_ignores_trailing_whitespace_and_optionally_number_formats(
    expected: str, actual: str, is_same: bool, is_same_loosely: bool
):
    assert is_same_text(expected, actual, loose_numbers=False) is is_same
    assert is_same_text(expected, actual, loose_numbers=True) is is_same_loosely


@pytest.mark.parametrize(
    ("expected", "actual", "is_same"),
    [
        (1, 1.0, True),
        (0.1 + 0.2, 0.3, True),
        (1_000_000, 1_000_001, False),
        (0.001, 0.0011, False),
        (True, 1, False),
        (1, True, False),
        (False, None, False),
        ("1", 1, False),
        ((1, (2, 3)), [1, [2, 3]], True),
        ([1, 2], [1, 2, 3], False),
        ("ab", ["a", "b"], False),
        ({1: [0.5]}, {"1": [0.5000000001]}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (math.nan, math.nan, False),
        (math.inf, math.inf, True),
        (1.5, 10**400, False),
        (100_000, 100_000.5, False),
        (100_000, 99_999.9999999, False),
        (100_000.0, 100_000.5, True),
        (100_000.0, 100_000, True),
        (100_000.5, 100_000, True),
        (0, 1e-12, False),
        (0, -0.0, True),
        (0.0, 1e-12, True),
        (2**53 + 1, float(2**53), False),
        (10**400, math.inf, False),
        (1, math.nan, False),
        ([1, [2, {"a": 100_000}]], [1, [2, {"a": 100_000.5}]], False),
        ([0.5, [100_000]], [0.5000001, [100_000]], True),
        ({"a": (1, 2.5)}, {"a": [1.0000001, 2.5]}, False),
        ({"a": (1, 2.5)}, {"a": [1, 2.5000001]}, True),
        ([True, 1], [1, 1], False),
        ([False], [0.0], False),
        (1.0, True, False),
        ("0.5", "0.50", False),
        ("0.5", 0.5, False),
    ],
)
def test_integers_compare_exactly_and_floats_approximately(
    expected: object, actual: object, is_same: bool
):
    assert is_same_value(expected, actual) is is_same


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
        patch.setattr(compare, "_BLOCK_SIZE", block)
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
        patch.setattr(compare, "_BLOCK_SIZE", block)
        assert decode_output(data) == data.decode(errors="replace")


@given(PLAIN)
def test_a_long_value_is_parsed_only_with_matching_structure(value: object):
    long_value = [value, "x" * (1 << 16)]
    data = json.dumps(long_value).encode()
    assert can_be_value(data, [5, long_value])
    assert not can_be_value(data, [5, [long_value], [*long_value, 5]])
    assert can_be_value(b"[[],[]]", [5])
