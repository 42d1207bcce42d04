"""`scripts/train.sbatch` in a shell with stand-ins for SLURM's commands."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.toy import write_toy

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "train.sbatch"
LONGEST_S = 240.0
LOG_CALL = 'echo "$(basename "$0")" "$@" >> calls.txt\n'
SRUN = LOG_CALL + 'while [[ "$1" == -* ]]; do shift; done\nexec "$@"\n'
RAY = """
case "$1" in
    start) echo x >> nodes.txt; exec sleep 600;;
    status) sed "s/x/ 1 node_x/" nodes.txt;;
esac
"""
TRAIN = """
[ -n "$CODE" ] && exit "$CODE"
trap 'echo x >> terms.txt; sleep 1; exit 130' TERM
touch started
while sleep 0.1; do :; done
"""


def write_command(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}")
    path.chmod(0o755)


class Job:
    """Job of the script in a folder; SLURM ends all its processes with it, and so does `end`."""

    def __init__(self, folder: Path, *words: str, **environment: str) -> None:
        self._output = folder / "output.txt"
        slurm = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NAME": "mine",
            "SLURM_NNODES": "1",
            "SLURM_CPUS_ON_NODE": "4",
            "SLURMD_NODENAME": "node-1",
        }
        path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        with self._output.open("a") as output:
            self.process = subprocess.Popen(
                ["bash", str(SCRIPT), *words],
                cwd=folder,
                env={**os.environ, **slurm, **path, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def await_true(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONGEST_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.output
            time.sleep(0.05)

    @property
    def output(self) -> str:
        return self._output.read_text()

    def end(self) -> int:
        """Wait for the script's exit code, then end its steps."""
        try:
            return self.process.wait(LONGEST_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of a job, with stand-ins for SLURM, Ray and streamrl."""
    write_command(tmp_path / "bin" / "srun", SRUN)
    write_command(tmp_path / "bin" / "scontrol", LOG_CALL)
    write_command(tmp_path / ".venv" / "bin" / "ray", LOG_CALL + RAY)
    write_command(tmp_path / ".venv" / "bin" / "streamrl", LOG_CALL + TRAIN)
    return tmp_path


def read_calls(folder: Path, command: str) -> list[list[str]]:
    calls = [shlex.split(line) for line in (folder / "calls.txt").read_text().splitlines()]
    return [call[1:] for call in calls if call[0] == command]


def test_each_node_joins_ray_with_all_its_cores_and_gpus_before_training_starts(folder: Path):
    job = Job(
        folder, "my.yaml", "a=1", SLURM_NNODES="4", SLURM_GPUS_ON_NODE="8", CODE="0", READY_S="2"
    )
    assert job.end() == 1
    assert "2 of 4 nodes joined Ray at " in job.output
    first, others = read_calls(folder, "srun")
    for step in (first, others):
        assert {"--cpus-per-task=4", "--num-cpus=4", "--num-gpus=8", "--overlap"} <= {*step}
    assert {"--nodes=1", "--nodelist=node-1", "--head"} <= {*first}
    assert {"--nodes=3", "--ntasks=3", "--exclude=node-1"} <= {*others}
    assert not read_calls(folder, "streamrl")


def test_two_signals_stop_training_once_and_requeue_the_job(folder: Path):
    job = Job(folder, "my.yaml", "a=1")
    job.await_true((folder / "started").exists)
    os.kill(job.process.pid, signal.SIGUSR1)
    job.await_true((folder / "terms.txt").exists)
    os.kill(job.process.pid, signal.SIGUSR1)
    assert job.end() == 0
    assert (folder / "terms.txt").read_text() == "x\n"
    assert read_calls(folder, "scontrol") == [["requeue", "7"]]
    (train,) = read_calls(folder, "streamrl")
    assert train[:4] == ["train", "my.yaml", "a=1", "run.name=mine"]


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_run_that_ends_by_itself_ends_the_job_with_its_code(folder: Path, code: int):
    (folder / "runs" / "mine").mkdir(parents=True)
    assert Job(folder, "my.yaml", "a=1", CODE=str(code)).end() == code
    assert not read_calls(folder, "scontrol")
    (train,) = read_calls(folder, "streamrl")
    assert train[:4] == ["train", "--resume", "runs/mine", "a=1"]


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """Short path: Ray's sockets lie below it."""
    folder = tempfile.mkdtemp(dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def find_port() -> str:
    with socket.socket() as free:
        free.bind(("", 0))
        return str(free.getsockname()[1])


@pytest.mark.slow
def test_a_requeued_job_goes_on_from_the_checkpoint_that_it_saved(folder: Path, ray_folder: str):
    shutil.rmtree(folder / ".venv")
    (folder / ".venv").symlink_to(ROOT / ".venv")
    write_toy(folder)
    environment = {"RAY_TMPDIR": ray_folder, "OBJECT_STORE_BYTES": "200000000"}
    metrics = folder / "runs" / "mine" / "metrics.jsonl"
    job = Job(folder, "recipe.yaml", "run.steps=200", RAY_PORT=find_port(), **environment)
    job.await_true(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 1)
    os.kill(job.process.pid, signal.SIGUSR1)
    assert job.end() == 0, job.output
    assert read_calls(folder, "scontrol") == [["requeue", "7"]]
    checkpoints = (metrics.parent / "checkpoints").glob("step_*")
    saved = max(int(path.name.removeprefix("step_")) for path in checkpoints)
    assert 0 < saved < 200
    # SLURM would have ended Ray before; here it may still be shutting down.
    words = ("recipe.yaml", f"run.steps={saved + 2}")
    job = Job(folder, *words, RAY_PORT=find_port(), **environment)
    assert job.end() == 0, job.output
    assert len(read_calls(folder, "scontrol")) == 1
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, saved + 3))
