"""Run lock: live and dead owners on the same machine and on other nodes."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from streamrl.errors import ConfigError, StreamError
from streamrl.run_dir import run_lock
from streamrl.run_dir.run_lock import (
    LOCK_FILE,
    RunOwner,
    acquire_run_lock,
    check_links,
    lock_for_reading,
    read_owner,
)

OWNER_PROGRAM = """
import os, sys, time
from pathlib import Path
from typing import Any
from streamrl.run_dir.run_lock import acquire_run_lock
lock = acquire_run_lock(Path(sys.argv[1]))
if "forks" in sys.argv and (child := os.fork()) == 0:
    time.sleep(600)
print(child if "forks" in sys.argv else os.getpid(), flush=True)
time.sleep(600)
"""


@contextmanager
def owner(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a process that owns a directory; yields the pid, or with "forks" that of its child."""
    words = [sys.executable, "-c", OWNER_PROGRAM, str(folder), *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    try:
        yield process, pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if options:
            os.kill(pid, signal.SIGKILL)


def test_a_second_owner_is_refused_with_the_owners_start_host_and_pid(tmp_path: Path):
    with owner(tmp_path) as (process, _):
        with pytest.raises(ConfigError) as caught:
            acquire_run_lock(tmp_path)
        text = str(caught.value)
        assert f"{tmp_path} is in use" in text and f"pid {process.pid}" in text
        assert f"since {time.strftime('%Y-')}" in text and os.uname().nodename in text
        assert f"kill -INT {process.pid}" in text and "\n" not in text
        with pytest.raises(ConfigError, match="is in use"), lock_for_reading(tmp_path):
            pass
        process.kill()
        process.wait()
        started = time.monotonic()
        acquire_run_lock(tmp_path).release()
        assert time.monotonic() - started < 1, "a dead owner is detected at once"
        assert read_owner(tmp_path) is None


def test_a_fork_neither_keeps_nor_releases_the_owners_lock(tmp_path: Path):
    with owner(tmp_path, "forks") as (process, child):
        process.kill()
        process.wait()
        os.kill(child, 0)
        lock = acquire_run_lock(tmp_path)
    if (fork_pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(fork_pid, 0)
    program = (
        "from pathlib import Path; from streamrl.run_dir.run_lock import acquire_run_lock;"
        f"acquire_run_lock(Path({str(tmp_path)!r}))"
    )
    words = [sys.executable, "-c", program]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode and f"pid {os.getpid()}" in result.stderr
    lock.release()


def test_a_read_lock_keeps_owners_out_and_writes_nothing(tmp_path: Path):
    with lock_for_reading(tmp_path):
        assert list(tmp_path.iterdir()) == []
    acquire_run_lock(tmp_path).release()
    before = (tmp_path / LOCK_FILE).stat()
    with lock_for_reading(tmp_path), pytest.raises(ConfigError, match="reading it for a fork"):
        acquire_run_lock(tmp_path)
    assert (tmp_path / LOCK_FILE).stat().st_mtime_ns == before.st_mtime_ns


def write_remote_owner(folder: Path) -> RunOwner:
    """Write an owner on another node, which flock does not reach."""
    remote_owner = replace(
        RunOwner.from_this_process(), host="node-7", boot="another kernel", pid=1
    )
    (folder / LOCK_FILE).write_text(json.dumps(asdict(remote_owner)))
    return remote_owner


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the heartbeat intervals."""
    monkeypatch.setattr(run_lock, "HEARTBEAT_INTERVAL_S", 0.05)
    monkeypatch.setattr(run_lock, "HEARTBEAT_TIMEOUT_S", 0.4)
    monkeypatch.setattr(run_lock, "_POLL_INTERVAL_S", 0.02)


@pytest.mark.usefixtures("quick")
def test_an_owner_on_another_node_is_alive_while_its_heartbeat_moves(tmp_path: Path):
    write_remote_owner(tmp_path)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.05):
            os.utime(tmp_path / LOCK_FILE)

    heartbeat = threading.Thread(target=beat)
    heartbeat.start()
    status_lines: list[str] = []
    try:
        with pytest.raises(ConfigError, match=r"on node-7, pid 1.*kill -INT 1 on node-7"):
            acquire_run_lock(tmp_path, status=status_lines.append)
    finally:
        ended.set()
        heartbeat.join()
    assert "owned since" in status_lines[0]
    acquire_run_lock(tmp_path, status=status_lines.append).release()


@pytest.mark.usefixtures("quick")
def test_an_owner_sends_heartbeats(tmp_path: Path):
    lock = acquire_run_lock(tmp_path)
    before = (tmp_path / LOCK_FILE).stat().st_mtime_ns
    time.sleep(0.3)
    assert (tmp_path / LOCK_FILE).stat().st_mtime_ns > before
    lock.release()


def test_verify_owner_names_the_new_owner(tmp_path: Path):
    lock = acquire_run_lock(tmp_path)
    lock.verify_owner()
    write_remote_owner(tmp_path)
    with pytest.raises(StreamError, match=r"was taken over since .* on node-7, pid 1"):
        lock.verify_owner()
    lock.release()
    assert read_owner(tmp_path) is not None, "the new owner's entry stays"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("alive", [True, False])
def test_without_flock_pid_and_start_time_identify_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool
):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    this_process = RunOwner.from_this_process()
    recorded = this_process if alive else replace(this_process, start=this_process.start + 1)
    (tmp_path / LOCK_FILE).write_text(json.dumps(asdict(recorded)))
    if alive:
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
            acquire_run_lock(tmp_path)
    else:
        acquire_run_lock(tmp_path).release()


def test_a_lock_file_that_is_a_symlink_or_irregular_is_refused(tmp_path: Path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="cannot be locked"):
        acquire_run_lock(tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"
    (tmp_path / LOCK_FILE).unlink()
    os.mkfifo(tmp_path / LOCK_FILE)
    with pytest.raises(ConfigError, match="not a regular file"):
        acquire_run_lock(tmp_path)


LINK_NAMES = (
    ".config.yaml.partial",
    "wandb/.run_id.txt.partial",
    "rollouts",
    "checkpoints/step_000001/queue",
)


@pytest.mark.parametrize("name", LINK_NAMES)
@pytest.mark.parametrize("target", ["..", "nowhere", "absolute", "circle"])
def test_a_directory_with_a_link_to_the_outside_is_refused(tmp_path: Path, name: str, target: str):
    run_dir, link = tmp_path / "run", tmp_path / "run" / name
    link.parent.mkdir(parents=True)
    out = os.path.relpath(tmp_path, link.parent)
    targets = {"..": out, "nowhere": f"{out}/nowhere", "absolute": "/etc", "circle": link.name}
    link.symlink_to(targets[target])
    with pytest.raises(ConfigError, match=re.escape(f"{link} is a link to")):
        acquire_run_lock(run_dir)
    assert not (run_dir / LOCK_FILE).exists()


def test_links_inside_and_to_the_directory_are_allowed(tmp_path: Path):
    logs = tmp_path / "run/wandb/offline-run-1/logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to("/root/.cache/wandb/logs/core-debug.log")
    (tmp_path / "run/wandb/latest-run").symlink_to("offline-run-1")
    (tmp_path / "run/latest").symlink_to(tmp_path / "run" / "v1")
    (tmp_path / "link").symlink_to("run")
    acquire_run_lock(tmp_path / "link").release()


def test_a_folder_removed_during_the_link_check_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "checkpoints" / ".partial").mkdir(parents=True)
    scan = os.scandir

    def scan_and_remove(path: Path) -> Any:
        entries = list(scan(path))
        for entry in entries if Path(path).name == "checkpoints" else ():
            os.rmdir(entry.path)
        return entries

    monkeypatch.setattr("streamrl.run_dir.run_lock.os.scandir", scan_and_remove)
    check_links(tmp_path)
    assert not list((tmp_path / "checkpoints").iterdir())
