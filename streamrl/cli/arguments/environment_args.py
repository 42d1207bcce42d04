"""Arguments that name an environment and the rows of its episodes."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.config.run_config import ConfigSections, load_sections
from streamrl.data.classify_rows import make_prompt
from streamrl.data.files import DataFile
from streamrl.data.reading.rows import load_rows
from streamrl.environments.config import EnvironmentConfig
from streamrl.errors import ConfigError
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
        "--config",
        type=parse_path,
        metavar="CONFIG",
        help="YAML file with the sections to use: environment and, if given, model and data",
    )
    parser.add_argument(
        "--data", type=parse_nonempty, metavar="FILE", help="prompt file with the rows of episodes"
    )
    parser.add_argument(
        "--prompt-key", metavar="COLUMN", help="prompt column (default: the config's, or prompt)"
    )
    parser.add_argument("--label-key", metavar="COLUMN", help="ground truth column")
    parser.add_argument("--split", metavar="NAME", help="split to read from a dataset with several")


def load_recipe(path: Path | None) -> ConfigSections | None:
    """Read the file of --config, which need not be the whole config of a run."""
    return None if path is None else load_sections(path)


def choose_environment(
    path: str | None, recipe: EnvironmentConfig, **settings: Any
) -> EnvironmentConfig:
    """Return the recipe's settings for the environment at `path`, by default the recipe's own.

    settings: values that replace the recipe's, unless they are None. Raises ConfigError if no
    environment is named.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    config = replace(recipe, path=path or recipe.path, **given)
    if not config.is_enabled:
        raise ConfigError("give ENVIRONMENT, as file.py:Class, or a --config with environment.path")
    return config


def choose_data_file(
    arguments: argparse.Namespace, recipe: ConfigSections | None
) -> DataFile | None:
    """Return the prompt file of --data, else the first of the recipe, else None.

    Raises ConfigError for a reading option without a file.
    """
    names = ("prompt_key", "label_key", "split")
    options = {name: vars(arguments)[name] for name in names if vars(arguments)[name] is not None}
    if arguments.data is not None:
        prompt_key = recipe.data.prompt_key if recipe else "prompt"
        return replace(DataFile(arguments.data, prompt_key=prompt_key), **options)
    files = (*recipe.data.train_files, *recipe.data.eval_files) if recipe else ()
    if options and not files:
        name, value = next(iter(options.items()))
        flag = name.replace("_", "-")
        raise ConfigError(f"--{flag}={value} has no effect: no file is named; give --data")
    return replace(files[0], **options) if files else None


def read_prompts(
    file: DataFile, render_prompt: RenderPrompt, *, first: int, count: int
) -> list[Prompt]:
    """Return `count` prompts of a file from row `first` on, fewer at its end.

    Raises ConfigError for a bad row, and for a file without row `first`.
    """
    rows = load_rows(file.path, file.prompt_key, label_key=file.label_key, split=file.split)
    chosen = list(islice(rows, first, first + count))
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
