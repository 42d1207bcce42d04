"""JSON as a policy writes it: a value inside a text, parsed without any tolerance."""

import json
import math
from typing import Any

from streamrl.files.bounded_read import check_depth, make_unique_dict


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Parse the JSON value that begins at `start`; return it and the position of its end.

    Raises ValueError, also for NaN and Infinity, duplicate keys, deep nesting and numbers out of
    range. Positions in the message count from `start`.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos - start}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    check_depth(value)
    return value, end


def check_encodable(value: Any) -> None:
    """Raise ValueError for a JSON value with a string that UTF-8 cannot encode.

    Escapes can write half a surrogate pair, which hosts of environments and tokenizers refuse.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a string contains half a surrogate pair") from None


def parse_finite_float(number: str) -> float:
    """Convert a JSON number to a float. Raises ValueError if it is out of range."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"the number {number[:40]} is out of range")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=make_unique_dict,
    parse_constant=_refuse_constant,
    parse_float=parse_finite_float,
)
