"""JSON as a policy writes it, parsed without tolerance, and hermes, the format of Qwen.

vLLM's parser of hermes ends a call at the first </tool_call>, also within a string, and gives up a
whole turn for one call that is malformed.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from streamrl.environments.tool_calls.marked_turn import MarkedTurn, WrittenCall
from streamrl.files.bounded_read import check_depth, make_unique_dict

OPENING, CLOSING = "<tool_call>", "</tool_call>"


def find_hermes_calls(turn: MarkedTurn) -> Iterator[WrittenCall]:
    """Yield calls such as <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>."""
    opening, closing = turn.get_code(OPENING), turn.get_code(CLOSING)
    end = turn.start
    while (start := turn.text.find(opening, end)) >= 0:
        body = start + len(opening)
        try:
            value, end = turn.parse_at(body, parse_json_at)
            name, arguments = read_call_object(value)
            end = turn.skip_space(end)
            if not turn.text.startswith(closing, end):
                raise ValueError(f"expected {CLOSING} after the call")
        except ValueError as error:
            end = _find_end(turn, body)
            if end < 0:
                return
            yield WrittenCall(start, end, error=str(error))
        else:
            end += len(closing)
            yield WrittenCall(start, end, name, arguments)


def _find_end(turn: MarkedTurn, body: int) -> int:
    """Return where a malformed call ends; -1 if the turn was cut within the call."""
    opening, closing = turn.get_code(OPENING), turn.get_code(CLOSING)
    last = turn.text.find(closing, body)
    following = turn.text.find(opening, body)
    if last >= 0 and not 0 <= following < last:
        return last + len(closing)
    if following >= 0:
        return following
    return -1 if turn.is_cut else len(turn.text)


def read_call_object(value: Any) -> tuple[str, Mapping[str, Any]]:
    """Return name and arguments of a call.

    Raises ValueError unless the value is an object with a name and an object of arguments.
    """
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object with the keys name and arguments")
    name = value.get("name")
    if not (isinstance(name, str) and name):
        raise ValueError("the key name must hold the name of a tool")
    return name, read_arguments_object(value.get("arguments"), "the key arguments")


def read_arguments_object(value: Any, place: str) -> Mapping[str, Any]:
    """Return arguments. place: where they stand. Raises ValueError unless they are an object."""
    if not isinstance(value, dict):
        raise ValueError(f"{place} must hold a JSON object with the arguments")
    return value


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


def parse_json(text: str) -> Any:
    """Parse a text that is one JSON value. Raises ValueError as `parse_json_at` does."""
    text = text.strip()
    value, end = parse_json_at(text, 0)
    if end < len(text):
        raise ValueError(f"expected the end of the value at character {end}")
    return value


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
