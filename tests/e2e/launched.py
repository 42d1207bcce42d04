"""`streamrl` as a process of its own, as a user starts it, and what it leaves behind."""

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

MARK = "STREAMRL_TEST_RUN"


class Launched:
    """A running command; its output goes to a file. Every process it starts carries a mark.

    `env` is added to the environment. That, and the directory, are those of the tests at the moment
    unless `inherits` and `cwd` say otherwise; the command is streamrl's, or that of a `module`.
    """

    def __init__(
        self,
        words: list[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        *,
        inherits: Mapping[str, str] = os.environ,
        cwd: Path | None = None,
        module: str = "streamrl.cli.main",
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._log = folder / f"output-{self._mark[:8]}.txt"
        # A session of its own is a process group of its own, as a shell gives a command.
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.DEVNULL,
            stdout=self._log.open("w"),
            stderr=subprocess.STDOUT,
            env={**inherits, **(env or {}), MARK: self._mark},
            cwd=cwd,
            start_new_session=True,
        )
        # Whatever becomes of the test, its run must not go on beside the tests that follow.
        self.end = weakref.finalize(self, _kill_group, self.process)

    @property
    def output(self) -> str:
        """What it printed so far, both streams."""
        return self._log.read_text()

    def wait(self, timeout_s: float = 600.0) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"did not end in {timeout_s:g} s:\n{self.output}") from None

    def until(self, condition: Callable[[], bool], timeout_s: float = 600.0) -> None:
        """Wait for something to become true while it runs."""
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
        """Ctrl-C: the terminal signals the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def processes(self) -> list[psutil.Process]:
        """Everything alive that it started, however deep, itself included."""
        return marked(self._mark)

    def actor(self, kind: str) -> psutil.Process:
        """The process of an actor class."""
        return self.named(f"ray::{kind}")[0]

    def named(self, word: str) -> list[psutil.Process]:
        """Its processes with a word in their command."""
        return [process for process in self.processes() if word in _command(process)]

    def orphans(self, within_s: float = 20.0) -> list[str]:
        """What is still alive a little after it ended."""
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return [_command(process) for process in left]


def marked(mark: str) -> list[psutil.Process]:
    """Everything alive that has this mark in its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != "zombie":
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def _command(process: psutil.Process) -> str:
    """What it was started as; nothing of one that has ended since it was listed."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """The command and what it started in its group; Ray's processes end without their driver."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that are complete."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """The events of one name."""
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == name]
