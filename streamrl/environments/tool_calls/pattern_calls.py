"""Calls that a regular expression of the user finds."""

import ast
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import regex

from streamrl.environments.interface import ToolSchema
from streamrl.environments.tool_calls.json_calls import read_arguments_object
from streamrl.environments.tool_calls.marked_turn import MarkedTurn, WrittenCall
from streamrl.environments.tool_calls.strict_json import parse_json_at
from streamrl.environments.tool_calls.tool_schema import is_valid_argument
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import suggest_nearest
from streamrl.rewards.interface.answers import SEARCH_TIMEOUT_S

NAME_GROUP, ARGUMENTS_GROUP = "name", "arguments"


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
    return WrittenCall(start, end, name, _convert_text_arguments(turn.tools.get(name), texts))


def _convert_text_arguments(tool: ToolSchema | None, texts: Mapping[str, str]) -> dict[str, Any]:
    """Convert each text to the first of its readings that the schema of its parameter accepts.

    Without such a reading, or without a tool, the text stays; validation then reports its type.
    """
    if tool is None:
        return dict(texts)
    return {
        name: next((v for v in _list_readings(text) if is_valid_argument(tool, name, v)), text)
        for name, text in texts.items()
    }


def _list_readings(text: str) -> Iterator[Any]:
    """Yield a text as JSON, as a Python literal (templates write True) and as itself.

    A quoted string is no reading: the quotes belong to the text.
    """
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text.strip())
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        if not isinstance(value, str):
            yield value
    yield text
