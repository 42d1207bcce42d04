"""Arguments that name an environment and the rows of its episodes."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from streamrl.cli.arguments.arg_types import parse_nonempty
from streamrl.cli.arguments.config_args import (
    ROW_OPTIONS,
    add_file_options,
    add_recipe_argument,
    read_file_options,
)
from streamrl.config.run_config import ConfigSections
from streamrl.data.config import DataFile
from streamrl.data.prompt_file import check_row_environment, load_data_rows, make_prompt
from streamrl.environments.config import CLASS_KIND, EnvironmentConfig
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import suggest_nearest
from streamrl.messages import Array, Prompt, make_uid

RenderPrompt = Callable[..., Array]
"""Function that returns the tokens of a row's messages."""


def add_environment_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ENVIRONMENT, --config, --data and the reading options of rows."""
    parser.add_argument(
        "environment",
        nargs="?",
        type=parse_nonempty,
        metavar="ENVIRONMENT",
        help="file.py or file.py:Class, as in environment.path (default: the config's)",
    )
    parser.add_argument(
        "--environment",
        dest="environment_name",
        type=parse_nonempty,
        metavar="NAME",
        help="environment among environment.named of --config (default: the row's)",
    )
    add_recipe_argument(parser, "the environment and, if given, model and data")
    parser.add_argument(
        "--data", type=parse_nonempty, metavar="FILE", help="prompt file with the rows of episodes"
    )
    add_file_options(parser, ROW_OPTIONS)


def choose_environment(
    arguments: argparse.Namespace, recipe: EnvironmentConfig, prompt: Prompt
) -> EnvironmentConfig:
    """Return settings of the environment of ENVIRONMENT, else of --environment, else of the prompt.

    Raises ConfigError if no environment is named, or the recipe lacks it.
    """
    path, name = arguments.environment, arguments.environment_name
    if path is not None:
        if name is not None:
            raise ConfigError(f"--environment={name} has no effect: ENVIRONMENT={path} is given")
        return replace(recipe, path=path, kind=CLASS_KIND, options={}, tools=[], named={})
    if not recipe.is_enabled:
        raise ConfigError("give ENVIRONMENT, as file.py:Class, or a --config with environment.path")
    names = tuple(recipe.specs)
    if name is not None and name not in recipe.named:
        hint = suggest_nearest(name, recipe.named, noun="environment")
        raise ConfigError(f"--environment={name}: not in environment.named of --config; {hint}")
    if name is None and recipe.named and not prompt.row_location:
        raise ConfigError(f"give --environment NAME, one of {', '.join(names)}")
    if name is None:
        check_row_environment(prompt, names)
        name = prompt.environment
    return recipe.select(name)


def choose_data_file(
    arguments: argparse.Namespace, recipe: ConfigSections | None
) -> DataFile | None:
    """Return the prompt file of --data, else the first of the recipe, else None.

    Raises ConfigError for a reading option without a file.
    """
    files = (*recipe.data.train_files, *recipe.data.eval_files) if recipe else ()
    if arguments.data is not None:
        files = (DataFile(arguments.data),)
    options = read_file_options(arguments, has_file=bool(files))
    return replace(files[0], **options) if files else None


def read_prompts(
    file: DataFile,
    render_prompt: RenderPrompt,
    *,
    first: int,
    count: int,
    environment: str | None = None,
) -> list[Prompt]:
    """Return `count` prompts of a file from row `first` on, fewer at its end.

    environment: name that the rows must have; None: any. Raises ConfigError for a bad row, and for
    a file without such rows.
    """
    rows = load_data_rows(file)
    if environment is not None:
        rows = (row for row in rows if row.environment == environment)
    chosen = list(islice(rows, first, first + count))
    if not chosen and environment is not None:
        raise ConfigError(f"{file.path}: no row names the environment {environment}")
    if not chosen:
        raise ConfigError(f"{file.path}: has no row {first}; rows count from 0")
    return [make_prompt(row, render_prompt(row.messages).tolist()) for row in chosen]


def make_text_prompt(
    text: str, ground_truth: str | None, render_prompt: RenderPrompt, *, index: int = 0
) -> Prompt:
    """Return a prompt of one user message, as of row `index` with {"prompt": text}."""
    messages = [{"role": "user", "content": text}]
    return Prompt(
        make_uid(0, index),
        render_prompt(messages),
        messages=messages,
        ground_truth=ground_truth,
        is_chat=False,
    )
