"""Files that a crash leaves whole or not at all: a temporary name, fsync, rename."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from streamrl.errors import DiskError, StreamError


@contextlib.contextmanager
def named_errors(what: str, kind: type[StreamError]) -> Iterator[None]:
    """The system's errors as one of ours, which says `what`, with its file, went wrong."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or error}") from error


def disk_errors(path: Path) -> AbstractContextManager[None]:
    """The system's errors over a file of the run directory, as DiskError naming it."""
    return named_errors(f"{path} cannot be written", DiskError)


def write_whole(path: Path, text: str) -> None:
    """Put `text` into a file at once: readers and crashes see the old file or the new one."""
    partial = partial_of(path)
    partial.write_text(text, encoding="utf-8")
    move_whole(partial, path)


def partial_of(path: Path) -> Path:
    """What a file is called until it is whole."""
    return path.with_name(f".{path.name}.partial")


def move_whole(partial: Path, final: Path) -> None:
    """Give a finished file or directory its name, once everything in it is on the disk."""
    inside = partial.rglob("*") if partial.is_dir() else ()
    for path in (*inside, partial):
        _fsync(path)
    partial.replace(final)
    _fsync(final.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
