"""Output files of commands: checked before the work starts, written atomically."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from streamrl.errors import ConfigError
from streamrl.files.atomic_write import get_partial_path, write_atomic
from streamrl.files.bounded_read import wrap_file_errors


def check_output_file(option: str, path: Path) -> Path:
    """Return the path to write for a command-line option, with symlinks resolved.

    Writing replaces the target of a symlink. Raises ConfigError, naming the option, if the path is
    unwritable or names a folder or a device.
    """
    target = Path(os.path.realpath(path))
    if os.path.exists(target) and not target.is_file():
        raise ConfigError(f"{option} {path}: not a file")
    if not os.path.isdir(target.parent):
        code = errno.ENOTDIR if os.path.exists(target.parent) else errno.ENOENT
        raise ConfigError(f"{option} {path}: {os.strerror(code)}")
    _check_creatable(option, path, target.parent, [get_partial_path(target)])
    return target


def check_html_file(path: Path) -> Path:
    """Return the path to write for `--html`, as `check_output_file` does.

    Also raises ConfigError for an existing file that is no HTML page, such as a run's metrics.
    """
    target = check_output_file("--html", path)
    if target.is_file() and target.stat().st_size:
        with wrap_file_errors(target), target.open("rb") as file:
            if not file.read(64).lstrip().lower().startswith(b"<!doctype html"):
                raise ConfigError(f"--html {path}: exists and is no HTML page; name another file")
    return target


def _check_creatable(option: str, path: Path, folder: Path, names: Sequence[Path]) -> None:
    """Raise ConfigError unless `folder` is writable and its file system accepts the paths."""
    try:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.lstat(name)
        # Permission bits do not tell (read-only mounts, ACLs), so create an unnamed file.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or error}") from None


def write_output_file(option: str, path: Path, content: str) -> None:
    """Write the file of a command-line option atomically.

    Raises ConfigError, naming the option, on failure.
    """
    target = check_output_file(option, path)
    try:
        write_atomic(target, content)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or error}") from None
