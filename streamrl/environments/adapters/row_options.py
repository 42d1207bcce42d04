"""Options of a single data row, which override those of the run."""

from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.errors import ConfigError
from streamrl.messages import Prompt, describe_prompt

ROW_KEY = "environment_options"
"""Key of `extra_info` under which a row has options of its own."""


def merge_row_options(
    row: Prompt, options: Mapping[str, Any], *, allowed: Sequence[str]
) -> dict[str, Any]:
    """Return the options of the run with those of a row: mappings merge, other values replace.

    allowed: options that a row may have. Options that name code are not among them, because rows
    may come from elsewhere. Raises ConfigError for any other option.
    """
    own = row.extra_info.get(ROW_KEY, {})
    place = f"{describe_prompt(row)}: extra_info.{ROW_KEY}"
    if not isinstance(own, Mapping):
        raise ConfigError(f"{place}={own}: must map options to values")
    merged = dict(options)
    for name, value in own.items():
        if name not in allowed:
            raise ConfigError(f"{place}.{name}: a row may have {', '.join(allowed)}")
        if isinstance(merged.get(name), Mapping) and isinstance(value, Mapping):
            value = {**merged[name], **value}
        merged[name] = value
    return merged
