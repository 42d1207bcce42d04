"""A user's function that says which prompts of a file are used."""

import reprlib
from collections.abc import Callable

import numpy as np

from streamrl.errors import ConfigError
from streamrl.files.python_module import load_referenced_function
from streamrl.messages import Prompt

PromptFilter = Callable[[Prompt, str], bool]
"""Whether a prompt is kept; the second argument is its place, for errors."""


def load_prompt_filter(reference: str, *, setting: str) -> PromptFilter:
    """The filter that `setting` names as file.py:function; empty: one that keeps all.

    Raises ConfigError if there is no such function. The filter itself raises ConfigError, with the
    place of the prompt and the user's own line, if the function fails or returns no bool.
    """
    if not reference:
        return _keep_all
    code = load_referenced_function(reference, setting=setting)
    code.check_not_async()

    def keep(prompt: Prompt, place: str) -> bool:
        try:
            kept = code.function(prompt)
        # Whatever a user's function does wrong, exit() included.
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{place}: filter: {code.describe_error(error)}") from error
        if not isinstance(kept, bool | np.bool_):
            found = " ".join(reprlib.repr(kept).split())
            raise ConfigError(
                f"{place}: filter: {code.name} in {code.file} returned {found}, not True or False"
            )
        return bool(kept)

    return keep


def _keep_all(prompt: Prompt, place: str) -> bool:
    return True
