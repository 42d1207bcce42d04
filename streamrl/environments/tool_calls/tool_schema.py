"""Tool schemas from Python functions, and validation of arguments against a schema.

Schemas come from here or from a server (MCP), so validation needs nothing but the schema.
"""

import functools
import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, cast, get_args, get_origin
from typing import get_type_hints as resolve_annotations

from streamrl.environments.interface import ToolSchema
from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from jsonschema import ValidationError

JSON_TYPES = (str, int, float, bool, type(None), list, dict, Any)
"""Annotations of values that JSON can carry as they are."""
ANNOTATION_RULE = "use str, int, float, bool, list, dict, Literal, or a union of these"
MAX_PROBLEMS = 3
"""Most problems of one call that are reported to the policy."""
MAX_MESSAGE_CHARS = 120
"""Most characters of a problem: it may repeat a long value."""
_ARGS = re.compile(r"^(?:Args|Arguments|Parameters): *\n((?: +.*\n|\n)*)", re.MULTILINE)


def make_tool_schema(function: Callable[..., Any]) -> ToolSchema:
    """Return the schema of a tool that a function or bound method implements.

    The description is the first paragraph of the docstring. An `Args:` section in Google's style
    may describe parameters, as may `Annotated[int, pydantic.Field(description=...)]`. Raises
    ConfigError for a function without docstring, and for a parameter without annotation, of a type
    that JSON does not have, or that callers cannot pass by name.
    """
    # pydantic takes half a second to import; only hosts of environments with tools need it.
    from pydantic import TypeAdapter
    from pydantic.json_schema import GenerateJsonSchema

    class UntitledSchema(GenerateJsonSchema):
        """JSON schema without titles, which repeat the names of the parameters."""

        def field_title_should_be_set(self, schema: Any) -> bool:
            return False

    _check_signature(function)
    paragraph, descriptions = _read_docstring(function)
    adapter: TypeAdapter[Any] = TypeAdapter(cast(Any, function))
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
    first = _ARGS.sub("", text).partition("\n\n")[0]
    section = "".join(_ARGS.findall(text))
    indent = section[: len(section) - len(section.lstrip(" "))]
    # A description goes on in lines that are indented further than its name.
    entry = rf"^{indent}(\w+)(?:\s*\([^)]*\))?:(.*(?:\n{indent} .*)*)"
    entries = re.findall(entry, section, re.MULTILINE)
    return _join_words(first), {name: _join_words(words) for name, words in entries}


def _join_words(text: str) -> str:
    return " ".join(text.split())


def get_tool_name(tool: ToolSchema) -> str:
    return str(tool["function"]["name"])


def _get_parameters(tool: ToolSchema) -> Mapping[str, Any]:
    parameters: Mapping[str, Any] = tool["function"].get("parameters") or {}
    return parameters


def check_tool_schema(tool: Any, *, place: str) -> None:
    """Raise ConfigError unless `tool`, in OpenAI's form, has a name and a JSON schema.

    place: origin of the schema, for errors.
    """
    import jsonschema

    name, parameters = tool["function"].get("name"), _get_parameters(tool)
    if not (isinstance(name, str) and name and isinstance(parameters, Mapping)):
        raise ConfigError(f"{place}: tool {name!r}: needs a name, and an object of parameters")
    label = f"{place}: tool {name}: parameters"
    try:
        _make_validator_class().check_schema(parameters)
    except jsonschema.SchemaError as error:
        raise ConfigError(f"{label}: {_describe_problem(error)}") from None
    _check_references(parameters, label)


def _check_references(parameters: Mapping[str, Any], label: str) -> None:
    """Raise ConfigError for a $ref that leads out of the schema, or nowhere."""
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    resource = DRAFT202012.create_resource(parameters)
    resolver = Registry().with_resource("", resource).resolver()
    for reference in re.findall(r'"\$ref": "([^"]*)"', json.dumps(parameters)):
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise ConfigError(
                f"{label}: $ref {reference}: must lead to a definition in the same schema"
            ) from None


def validate_arguments(tool: ToolSchema, arguments: Mapping[str, Any]) -> str:
    """Return why arguments do not match the schema of a tool, for the policy; "" if they do.

    Types are strict: "3" and 3.0 are no integers; 3 is a number.
    """
    parameters = _get_parameters(tool)
    errors = sorted(_make_validator(parameters).iter_errors(arguments), key=lambda e: e.json_path)
    problems = dict.fromkeys(map(_describe_problem, errors))
    return "; ".join(list(problems)[:MAX_PROBLEMS])


def is_valid_argument(tool: ToolSchema, name: str, value: Any) -> bool:
    """Return whether a value matches the schema of one parameter of a tool."""
    parameters = _get_parameters(tool)
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    schema = parameters.get("properties", {}).get(name, {})
    if isinstance(schema, Mapping):
        schema = {**schema, **definitions}
    return bool(_make_validator(schema).is_valid(value))


@functools.cache
def _make_validator_class() -> Any:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend

    def is_integer(checker: Any, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool)

    # JSON schema counts 3.0 as an integer, but a tool in Python that takes int cannot use it.
    types_of_json = Draft202012Validator.TYPE_CHECKER.redefine("integer", is_integer)
    return extend(Draft202012Validator, type_checker=types_of_json)


def _make_validator(schema: Any) -> Any:
    from referencing import Registry

    # Without a registry, jsonschema fetches a $ref to another host over the network.
    return _make_validator_class()(schema, registry=Registry())


def _describe_problem(error: "ValidationError") -> str:
    # A branch of a union that failed inside the value says more than the union.
    if inner := [branch for branch in error.context or () if branch.relative_path]:
        return _describe_problem(inner[0])
    place = error.json_path.removeprefix("$").removeprefix(".")
    message = error.message
    if len(message) > MAX_MESSAGE_CHARS:
        half = MAX_MESSAGE_CHARS // 2
        message = f"{message[:half]}...{message[-half:]}"
    return f"{place}: {message}" if place else message


def format_tool(tool: ToolSchema) -> str:
    """Return a tool as `search(query: string, limit: integer = 3): Search the web.`"""
    function = tool["function"]
    parameters = _get_parameters(tool)
    written = []
    for name, schema in parameters.get("properties", {}).items():
        facts = schema if isinstance(schema, Mapping) else {}
        default = "" if name in parameters.get("required", ()) else f" = {facts.get('default')}"
        written.append(f"{name}: {facts.get('type', 'any')}{default}")
    return f"{function['name']}({', '.join(written)}): {function.get('description', '')}".rstrip()
