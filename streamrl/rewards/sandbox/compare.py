"""Whether what a program gave is what was wanted. Always outside of the jail."""

import json
import math
from collections.abc import Sequence
from typing import Any

#: What numpy.allclose takes for equal.
_RELATIVE = 1e-5
_ABSOLUTE = 1e-8


def same_text(wanted: str, got: str, *, loose_numbers: bool) -> bool:
    """Whether two outputs are equal but for white space that ends a line, or the whole.

    loose_numbers: words that are numbers are equal if they nearly are, however they are written;
    then white space only separates words.
    """
    wanted_lines, got_lines = _lines(wanted), _lines(got)
    if wanted_lines == got_lines or not loose_numbers:
        return wanted_lines == got_lines
    wanted_words, got_words = wanted.split(), got.split()
    return len(wanted_words) == len(got_words) and all(map(_same_word, wanted_words, got_words))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_word(wanted: str, got: str) -> bool:
    if wanted == got:
        return True
    try:
        return _close(float(wanted), float(got))
    except ValueError:
        return False


def same_value(wanted: Any, got: Any) -> bool:
    """Whether two values made of JSON's types are equal. Tuples are lists; true is not 1.

    Whole numbers must be the same; where one of two is a float, they may differ slightly.
    """
    if isinstance(wanted, bool) or isinstance(got, bool):
        return wanted is got
    if isinstance(wanted, int | float) and isinstance(got, int | float):
        exact = isinstance(wanted, int) and isinstance(got, int)
        return wanted == got if exact else _close(wanted, got)
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        is_list = isinstance(got, list) and len(got) == len(wanted)
        return is_list and all(map(same_value, wanted, got))
    if isinstance(wanted, dict):
        if not isinstance(got, dict) or {str(key) for key in wanted} != got.keys():
            return False
        return all(same_value(value, got[str(key)]) for key, value in wanted.items())
    return type(wanted) is type(got) and bool(wanted == got)


def _close(a: float, b: float) -> bool:
    try:
        return math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    except OverflowError:  # a whole number too large for a float
        return False


def read_value(data: bytes) -> Any:
    """A value that a jail says a function returned. Raises ValueError if it is not JSON."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
