"""Functions of users that an option of an adapter names as file.py:function."""

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from streamrl.errors import EpisodeError
from streamrl.user_code.checks import format_value
from streamrl.user_code.python_module import FileFunction, load_referenced_function

_LOADING = threading.Lock()


def load_option_function(
    reference: str,
    *,
    option: str,
    parameters: Sequence[str],
    lets_through: tuple[type[Exception], ...] = (),
    gives_text: bool = False,
) -> Callable[..., Any]:
    """Return the function of an option; each process imports its file once.

    parameters: names of the positional arguments of its calls. lets_through: exceptions of
    the function that its caller handles; any other becomes an EpisodeError with the user's line.
    gives_text: a result that is no text is an EpisodeError, too.
    Raises ConfigError if the function cannot be loaded or has other parameters.
    """
    setting = f"environment.options.{option}"
    with _LOADING:  # sessions load it from threads; one import at a time
        code = _load_function(reference, setting)
    code.check_not_async()
    code.check_positional(parameters)

    def call(*arguments: Any) -> Any:
        try:
            result = code.function(*arguments)
        except lets_through:
            raise
        # SystemExit too: a user's function may call exit().
        except (Exception, SystemExit) as error:
            raise EpisodeError(f"{setting}={code.describe_error(error)}") from error
        if gives_text and not isinstance(result, str):
            raise EpisodeError(f"{setting}: returned {format_value(result)}, not text")
        return result

    return call


@cache
def _load_function(reference: str, setting: str) -> FileFunction:
    return load_referenced_function(reference, setting=setting)
