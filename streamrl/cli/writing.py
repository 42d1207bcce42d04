"""Files that a command is asked to write."""

import os
from pathlib import Path

from streamrl.durable import write_whole
from streamrl.errors import ConfigError


def write_file(option: str, path: Path, content: str) -> None:
    """Write all of it or nothing. Raises ConfigError, naming the option, where no file can be."""
    # What a link names is replaced, and not the link; a device must never be.
    place = Path(os.path.realpath(path))
    if os.path.exists(place) and not place.is_file():
        raise ConfigError(f"{option} {path}: not a file")
    try:
        write_whole(place, content)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or error}") from None
