"""Files that a crash leaves whole or not at all: a temporary name, fsync, rename."""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from streamrl.errors import CheckpointError, DiskError, NoSpaceError, StreamError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a quota that is used up, a file as large as it may be."""
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")


def find_system_error(error: BaseException) -> OSError | None:
    """The system's error behind an exception: libraries written in Rust have it in their text."""
    if isinstance(error, OSError):
        return error
    found = None if isinstance(error, StreamError) else _RUST_ERROR.search(str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else None


@contextlib.contextmanager
def wrap_os_errors(what: str, kind: type[StreamError]) -> Iterator[None]:
    """The system's errors as one of ours, which says `what`, with its file, went wrong."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error


@contextlib.contextmanager
def wrap_checkpoint_errors(path: Path) -> Iterator[None]:
    """The system's errors over a part of a checkpoint, also those that libraries tell.

    NoSpaceError where there is no space, CheckpointError otherwise; both name the path.
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
    """The system's errors over a file of the run directory, as DiskError naming it."""
    return wrap_os_errors(f"{path} cannot be written", DiskError)


def write_atomic(path: Path, text: str) -> None:
    """Put `text` into a file at once: readers and crashes see the old file or the new one."""
    partial = get_partial_path(path)
    try:
        with open(open_new_file(partial), "w", encoding="utf-8") as file:
            file.write(text)
        sync_and_rename(partial, path)
    except OSError:
        # On a full disk half a file would take what others need.
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def open_new_file(path: Path) -> int:
    """Open a new file for writing, in the place of what is there; returns its descriptor.

    A link that stands there, as in a directory of a stranger's, is never followed. Raises OSError.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def get_partial_path(path: Path) -> Path:
    """What a file is called until it is whole."""
    return path.with_name(f".{path.name}.partial")


def sync_and_rename(partial: Path, final: Path) -> None:
    """Give a finished file or directory its name, once everything in it is on the disk."""
    inside = partial.rglob("*") if partial.is_dir() else ()
    for path in (*inside, partial):
        _fsync_path(path)
    partial.replace(final)
    _fsync_path(final.parent)


def _fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
