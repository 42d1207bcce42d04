"""Kinds of reward that streamrl does not have: registered by a user's file or another package."""

import re
import traceback
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from streamrl.errors import ConfigError
from streamrl.files.python_module import format_failure, import_file, limit_import_time

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

#: What packages name their rewards under, as entry points.
ENTRY_POINT_GROUP = "streamrl.rewards"
_registered_functions: dict[str, Callable[..., Any]] = {}


def reward(name: str) -> Callable[[FunctionT], FunctionT]:
    """Register a reward function as a kind: `@reward("my_name")` above it.

    A run finds it by `{kind: my_name, path: its_file.py}`, or without a path where an installed
    package names it as an entry point of the group `streamrl.rewards`.
    """

    def register(function: FunctionT) -> FunctionT:
        if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
            raise ValueError(f"kind {name!r}: letters, digits and _ . - only")
        if name in _registered_functions:
            raise ValueError(f"kind {name} is registered twice")
        _registered_functions[name] = function
        return function

    return register


def list_installed_kinds() -> dict[str, str]:
    """Kinds that installed packages bring: name to where the function is."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def load_registered_kinds(path: str, *, setting: str) -> dict[str, Callable[..., Any]]:
    """The kinds that a Python file registers. Raises ConfigError as `import_file` does."""
    before = dict(_registered_functions)
    _registered_functions.clear()
    try:
        import_file(path, setting=setting)
        return dict(_registered_functions)
    finally:
        _registered_functions.update(before)


def _load_entry_point(point: EntryPoint) -> Callable[..., Any]:
    try:
        with limit_import_time():
            function = point.load()
    # Whatever another's package does wrong while it is imported, exit() included.
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"rewards.kind={point.name}: {point.value}: {format_failure(place.filename, error)}"
        ) from error
    if not callable(function):
        raise ConfigError(f"rewards.kind={point.name}: {point.value} is no function")
    return function


def find_registered_function(kind: str, path: str) -> Callable[..., Any]:
    """The function of a kind. Raises ConfigError, with the names there are, if there is none."""
    if path:
        found = load_registered_kinds(path, setting="rewards.path")
        if kind not in found:
            names = ", ".join(found) or "none"
            raise ConfigError(f"rewards.kind={kind}: not registered in {path}, which has {names}")
        return found[kind]
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == kind:
            return _load_entry_point(point)
    raise ConfigError(f"rewards.kind={kind}: no such kind")
