"""Files that a user names and that are read whole: no larger than such a file can sensibly be."""

import json
from pathlib import Path
from typing import Any

import yaml

MIB = 1 << 20
MOST_BYTES = MIB
"""Of a file of settings: a cluster of 16,384 nodes, each by itself, fits."""
LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""The first is several times as fast."""


def read_small(path: Path, *, most_bytes: int = MOST_BYTES) -> str:
    """The text of a file.

    Raises OSError, or ValueError for what is no regular file (which may never end), larger, or no
    text.
    """
    # What is not there is told by open.
    if path.exists() and not path.is_file():
        raise ValueError("is a directory" if path.is_dir() else "not a regular file")
    with path.open("rb") as file:
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise ValueError(f"more than {most_bytes // MIB} MiB: must be at most that")
    return found.decode()


def read_small_json(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """The same as JSON."""
    return parse_json(read_small(path, most_bytes=most_bytes))


def parse_json(text: str) -> Any:
    """Raises ValueError, also for what is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_small_yaml(path: Path) -> Any:
    """The same as YAML, in which nothing is an alias: a few of them may stand for endless text."""
    text = read_small(path)
    try:
        for event in yaml.parse(text, Loader=LOADER):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"*{event.anchor}: must be written out, no alias")
        return yaml.load(text, Loader=LOADER)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
