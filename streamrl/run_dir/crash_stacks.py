"""Stack traces of a run's crashed processes, in `RUN/stacks/<actor>-<pid>.txt`.

Written on fatal signals (SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT); SIGKILL cannot be caught.
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
    """Crash of an actor's process: its pid, the reason, and the file with the stack traces."""

    actor: str
    pid: int
    reason: str
    stacks: str


def record_crash_stacks(run_dir: Path, actor: str) -> None:
    """Make this process write the stacks of all its threads to a file when it crashes.

    actor: name of the actor in the process, for the file's name.
    """
    folder = run_dir / STACKS_FOLDER
    # A full disk only costs the stacks, not the run.
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        # Opened now, since a crash handler cannot open files; faulthandler keeps the reference.
        file = open(open_new_file(folder / f"{actor}-{os.getpid()}.txt"), "w")  # noqa: SIM115
        # Re-enable, to override signal handlers that Ray installed after the first call.
        faulthandler.disable()
        faulthandler.enable(file)


def record_crash_reason(run_dir: Path, actor: str, reason: str) -> None:
    """Leave a line of text, why this process ends, in place of the stacks of its threads."""
    with contextlib.suppress(OSError):
        (run_dir / STACKS_FOLDER / f"{actor}-{os.getpid()}.txt").write_text(f"{reason}\n")


class CrashWatch:
    """Reader of crash files: finds the crashes of a run's processes."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / STACKS_FOLDER
        self._reported_files = {file.name for file in self._list_files()}

    def find_new_crashes(self) -> list[CrashRecord]:
        """Return the crashes that left a stack file since the last call, or since construction.

        A process killed by SIGKILL leaves none.
        """
        new_files = [file for file in self._list_files() if file.name not in self._reported_files]
        crashes = [_read_crash(file) for file in new_files if file.stat().st_size]
        self._reported_files |= {Path(crash.stacks).name for crash in crashes}
        return crashes

    def close(self) -> None:
        """Remove the empty crash files of processes that did not crash, after all have ended."""
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
        first_line = lines.readline(MAX_REASON_BYTES).decode(errors="replace")
    reason = first_line.strip().removeprefix("Fatal Python error: ")
    return CrashRecord(actor, int(pid), reason, str(file))
