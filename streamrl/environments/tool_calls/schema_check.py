"""Validation of tools' schemas, and of the arguments of calls against them.

Schemas come from functions or from a server (MCP), so validation needs nothing but the schema.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator, SchemaError, ValidationError
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from streamrl.environments.interface import ToolSchema
from streamrl.environments.tool_calls.tool_schema import get_parameters
from streamrl.errors import ConfigError
from streamrl.files.printable_text import shorten_text

MAX_PROBLEMS = 3
"""Most problems of one call that are reported to the policy."""


def _is_integer(checker: Any, value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# JSON schema counts 3.0 as an integer, but a tool in Python that takes int cannot use it.
VALIDATOR: Any = extend(
    Draft202012Validator,
    type_checker=Draft202012Validator.TYPE_CHECKER.redefine("integer", _is_integer),
)


def check_tool_schema(tool: Any, *, place: str) -> None:
    """Raise ConfigError unless `tool`, in OpenAI's form, has a name and a JSON schema.

    place: origin of the schema, for errors.
    """
    name, parameters = tool["function"].get("name"), get_parameters(tool)
    if not (isinstance(name, str) and name and isinstance(parameters, Mapping)):
        raise ConfigError(f"{place}: tool {name!r}: needs a name, and an object of parameters")
    label = f"{place}: tool {name}: parameters"
    try:
        VALIDATOR.check_schema(parameters)
    except SchemaError as error:
        raise ConfigError(f"{label}: {_describe_problem(error)}") from None
    _check_references(parameters, label)


def _check_references(parameters: Mapping[str, Any], label: str) -> None:
    """Raise ConfigError for a $ref that leads out of the schema, or nowhere."""
    resource = DRAFT202012.create_resource(parameters)
    resolver = Registry().with_resource("", resource).resolver()
    for reference in _list_references(parameters):
        try:
            resolver.lookup(reference)
        except Unresolvable:
            raise ConfigError(
                f"{label}: $ref {reference}: must lead to a definition in the same schema"
            ) from None


def _list_references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        schema = list(schema.values())
    for part in schema if isinstance(schema, list) else ():
        yield from _list_references(part)


def validate_arguments(tool: ToolSchema, arguments: Mapping[str, Any]) -> str:
    """Return why arguments do not match the schema of a tool, for the policy; "" if they do.

    Types are strict: "3" and 3.0 are no integers; 3 is a number.
    """
    parameters = get_parameters(tool)
    errors = sorted(_make_validator(parameters).iter_errors(arguments), key=lambda e: e.json_path)
    problems = dict.fromkeys(map(_describe_problem, errors))
    return "; ".join(list(problems)[:MAX_PROBLEMS])


def is_valid_argument(tool: ToolSchema, name: str, value: Any) -> bool:
    """Return whether a value matches the schema of one parameter of a tool."""
    parameters = get_parameters(tool)
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    schema = parameters.get("properties", {}).get(name, {})
    if isinstance(schema, Mapping):
        schema = {**schema, **definitions}
    return bool(_make_validator(schema).is_valid(value))


def _make_validator(schema: Any) -> Any:
    # Without a registry, jsonschema fetches a $ref to another host over the network.
    return VALIDATOR(schema, registry=Registry())


def _describe_problem(error: ValidationError | SchemaError) -> str:
    # A branch of a union that failed inside the value says more than the union.
    if inner := [branch for branch in error.context or () if branch.relative_path]:
        return _describe_problem(inner[0])
    place = error.json_path.removeprefix("$").removeprefix(".")
    # The message may repeat a long value.
    message = shorten_text(error.message)
    return f"{place}: {message}" if place else message
