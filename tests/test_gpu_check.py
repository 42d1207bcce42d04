"""scripts/gpu_check.py in its shortest form: on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "gpu_check.py"


def run_check(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, SCRIPT, "--device", "cpu", "--out", out, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
def test_gpu_check_passes_on_a_cpu(tmp_path: Path):
    out = tmp_path / "lines.jsonl"
    done = run_check(out)
    assert done.returncode == 0, done.stdout
    lines = {line["step"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert len(lines) == len(out.read_text().splitlines()) > 10
    assert "skipped" in lines["nccl"]["cases"]["all"]


def test_gpu_check_refuses_unknown_steps(tmp_path: Path):
    done = run_check(tmp_path / "lines.jsonl", "--steps", "machine,warp")
    assert done.returncode == 2
    assert "no step warp; there are machine, losses" in done.stdout
