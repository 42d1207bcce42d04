"""Literals and calls in Python's syntax."""

from typing import Any

import pytest

from streamrl.environments.tool_calls.python_literals import parse_calls_at, parse_literal


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" -12 ", -12),
        ("1.5e-3", 0.0015),
        ("2.", 2.0),
        ("True", True),
        ("null", None),
        ("[1, [], 'a',]", [1, [], "a"]),
        ("{'a': {\"b\": None}}", {"a": {"b": None}}),
        (r"'it\'s\n\x41\u00e9\U0001f600\101'", "it's\nA\xe9\U0001f600A"),
        (r"'C:\dir \q'", r"C:\dir \q"),
        ("'''a\n'b' \"c\"'''", "a\n'b' \"c\""),
        ('""""""', ""),
    ],
)
def test_a_literal_is_parsed(text: str, value: Any):
    assert parse_literal(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "1 2", "007", "1_000", "0x1f", "+1", "1e999", "9" * 5000, "-", "inf", "nan"),
        *("'a", "'a\nb'", "[1", "[1 2]", "[,]", "{1: 2}", "{'a': 1, 'a': 2}", "{'a'}", "(1, 2)"),
        *("f'{x}'", "b'a'", "'a' 'b'", "1 + 1", "__import__('os')", "[x for x in y]", "[" * 5000),
    ],
)
def test_anything_but_a_literal_is_refused(text: str):
    with pytest.raises(ValueError, match=r"."):
        parse_literal(text)


def test_calls_end_where_their_list_ends():
    text = "so [f(), g.h( a = 'x)' , b=[1] ,)] done"
    assert parse_calls_at(text, 3) == ([("f", {}), ("g.h", {"a": "x)", "b": [1]})], 34)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[f(1)]", "expected a name at character 3"),
        ("[f(a)]", "expected = at character 4"),
        ("[f(a=g())]", "expected a literal at character 5"),
        ("[f(a=1)", "expected ] at character 7"),
        ("[f(**a)]", "expected a name"),
    ],
)
def test_an_error_says_where_it_is(text: str, error: str):
    with pytest.raises(ValueError, match=error.replace("[", r"\[")):
        parse_calls_at(text, 0)
