"""Calls in JSON without an end marker: Llama 3 and Mistral."""

import re
from collections.abc import Iterator

from streamrl.environments.tool_calls.call_objects import read_arguments_object, read_call_object
from streamrl.environments.tool_calls.marked_turn import MarkedTurn, WrittenCall
from streamrl.environments.tool_calls.strict_json import parse_json_at

PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LLAMA_CALL = re.compile(r"""\s*\{\s*"(?:type|name)"\s*:""")
_LLAMA_SEPARATOR = re.compile(r"\s*[;,]?\s*(?=\{)")
_TOOL_NAME = re.compile(r"[\w.:-]+")


def find_llama3_calls(turn: MarkedTurn) -> Iterator[WrittenCall]:
    """Yield calls such as {"name": "add", "parameters": {"a": 1}}, at the start of the turn.

    After <|python_tag|> they may stand anywhere. Several are separated by semicolons.
    """
    tag = turn.get_code(PYTHON_TAG)
    start = turn.text.find(tag, turn.start)
    is_tagged = start >= 0
    if not is_tagged:
        start = turn.skip_space(turn.start)
        if not _LLAMA_CALL.match(turn.text, start):
            return
    body = start + len(tag) if is_tagged else start
    while True:
        try:
            value, end = turn.parse_at(body, parse_json_at)
            # An answer in JSON may begin with a name, too.
            if not (is_tagged or {"parameters", "arguments"} & value.keys()):
                return
            name, arguments = read_call_object(value, ("parameters", "arguments"))
        except ValueError as error:
            if not turn.is_cut:
                yield WrittenCall(start, len(turn.text), error=str(error))
            return
        yield WrittenCall(start, end, name, arguments)
        separator = _LLAMA_SEPARATOR.match(turn.text, end)
        if not (separator and _LLAMA_CALL.match(turn.text, separator.end())):
            return
        start, body = end, separator.end()


def find_mistral_calls(turn: MarkedTurn) -> Iterator[WrittenCall]:
    """Yield calls such as [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}].

    Newer models write [TOOL_CALLS]add[ARGS]{"a": 1}, once for each call.
    """
    marker = turn.get_code(TOOL_CALLS)
    end = turn.start
    while (start := turn.text.find(marker, end)) >= 0:
        body = turn.skip_space(start + len(marker))
        try:
            if turn.text.startswith(("[", "{"), body):
                calls, end = _read_mistral_list(turn, start, body)
            else:
                calls, end = _read_mistral_call(turn, start, body)
        except ValueError as error:
            following = turn.text.find(marker, body)
            if following < 0 and turn.is_cut:
                return
            end = following if following >= 0 else len(turn.text)
            calls = [WrittenCall(start, end, error=str(error))]
        yield from calls


def _read_mistral_list(turn: MarkedTurn, start: int, body: int) -> tuple[list[WrittenCall], int]:
    value, end = turn.parse_at(body, parse_json_at)
    objects = value if isinstance(value, list) else [value]
    if not objects:
        raise ValueError("the list of calls is empty")
    calls = [WrittenCall(start, end, *read_call_object(item)) for item in objects]
    return calls, end


def _read_mistral_call(turn: MarkedTurn, start: int, body: int) -> tuple[list[WrittenCall], int]:
    args = turn.get_code(ARGS)
    position = turn.text.find(args, body)
    name = turn.text[body:position].partition(turn.get_code(CALL_ID))[0].strip()
    if position < 0 or not _TOOL_NAME.fullmatch(name):
        raise ValueError(f"expected NAME{ARGS} and the arguments, or a JSON list of calls")
    value, end = turn.parse_at(position + len(args), parse_json_at)
    return [WrittenCall(start, end, name, read_arguments_object(value, ARGS))], end
