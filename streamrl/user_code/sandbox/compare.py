"""Compare a program's output with the expected output, outside the jail.

Output is hostile input: long, and built to be slow to parse. All functions work in blocks, so that
no single call into C holds the GIL for long.
"""

import codecs
import json
import math
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from itertools import zip_longest
from typing import Any

#: Tolerances of numpy.allclose; they apply only if the expected value is a float.
_RELATIVE_TOLERANCE = 1e-5
_ABSOLUTE_TOLERANCE = 1e-8
#: Bytes or characters decoded or split per call.
_BLOCK_SIZE = 1 << 16
_BLANK = re.compile(r"\s")
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
#: JSON of this size is parsed only if its structure matches an accepted value (see can_be_value).
_LONG_VALUE_BYTES = 1 << 16
_PART_MARKERS = b"[{,"


def decode_output(data: bytes) -> str:
    """Decode UTF-8 in blocks; invalid bytes become U+FFFD."""
    blocks = (data[start : start + _BLOCK_SIZE] for start in range(0, len(data), _BLOCK_SIZE))
    return "".join(codecs.iterdecode(blocks, "utf-8", errors="replace"))


def is_same_text(expected: str, actual: str, *, loose_numbers: bool) -> bool:
    """Return True if two outputs are equal, ignoring whitespace at the end of lines and text.

    loose_numbers: compare word by word, ignoring all other whitespace. Words that are numbers are
    equal as numbers, approximately if the expected number is a float.
    """
    expected, actual = expected.rstrip(), actual.rstrip()
    if expected == actual:
        return True
    if not loose_numbers:
        lines = zip_longest(_iter_lines(expected), _iter_lines(actual))
        return all(line == actual_line for line, actual_line in lines)
    words = zip_longest(_iter_words(expected), _iter_words(actual))
    return all(_is_same_word(word, actual_word) for word, actual_word in words)


def _iter_lines(text: str) -> Iterator[str]:
    start = 0
    while start <= len(text):
        end = text.find("\n", start + _BLOCK_SIZE)
        end = len(text) if end < 0 else end
        yield from (line.rstrip() for line in text[start:end].split("\n"))
        start = end + 1


def _iter_words(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        blank = _BLANK.search(text, start + _BLOCK_SIZE)
        end = blank.start() if blank else len(text)
        yield from text[start:end].split()
        start = end


def _is_same_word(expected: str | None, actual: str | None) -> bool:
    """Compare two words as text, then as numbers; None: the text has no further words."""
    if expected is None or actual is None or expected == actual:
        return expected == actual
    try:
        if _WHOLE_NUMBER.fullmatch(expected):
            return Decimal(actual) == Decimal(expected)
        return _is_close(float(expected), float(actual))
    except (ValueError, InvalidOperation):
        return False


def is_same_value(expected: Any, actual: Any) -> bool:
    """Return True if two values of JSON types are equal.

    An expected integer is compared exactly, an expected float approximately. Tuples equal lists;
    true differs from 1.
    """
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, int | float) and isinstance(actual, int | float):
        return expected == actual if isinstance(expected, int) else _is_close(expected, actual)
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        is_list = isinstance(actual, list) and len(actual) == len(expected)
        return is_list and all(map(is_same_value, expected, actual))
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or {str(key) for key in expected} != actual.keys():
            return False
        return all(is_same_value(value, actual[str(key)]) for key, value in expected.items())
    return type(expected) is type(actual) and bool(expected == actual)


def _is_close(a: float, b: float) -> bool:
    try:
        return math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    except OverflowError:  # an integer too large for a float
        return False


def can_be_value(data: bytes, accepted: Sequence[Any]) -> bool:
    """Return False if JSON `data` cannot equal any accepted value; does not parse the data.

    json.loads holds the GIL, for longer the more containers and elements the data has. Data that
    differs from every accepted value in the counts of "[", "{" and "," is rejected here. Short data
    passes unchecked.
    """
    if len(data) < _LONG_VALUE_BYTES:
        return True
    counts = _count_parts(data)
    return any(counts == _count_parts(json.dumps(value).encode()) for value in accepted)


def _count_parts(data: bytes) -> list[int]:
    blocks = range(0, len(data), _BLOCK_SIZE)
    return [sum(data.count(part, at, at + _BLOCK_SIZE) for at in blocks) for part in _PART_MARKERS]


def parse_value(data: bytes) -> Any:
    """Parse a return value from JSON. Raises ValueError for invalid or too deeply nested data."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
