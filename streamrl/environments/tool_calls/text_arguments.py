"""Arguments that a call writes as text, converted to the types that the tool's schema declares."""

from collections.abc import Iterator, Mapping
from typing import Any

from streamrl.environments.interface import ToolSchema
from streamrl.environments.tool_calls.python_literals import parse_literal
from streamrl.environments.tool_calls.strict_json import parse_json_at
from streamrl.environments.tool_calls.tool_schema import is_valid_argument


def convert_text_arguments(tool: ToolSchema | None, texts: Mapping[str, str]) -> dict[str, Any]:
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
    for parse in (_parse_json, parse_literal):
        try:
            value = parse(text)
        except ValueError:
            continue
        if not isinstance(value, str):
            yield value
    yield text


def _parse_json(text: str) -> Any:
    stripped = text.strip()
    value, end = parse_json_at(stripped, 0)
    if end < len(stripped):
        raise ValueError("more than one value")
    return value
