"""Reward kinds registered by a user's file or by an installed package."""

import re
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from streamrl.errors import ConfigError
from streamrl.user_code.python_module import format_failure, import_file, limit_import_time

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

#: Entry point group in which packages list their rewards.
ENTRY_POINT_GROUP = "streamrl.rewards"
_registered_functions: dict[str, Callable[..., Any]] = {}


def reward(name: str) -> Callable[[FunctionT], FunctionT]:
    """Register a reward function as a kind; use as decorator `@reward("my_name")`.

    The config names the kind as `{kind: my_name, path: file.py}`. A kind that an installed package
    lists in the entry point group `streamrl.rewards` needs no path.
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
    """Return the reward kinds of installed packages, as {kind: "module:function"}."""
    return {point.name: point.value for point in _list_entry_points()}


def load_registered_kinds(path: str, *, setting: str) -> dict[str, Callable[..., Any]]:
    """Import a file; return the functions registered in it, by kind. Raises ConfigError."""
    before = dict(_registered_functions)
    _registered_functions.clear()
    try:
        import_file(path, setting=setting)
        return dict(_registered_functions)
    finally:
        _registered_functions.update(before)


def _list_entry_points() -> "Iterable[EntryPoint]":
    # Imported here: each process of an environment imports this module, and needs no entry points.
    from importlib.metadata import entry_points

    return entry_points(group=ENTRY_POINT_GROUP)


def _load_entry_point(point: "EntryPoint") -> Callable[..., Any]:
    try:
        with limit_import_time():
            function = point.load()
    # Importing a package may raise anything, SystemExit included.
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"rewards.kind={point.name}: {point.value}: {format_failure(frame.filename, error)}"
        ) from error
    if not callable(function):
        raise ConfigError(f"rewards.kind={point.name}: {point.value} is not a function")
    return function


def find_registered_function(kind: str, path: str) -> Callable[..., Any]:
    """Return the function registered as `kind` in file `path`, or without a path by a package."""
    if path:
        functions = load_registered_kinds(path, setting="rewards.path")
        if kind not in functions:
            names = ", ".join(functions) or "none"
            raise ConfigError(
                f"rewards.kind={kind}: not registered in {path}, which registers: {names}"
            )
        return functions[kind]
    for point in _list_entry_points():
        if point.name == kind:
            return _load_entry_point(point)
    raise ConfigError(f"rewards.kind={kind}: no such kind")
