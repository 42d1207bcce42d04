"""Log of a few rollouts of every step as text, for reading."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrl.files.atomic_write import wrap_disk_errors, write_atomic


class RolloutLog:
    """Writer of `rollouts/step_000012.jsonl`: per line a prompt, its completions and scores."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "rollouts"

    def discard_steps_after(self, step: int) -> None:
        """Delete the files of steps after `step`, which a resumed run trains again."""
        for path in self._folder.glob("step_*.jsonl"):
            number = path.stem.removeprefix("step_")
            if number.isdecimal() and int(number) > step:
                path.unlink()

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the sampled groups of a training step; no file without samples. Raises
        DiskError."""
        if not samples:
            return
        lines = [json.dumps(sample, default=str, ensure_ascii=False) for sample in samples]
        path = self._folder / f"step_{step:06d}.jsonl"
        with wrap_disk_errors(path):
            self._folder.mkdir(exist_ok=True)
            write_atomic(path, "\n".join(lines) + "\n")
