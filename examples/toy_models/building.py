"""A folder that a task's make.py makes once: whole or not at all, and with a record of how."""

import argparse
import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Written with the rest before the folder gets its name: where it is, everything is.
RECORD = "made.json"


@dataclass(frozen=True)
class Build:
    """What a task makes.

    folder: where, unless the command line names another place.
    format: of what a build consists of; an older one lacks something.
    fill: writes all of it into an empty folder, given the seed; returns what else to record.
    """

    task: str
    folder: Path
    format: int
    fill: Callable[[Path, int], dict[str, Any]]

    def main(self) -> None:
        """Read the command line, and make what is missing."""
        parser = argparse.ArgumentParser(description=f"Make what the task {self.task} needs.")
        parser.add_argument("--out", type=Path, default=self.folder, help="folder to make")
        parser.add_argument("--seed", type=int, default=0, help="of split, weights and lessons")
        args = parser.parse_args()
        if self.is_made(args.out, seed=args.seed):
            print(f"{self.task}: {args.out} is complete")
            return
        # Torch takes seconds to import, and most calls end above.
        import torch

        # Such small models are no faster on more, and far slower where others want the cores.
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        self.make(args.out, seed=args.seed)

    def is_made(self, out: Path, *, seed: int) -> bool:
        """Whether `out` holds a complete build with this seed.

        Raises SystemExit if it holds anything else: nothing of a user's is ever overwritten.
        """
        record = out / RECORD
        made = json.loads(record.read_text()) if record.is_file() else {}
        if (made.get("seed"), made.get("format")) == (seed, self.format):
            return True
        if out.exists():
            raise SystemExit(
                f"{self.task}: {out} is there, but is not this task (format {self.format}) made"
                f" with seed {seed}; remove it or choose another --out"
            )
        return False

    def make(self, out: Path, *, seed: int) -> None:
        """Make everything under a temporary name beside `out`, then give it its name.

        Where another process makes it just now, wait until it has.
        """
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out.parent):
            if not self.is_made(out, seed=seed):
                self._make(out, seed=seed)

    def _make(self, out: Path, *, seed: int) -> None:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.partial-") as partial:
            whole = Path(partial) / out.name
            whole.mkdir()
            record = {"format": self.format, "seed": seed, **self.fill(whole, seed)}
            (whole / RECORD).write_text(json.dumps(record, indent=2) + "\n")
            whole.rename(out)
        print(f"{self.task}: {out} is made")


_HELD = set[Path]()
"""Folders that this process has locked: a task that makes another may make it beside its own."""


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which ends with the process."""
    key = folder.resolve()
    if key in _HELD:
        yield
        return
    descriptor = os.open(key, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        _HELD.add(key)
        yield
    finally:
        _HELD.discard(key)
        os.close(descriptor)
