"""Build a task's folder once, atomically, with a record of the settings."""

import argparse
import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Written before the folder is renamed: if the record exists, the build is complete.
RECORD = "made.json"
MAX_ATTEMPTS = 6
SEEDS_APART = 1000
"""Distance of the seeds of two attempts, so that builds of neighbouring seeds share no model."""


def repeat_until_reached(
    attempt: Callable[[int], dict[str, float]], bar: Mapping[str, float], *, task: str, seed: int
) -> dict[str, Any]:
    """Train models from different seeds until one reaches its bar: the lowest values it may have.

    attempt: function of a seed that trains a model and returns the measured values. Processors
    round differently, so the same seed may give a good model on one and a bad one on another.
    Returns measured values and attempts for the build record. Raises SystemExit after MAX_ATTEMPTS.
    """
    for number in range(MAX_ATTEMPTS):
        measured = attempt(seed + SEEDS_APART * number)
        missed = ", ".join(f"{key} is below {bar[key]}" for key in bar if measured[key] < bar[key])
        print(f"{task}: the model has {measured}" + (missed and f": {missed}"), flush=True)
        if not missed:
            return {"measured": measured, "attempts": number + 1}
    raise SystemExit(f"{task}: {MAX_ATTEMPTS} models failed: {missed}; choose another --seed")


@dataclass(frozen=True)
class Build:
    """The build of a task.

    folder: default output folder.
    format: version of the contents; a build of another version is refused.
    fill: function of folder and seed that writes the contents; returns more values to record.
    """

    task: str
    folder: Path
    format: int
    fill: Callable[[Path, int], dict[str, Any]]

    def main(self) -> None:
        """Parse the command line and build what is missing."""
        parser = argparse.ArgumentParser(
            description=f"Build data and models of the task {self.task}."
        )
        parser.add_argument("--out", type=Path, default=self.folder, help="output folder")
        parser.add_argument(
            "--seed", type=int, default=0, help="seed of split, weights and training"
        )
        args = parser.parse_args()
        if self.is_made(args.out, seed=args.seed):
            print(f"{self.task}: {args.out} is complete")
            return
        # Importing torch takes seconds; most calls return above.
        import torch

        # More threads gain nothing for small models, and slow down other processes.
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        self.make(args.out, seed=args.seed)

    def is_made(self, out: Path, *, seed: int) -> bool:
        """Return whether `out` holds a complete build with this seed.

        Raises SystemExit if it holds anything else; user files are never overwritten.
        """
        record = out / RECORD
        recorded = json.loads(record.read_text()) if record.is_file() else {}
        if (recorded.get("seed"), recorded.get("format")) == (seed, self.format):
            return True
        if out.exists():
            raise SystemExit(
                f"{self.task}: {out} exists, but is no build of format {self.format} with seed"
                f" {seed}; remove it or choose another --out"
            )
        return False

    def make(self, out: Path, *, seed: int) -> None:
        """Build under a temporary name beside `out`, then rename.

        Waits for another process that builds the same folder.
        """
        out.parent.mkdir(parents=True, exist_ok=True)
        with _lock_folder(out.parent):
            if not self.is_made(out, seed=seed):
                self._make(out, seed=seed)

    def _make(self, out: Path, *, seed: int) -> None:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}.partial-") as partial:
            build = Path(partial) / out.name
            build.mkdir()
            record = {"format": self.format, "seed": seed, **self.fill(build, seed)}
            (build / RECORD).write_text(json.dumps(record, indent=2) + "\n")
            build.rename(out)
        print(f"{self.task}: built {out}")


_HELD = set[Path]()
"""Folders locked by this process; a task may build another task within its own lock."""


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold the flock of a folder; the system releases it when the process ends."""
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
