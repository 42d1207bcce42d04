"""Calls as Python writes them, and calls that a regular expression of the user finds."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import regex

from streamrl.environments.interface import ToolSchema
from streamrl.environments.tool_calls.call_objects import read_arguments_object
from streamrl.environments.tool_calls.marked_turn import MarkedTurn, WrittenCall
from streamrl.environments.tool_calls.python_literals import parse_calls_at
from streamrl.environments.tool_calls.strict_json import parse_json_at
from streamrl.environments.tool_calls.text_arguments import convert_text_arguments
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import suggest_nearest
from streamrl.rewards.interface.extract import SEARCH_TIMEOUT_S

PYTHONIC_MARKERS = {
    "<|python_start|>": "<|python_end|>",
    "<|tool_call_start|>": "<|tool_call_end|>",
}
"""Markers that families write around the list of calls: Llama 4, LFM2."""
NAME_GROUP, ARGUMENTS_GROUP = "name", "arguments"
_CALL_LIST = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")


def find_pythonic_calls(turn: MarkedTurn) -> Iterator[WrittenCall]:
    """Yield calls such as [add(a=1, b=2), stop()], at the start of the turn or after a marker."""
    start = body = turn.start
    closing = ""
    for opening, following in PYTHONIC_MARKERS.items():
        code = turn.get_code(opening)
        position = turn.text.find(code, turn.start)
        if position >= 0:
            start, body, closing = position, position + len(code), turn.get_code(following)
    if not (closing or _CALL_LIST.match(turn.text, start)):
        return
    try:
        calls, end = turn.parse_at(body, parse_calls_at)
        if not calls:
            raise ValueError("the list of calls is empty")
    except ValueError as error:
        last = turn.text.find(closing, body) if closing else -1
        if last >= 0 or not turn.is_cut:
            end = last + len(closing) if last >= 0 else len(turn.text)
            yield WrittenCall(start, end, error=str(error))
        return
    if closing and turn.text.startswith(closing, turn.skip_space(end)):
        end = turn.skip_space(end) + len(closing)
    for name, arguments in calls:
        yield WrittenCall(start, end, name, arguments)


def make_pattern_finder(
    pattern: str, *, setting: str
) -> Callable[[MarkedTurn], Iterator[WrittenCall]]:
    """Return a function that finds the calls that match a regular expression.

    The groups `name` and `arguments` (a JSON object) hold the call. Without a group `name`, the
    environment must have one tool; without a group `arguments`, every other named group is an
    argument, converted to the type in the schema. setting: config key of the pattern. Raises
    ConfigError for an invalid pattern.
    """
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ConfigError(f"{setting}={pattern}: {error}") from None
    groups = compiled.groupindex.keys()
    if not groups:
        raise ConfigError(
            f"{setting}={pattern}: has no named groups; name a group after each argument, or"
            f" write (?P<{NAME_GROUP}>...) and (?P<{ARGUMENTS_GROUP}>...)"
        )

    def find_calls(turn: MarkedTurn) -> Iterator[WrittenCall]:
        if not turn.tools:
            return
        if NAME_GROUP not in groups:
            _check_groups(groups, turn.tools, place=f"{setting}={pattern}")
        try:
            # concurrent=True releases the GIL during the search.
            yield from (
                _read_match(turn, found)
                for found in compiled.finditer(
                    turn.text, turn.start, timeout=SEARCH_TIMEOUT_S, concurrent=True
                )
            )
        except TimeoutError:
            end = len(turn.text)
            yield WrittenCall(end, end, error="searching the turn for calls took too long")

    return find_calls


def _check_groups(groups: Iterable[str], tools: Mapping[str, ToolSchema], *, place: str) -> None:
    """Raise ConfigError unless the groups are the arguments of the only tool.

    No call of another pattern could ever be right.
    """
    if len(tools) != 1:
        raise ConfigError(
            f"{place}: without a group {NAME_GROUP}, the environment must have one tool, not"
            f" {len(tools)}"
        )
    if ARGUMENTS_GROUP in groups:
        return
    ((name, tool),) = tools.items()
    parameters = tool["function"].get("parameters") or {}
    known = parameters.get("properties", {})
    for group in groups:
        if group not in known and parameters.get("additionalProperties", False) is False:
            hint = suggest_nearest(group, known, noun="argument")
            raise ConfigError(f"{place}: {name} has no argument {group}; {hint}")
    missing = [argument for argument in parameters.get("required", ()) if argument not in groups]
    if missing:
        raise ConfigError(
            f"{place}: {name} needs {', '.join(missing)}; name a group after each required argument"
        )


def _read_match(turn: MarkedTurn, found: "regex.Match[str]") -> WrittenCall:
    texts = {key: turn.spell(text) for key, text in found.groupdict().items() if text is not None}
    has_name = NAME_GROUP in found.re.groupindex
    name = texts.pop(NAME_GROUP, "") if has_name else next(iter(turn.tools))
    start, end = found.span()
    try:
        if ARGUMENTS_GROUP in texts:
            text = texts[ARGUMENTS_GROUP].strip()
            value, length = parse_json_at(text, 0)
            if length < len(text):
                raise ValueError(
                    f"more than one JSON value in the arguments, at character {length}"
                )
            return WrittenCall(start, end, name, read_arguments_object(value, "the call"))
    except ValueError as error:
        return WrittenCall(start, end, name, error=str(error))
    return WrittenCall(start, end, name, convert_text_arguments(turn.tools.get(name), texts))
