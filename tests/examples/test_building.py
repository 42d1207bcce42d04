"""A build is made once, also by concurrent processes."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys, time
from pathlib import Path

from examples.toy_models.building import Build

out = Path(sys.argv[1])

def fill(folder, seed):
    with out.with_name("filled.txt").open("a") as log:
        log.write("filled\\n")
    time.sleep(0.3)
    return {}

Build("toy", out, 1, fill).make(out, seed=0)
"""


def test_concurrent_processes_make_a_build_once(tmp_path: Path):
    words = [sys.executable, "-c", SCRIPT, str(tmp_path / "build")]
    both = [subprocess.Popen(words, cwd=ROOT) for _ in range(2)]
    assert [process.wait(60.0) for process in both] == [0, 0]
    assert (tmp_path / "filled.txt").read_text() == "filled\n"
    assert (tmp_path / "build" / "made.json").is_file()
