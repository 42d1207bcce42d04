"""A user's function that says which prompts of a file are used."""

import inspect
import reprlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from streamrl.errors import ConfigError
from streamrl.messages import Prompt
from streamrl.user_module import failure_place, import_file, split_reference

Keep = Callable[[Prompt, str], bool]
"""Whether a prompt is kept; the second argument is its place, for errors."""


def load_filter(setting: str) -> Keep:
    """The filter written as file.py:function; empty: one that keeps all.

    Raises ConfigError if there is no such function. The filter itself raises ConfigError, with the
    place of the prompt and the user's own line, if the function fails or returns no bool.
    """
    if not setting:
        return _keep_all
    path, name = split_reference(setting, setting="filter")
    function = vars(import_file(path, setting="filter")).get(name)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(f"filter={setting}: {path} has no plain function {name}")
    file = str(Path(path).resolve())

    def keep(prompt: Prompt, place: str) -> bool:
        try:
            kept = function(prompt)
        # Whatever a user's function does wrong, exit() included.
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{place}: filter: {failure_place(file, error)}") from error
        if not isinstance(kept, bool | np.bool_):
            found = " ".join(reprlib.repr(kept).split())
            raise ConfigError(
                f"{place}: filter: {name} in {file} returned {found}, not True or False"
            )
        return bool(kept)

    return keep


def _keep_all(prompt: Prompt, place: str) -> bool:
    return True
