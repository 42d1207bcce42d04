"""The stacks that a process of a run leaves when a signal ends it: `RUN/stacks/<actor>-<pid>.txt`.

Signals of faults only (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT): of SIGKILL no process knows.
"""

import contextlib
import faulthandler
import os
from dataclasses import dataclass
from pathlib import Path

from streamrl.files.atomic_write import open_new_file
from streamrl.files.bounded_read import open_regular_file

STACKS_FOLDER = "stacks"
MAX_REASON_BYTES = 1000


@dataclass(frozen=True)
class CrashRecord:
    """What a process left: its actor, its process id, how it ended, and the file of its stacks."""

    actor: str
    pid: int
    reason: str
    stacks: str


def record_crash_stacks(run_dir: Path, actor: str) -> None:
    """Have this process write the stacks of all its threads into the run directory at its crash."""
    folder = run_dir / STACKS_FOLDER
    # On a full disk a run goes on: there is only less to read if it crashes.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        # It stays open, as nothing can be opened in a crash; faulthandler keeps it.
        file = open(open_new_file(folder / f"{actor}-{os.getpid()}.txt"), "w")  # noqa: SIM115
        # Else handlers of signals that were installed since it was enabled, Ray's, stay in place.
        faulthandler.disable()
        faulthandler.enable(file)


class CrashWatch:
    """The crashes of the processes of a run, each told once."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / STACKS_FOLDER
        self._reported_files = {file.name for file in self._list_files()}

    def find_new_crashes(self) -> list[CrashRecord]:
        """Return the crashes since the last look."""
        fresh = [file for file in self._list_files() if file.name not in self._reported_files]
        crashes = [_read_crash(file) for file in fresh if file.stat().st_size]
        self._reported_files |= {Path(crash.stacks).name for crash in crashes}
        return crashes

    def close(self) -> None:
        """Remove the files of processes that did not crash; all have ended."""
        with contextlib.suppress(OSError):
            for file in self._list_files():
                if not file.stat().st_size:
                    file.unlink()
            self._folder.rmdir()

    def _list_files(self) -> list[Path]:
        return sorted(self._folder.glob("*.txt"))


def _read_crash(file: Path) -> CrashRecord:
    actor, _, pid = file.stem.rpartition("-")
    with open_regular_file(file) as lines:
        first = lines.readline(MAX_REASON_BYTES).decode(errors="replace")
    reason = first.strip().removeprefix("Fatal Python error: ")
    return CrashRecord(actor, int(pid), reason, str(file))
