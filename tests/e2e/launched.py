"""`streamrl` as its own process, as a user starts it, and the processes and files it leaves."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from streamrl.buffer.run_log import LedgerAudit, audit_run_log, read_history
from streamrl.run_dir.checkpoint import RUN_LOG_FOLDER, get_journal_dir

MARK = "STREAMRL_TEST_RUN"


class Launched:
    """A running command; its output goes to a file. Every process it starts carries a mark.

    `env` is added to the environment that it `inherits`; `module` is run instead of streamrl's CLI.
    """

    def __init__(
        self,
        words: list[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        *,
        inherits: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
        module: str = "streamrl.cli",
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._log = folder / f"output-{self._mark[:8]}.txt"
        # A new session is a new process group, as a shell gives a command.
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.DEVNULL,
            stdout=self._log.open("w"),
            stderr=subprocess.STDOUT,
            env={**inherits, **(env or {}), MARK: self._mark},
            cwd=cwd,
            start_new_session=True,
        )
        # If the test fails, its run must not continue during the next tests.
        self.end = weakref.finalize(self, _kill_group, self.process)

    @property
    def output(self) -> str:
        """Both streams so far."""
        return self._log.read_text()

    def wait(self, timeout_s: float = 600.0) -> int:
        """Wait for the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"did not end in {timeout_s:g} s:\n{self.output}") from None

    def finish(self, timeout_s: float = 600.0) -> None:
        """Wait for the end; assert that it succeeded and left no process."""
        assert self.wait(timeout_s) == 0, self.output
        assert self.orphans() == []

    def fail(self, timeout_s: float = 240.0) -> str:
        """Wait for the end; assert that it failed in one line and left no process; return it."""
        assert self.wait(timeout_s) == 1, self.output
        line = self.output.strip().splitlines()[-1]
        assert line.startswith("streamrl: "), self.output
        assert "Traceback" not in self.output
        assert self.orphans() == []
        return line

    def stop(self) -> None:
        """Interrupt it; assert that it saves and ends within half a minute, and left no process."""
        started = time.monotonic()
        self.interrupt()
        assert self.wait() == 130, self.output
        # A run has 12 s to save; then its processes end.
        assert time.monotonic() - started < 30
        assert self.orphans() == []
        assert "Traceback" not in self.output

    def kill(self) -> None:
        """Kill the command; assert that its other processes end."""
        self.process.kill()
        self.process.wait()
        # Ray's own agents would stay for a minute.
        assert self.orphans(60.0) == []

    def until(self, condition: Callable[[], bool], timeout_s: float = 600.0) -> None:
        """Wait for a condition to become true while the command runs."""
        deadline = time.monotonic() + timeout_s
        try:
            while not condition():
                assert self.process.poll() is None, f"it ended early:\n{self.output}"
                assert time.monotonic() < deadline, f"not in {timeout_s:g} s:\n{self.output}"
                time.sleep(0.1)
        except BaseException:
            self.end()
            raise

    def interrupt(self) -> None:
        """Signal the whole process group, as a terminal does on Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def processes(self) -> list[psutil.Process]:
        """Return all its live processes, itself included."""
        return marked(self._mark)

    def actor(self, kind: str) -> psutil.Process:
        """Return the process of an actor class."""
        return self.named(f"ray::{kind}")[0]

    def named(self, word: str) -> list[psutil.Process]:
        """Return its processes with a word in their command."""
        return [process for process in self.processes() if word in _command(process)]

    def orphans(self, within_s: float = 60.0) -> list[str]:
        """Return commands that are still alive some seconds after it ended."""
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [_command(process) for process in left]


def marked(mark: str) -> list[psutil.Process]:
    """Return live processes with this mark in their environment."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != "zombie":
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return processes


def _command(process: psutil.Process) -> str:
    """Return the command line, "" if the process has ended since it was listed."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the command and its process group; Ray's processes end without their driver."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def train(toy: Path, name: str, *overrides: str) -> tuple[Launched, Path]:
    """Start a run of the toy's recipe; return it and its directory."""
    words = ["train", str(toy / "recipe.yaml"), f"run.dir={toy}/runs", f"run.name={name}"]
    return Launched([*words, *overrides], toy), toy / "runs" / name


def audit(run_dir: Path) -> LedgerAudit:
    """Return the account of a run's prompts; assert that each was trained at most once."""
    account = audit_run_log(read_history(get_journal_dir(run_dir, RUN_LOG_FOLDER)))
    assert not account.problems
    assert len(account.trained) == len(set(account.trained))
    return account


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Return the complete rows of metrics.jsonl."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]
