"""Calls that are JSON objects with a name and arguments: the common part of their formats."""

from collections.abc import Mapping, Sequence
from typing import Any


def read_call_object(
    value: Any, keys: Sequence[str] = ("arguments",)
) -> tuple[str, Mapping[str, Any]]:
    """Return name and arguments of a call. keys: accepted keys of the arguments.

    Raises ValueError unless the value is an object with a name and an object of arguments.
    """
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object with the keys name and {keys[0]}")
    name = value.get("name")
    if not (isinstance(name, str) and name):
        raise ValueError("the key name must hold the name of a tool")
    key = next((key for key in keys if key in value), keys[0])
    return name, read_arguments_object(value.get(key), f"the key {key}")


def read_arguments_object(value: Any, place: str) -> Mapping[str, Any]:
    """Return arguments. place: where they stand. Raises ValueError unless they are an object."""
    if not isinstance(value, dict):
        raise ValueError(f"{place} must hold a JSON object with the arguments")
    return value
