"""Local Ray instance: its token, its directory and its ports."""

import fcntl
import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from streamrl.actors.launch.fork_server import TOKEN_AUTH_ENV
from streamrl.actors.launch.local_ray import (
    LONGEST_SOCKET_SUFFIX,
    MAX_SOCKET_PATH_BYTES,
    TOKEN_VARIABLE,
    _create_session,
    _make_private_folder,
    defer_signals,
    override_ray_environment,
)
from streamrl.errors import ActorError
from tests.e2e.outside import list_addresses


@pytest.fixture
def ray_tmpdir(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """Directory for Ray with a short path, set as RAY_TMPDIR."""
    folder = Path("/tmp", f"streamrl-test-{os.getpid()}")
    folder.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    yield folder
    for entry in folder.iterdir():
        entry.unlink() if entry.is_symlink() or entry.is_file() else entry.rmdir()
    folder.rmdir()


def test_rays_directory_is_accessible_to_its_user_only(ray_tmpdir: Path):
    before = os.umask(0)
    try:
        folder = _make_private_folder()
    finally:
        os.umask(before)
    assert folder == ray_tmpdir / f"streamrl-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert _make_private_folder() == folder


@pytest.mark.parametrize("case", ["open", "link", "file"])
def test_a_directory_of_or_accessible_to_other_users_is_refused(ray_tmpdir: Path, case: str):
    folder = ray_tmpdir / f"streamrl-{os.getuid()}"
    if case == "open":
        folder.mkdir()
        folder.chmod(0o755)
    elif case == "link":
        (ray_tmpdir / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(ray_tmpdir / "elsewhere")
    else:
        folder.touch()
    with pytest.raises(ActorError) as caught:
        _make_private_folder()
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_the_directory_is_in_tmp_if_socket_paths_would_be_too_long(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + "x" * 60)
    folder = _make_private_folder()
    assert folder.parent == Path("/tmp")
    assert len(f"{folder}{LONGEST_SOCKET_SUFFIX}") <= MAX_SOCKET_PATH_BYTES
    monkeypatch.setenv("RAY_TMPDIR", "/nowhere")
    with pytest.raises(ActorError, match=r"^Ray did not start: /nowhere/streamrl-\d+: No such"):
        _make_private_folder()


def test_the_users_ray_environment_is_restored(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv(TOKEN_VARIABLE, "of a cluster")
    with override_ray_environment({**TOKEN_AUTH_ENV, TOKEN_VARIABLE: "own", "STREAMRL_TEST": "1"}):
        assert (os.environ["RAY_AUTH_MODE"], os.environ[TOKEN_VARIABLE]) == ("token", "own")
    assert (os.environ["RAY_AUTH_MODE"], os.environ[TOKEN_VARIABLE]) == ("disabled", "of a cluster")
    assert "STREAMRL_TEST" not in os.environ


@pytest.mark.parametrize("is_failing", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_start_is_interrupted_at_its_end_even_if_it_fails(number: int, is_failing: bool):
    raise_handled = signal.default_int_handler
    before = {
        n: signal.signal(n, raise_handled) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    reached = False
    try:
        with pytest.raises(KeyboardInterrupt), defer_signals():
            signal.raise_signal(number)
            reached = True
            if is_failing:
                raise RuntimeError("no node")
        with pytest.raises(KeyboardInterrupt), defer_signals():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            pytest.fail("a second signal waits for nothing")
        assert [signal.getsignal(n) for n in before] == [raise_handled] * 3
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    assert reached


def test_sessions_of_ended_commands_are_removed_and_no_others(tmp_path: Path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = {
        who: f"session_2026-01-01_00-00-0{i}_000000_{pid}"
        for i, (who, pid) in enumerate(
            {"ended": ended.pid, "alive": os.getppid(), "container": ended.pid}.items()
        )
    }
    for name in (*names.values(), "session_of_a_person", "other"):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs" / "raylet.out").write_text("log")
    (tmp_path / "session_latest").symlink_to(tmp_path / names["ended"])
    # A command whose pid means nothing here, as in another container, holds its lock.
    lock = os.open(tmp_path / names["container"], os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with _create_session(tmp_path) as first, _create_session(tmp_path) as second:
            kept = {names["alive"], names["container"], "session_of_a_person", "other"}
            found = {path.name for path in tmp_path.iterdir()} - {"session_latest"}
            assert found == {*kept, first, second}
    finally:
        os.close(lock)


class Listing:
    """Actor that reports the token, address, listening sockets and niceness of its process."""

    def look(self) -> tuple[str | None, str, list[str], int]:
        address = ray.util.get_node_ip_address()
        sockets = list_addresses(psutil.Process())
        return os.environ.get(TOKEN_VARIABLE), address, sockets, os.nice(0)


def command_of(process: psutil.Process) -> str:
    """Return the command line of a process; empty if it has exited."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def blocks_sighup(process: psutil.Process) -> bool:
    (blocked,) = re.findall(r"SigBlk:\t(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return bool(int(blocked, 16) >> (signal.SIGHUP - 1) & 1)


@pytest.mark.usefixtures("local_ray")
def test_an_instance_listens_on_loopback_only_and_its_workers_have_its_token_and_niceness():
    actor: Any = ray.remote(num_cpus=0)(Listing).remote()
    token, address, addresses, niceness = ray.get(actor.look.remote(), timeout=60.0)
    assert niceness == os.nice(0)
    assert token == os.environ[TOKEN_VARIABLE] and len(token) == 64
    assert address == "127.0.0.1"
    started = psutil.Process().children(recursive=True)
    addresses += [listening for process in started for listening in list_addresses(process)]
    assert len(addresses) > 3
    assert {listening.rpartition(":")[0] for listening in addresses} == {"127.0.0.1"}
    assert not [process for process in started if token in command_of(process)]
    servers = [p for p in started if {"raylet", "gcs_server"} & {Path(p.exe()).name}]
    assert len(servers) == 2 and all(map(blocks_sighup, servers)), "a closed terminal ends neither"
