"""Arguments that several commands share: a run's config, prompt files, a finished run's cluster."""

import argparse
from collections.abc import Sequence
from typing import Any

from streamrl.cli.arguments.arg_types import parse_path
from streamrl.data.config import MODEL_TEMPLATE, PLAIN_TEMPLATE
from streamrl.errors import ConfigError


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=parse_path, metavar="CONFIG", help="YAML file or run directory"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings that override the config",
    )


def add_recipe_argument(parser: argparse.ArgumentParser, contents: str) -> None:
    """Declare --config, which gives some sections. contents: what the command takes from it."""
    text = f"YAML file or run directory with {contents}"
    parser.add_argument("--config", type=parse_path, metavar="CONFIG", help=text)


FILE_OPTIONS = {
    "prompt_key": ("COLUMN", "prompt column (default: the config's, or prompt)"),
    "label_key": ("COLUMN", "ground truth column"),
    "split": ("NAME", "split to read from a dataset with several"),
    "template": (
        "NAME|FILE",
        f"{MODEL_TEMPLATE}, {PLAIN_TEMPLATE} or a jinja file (default: {MODEL_TEMPLATE})",
    ),
    "filter": ("FILE:FUNCTION", "Python function that selects prompts"),
}
"""Settings of a prompt file with command-line options: metavar and help."""
ROW_OPTIONS = ("prompt_key", "label_key", "split")
"""Settings of a file whose rows are not rendered for a model."""


def add_file_options(
    parser: argparse.ArgumentParser, names: Sequence[str] = tuple(FILE_OPTIONS)
) -> None:
    for name in names:
        metavar, text = FILE_OPTIONS[name]
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, help=text)


def read_file_options(arguments: argparse.Namespace, *, has_file: bool) -> dict[str, Any]:
    """Return the given settings of prompt files. Raises ConfigError for one without a file."""
    options = {name: vars(arguments).get(name) for name in FILE_OPTIONS}
    given = {name: value for name, value in options.items() if value is not None}
    if given and not has_file:
        name, value = next(iter(given.items()))
        raise ConfigError(
            f"--{name.replace('_', '-')}={value} has no effect: no file is named. Name one or"
            " remove it"
        )
    return given
