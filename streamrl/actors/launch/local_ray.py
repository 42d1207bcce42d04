"""Local Ray instance of a run: on the loopback device, protected by a token.

Without a token, Ray lets anyone who reaches one of its ports run code as its user. Each instance
has a random token that only its own processes see: workers, forked or not, and restarted actors
inherit the environment of the raylet.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import psutil
import ray
from ray._private import node, parameter, services, utils
from ray._private.authentication.authentication_token_generator import (
    generate_new_authentication_token,
)
from ray._private.state import GlobalState
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from streamrl.actors.launch.fork_server import LAUNCHER_PATH, TOKEN_AUTH_ENV, is_serving
from streamrl.distributed.devices import override_environment
from streamrl.errors import ActorError, get_message

LOOPBACK = "127.0.0.1"
LOOPBACK_DEVICE_ENV = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Network device of torch.distributed, unless the user has set another."""
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
RAY_SETTINGS = {
    # Relative to the command's; Ray's 15 would starve a run beside any busy program.
    "RAY_worker_niceness": "0",
    # An actor that ends would kill the reapers of its workers before they have killed the rest.
    "RAY_kill_child_processes_on_worker_exit": "false",
}
"""Settings of the local Ray, unless the user has set others."""
AGENT_CODE = (
    "import ctypes, os, runpy, sys; ctypes.CDLL(None).prctl(1, 9);"  # PR_SET_PDEATHSIG, SIGKILL
    " os.getppid() == int(os.environ['RAY_RAYLET_PID']) or os._exit(1);"
    " del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Program that runs an agent of Ray, and dies with the raylet instead of a minute later."""
NODE_TIMEOUT_S = 60.0
"""Longest wait for the node of a new instance to register."""
NODE_POLL_INTERVAL_S = 0.02
MAX_SOCKET_PATH_BYTES = 107
"""Linux's limit for the length of a Unix socket path."""
LONGEST_SOCKET_SUFFIX = "/ray/session_2000-01-01_00-00-00_000000_1000000/sockets/plasma_store"
"""Suffix that Ray appends to its temp directory for its longest socket path."""


@contextlib.contextmanager
def start_local_ray(
    cpus: int, object_store_bytes: int, *, gpus: int | None = None
) -> Iterator[None]:
    """Context that starts a local Ray instance, and shuts the instance down at the end.

    object_store_bytes: size of the object store. gpus: GPUs that Ray may use, all by default.

    Raises ActorError if the instance does not start.
    """
    folder = _make_private_folder() / "ray"
    defaults = {**LOOPBACK_DEVICE_ENV, **RAY_SETTINGS}
    env = {name: os.environ.get(name, value) for name, value in defaults.items()}
    env |= {**TOKEN_AUTH_ENV, TOKEN_VARIABLE: generate_new_authentication_token()}
    # Ray warns when processes exceed 4 * maximum_startup_concurrency (default: the cores). A run
    # needs a process per slot and about eight more.
    max_starting = max(os.cpu_count() or 1, -(-(cpus + 8) // 4))
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(max_starting))
    with override_ray_environment(env), _create_session(folder) as session:
        try:
            try:
                with _patch_lean_ray(session), defer_signals():
                    ray.init(
                        address="local",
                        num_cpus=cpus,
                        num_gpus=gpus,
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level=logging.ERROR,
                        object_store_memory=object_store_bytes,
                        _node_ip_address=LOOPBACK,
                        _temp_dir=str(folder),
                    )
            except Exception as error:  # noqa: BLE001
                raise ActorError(f"Ray did not start: {get_message(error)}") from None
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def override_ray_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context that sets environment variables for Ray, here and in processes that Ray starts."""
    try:
        with override_environment(variables):
            _reload_environment()
            yield
    finally:
        _reload_environment()


def _reload_environment() -> None:
    """Make Ray read its settings and its token from the environment again; Ray caches both."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _make_private_folder() -> Path:
    """Return a directory that only this user may enter.

    Ray makes its own directories world-writable, including those of its sockets, which check no
    token. Raises ActorError if the directory belongs to another user or is accessible to others.
    """
    name = f"streamrl-{os.getuid()}"
    temp_root = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    is_short = (
        len(os.fsencode(f"{temp_root}/{name}{LONGEST_SOCKET_SUFFIX}")) <= MAX_SOCKET_PATH_BYTES
    )
    folder = Path(temp_root if is_short else "/tmp", name)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ActorError(f"Ray did not start: {folder}: {error.strerror}") from None
    is_own_directory = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own_directory or status.st_mode & 0o077:
        raise ActorError(
            f"Ray did not start: {folder} must be a directory that only you may enter"
            " (chmod 700); remove it, or set RAY_TMPDIR to another directory"
        )
    return folder


@contextlib.contextmanager
def _create_session(folder: Path) -> Iterator[str]:
    """Context with the name of a new Ray session, whose directory in `folder` is locked.

    Removes the directories of sessions whose command has ended. The kernel drops the lock with the
    command, however it ends, and shows it in other containers, where the command has no pid.
    """
    folder.mkdir(exist_ok=True)
    for session in folder.glob("session_*_[0-9]*"):
        if not psutil.pid_exists(int(session.name.rpartition("_")[2])):
            with contextlib.suppress(OSError), _open_directory(session) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(session)
    # Locked before another command finds the directory by its name.
    created = Path(tempfile.mkdtemp(dir=folder))
    with _open_directory(created) as file:
        with contextlib.suppress(OSError):  # NFS locks no directory, so nobody removes one there
            fcntl.flock(file, fcntl.LOCK_EX)
        name = f"session_{datetime.now():%Y-%m-%d_%H-%M-%S_%f}_{os.getpid()}"
        yield created.rename(folder / name).name


@contextlib.contextmanager
def _open_directory(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield file
    finally:
        os.close(file)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Context of `ray.init`: the first SIGINT, SIGTERM or SIGHUP takes effect at its end.

    If it is interrupted halfway, Ray crashes this process at its exit. Ray's own handler of SIGTERM
    would exit at once. New processes never get SIGHUP, which a closed terminal sends to all: the
    command needs Ray's for an orderly stop.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            handlers.close()

    def deliver() -> None:
        if received:
            signal.raise_signal(received[0])

    with contextlib.ExitStack() as handlers:
        handlers.callback(deliver)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        handlers.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        handlers.enter_context(
            mock.patch.object(utils, "set_sigterm_handler", lambda handler: None)
        )
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                handlers.callback(signal.signal, number, signal.signal(number, receive))
        yield


@contextlib.contextmanager
def _patch_lean_ray(session: str) -> Iterator[None]:
    """Context in which `ray.init` starts only the processes that a local instance needs.

    Workers come from the fork server. `ray.init` has no arguments to disable the autoscaler's
    monitor, the log monitor, the dashboard head and the agent's modules, which delay the start by
    seconds. `ray.init` also replaces a loopback address by the machine's network address.
    """
    changes: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False}
    changes["session_name"] = session
    if is_serving():
        changes["setup_worker_path"] = str(LAUNCHER_PATH)
    with (
        mock.patch.object(parameter, "RayParams", partial(parameter.RayParams, **changes)),
        mock.patch.object(node.Node, "start_api_server", _skip_api_server),
        mock.patch.object(
            services,
            "_build_python_executable_command_memory_profileable",
            lambda *arguments: [sys.executable, "-u", "-c", AGENT_CODE],
        ),
        mock.patch.object(
            utils, "get_dashboard_dependency_error", lambda: ImportError("no dashboard")
        ),
        mock.patch.object(services, "get_node", _wait_for_node),
        mock.patch.object(services, "resolve_ip_for_localhost", str),
    ):
        yield


def _skip_api_server(self: Any, **options: Any) -> None:
    """Do nothing, in place of the method of Ray that starts the dashboard."""
    self._webui_url = ""


def _wait_for_node(gcs_address: str, node_id: str) -> Any:
    """Return Ray's record of a new node as soon as the node has registered.

    Replaces Ray's own function, which polls only once a second.
    """
    state = GlobalState()
    state._initialize_global_state(services._get_gcs_client_options(gcs_address))
    deadline = time.monotonic() + NODE_TIMEOUT_S
    while not any(record["NodeID"] == node_id for record in state.node_table()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"its node has not registered within {NODE_TIMEOUT_S:g} s")
        time.sleep(NODE_POLL_INTERVAL_S)
    return state.get_node(node_id)
