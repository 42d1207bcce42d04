"""Argparse types. Each rejects an empty argument, such as an unset shell variable leaves."""

import argparse
from pathlib import Path


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
