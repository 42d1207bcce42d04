"""Atomic writes (temporary name, fsync, rename): a crash leaves the old file or the new one."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from streamrl.errors import CheckpointError, ConfigError, DiskError, NoSpaceError, StreamError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk: no space, exhausted quota, maximum file size."""
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")


def find_system_error(error: BaseException) -> OSError | None:
    """Return the OSError behind an exception, or None.

    Errors of Rust libraries only contain the number of the OSError in their text.
    """
    if isinstance(error, OSError):
        return error
    match = None if isinstance(error, StreamError) else _RUST_ERROR.search(str(error))
    return OSError(int(match[1]), os.strerror(int(match[1]))) if match else None


@contextlib.contextmanager
def wrap_os_errors(subject: str, kind: type[StreamError] | type[ConfigError]) -> Iterator[None]:
    """Convert an OSError in the block to error class `kind`; its message begins with `subject`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{subject}: {error.strerror or error}") from error


@contextlib.contextmanager
def wrap_checkpoint_errors(path: Path) -> Iterator[None]:
    """Convert an OSError while a checkpoint is written, even inside the error of a library.

    Raises NoSpaceError on a full disk, CheckpointError otherwise; both name the path.
    """
    try:
        yield
    except Exception as error:
        system = find_system_error(error)
        if system is None:
            raise
        kind = NoSpaceError if system.errno in NO_SPACE else CheckpointError
        raise kind(f"{path} cannot be written: {system.strerror or system}") from error


def wrap_disk_errors(path: Path) -> AbstractContextManager[None]:
    """Convert an OSError while a file of the run directory is written to DiskError."""
    return wrap_os_errors(f"{path} cannot be written", DiskError)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file atomically: readers see the old or the new content, even after a crash.

    Text is written as UTF-8.
    """
    partial = get_partial_path(path)
    try:
        with open(open_new_file(partial), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        sync_and_rename(partial, path)
    except OSError:
        # Free the partial file's space: the disk may be full.
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def open_new_file(path: Path) -> int:
    """Create a new file for writing, replacing an existing file; return the descriptor.

    Never follows a symlink at `path`, which another user may have placed there. Raises OSError.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def get_partial_path(path: Path) -> Path:
    """Return the temporary path at which a file is written before it is renamed."""
    return path.with_name(f".{path.name}.partial")


def sync_and_rename(partial: Path, final: Path) -> None:
    """Fsync a finished file, or a directory with its contents, then rename `partial` to `final`."""
    contents = partial.rglob("*") if partial.is_dir() else ()
    for path in (*contents, partial):
        fsync_path(path)
    partial.replace(final)
    fsync_path(final.parent)


def fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
