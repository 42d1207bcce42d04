"""Files that a crash leaves whole or not at all: a temporary name, fsync, rename."""

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Put `text` into a file at once: readers and crashes see the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    move_whole(partial, path)


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
