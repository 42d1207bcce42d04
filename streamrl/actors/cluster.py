"""The Ray cluster a run uses: an existing one by address, or a local instance of its own."""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import node, parameter, services, utils
from ray._private.state import GlobalState
from ray.exceptions import RayError

from streamrl.actors.fork_server import LAUNCHER, LOCAL_RAY_ENV, is_serving, stop_fork_server
from streamrl.errors import ActorError, ConfigError
from streamrl.placement import (
    Capacity,
    PlacementConfig,
    Settled,
    Way,
    settle,
    total_cpus,
)

GIB = 1 << 30
CONNECT_S = 10.0
"""Longest wait for a cluster's address to answer, s."""
NODE_S = 60.0
NODE_POLL_S = 0.02
"""Longest wait for the node of a local instance, and between two looks at it, s."""


#: Each mode a run may be placed in, best first, given whether there are GPUs.
Ways = Callable[[bool], Mapping[str, Way]]


@dataclass(frozen=True)
class Site:
    """Where a run has come to: whether there are GPUs, and how it is placed."""

    on_gpu: bool
    placed: Settled

    @property
    def machine(self) -> dict[str, int | bool | str]:
        """What it runs on: whether there are GPUs, how many nodes, this one's cores, and how."""
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        cores = len(os.sched_getaffinity(0))
        return {
            "on_gpu": self.on_gpu,
            "nodes": nodes,
            "cores": cores,
            "placement": self.placed.mode,
        }


def nothing(on_gpu: bool) -> Mapping[str, Way]:
    """For who takes no actors of a run."""
    return {"disaggregated": ()}


@contextlib.contextmanager
def cluster(placement: PlacementConfig, ways: Ways) -> Iterator[Site]:
    """Connect to a cluster or start a local one; disconnects at the end.

    Raises ConfigError if the cluster cannot be reached, or cannot hold the run in any of its ways.
    """
    # Ray hides the GPUs from actors that ask for none only if told so.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    try:
        if placement.address:
            _connect(placement.address)
        else:
            wanted = ways(False)
            best = next(iter(wanted.values()))
            most = 0 if isinstance(best, str) else total_cpus(best)
            cpus = placement.cpus or max(most, os.cpu_count() or 1)
            settle(wanted, Capacity(cpus, 0, psutil.virtual_memory().total / GIB))
            _start_local(cpus, placement.object_store_mb << 20)
        have = ray.cluster_resources()
        gpus = have.get("GPU", 0)
        yield Site(gpus > 0, settle(ways(gpus > 0), Capacity(have.get("CPU", 0), gpus)))
    finally:
        started = [] if placement.address else _started_by_ray()
        ray.shutdown()
        # Ended while it starts, Ray would leave its agents for a minute.
        for process in started:
            with contextlib.suppress(psutil.Error):
                process.kill()


def node_stores() -> list[float]:
    """Size of each node's object store, bytes."""
    alive = (node["Resources"] for node in ray.nodes() if node["Alive"])
    return [float(resources.get("object_store_memory", 0.0)) for resources in alive]


def _connect(address: str) -> None:
    # Its own nodes start the workers.
    stop_fork_server()
    _check_reachable(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"placement.address={address}: {reason}") from None


def _check_reachable(address: str) -> None:
    """Raise ConfigError if nobody listens at host:port: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"placement.address={address}: {reason}") from None


def _start_local(cpus: int, object_store_bytes: int) -> None:
    for name, value in LOCAL_RAY_ENV.items():
        os.environ.setdefault(name, value)
    # Ray prints a warning once there are four times as many processes as may start at once, by
    # default one per core. A run needs one per slot and a few more.
    at_once = max(os.cpu_count() or 1, -(-(cpus + 8) // 4))
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", str(at_once))
    try:
        with _lean_ray():
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=object_store_bytes,
            )
    except Exception as error:  # noqa: BLE001
        raise ActorError(f"Ray did not start: {' '.join(str(error).split())}") from None


def _started_by_ray() -> list[psutil.Process]:
    """Find the programs of Ray among the processes that descend from this one."""
    package, found = str(Path(ray.__file__).parent), []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(package in word for word in process.cmdline()):
                found.append(process)
    return found


@contextlib.contextmanager
def _lean_ray() -> Iterator[None]:
    """Have Ray start only what a local instance needs, and workers from the fork server.

    No argument of `ray.init` leaves out the autoscaler's monitor, the log monitor, the head of the
    dashboard and the modules of its agent, which together keep a start waiting for seconds.
    """
    changes: dict[str, Any] = {"no_monitor": True, "include_log_monitor": False}
    if is_serving():
        changes["setup_worker_path"] = str(LAUNCHER)
    with (
        _replaced(parameter, "RayParams", partial(parameter.RayParams, **changes)),
        _replaced(node.Node, "start_api_server", _start_no_api_server),
        _replaced(utils, "get_dashboard_dependency_error", lambda: ImportError("no dashboard")),
        _replaced(services, "get_node", _wait_for_node),
    ):
        yield


def _start_no_api_server(self: Any, **options: Any) -> None:
    self._webui_url = ""


def _wait_for_node(gcs_address: str, node_id: str) -> Any:
    """Return what is known of the node that was just started; Ray looks once a second."""
    state = GlobalState()
    state._initialize_global_state(services._get_gcs_client_options(gcs_address))
    deadline = time.monotonic() + NODE_S
    while not any(known["NodeID"] == node_id for known in state.node_table()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"its node has not registered within {NODE_S:g} s")
        time.sleep(NODE_POLL_S)
    return state.get_node(node_id)


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
