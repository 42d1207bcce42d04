"""Files that a command is asked to write."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from streamrl.errors import ConfigError
from streamrl.files.atomic_write import get_partial_path, write_atomic


def check_output_file(option: str, path: Path) -> Path:
    """The file that is to be written. Raises ConfigError, naming the option, where none can be."""
    # What a link names is replaced, and not the link; a device must never be.
    place = Path(os.path.realpath(path))
    if os.path.exists(place) and not place.is_file():
        raise ConfigError(f"{option} {path}: not a file")
    if not os.path.isdir(place.parent):
        wrong = errno.ENOTDIR if os.path.exists(place.parent) else errno.ENOENT
        raise ConfigError(f"{option} {path}: {os.strerror(wrong)}")
    _check_creatable(option, path, place.parent, [get_partial_path(place)])
    return place


def check_output_dir(option: str, path: Path) -> None:
    """Raise ConfigError, naming the option, where no folder of that name is or can be made."""
    place = Path(os.path.realpath(path))
    there = next(each for each in (place, *place.parents) if os.path.lexists(each))
    if not there.is_dir():
        raise ConfigError(f"{option} {path}: {os.strerror(errno.ENOTDIR)}")
    missing = place.relative_to(there).parts
    _check_creatable(option, path, there, [place, *(there / name for name in missing)])


def _check_creatable(option: str, path: Path, folder: Path, names: Sequence[Path]) -> None:
    """Raise ConfigError where nothing new can be in a folder, or a name is too long for it."""
    try:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.lstat(name)
        # One without a name, of which nothing is left: not all folders say what they allow.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or error}") from None


def write_output_file(option: str, path: Path, content: str) -> None:
    """Write all of it or nothing. Raises ConfigError, naming the option, where no file can be."""
    place = check_output_file(option, path)
    try:
        write_atomic(place, content)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or error}") from None
