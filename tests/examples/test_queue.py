"""The example of the queue alone: a shard is killed, and every group arrives once."""

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "queue" / "standalone.py"
MARK = "STREAMRL_TEST_RUN"


def alive(mark: str) -> list[psutil.Process]:
    """The processes that carry a mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != "zombie":
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@pytest.mark.slow
def test_every_group_arrives_once_though_a_shard_is_killed() -> None:
    mark = uuid.uuid4().hex
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=400.0,
        env={**os.environ, MARK: mark},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"killed a shard, process \d+", done.stdout)
    assert re.search(r"^400 groups have arrived; \d+ were handed out twice", done.stdout, re.M)
    assert "missing or wrong: 0\n" in done.stdout
    _, left = psutil.wait_procs(alive(mark), timeout=30.0)
    assert not left, "processes were left behind"
