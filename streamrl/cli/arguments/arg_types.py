"""Argparse types that reject an empty argument, such as an unset shell variable leaves."""

import argparse
from pathlib import Path


def parse_nonempty(word: str) -> str:
    if not word:
        raise argparse.ArgumentTypeError("must not be empty")
    return word


def parse_path(word: str) -> Path:
    """Convert an argument to a path; `Path("")` would silently name the working directory."""
    return Path(parse_nonempty(word))
