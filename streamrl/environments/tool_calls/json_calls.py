"""Calls that are JSON objects with a name and arguments, and hermes, the format of Qwen.

vLLM's parser of hermes ends a call at the first </tool_call>, also within a string, and gives up a
whole turn for one call that is malformed.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from streamrl.environments.tool_calls.marked_turn import MarkedTurn, WrittenCall
from streamrl.environments.tool_calls.strict_json import parse_json_at

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
