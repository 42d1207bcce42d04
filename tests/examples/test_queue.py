"""The example of a standalone queue: after the kill of a shard every group arrives once."""

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
def test_every_group_arrives_once_after_a_shard_is_killed():
    mark = uuid.uuid4().hex
    command, env = [sys.executable, str(SCRIPT)], {**os.environ, MARK: mark}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400.0, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"killed a shard, process \d+", done.stdout)
    assert re.search(r"^400 groups have arrived; \d+ were leased twice", done.stdout, re.M)
    assert "missing or wrong: 0\n" in done.stdout
    _, left = psutil.wait_procs(marked(mark), timeout=30.0)
    assert not left, "processes were left behind"
