"""Argparse types. Each rejects an empty argument, such as an unset shell variable leaves."""

import argparse
from pathlib import Path

from streamrl.errors import ConfigError
from streamrl.run_dir.run_config_file import check_run_dir


def parse_nonempty(word: str) -> str:
    if not word:
        raise argparse.ArgumentTypeError("must not be empty")
    return word


def parse_path(word: str) -> Path:
    """Convert a command-line argument to a path. Raises ArgumentTypeError for an empty argument.

    `Path("")` would silently name the working directory.
    """
    return Path(parse_nonempty(word))


def parse_whole_number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word}: must be a whole number") from None


def parse_number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word}: must be a number") from None


def parse_run_dir(word: str) -> Path:
    path = parse_path(word)
    try:
        check_run_dir(path)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path
