"""Tool schemas in OpenAI's form, made from Python functions."""

import inspect
import re
import textwrap
import types
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin
from typing import get_type_hints as resolve_annotations

from streamrl.environments.interface import ToolSchema
from streamrl.errors import ConfigError

JSON_TYPES = (str, int, float, bool, type(None), list, dict, Any)
"""Annotations of values that JSON can carry as they are."""
ANNOTATION_RULE = "use str, int, float, bool, list, dict, Literal, or a union of these"
_ARGS = re.compile(r"^(?:Args|Arguments|Parameters): *\n((?: +.*\n|\n)*)", re.MULTILINE)
_END_OF_FIRST = re.compile(r"\n\n|^(?:Returns|Raises|Yields|Examples?): *$", re.MULTILINE)


def make_tool_schema(function: Callable[..., Any]) -> ToolSchema:
    """Return the schema of a tool that a function or bound method implements.

    The description is the first paragraph of the docstring. An `Args:` section in Google's style
    may describe parameters, as may `Annotated[int, pydantic.Field(description=...)]`. Raises
    ConfigError for a function without docstring, and for a parameter without annotation, of a type
    that JSON does not have, or that callers cannot pass by name.
    """
    # It takes half a second to import; only hosts of classes with tools need it.
    import pydantic.json_schema

    class UntitledSchema(pydantic.json_schema.GenerateJsonSchema):
        """JSON schema without titles, which repeat the names of the parameters."""

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    _check_signature(function)
    paragraph, descriptions = _read_docstring(function)
    adapter: Any = pydantic.TypeAdapter(cast(Any, function))
    parameters = adapter.json_schema(schema_generator=UntitledSchema)
    properties = parameters.setdefault("properties", {})
    for name in descriptions.keys() & properties.keys():
        properties[name].setdefault("description", descriptions[name])
    parameters = {"type": "object", "properties": properties, **parameters}
    described = {"name": function.__name__, "description": paragraph, "parameters": parameters}
    return {"type": "function", "function": described}


def _check_signature(function: Callable[..., Any]) -> None:
    place = _describe_place(function)
    if not (inspect.getdoc(function) or "").strip():
        raise ConfigError(f"{place}: needs a docstring, which describes the tool to the model")
    try:
        annotations = resolve_annotations(function, include_extras=True)
    except NameError as error:
        raise ConfigError(f"{place}: annotations: {error}") from None
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"{place}: parameter {parameter}: {parameter.kind.description}; a model passes"
                " arguments by name only"
            )
        if name not in annotations:
            raise ConfigError(f"{place}: parameter {name} has no annotation; {ANNOTATION_RULE}")
        if not _is_json_type(annotations[name]):
            text = inspect.formatannotation(annotations[name])
            raise ConfigError(
                f"{place}: parameter {name}: {text}: not a type of JSON; {ANNOTATION_RULE}"
            )


def _describe_place(function: Callable[..., Any]) -> str:
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        raise ConfigError(f"tool {function!r}: must be a function or method written in Python")
    code = inspect.unwrap(function).__code__
    return f"{code.co_filename}:{code.co_firstlineno}: tool {function.__name__}"


def _is_json_type(annotation: Any) -> bool:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _is_json_type(arguments[0])
    if origin is Literal:
        return all(value is None or isinstance(value, str | int) for value in arguments)
    if origin is dict:
        return arguments[0] is str and _is_json_type(arguments[1])
    if origin in (list, Union, types.UnionType):
        return all(map(_is_json_type, arguments))
    return annotation in JSON_TYPES


def _read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a docstring, and the descriptions in its Args section."""
    text = f"{inspect.getdoc(function)}\n"
    first = _END_OF_FIRST.split(_ARGS.sub("", text), maxsplit=1)[0]
    section = textwrap.dedent("".join(_ARGS.findall(text)))
    # A description goes on in lines that are indented further than its name.
    entry = r"^(\w+)(?:\s*\([^)]*\))?:(.*(?:\n+ .*)*)"
    entries = re.findall(entry, section, re.MULTILINE)
    return _join_words(first), {name: _join_words(words) for name, words in entries}


def _join_words(text: str) -> str:
    return " ".join(text.split())


def get_tool_name(tool: ToolSchema) -> str:
    return str(tool["function"]["name"])


def get_parameters(tool: ToolSchema) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = tool["function"].get("parameters") or {}
    return parameters


def format_tool(tool: ToolSchema) -> str:
    """Return a tool as `search(query: string, limit: integer): Search the web.`"""
    function, properties = tool["function"], get_parameters(tool).get("properties", {})
    kinds = {n: s.get("type") for n, s in properties.items() if isinstance(s, Mapping)}
    kinds = {n: kind for n, kind in kinds.items() if isinstance(kind, str)}
    written = (f"{name}: {kinds.get(name, 'any')}" for name in properties)
    return f"{function['name']}({', '.join(written)}): {function.get('description', '')}".rstrip()
