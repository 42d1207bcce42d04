"""A Ray instance of one run's own: on the loopback device, for those who have its token alone.

Ray lets everybody who reaches one of its ports run code as its user, unless it is told to ask for
a token. The token of an instance is drawn for it, and is in the environment of its processes alone:
workers, forked or not, and actors that Ray starts again inherit it from the raylet.
"""

import contextlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import node, parameter, services, utils
from ray._private.authentication.authentication_token_generator import (
    generate_new_authentication_token,
)
from ray._private.state import GlobalState
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from streamrl.actors.launch.fork_server import LAUNCHER_PATH, TOKEN_AUTH_ENV, is_serving
from streamrl.errors import ActorError

LOOPBACK = "127.0.0.1"
LOOPBACK_DEVICE_ENV = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Where the ranks of torch.distributed listen, unless the user has chosen another device."""
TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
NODE_TIMEOUT_S = 60.0
NODE_POLL_INTERVAL_S = 0.02
"""Longest wait for the node of an instance, and between two looks at it, s."""
MAX_SOCKET_PATH_BYTES = 107
"""Bytes that Linux has for the path of a socket."""
LONGEST_SOCKET_SUFFIX = "/ray/session_2000-01-01_00-00-00_000000_1000000/sockets/plasma_store"
"""What Ray appends to a directory to get the path of its longest socket."""


@contextlib.contextmanager
def start_local_ray(
    cpus: int, object_store_bytes: int, *, gpus: int | None = None
) -> Iterator[None]:
    """Start an instance, connect this process to it, and end it.

    Raises ActorError if it does not start.
    """
    folder = _make_private_folder()
    own = {name: os.environ.get(name, device) for name, device in LOOPBACK_DEVICE_ENV.items()}
    own |= {**TOKEN_AUTH_ENV, TOKEN_VARIABLE: generate_new_authentication_token()}
    # Ray prints a warning once there are four times as many processes as may start at once, by
    # default one per core. A run needs one per slot and a few more.
    at_once = max(os.cpu_count() or 1, -(-(cpus + 8) // 4))
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(at_once))
    with override_ray_environment(own):
        try:
            try:
                with _patch_lean_ray():
                    ray.init(
                        address="local",
                        num_cpus=cpus,
                        num_gpus=gpus,
                        include_dashboard=False,
                        log_to_driver=False,
                        logging_level=logging.ERROR,
                        object_store_memory=object_store_bytes,
                        _node_ip_address=LOOPBACK,
                        _temp_dir=str(folder / "ray"),
                    )
            except Exception as error:  # noqa: BLE001
                reason = " ".join(str(error).split())
                raise ActorError(f"Ray did not start: {reason}") from None
            yield
        finally:
            started = _find_ray_processes()
            ray.shutdown()
            # Ended while it starts, Ray would leave its agents for a minute.
            for process in started:
                with contextlib.suppress(psutil.Error):
                    process.kill()


@contextlib.contextmanager
def override_ray_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Have Ray, in this process and in those that it starts, go by these variables meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    _reload_environment()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _reload_environment()


def _reload_environment() -> None:
    """Have Ray read its settings and the token again, which it keeps from the first time on."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _make_private_folder() -> Path:
    """Return a directory of this user that nobody else may enter.

    Ray lets all users write into its own directories, those of the sockets among them, which ask
    for no token. Raises ActorError if the directory is another's, or open to others.
    """
    name = f"streamrl-{os.getuid()}"
    chosen = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    is_short = len(os.fsencode(f"{chosen}/{name}{LONGEST_SOCKET_SUFFIX}")) <= MAX_SOCKET_PATH_BYTES
    folder = Path(chosen if is_short else "/tmp", name)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ActorError(f"Ray did not start: {folder}: {error.strerror}") from None
    is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_ours or found.st_mode & 0o077:
        raise ActorError(
            f"Ray did not start: {folder} must be a directory that you alone may enter"
            " (chmod 700); remove it, or name another place in RAY_TMPDIR"
        )
    return folder


def _find_ray_processes() -> list[psutil.Process]:
    """Find the programs of Ray among the processes that descend from this one."""
    package, found = str(Path(ray.__file__).parent), []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(package in word for word in process.cmdline()):
                found.append(process)
    return found


@contextlib.contextmanager
def _patch_lean_ray() -> Iterator[None]:
    """Have Ray start only what a local instance needs, and workers from the fork server.

    No argument of `ray.init` leaves out the autoscaler's monitor, the log monitor, the head of the
    dashboard and the modules of its agent, which together keep a start waiting for seconds; and it
    takes an address of the loopback device for one of the machine's on the network.
    """
    changes: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False}
    if is_serving():
        changes["setup_worker_path"] = str(LAUNCHER_PATH)
    with (
        _patch_attribute(parameter, "RayParams", partial(parameter.RayParams, **changes)),
        _patch_attribute(node.Node, "start_api_server", _skip_api_server),
        _patch_attribute(
            utils, "get_dashboard_dependency_error", lambda: ImportError("no dashboard")
        ),
        _patch_attribute(services, "get_node", _wait_for_node),
        _patch_attribute(services, "resolve_ip_for_localhost", str),
    ):
        yield


def _skip_api_server(self: Any, **options: Any) -> None:
    self._webui_url = ""


def _wait_for_node(gcs_address: str, node_id: str) -> Any:
    """Return what is known of the node that was just started; Ray looks once a second."""
    state = GlobalState()
    state._initialize_global_state(services._get_gcs_client_options(gcs_address))
    deadline = time.monotonic() + NODE_TIMEOUT_S
    while not any(known["NodeID"] == node_id for known in state.node_table()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"its node has not registered within {NODE_TIMEOUT_S:g} s")
        time.sleep(NODE_POLL_INTERVAL_S)
    return state.get_node(node_id)


@contextlib.contextmanager
def _patch_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
