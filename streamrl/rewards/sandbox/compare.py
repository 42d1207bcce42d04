"""Whether what a program gave is what was wanted. Always outside of the jail.

A program may give much, made to be slow to read. Nothing here works long on it at a stretch, so
that other threads get their turn.
"""

import codecs
import json
import math
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from itertools import zip_longest
from typing import Any

#: What numpy.allclose takes for equal. Only where a float is wanted.
_RELATIVE_TOLERANCE = 1e-5
_ABSOLUTE_TOLERANCE = 1e-8
#: What is decoded or split at a stretch, bytes or characters.
_BLOCK_SIZE = 1 << 16
_BLANK = re.compile(r"\s")
_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
#: A value of so many bytes is read only if its parts are as many as those of one that is wanted.
_LONG_VALUE_BYTES = 1 << 16
_PART_MARKERS = b"[{,"


def decode_output(data: bytes) -> str:
    """What a jail says a program wrote; what is no UTF-8 is replaced."""
    blocks = (data[start : start + _BLOCK_SIZE] for start in range(0, len(data), _BLOCK_SIZE))
    return "".join(codecs.iterdecode(blocks, "utf-8", errors="replace"))


def is_same_text(wanted: str, got: str, *, loose_numbers: bool) -> bool:
    """Whether two outputs are equal but for white space that ends a line, or the whole.

    loose_numbers: words that are numbers are equal however they are written, and where a float is
    wanted if they nearly are; then white space only separates words.
    """
    wanted, got = wanted.rstrip(), got.rstrip()
    if wanted == got:
        return True
    if not loose_numbers:
        lines = zip_longest(_iter_lines(wanted), _iter_lines(got))
        return all(one == other for one, other in lines)
    words = zip_longest(_iter_words(wanted), _iter_words(got))
    return all(_is_same_word(one, other) for one, other in words)


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


def _is_same_word(wanted: str | None, got: str | None) -> bool:
    if wanted is None or got is None or wanted == got:
        return wanted == got
    try:
        if _WHOLE_NUMBER.fullmatch(wanted):
            return Decimal(got) == Decimal(wanted)
        return _is_close(float(wanted), float(got))
    except (ValueError, InvalidOperation):
        return False


def is_same_value(wanted: Any, got: Any) -> bool:
    """Whether two values made of JSON's types are equal. Tuples are lists; true is not 1.

    A whole number that is wanted is equal or not; from a float the other may differ slightly.
    """
    if isinstance(wanted, bool) or isinstance(got, bool):
        return wanted is got
    if isinstance(wanted, int | float) and isinstance(got, int | float):
        return wanted == got if isinstance(wanted, int) else _is_close(wanted, got)
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        is_list = isinstance(got, list) and len(got) == len(wanted)
        return is_list and all(map(is_same_value, wanted, got))
    if isinstance(wanted, dict):
        if not isinstance(got, dict) or {str(key) for key in wanted} != got.keys():
            return False
        return all(is_same_value(value, got[str(key)]) for key, value in wanted.items())
    return type(wanted) is type(got) and bool(wanted == got)


def _is_close(a: float, b: float) -> bool:
    try:
        return math.isclose(a, b, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    except OverflowError:  # a whole number too large for a float
        return False


def can_be_value(data: bytes, accepted: Sequence[Any]) -> bool:
    """Whether JSON that a jail says a function returned may be of one of these, before it is read.

    Reading holds up all threads, for longer the more parts there are: other parts than a wanted
    value has need not be read. Of short data nothing is known.
    """
    if len(data) < _LONG_VALUE_BYTES:
        return True
    parts = _count_parts(data)
    return any(parts == _count_parts(json.dumps(value).encode()) for value in accepted)


def _count_parts(data: bytes) -> list[int]:
    blocks = range(0, len(data), _BLOCK_SIZE)
    return [sum(data.count(part, at, at + _BLOCK_SIZE) for at in blocks) for part in _PART_MARKERS]


def parse_value(data: bytes) -> Any:
    """A value that a jail says a function returned. Raises ValueError if it is not JSON."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
