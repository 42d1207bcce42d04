"""Options of adapters that a row may have of its own."""

from collections.abc import Mapping, Sequence
from typing import Any

from streamrl.errors import ConfigError
from streamrl.messages import Prompt, describe_prompt

ROW_KEY = "environment_options"
"""Key of `extra_info` under which a row has options of its own."""


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
