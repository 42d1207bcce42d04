"""The Ray cluster a run uses: an existing one by address, or a local instance of its own."""

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import psutil
import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RayError

from streamrl.actors.launch.fork_server import stop_fork_server
from streamrl.actors.launch.local_ray import start_local_ray
from streamrl.errors import ConfigError
from streamrl.placement import (
    ClusterCapacity,
    PlacementConfig,
    PlacementDecision,
    PlacementOption,
    choose_mode,
    sum_cpus,
)

GIB = 1 << 30
NO_TOKEN_MESSAGE = (
    "the cluster asks for a token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH does not hold it:"
    " set one of them, and RAY_AUTH_MODE=token, as where Ray was started"
)
CONNECT_TIMEOUT_S = 10.0
"""Longest wait for a cluster's address to answer, s."""


#: Each mode a run may be placed in, best first, given whether there are GPUs.
PlacementOptionsFactory = Callable[[bool], Mapping[str, PlacementOption]]


@dataclass(frozen=True)
class RayContext:
    """Where a run has come to: whether there are GPUs, and how it is placed."""

    has_gpus: bool
    placement: PlacementDecision

    @property
    def machine_facts(self) -> dict[str, int | bool | str]:
        """What it runs on: whether there are GPUs, how many nodes, this one's cores, and how."""
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        cores = len(os.sched_getaffinity(0))
        return {
            "on_gpu": self.has_gpus,
            "nodes": nodes,
            "cores": cores,
            "placement": self.placement.mode,
        }


def disaggregated_only(on_gpu: bool) -> Mapping[str, PlacementOption]:
    """For who takes no actors of a run."""
    return {"disaggregated": ()}


@contextlib.contextmanager
def connect_cluster(
    placement: PlacementConfig, ways: PlacementOptionsFactory
) -> Iterator[RayContext]:
    """Connect to a cluster or start a local one; disconnects at the end.

    Raises ConfigError if the cluster cannot be reached, or cannot hold the run in any of its ways.
    """
    # Ray hides the GPUs from actors that ask for none only if told so.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    with (
        _connect_address(placement.address)
        if placement.address
        else _start_instance(placement, ways)
    ):
        have = ray.cluster_resources()
        gpus = have.get("GPU", 0)
        yield RayContext(
            gpus > 0, choose_mode(ways(gpus > 0), ClusterCapacity(have.get("CPU", 0), gpus))
        )


def get_object_store_bytes() -> list[float]:
    """Size of each node's object store, bytes."""
    alive = (node["Resources"] for node in ray.nodes() if node["Alive"])
    return [float(resources.get("object_store_memory", 0.0)) for resources in alive]


@contextlib.contextmanager
def _start_instance(placement: PlacementConfig, ways: PlacementOptionsFactory) -> Iterator[None]:
    """An instance of the run's own, unless it cannot hold the run."""
    wanted = ways(False)
    best = next(iter(wanted.values()))
    most = 0 if isinstance(best, str) else sum_cpus(best)
    cpus = placement.cpus or max(most, os.cpu_count() or 1)
    choose_mode(wanted, ClusterCapacity(cpus, 0, psutil.virtual_memory().total / GIB))
    with start_local_ray(cpus, placement.object_store_mb << 20):
        yield


@contextlib.contextmanager
def _connect_address(address: str) -> Iterator[None]:
    """The cluster at an address, which decides whether it asks for a token, and for which."""
    # Its own nodes start the workers.
    stop_fork_server()
    _check_reachable(address)
    try:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (RayError, ConnectionError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            if AuthenticationError.__name__ in f"{type(error).__name__} {error.__cause__}":
                reason = NO_TOKEN_MESSAGE
            raise ConfigError(f"placement.address={address}: {reason}") from None
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise ConfigError if nobody at host:port lets this process in: Ray itself would try on."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"placement.address={address}: {reason}") from None
    try:
        GcsClient(address=f"{host}:{port}")
    except AuthenticationError:
        raise ConfigError(f"placement.address={address}: {NO_TOKEN_MESSAGE}") from None
    except (RayError, RuntimeError):
        return  # whatever it is, `ray.init` will say it
