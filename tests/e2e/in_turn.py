"""Commands of streamrl one after the other in one process: a folder, then name and words as JSON.

The exit code of each is written into the folder, even after an earlier one failed.
"""

import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from streamrl.files.atomic_write import write_atomic

HEADING = "=== in turn:"
"""Line before a command's output, followed by its name."""


def code_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.code"


def play(words: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    from streamrl.cli.main import main

    try:
        return main(words)
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    folder, *commands = sys.argv[1:]
    for name, *words in map(json.loads, commands):
        print(HEADING, name, flush=True)
        write_atomic(code_file(Path(folder), name), str(play(words)))
