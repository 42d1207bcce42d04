"""Calls that a regular expression of the user finds."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import regex

from streamrl.environments.interface import ToolSchema
from streamrl.environments.tool_calls.json_calls import parse_json, read_arguments_object
from streamrl.environments.tool_calls.marked_turn import MarkedTurn, WrittenCall
from streamrl.environments.tool_calls.tool_schema import is_valid_argument
from streamrl.errors import ConfigError
from streamrl.rewards.interface.answers import SEARCH_TIMEOUT_S

NAME_GROUP, ARGUMENTS_GROUP = "name", "arguments"
PYTHON_WORDS = {"True": True, "False": False, "None": None}


def make_pattern_finder(pattern: str) -> Callable[[MarkedTurn], Iterator[WrittenCall]]:
    """Return a function that finds the calls that match a regular expression.

    The groups `name` and `arguments` (a JSON object) hold the call. Without a group `name`, the
    environment must have one tool; without a group `arguments`, every other named group is an
    argument, converted to the type in the schema. Raises ConfigError for an invalid pattern.
    """
    place = f"environment.call_pattern={pattern}"
    try:
        compiled = regex.compile(pattern)
    except regex.error as error:
        raise ConfigError(f"{place}: {error}") from None
    if not compiled.groupindex:
        raise ConfigError(
            f"{place}: has no named groups; name a group after each argument, or write"
            f" (?P<{NAME_GROUP}>...) and (?P<{ARGUMENTS_GROUP}>...)"
        )

    def find_calls(turn: MarkedTurn) -> Iterator[WrittenCall]:
        if turn.tools and NAME_GROUP not in compiled.groupindex:
            _check_groups(compiled.groupindex, turn.tools, place=place)
        try:
            # concurrent=True releases the GIL during the search.
            for found in compiled.finditer(
                turn.text, turn.start, timeout=SEARCH_TIMEOUT_S, concurrent=True
            ):
                yield _read_match(turn, found)
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
    ((name, tool),) = tools.items()
    parameters = tool["function"].get("parameters") or {}
    unknown = {*groups} - parameters.get("properties", {}).keys()
    missing = {*parameters.get("required", ())} - {*groups}
    is_closed = parameters.get("additionalProperties", False) is False
    if ARGUMENTS_GROUP not in groups and ((unknown and is_closed) or missing):
        raise ConfigError(
            f"{place}: the groups {', '.join(groups)} are not the arguments of {name}, which has"
            f" {', '.join(parameters.get('properties', {}))}"
        )


def _read_match(turn: MarkedTurn, found: "regex.Match[str]") -> WrittenCall:
    texts = {key: turn.spell(text) for key, text in found.groupdict().items() if text is not None}
    has_name = NAME_GROUP in found.re.groupindex
    name = texts.pop(NAME_GROUP, "") if has_name else next(iter(turn.tools), "")
    start, end = found.span()
    if ARGUMENTS_GROUP in texts:
        try:
            arguments = read_arguments_object(parse_json(texts[ARGUMENTS_GROUP]), "the call")
        except ValueError as error:
            return WrittenCall(start, end, name, error=str(error))
    else:
        tool = turn.tools.get(name)
        arguments = {key: _read_argument(tool, key, text) for key, text in texts.items()}
    return WrittenCall(start, end, name, arguments)


def _read_argument(tool: ToolSchema | None, name: str, text: str) -> Any:
    """Return a text as JSON, or as Python writes it, if the tool's schema accepts that.

    Otherwise the text stays, as does a quoted string: the quotes belong to it.
    """
    try:
        value = PYTHON_WORDS[text] if text in PYTHON_WORDS else parse_json(text)
    except ValueError:
        return text
    if tool is None or isinstance(value, str) or not is_valid_argument(tool, name, value):
        return text
    return value
