"""Options of adapters: functions of the user, and those that a row may have of its own."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from streamrl.errors import ConfigError, EpisodeError
from streamrl.files.python_module import FileFunction, load_referenced_function
from streamrl.messages import Prompt, describe_prompt

ROW_KEY = "environment_options"
"""Key of `extra_info` under which a row has options of its own."""


def load_option_function(
    reference: str,
    *,
    option: str,
    parameters: Sequence[str],
    lets_through: type[Exception] | None = None,
) -> Callable[..., Any]:
    """Return the user's function that an option names as file.py:function.

    parameters: names of the positional arguments of its calls. lets_through: exception of the
    function that its caller handles; any other becomes an EpisodeError with the user's line. Raises
    ConfigError if the function cannot be loaded or has other parameters.
    """
    setting = f"environment.options.{option}"
    code = _load_function(reference, setting)
    code.check_not_async()
    code.check_positional(parameters)

    def call(*arguments: Any) -> Any:
        try:
            return code.function(*arguments)
        # SystemExit too: a user's function may call exit().
        except (Exception, SystemExit) as error:
            if lets_through and isinstance(error, lets_through):
                raise
            raise EpisodeError(f"{setting}={code.describe_error(error)}") from error

    return call


@cache
def _load_function(reference: str, setting: str) -> FileFunction:
    return load_referenced_function(reference, setting=setting)


def merge_row_options(
    row: Prompt, seed: int, options: Mapping[str, Any], *, allowed: Sequence[str]
) -> dict[str, Any]:
    """Return the options of the run with those of a row: mappings merge, other values replace.

    seed: value of the option `seed` if neither has one. allowed: options that a row may have.
    Options that name code are not among them, because rows may come from elsewhere. Raises
    ConfigError for any other option.
    """
    merged = dict(options)
    own = row.extra_info.get(ROW_KEY, {})
    if not (isinstance(own, Mapping) and own.keys() <= {*allowed}):
        raise ConfigError(
            f"{describe_prompt(row)}: extra_info.{ROW_KEY}={own!r:.100}: must map options to"
            f" values; a row may have {', '.join(allowed)}"
        )
    for name, value in own.items():
        is_mapping = isinstance(merged.get(name), Mapping) and isinstance(value, Mapping)
        merged[name] = {**merged[name], **value} if is_mapping else value
    if merged["seed"] is None:
        merged["seed"] = seed
    return merged
