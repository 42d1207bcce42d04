"""The stacks that a process of a run leaves when a signal ends it: `RUN/stacks/<actor>-<pid>.txt`.

Signals of faults only (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT): of SIGKILL no process knows.
"""

import contextlib
import faulthandler
import os
from dataclasses import dataclass
from pathlib import Path

from streamrl.files.atomic_write import open_new
from streamrl.files.bounded_read import open_regular

FOLDER = "stacks"
MOST_REASON_BYTES = 1000


@dataclass(frozen=True)
class Crash:
    """What a process left: its actor, its process id, how it ended, and the file of its stacks."""

    actor: str
    pid: int
    reason: str
    stacks: str


def record_stacks(run_dir: Path, actor: str) -> None:
    """Have this process write the stacks of all its threads into the run directory at its crash."""
    folder = run_dir / FOLDER
    # On a full disk a run goes on: there is only less to read if it crashes.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        # It stays open, as nothing can be opened in a crash; faulthandler keeps it.
        file = open(open_new(folder / f"{actor}-{os.getpid()}.txt"), "w")  # noqa: SIM115
        # Else handlers of signals that were installed since it was enabled, Ray's, stay in place.
        faulthandler.disable()
        faulthandler.enable(file)


class CrashWatch:
    """The crashes of the processes of a run, each told once."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._told = {file.name for file in self._files()}

    def look(self) -> list[Crash]:
        """Return the crashes since the last look."""
        fresh = [file for file in self._files() if file.name not in self._told]
        crashes = [_read_crash(file) for file in fresh if file.stat().st_size]
        self._told |= {Path(crash.stacks).name for crash in crashes}
        return crashes

    def close(self) -> None:
        """Remove the files of processes that did not crash; all have ended."""
        with contextlib.suppress(OSError):
            for file in self._files():
                if not file.stat().st_size:
                    file.unlink()
            self._folder.rmdir()

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.txt"))


def _read_crash(file: Path) -> Crash:
    actor, _, pid = file.stem.rpartition("-")
    with open_regular(file) as lines:
        first = lines.readline(MOST_REASON_BYTES).decode(errors="replace")
    reason = first.strip().removeprefix("Fatal Python error: ")
    return Crash(actor, int(pid), reason, str(file))
