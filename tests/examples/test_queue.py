"""The example of the queue alone: a shard is killed, and every group arrives once."""

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from tests.e2e.launched import MARK, marked

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "queue" / "standalone.py"


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
    assert re.search(r"^400 groups have arrived; \d+ were leased twice", done.stdout, re.M)
    assert "missing or wrong: 0\n" in done.stdout
    _, left = psutil.wait_procs(marked(mark), timeout=30.0)
    assert not left, "processes were left behind"
