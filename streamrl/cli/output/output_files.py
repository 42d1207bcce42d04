"""Output files of commands: checked before the work starts, written atomically."""

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from streamrl.errors import ConfigError
from streamrl.files.atomic_write import get_partial_path, wrap_os_errors, write_atomic
from streamrl.files.bounded_read import wrap_file_errors
from streamrl.run_dir.run_config_file import CONFIG_FILE


def check_output_file(option: str, path: Path, *, inputs: Iterable[Path] = ()) -> Path:
    """Return the path to write for a command-line option, with symlinks resolved.

    Writing replaces the target of a symlink. inputs: files or run directories that the command
    reads. Raises ConfigError, naming the option, if the path is unwritable, names a folder or a
    device, or is one of the inputs.
    """
    target = Path(os.path.realpath(path))
    if any(target in (p.resolve(), p.resolve() / CONFIG_FILE) for p in inputs):
        raise ConfigError(f"{option} {path}: is an input of this command; name another file")
    if os.path.exists(target) and not target.is_file():
        raise ConfigError(f"{option} {path}: not a file")
    with wrap_os_errors(f"{option} {path}", ConfigError):
        with contextlib.suppress(FileNotFoundError):
            os.lstat(get_partial_path(target))  # raises for a name that is too long
        # Permission bits do not tell (read-only mounts, ACLs), so create an unnamed file.
        tempfile.TemporaryFile(dir=target.parent).close()
    return target


def check_html_file(path: Path) -> None:
    """Check the path to write for `--html`, as `check_output_file` does.

    Also raises ConfigError for an existing file that is no HTML page, such as a run's metrics.
    """
    target = check_output_file("--html", path)
    if target.is_file() and target.stat().st_size:
        with wrap_file_errors(target), target.open("rb") as file:
            if not file.read(64).lstrip().lower().startswith(b"<!doctype html"):
                raise ConfigError(f"--html {path}: exists and is no HTML page; name another file")


def write_output_file(option: str, path: Path, content: str) -> None:
    """Write the file of a command-line option atomically.

    Raises ConfigError, naming the option, on failure.
    """
    target = check_output_file(option, path)
    with wrap_os_errors(f"{option} {path}", ConfigError):
        write_atomic(target, content)
