"""Words of a command line that name something; one that is empty names nothing."""

import argparse
from pathlib import Path


def parse_nonempty(word: str) -> str:
    """The word itself, as argparse's `type`; an empty one is refused."""
    if not word:
        raise argparse.ArgumentTypeError("must not be empty")
    return word


def parse_path(word: str) -> Path:
    """The path; an empty word would else be the folder that one is in."""
    return Path(parse_nonempty(word))
