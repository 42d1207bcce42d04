"""Argparse types. Each rejects an empty argument, such as an unset shell variable leaves."""

import argparse
import math
import re
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


def parse_whole_number(word: str, *, least: float = -math.inf, most: float = math.inf) -> int:
    if re.fullmatch(r"[+-]?\d{1,18}", word) and least <= int(word) <= most:
        return int(word)
    bounds = f" from {least} to {most}" if most < math.inf else f", at least {least}"
    rule = f"must be a whole number{'' if least == -math.inf else bounds}"
    raise argparse.ArgumentTypeError(f"{word}: {rule}")


def parse_number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word}: must be a number") from None
