"""Stacks of crashed processes: reported once, with the actor's name."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.run_dir.crash_stacks import CrashWatch

PROCESS = """
import os, sys
from pathlib import Path
from streamrl.run_dir.crash_stacks import record_crash_stacks

def busy_with_something():
    os.kill(os.getpid(), int(sys.argv[3]))

record_crash_stacks(Path(sys.argv[1]), sys.argv[2])
busy_with_something()
"""


def _end_by(number: int, run_dir: Path, actor: str) -> None:
    command = [sys.executable, "-c", PROCESS, str(run_dir), actor, str(int(number))]
    assert subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == -number


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGSEGV, "Segmentation fault"), (signal.SIGABRT, "Aborted")]
)
def test_a_crash_is_reported_once_and_its_stacks_are_kept(tmp_path: Path, number: int, reason: str):
    watch = CrashWatch(tmp_path)
    assert watch.find_new_crashes() == []
    _end_by(number, tmp_path, "trainer-1")
    (crash,) = watch.find_new_crashes()
    assert (crash.actor, crash.reason) == ("trainer-1", reason)
    assert "busy_with_something" in Path(crash.stacks).read_text()
    assert watch.find_new_crashes() == []
    watch.close()
    assert Path(crash.stacks).exists()
    assert CrashWatch(tmp_path).find_new_crashes() == [], "a resume reports no old crash"


def test_sigkill_leaves_no_stacks(tmp_path: Path):
    watch = CrashWatch(tmp_path)
    _end_by(signal.SIGKILL, tmp_path, "generator-0")
    assert watch.find_new_crashes() == []
    watch.close()
    assert list(tmp_path.iterdir()) == []
