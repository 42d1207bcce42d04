"""Files that a command is asked to write."""

import errno
import os
from pathlib import Path

from streamrl.durable import write_whole
from streamrl.errors import ConfigError


def check_file(option: str, path: Path) -> Path:
    """The file that is to be written. Raises ConfigError, naming the option, where none can be."""
    # What a link names is replaced, and not the link; a device must never be.
    place = Path(os.path.realpath(path))
    if os.path.exists(place) and not place.is_file():
        raise ConfigError(f"{option} {path}: not a file")
    wrong = 0
    if not os.path.isdir(place.parent):
        wrong = errno.ENOTDIR if os.path.exists(place.parent) else errno.ENOENT
    elif not os.access(place.parent, os.W_OK | os.X_OK):
        wrong = errno.EACCES
    if wrong:
        raise ConfigError(f"{option} {path}: {os.strerror(wrong)}")
    return place


def check_folder(option: str, path: Path) -> None:
    """Raise ConfigError, naming the option, where no folder of that name is or can be made."""
    place = Path(os.path.realpath(path))
    there = next(each for each in (place, *place.parents) if os.path.lexists(each))
    if not there.is_dir():
        raise ConfigError(f"{option} {path}: {os.strerror(errno.ENOTDIR)}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: {os.strerror(errno.EACCES)}")


def write_file(option: str, path: Path, content: str) -> None:
    """Write all of it or nothing. Raises ConfigError, naming the option, where no file can be."""
    place = check_file(option, path)
    try:
        write_whole(place, content)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or error}") from None
