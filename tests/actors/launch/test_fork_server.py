"""Fork server: state of a forked worker, and when Ray starts a worker instead."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from streamrl.actors.launch.fork_server import (
    FORK_VARIABLE,
    MAX_OPEN_FILES,
    _is_forkable,
)
from streamrl.actors.launch.launch_worker import (
    LEVEL_VARIABLE,
    SOCKETS_VARIABLE,
    fork_worker,
    is_same_user,
    make_socket_address,
)
from streamrl.engines.vllm.environment import make_vllm_env

# A command with two light levels; the second imports under X=1. The command itself has a thread.
COMMAND = """
import sys, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
from streamrl.actors.launch import fork_server
from streamrl.actors.launch.fork_server import ForkLevel
base = ForkLevel("base", "", ("numpy",))
second = ForkLevel("second", "base", ("wave",), {"X": "1"})
broken = ForkLevel("broken", "base", ("no_such_module",))
draws = ForkLevel("draws", "base", ("draws_an_id",))
threads = ForkLevel("threads", "base", ("starts_a_thread",))
fork_server.start_fork_server([base, second, broken, draws, threads])
print(fork_server.describe_refusal(), flush=True)
import os
print(os.environ.get("STREAMRL_FORK_SERVER"), flush=True)
time.sleep(600)
"""
WORKER = """
import gc, json, os, resource, signal, subprocess, sys
import numpy
state = {
    "argv": sys.argv[1:], "cwd": os.getcwd(), "name": __name__, "Y": os.environ.get("Y"),
    "has_module": "wave" in sys.modules, "draw": float(numpy.random.random()),
    "leads_its_group": os.getpgid(0) == os.getpid(), "parent": os.getppid(), "pid": os.getpid(),
    "session": os.getsid(0), "collects": gc.isenabled(),
    "waits": subprocess.run(["sh", "-c", "exit 3"]).returncode == 3,
    "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
}
with open(sys.argv[1], "w") as file:
    json.dump(state, file)
if "stay" in sys.argv:
    import time
    time.sleep(60)
"""


@contextmanager
def start_command(
    code: str = COMMAND, **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a command with a fork server; yield it with the name of its sockets."""
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "\n", "the levels did not start"
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def served_sockets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Sockets of a command whose levels also import a module of its own."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / "draws_an_id.py").write_text("import ray; ray.ObjectID.from_random()")
    (folder / "starts_a_thread.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    # A user's number of threads must not prevent forking.
    with start_command(PYTHONPATH=str(folder), OMP_NUM_THREADS="2") as (_, sockets):
        yield sockets


@pytest.fixture
def command(served_sockets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `fork_worker` find the command of this file."""
    monkeypatch.setenv(SOCKETS_VARIABLE, served_sockets)


@pytest.fixture
def worker(tmp_path: Path) -> str:
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return str(path)


def fork(worker: str, *words: str, env: dict[str, str] | None = None, **context) -> bool:
    """Request a fork as Ray would; return whether there is one."""
    serialized = json.dumps({"env_vars": env or {}, **context})
    options = ["--language=PYTHON", f"--serialized-runtime-env-context={serialized}"]
    return fork_worker([worker, *options, *words])


def read_worker_state(path: Path) -> dict:
    deadline = time.monotonic() + 30
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline, "the worker wrote nothing in 30 s"
        time.sleep(0.01)
    time.sleep(0.05)
    return json.loads(path.read_text())


def test_a_forked_worker_has_its_launchers_arguments_environment_and_directory(
    command, worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "state.json"
    assert fork(worker, str(out), env={"Y": "why"})
    state = read_worker_state(out)
    assert state["argv"] == [str(out)], "options of Ray's setup script are removed"
    assert state["cwd"] == str(tmp_path)
    assert state["name"] == "__main__"
    assert state["Y"] == "why"
    assert state["leads_its_group"], "Ray kills child processes of a worker by its process group"
    assert state["session"] != os.getsid(0), "Ctrl-C in the terminal reaches only the command"
    assert state["collects"]
    assert state["waits"], "the worker gets the exit codes of its children"
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert state["open_files"] >= min(max_files, MAX_OPEN_FILES)


def test_a_worker_is_forked_from_its_level_with_its_own_random_state(
    command, worker: str, tmp_path: Path
):
    draws = []
    for i, level in enumerate(["base", "second", "second"]):
        out = tmp_path / f"{i}.json"
        env = {LEVEL_VARIABLE: level, "X": "1"}
        assert fork(worker, str(out), env=env)
        state = read_worker_state(out)
        assert state["has_module"] == (level == "second")
        draws.append(state["draw"])
    assert len(set(draws)) == 3


LEFT_TO_RAY: dict[str, tuple[dict[str, str], dict]] = {
    "other environment": ({LEVEL_VARIABLE: "second", "X": "2"}, {}),
    "cannot import": ({LEVEL_VARIABLE: "broken"}, {}),
    "no level": ({LEVEL_VARIABLE: "none"}, {}),
    "draws ids": ({LEVEL_VARIABLE: "draws"}, {}),
    "has a thread": ({LEVEL_VARIABLE: "threads"}, {}),
    "python": ({}, {"py_executable": "python-of-a-container"}),
    "prefix": ({}, {"command_prefix": ["nsys"]}),
}


@pytest.mark.parametrize(("env", "context"), LEFT_TO_RAY.values(), ids=LEFT_TO_RAY)
def test_a_worker_with_other_requirements_is_left_to_ray(
    command, worker: str, tmp_path: Path, env: dict[str, str], context: dict
):
    assert not fork(worker, str(tmp_path / "x"), env=env, **context)
    assert not (tmp_path / "x").exists()


def test_a_level_with_a_cuda_context_does_not_fork(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("streamrl.actors.launch.fork_server.os.listdir", lambda path: ["1"])
    assert _is_forkable()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not _is_forkable()


def test_a_level_refuses_other_users(
    command, worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Connect as another user, or pretend to be another user where that is impossible."""
    sockets, out = os.environ[SOCKETS_VARIABLE], tmp_path / "state.json"
    server_end, client_end = socket.socketpair()
    with server_end, client_end, monkeypatch.context() as patch:
        assert is_same_user(server_end)
        patch.setattr(os, "getuid", lambda: 12345)
        assert not is_same_user(server_end)
        assert not fork(worker, str(out))
    if os.geteuid() == 0:
        done = subprocess.run(
            ["/usr/bin/python3", "-c", STRANGER, make_socket_address(sockets, "base")[1:]],
            user=NOBODY,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        assert done.stdout == "hung up\n"
    assert not out.exists()
    assert fork(worker, str(out)), "the level still serves its user"


NOBODY = 65534
STRANGER = """
import json, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect("\\0" + sys.argv[1])
    connection.settimeout(20)
    request = {"argv": ["-"], "env": {}, "cwd": "/"}
    # The level may hang up before the first byte or after it.
    try:
        socket.send_fds(connection, [b"f"], (0, 1, 2))
        connection.sendall(json.dumps(request).encode() + b"\\n")
        answer = connection.recv(1)
    except ConnectionError:
        answer = b""
print(answer or "hung up")
"""


def test_a_launcher_sends_no_request_to_another_users_socket(
    worker: str, monkeypatch: pytest.MonkeyPatch
):
    """Any user may bind the abstract socket name of a dead level."""
    name = f"streamrl-test-{os.getpid()}"
    monkeypatch.setenv(SOCKETS_VARIABLE, name)
    with socket.socket(socket.AF_UNIX) as squatter:
        squatter.bind(make_socket_address(name, "base"))
        squatter.listen()
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert not fork(worker)
        connection, _ = squatter.accept()
        with connection:
            assert connection.recv(1) == b""


def test_without_a_fork_server_a_worker_is_left_to_ray(
    worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(SOCKETS_VARIABLE, raising=False)
    assert not fork(worker)
    monkeypatch.setenv(SOCKETS_VARIABLE, str(tmp_path / "gone"))
    assert not fork(worker)


@pytest.mark.parametrize("sent_signal", [signal.SIGKILL, signal.SIGTERM])
def test_levels_and_workers_die_with_the_command(
    worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent_signal: signal.Signals
):
    out = tmp_path / "state.json"
    with start_command() as (command, sockets):
        monkeypatch.setenv(SOCKETS_VARIABLE, sockets)
        assert fork(worker, str(out), "stay")
        state = read_worker_state(out)
        started = psutil.Process(command.pid).children(recursive=True)
        assert {state["pid"], state["parent"]} <= {process.pid for process in started}
        command.send_signal(sent_signal)
        command.wait(10)
        _, alive = psutil.wait_procs(started, timeout=10)
        assert not alive


def run_command(code: str, **variables: str) -> list[str]:
    """Return the lines that a command prints if it exits before its sleep."""
    env = {name: value for name, value in os.environ.items() if name != SOCKETS_VARIABLE}
    code = code.replace("time.sleep(600)", "")
    words = [sys.executable, "-c", code]
    return subprocess.check_output(
        words, env={**env, **variables}, text=True, timeout=120
    ).splitlines()


def test_a_failed_start_of_the_levels_is_a_note(monkeypatch: pytest.MonkeyPatch):
    none = "import sys; sys.executable = 'no-such-python'\n"
    reason, sockets = run_command(none + COMMAND)
    assert reason.startswith("workers start slowly, each importing its own libraries: ")
    assert "no-such-python" in reason
    assert sockets == "None"


def test_dead_levels_are_a_note_and_can_be_restarted():
    restarts = (
        "import os, signal\n"
        "first = fork_server._server_state.process\n"
        "os.kill(first.pid, signal.SIGKILL); first.wait()\n"
        "print(fork_server.describe_refusal())\n"
        "fork_server.start_fork_server([base])\n"
        "print(fork_server.is_serving(), fork_server._server_state.process is not first)\n"
    )
    *_, reason, restarted = run_command(COMMAND + restarts)
    assert reason.endswith("the fork server exited with code -9")
    assert restarted == "True True"


def test_a_command_without_a_fork_server_does_not_use_that_of_an_enclosing_one():
    around = {SOCKETS_VARIABLE: "streamrl-of-another", FORK_VARIABLE: "0"}
    assert run_command(COMMAND, **around) == ["", "None"]


@pytest.mark.slow
def test_forks_of_a_level_draw_distinct_ray_ids():
    code = (
        "from streamrl.actors.launch import fork_server\n"
        "for level in fork_server.FORK_LEVELS: fork_server._import_modules(level)\n"
        "print(fork_server._draws_unique_ids())\n"
        "import ray; ray.remote(int)\n"
        "print(fork_server._draws_unique_ids())\n"
    )
    assert run_command(code, **make_vllm_env("cpu"))[-2:] == ["True", "False"]
