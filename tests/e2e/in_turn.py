"""Commands of streamrl one after the other in one process: a folder, then name and words as JSON.

The exit code of each is written into the folder, whatever has become of those before it.
"""

import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from streamrl.files.atomic_write import write_atomic

HEADING = "=== in turn:"
"""What a command's name follows where its output begins."""


def code_file(folder: Path, name: str) -> Path:
    """Where the exit code of a command is."""
    return folder / f"{name}.code"


def play(words: Sequence[str]) -> int:
    """The exit code of a command."""
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
