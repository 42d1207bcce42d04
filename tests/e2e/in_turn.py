"""Commands of streamrl one after the other in one process: folder for the codes, words as JSON.

The exit code of each is written to `<run.name>.code`, whatever has become of those before it.
"""

import json
import sys
import traceback
from pathlib import Path

from streamrl.cli.main import main
from streamrl.durable import write_whole


def play(words: list[str]) -> int:
    """The exit code of a command."""
    print(*words, flush=True)
    try:
        return main(words)
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    folder, *runs = sys.argv[1:]
    for words in map(json.loads, runs):
        (name,) = (word.removeprefix("run.name=") for word in words if word.startswith("run.name="))
        code = play(words)
        write_whole(Path(folder) / f"{name}.code", str(code))
