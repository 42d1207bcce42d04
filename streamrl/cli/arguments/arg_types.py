"""Argparse types that reject empty words, as from an unset shell variable."""

import argparse
from pathlib import Path


def parse_nonempty(word: str) -> str:
    if not word:
        raise argparse.ArgumentTypeError("must not be empty")
    return word


def parse_path(word: str) -> Path:
    """Return the path. `Path("")` would silently name the working directory."""
    return Path(parse_nonempty(word))
