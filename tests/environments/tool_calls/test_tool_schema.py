"""Tool schemas from functions, and validation of arguments against schemas."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from streamrl.environments.tool_calls.schema_check import check_tool_schema, validate_arguments
from streamrl.environments.tool_calls.tool_schema import format_tool, make_tool_schema
from streamrl.errors import ConfigError


class Library:
    async def search(
        self,
        query: str,
        limit: int = 3,
        *,
        tags: list[str] | None = None,
        weights: dict[str, float] | None = None,
        order: Literal["date", "title"] = "date",
    ) -> str:
        """Search the library
        for books.

        Slow at night.

        Args:
            query: Words: all of
                them must occur.
            limit (int): Most books.

        Returns:
            tags: not a parameter here.
        """
        return f"{query}{limit}{tags}{weights}{order}"


def test_types_defaults_and_the_args_section_reach_the_schema():
    tool = make_tool_schema(Library().search)
    function = tool["function"]
    assert (tool["type"], function["name"]) == ("function", "search")
    assert function["description"] == "Search the library for books."
    parameters = function["parameters"]
    assert (parameters["type"], parameters["additionalProperties"]) == ("object", False)
    assert parameters["required"] == ["query"]
    described = {name: parameters["properties"][name] for name in ("query", "limit", "order")}
    assert described == {
        "query": {"type": "string", "description": "Words: all of them must occur."},
        "limit": {"type": "integer", "default": 3, "description": "Most books."},
        "order": {"type": "string", "enum": ["date", "title"], "default": "date"},
    }


def close_sections(query: str, limit: int = 3) -> None:
    """Search the library.
    Args:

        query: Words.

            All must occur.
        limit: Most books.
    Returns:
        Nothing.
    """


def test_sections_need_no_blank_line_before_them_and_may_have_some_within():
    tool = make_tool_schema(close_sections)["function"]
    assert tool["description"] == "Search the library."
    properties = tool["parameters"]["properties"]
    descriptions = [schema["description"] for schema in properties.values()]
    assert descriptions == ["Words. All must occur.", "Most books."]


def test_a_tool_in_a_line_shows_its_types():
    assert format_tool(make_tool_schema(close_sections)) == (
        "close_sections(query: string, limit: integer): Search the library."
    )
    properties = {"x": True, "y": {"type": ["string", "null"]}}
    odd = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    assert format_tool(odd) == "f(x: any, y: any):"


def no_annotation(x):  # type: ignore[no-untyped-def]
    """Take anything."""


def by_position(x: int, /) -> None:
    """Take one."""


def takes_path(x: list[Path]) -> None:
    """Take paths."""


def undocumented(x: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (no_annotation, "parameter x has no annotation; use str, int"),
        (by_position, "parameter x: int: positional-only"),
        (takes_path, r"parameter x: list\[pathlib.Path\]: not a type of JSON; use str"),
        (undocumented, "needs a docstring"),
        (len, "written in Python"),
    ],
)
def test_a_function_that_a_model_cannot_call_is_refused_with_its_line(
    function: Callable[..., Any], error: str
):
    with pytest.raises(ConfigError, match=error) as caught:
        make_tool_schema(function)
    assert function is len or f"{__file__}:" in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"query": "rl", "limit": 2, "tags": ["a"], "weights": {"a": 1, "b": 0.5}}, ""),
        ({"query": "rl", "limit": "3"}, "limit: '3' is not of type 'integer'"),
        ({"query": "rl", "limit": True}, "limit: True is not of type 'integer'"),
        (
            {"text": "rl"},
            "Additional properties are not allowed ('text' was unexpected); 'query' is a required"
            " property",
        ),
    ],
)
def test_arguments_are_validated_strictly(arguments: dict[str, Any], problem: str):
    assert validate_arguments(make_tool_schema(Library().search), arguments) == problem


def test_a_problem_with_a_long_value_is_reported_in_one_short_line():
    problem = validate_arguments(make_tool_schema(Library().search), {"query": ["x" * 10_000]})
    assert len(problem) < 150 and problem.endswith("is not of type 'string'")


def wrap(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def test_schemas_of_servers_may_refer_to_their_own_definitions():
    properties = {"x": {"$ref": "#/$defs/Gr\u00f6\u00dfe"}}
    tool = wrap({"properties": properties, "$defs": {"Gr\u00f6\u00dfe": {"type": "integer"}}})
    check_tool_schema(tool, place="server")
    assert validate_arguments(tool, {"x": 1}) == ""
    assert validate_arguments(tool, {"x": "1"}) == "x: '1' is not of type 'integer'"


@pytest.mark.parametrize(
    ("tool", "error"),
    [
        ({"type": "function", "function": {}}, "server: tool None: needs a name"),
        (wrap([1]), "server: tool 'f': needs a name, and an object of parameters"),
        (wrap({"type": "objekt"}), "server: tool f: parameters: type: 'objekt' is not valid"),
        (
            wrap({"properties": {"x": {"$ref": "http://elsewhere/schema"}}}),
            "server: tool f: parameters: .*http://elsewhere/schema: must lead to a definition",
        ),
    ],
)
def test_an_unusable_schema_of_a_server_is_refused(tool: Any, error: str):
    with pytest.raises(ConfigError, match=error):
        check_tool_schema(tool, place="server")
