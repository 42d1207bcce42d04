"""Links to what a resume from an older checkpoint discards, until its first new step is done."""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from streamrl.files.atomic_write import get_partial_path

DISCARDED = ".discarded"
"""Folder of a run directory with the discarded journals and checkpoints."""


def keep_links(run_dir: Path, folders: Sequence[Path]) -> None:
    """Link what a resume discards into the folder DISCARDED, until its first new step is done.

    Links are safe: a later process never writes into an existing file of these folders. Leaves what
    an interrupted call has linked.
    """
    if (run_dir / DISCARDED).exists():
        return
    partial = get_partial_path(run_dir / DISCARDED)
    shutil.rmtree(partial, ignore_errors=True)
    for folder in filter(Path.is_dir, folders):
        target = partial / folder.relative_to(run_dir)
        shutil.copytree(folder, target, copy_function=link_or_copy)
    partial.rename(run_dir / DISCARDED)


def restore_discarded(run_dir: Path) -> None:
    """Undo a resume from an older checkpoint that ended before its first new step.

    A crash in between leaves a state from which a second call goes on.
    """
    discarded = run_dir / DISCARDED
    if (discarded / "journal").is_dir():
        shutil.rmtree(run_dir / "journal", ignore_errors=True)
        (discarded / "journal").rename(run_dir / "journal")
    for path in (discarded / "checkpoints").glob("step_*"):
        if not (run_dir / "checkpoints" / path.name).exists():
            path.rename(run_dir / "checkpoints" / path.name)
    forget_discarded(run_dir)


def forget_discarded(run_dir: Path) -> None:
    """Remove what a resume discarded; after a crash in between, none of it can be restored."""
    removed = get_partial_path(run_dir / DISCARDED)
    shutil.rmtree(removed, ignore_errors=True)
    with suppress(FileNotFoundError):
        (run_dir / DISCARDED).rename(removed)
    shutil.rmtree(removed, ignore_errors=True)


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=True)
    except OSError:
        # Different file systems, or no support for hard links.
        shutil.copy2(source, target)
