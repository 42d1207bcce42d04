"""User prompt filters: functions that select the prompts of a file."""

import reprlib
from collections.abc import Callable

import numpy as np

from streamrl.errors import ConfigError
from streamrl.files.python_module import load_referenced_function
from streamrl.messages import Prompt

PromptFilter = Callable[[Prompt, str], bool]
"""Takes a prompt and its location for errors; returns whether to keep the prompt."""


def load_prompt_filter(reference: str, *, setting: str) -> PromptFilter:
    """Load the user's prompt filter, a function that returns whether to keep a prompt.

    reference: value of `setting`, file.py:function; an empty reference keeps all prompts. Raises
    ConfigError for a missing function. The filter raises ConfigError, with the prompt's location
    and the user's line, if the function fails or returns anything but a bool.
    """
    if not reference:
        return _keep_all
    code = load_referenced_function(reference, setting=setting)
    code.check_not_async()

    def keep(prompt: Prompt, place: str) -> bool:
        try:
            kept = code.function(prompt)
        # SystemExit too: user code may call exit().
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{place}: filter: {code.describe_error(error)}") from error
        if not isinstance(kept, bool | np.bool_):
            returned = " ".join(reprlib.repr(kept).split())
            raise ConfigError(
                f"{place}: filter: {code.name} in {code.file} returned {returned},"
                " not True or False"
            )
        return bool(kept)

    return keep


def _keep_all(prompt: Prompt, place: str) -> bool:
    return True
