"""Calls between <tool_call> and </tool_call>: hermes (Qwen) and the XML of Qwen's coder models."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from streamrl.environments.tool_calls.call_objects import read_call_object
from streamrl.environments.tool_calls.marked_turn import MarkedTurn, WrittenCall
from streamrl.environments.tool_calls.strict_json import parse_json_at
from streamrl.environments.tool_calls.text_arguments import convert_text_arguments

OPENING, CLOSING = "<tool_call>", "</tool_call>"
# A value may itself contain </parameter>: it ends at the one that the format continues after.
_PARAMETER = re.compile(
    r"\s*<parameter=(?P<name>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
    r"(?=\s*(?:<parameter=|</function>))",
    re.DOTALL,
)
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^>\n]+)>")
_FUNCTION_END = re.compile(r"\s*</function>")
ReadBody = Callable[[MarkedTurn, int], tuple[str, Mapping[str, Any], int]]
"""Function that reads the body of a call from a position; returns name, arguments and end."""


def find_hermes_calls(turn: MarkedTurn) -> Iterator[WrittenCall]:
    """Yield calls such as <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>."""
    return _find_enclosed_calls(turn, _read_json_body)


def find_qwen_coder_calls(turn: MarkedTurn) -> Iterator[WrittenCall]:
    """Yield calls such as <tool_call><function=add><parameter=a>1</parameter></function>..."""
    return _find_enclosed_calls(turn, _read_xml_body)


def _find_enclosed_calls(turn: MarkedTurn, read_body: ReadBody) -> Iterator[WrittenCall]:
    opening, closing = turn.get_code(OPENING), turn.get_code(CLOSING)
    end = turn.start
    while (start := turn.text.find(opening, end)) >= 0:
        body = start + len(opening)
        try:
            name, arguments, end = read_body(turn, body)
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


def _read_json_body(turn: MarkedTurn, start: int) -> tuple[str, Mapping[str, Any], int]:
    value, end = turn.parse_at(start, parse_json_at)
    return *read_call_object(value), end


def _read_xml_body(turn: MarkedTurn, start: int) -> tuple[str, Mapping[str, Any], int]:
    if not (function := _FUNCTION.match(turn.text, start)):
        raise ValueError("expected <function=NAME>")
    texts: dict[str, str] = {}
    end = function.end()
    while parameter := _PARAMETER.match(turn.text, end):
        name = turn.spell(parameter["name"])
        if name in texts:
            raise ValueError(f"parameter {name} occurs twice")
        texts[name] = turn.spell(parameter["value"])
        end = parameter.end()
    if not (last := _FUNCTION_END.match(turn.text, end)):
        raise ValueError("expected <parameter=NAME>VALUE</parameter> or </function>")
    name = turn.spell(function["name"])
    return name, convert_text_arguments(turn.tools.get(name), texts), last.end()
