"""Calls in harmony, the format of gpt-oss: a turn of several messages, some of them to a tool.

<|channel|>analysis<|message|>I must add.<|end|><|start|>assistant
<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>
"""

import re
from collections.abc import Iterator

from streamrl.environments.tool_calls.json_calls import parse_json_at, read_arguments_object
from streamrl.environments.tool_calls.marked_turn import MarkedTurn, ScaffoldSpan, WrittenCall

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *MESSAGE_ENDS)
THINKING_CHANNEL = "analysis"
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")


def find_harmony_calls(turn: MarkedTurn) -> Iterator[WrittenCall | ScaffoldSpan]:
    """Yield messages to functions.NAME as calls; headers and thoughts as scaffold."""
    message = turn.get_code(MESSAGE)
    end = turn.start
    while (header_end := turn.text.find(message, end)) >= 0:
        start, body = end, header_end + len(message)
        header = _spell_header(turn, turn.text[start:header_end])
        if recipient := _RECIPIENT.search(header):
            call = _read_call(turn, start, body, recipient[1])
            if call is None:
                return
            end = call.end
            yield call
        else:
            body_end, end = _find_message_end(turn, body)
            is_thought = THINKING_CHANNEL in header.split()
            yield ScaffoldSpan(start, end if is_thought else body)
            yield ScaffoldSpan(body_end, end)


def _read_call(turn: MarkedTurn, start: int, body: int, recipient: str) -> WrittenCall | None:
    """Read the message to a tool whose body begins at `body`; None if the turn was cut in it."""
    error, arguments, value_end = "", None, body
    try:
        value, value_end = turn.parse_at(body, parse_json_at)
        arguments = read_arguments_object(value, "the message")
    except ValueError as problem:
        error = str(problem)
    body_end, end = _find_message_end(turn, value_end)
    # Engines leave out <|call|> if it is a stop token, so only a cut turn must have it.
    if body_end == end == len(turn.text) and turn.is_cut:
        return None
    if not error and turn.text[value_end:body_end].strip():
        error = "expected the end of the message after the arguments"
    return WrittenCall(start, end, recipient.removeprefix("functions."), arguments, error)


def _find_message_end(turn: MarkedTurn, start: int) -> tuple[int, int]:
    """Return where a message's body ends, and where its end marker ends."""
    codes = [turn.get_code(marker) for marker in (START, *MESSAGE_ENDS)]
    found = re.compile("|".join(map(re.escape, codes))).search(turn.text, start)
    if not found:
        return len(turn.text), len(turn.text)
    is_next_message = found[0] == turn.get_code(START)
    return found.start(), found.start() if is_next_message else found.end()


def _spell_header(turn: MarkedTurn, header: str) -> str:
    """Return a message's header with spaces for its markers."""
    for marker in HARMONY_MARKERS:
        header = header.replace(turn.get_code(marker), " ")
    return header
