"""Ray cluster of a run: an existing cluster at an address, or a local instance."""

import contextlib
import logging
import os
import platform
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RayError

from streamrl.actors.launch.fork_server import stop_fork_server
from streamrl.actors.launch.local_ray import defer_signals, start_local_ray
from streamrl.distributed.devices import check_device, count_local_gpus, use_device
from streamrl.engines.vllm.environment import MODEL_RUNNERS
from streamrl.errors import ConfigError, get_message
from streamrl.files.typed_settings import describe_read_error
from streamrl.placement.config import PlacementConfig
from streamrl.placement.resource_demand import (
    ClusterCapacity,
    PlacementDecision,
    PlacementOption,
    choose_mode,
)

GIB = 1 << 30
NO_TOKEN_MESSAGE = (
    "the cluster requires a token, and neither RAY_AUTH_TOKEN nor RAY_AUTH_TOKEN_PATH holds it:"
    " set one of them and RAY_AUTH_MODE=token, as on the machine that started Ray"
)
CONNECT_TIMEOUT_S = 10.0


#: Maps "has GPUs" to the possible placement modes, best first.
PlacementOptionsFactory = Callable[[bool], Mapping[str, PlacementOption]]


@dataclass(frozen=True)
class RayContext:
    """Connected Ray cluster of a run: whether it has GPUs, and the chosen placement mode."""

    has_gpus: bool
    placement: PlacementDecision

    @property
    def machine_facts(self) -> dict[str, int | bool | str]:
        """Facts that a run records: GPUs, live nodes, cores of this machine, placement mode.

        Also vLLM's model runner, whose sampler decides which tokens a seed gives, and processor and
        version of torch, which decide how sums are rounded.
        """
        nodes = sum(bool(node["Alive"]) for node in ray.nodes())
        cores = len(os.sched_getaffinity(0))
        return {
            "on_gpu": self.has_gpus,
            "nodes": nodes,
            "cores": cores,
            "placement": self.placement.mode,
            "model_runner": MODEL_RUNNERS["cuda" if self.has_gpus else "cpu"],
            "processor": read_processor_name(),
            "torch": version("torch"),
        }


def read_processor_name() -> str:
    names = re.findall(r"^model name\s*: (.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return names[0] if names else platform.machine()


def list_no_actors(on_gpu: bool) -> Mapping[str, PlacementOption]:
    """Return disaggregated placement as the only option, without actors that need devices."""
    return {"disaggregated": ()}


@contextlib.contextmanager
def connect_cluster(
    placement: PlacementConfig, make_options: PlacementOptionsFactory = list_no_actors
) -> Iterator[RayContext]:
    """Context that connects to a Ray cluster or starts a local instance.

    make_options: maps "has GPUs" to the possible placement modes, of which the best that fits is
    chosen.

    Raises ConfigError if the cluster is unreachable or too small for every mode.
    """
    # Makes Ray hide GPUs from actors that request none; Ray leaves them visible by default.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    with (
        _connect_address(placement.address)
        if placement.address
        else _start_instance(placement, make_options)
    ):
        resources = ray.cluster_resources()
        gpus = resources.get("GPU", 0)
        with use_device(on_gpu=gpus > 0):
            if not placement.address:
                check_device()  # Ray and torch count the GPUs of this machine
            capacity = ClusterCapacity(resources.get("CPU", 0), gpus)
            yield RayContext(gpus > 0, choose_mode(make_options(gpus > 0), capacity))


def get_object_store_bytes() -> list[float]:
    """Return the size of each node's object store, bytes."""
    alive = (node["Resources"] for node in ray.nodes() if node["Alive"])
    return [float(resources.get("object_store_memory", 0.0)) for resources in alive]


@contextlib.contextmanager
def _start_instance(
    placement: PlacementConfig, make_options: PlacementOptionsFactory
) -> Iterator[None]:
    """Context that starts a local Ray instance; ConfigError if the machine is too small."""
    gpus = count_local_gpus()
    options = make_options(gpus > 0)
    best = next(iter(options.values()))
    needed = [] if isinstance(best, str) else [demand.requested_cpus for demand in best]
    cpus = placement.cpus or max(sum(needed), os.cpu_count() or 1)
    choose_mode(options, ClusterCapacity(cpus, gpus, psutil.virtual_memory().total / GIB))
    with start_local_ray(cpus, placement.object_store_mb << 20):
        yield


@contextlib.contextmanager
def _connect_address(address: str) -> Iterator[None]:
    """Context that connects to the Ray cluster at an address.

    The cluster decides whether a client needs a token.
    """
    # The nodes of the cluster start the workers, so the local fork server is useless.
    stop_fork_server()
    _check_reachable(address)
    try:
        try:
            with defer_signals():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (RayError, ConnectionError, ValueError, RuntimeError) as error:
            reason = get_message(error)
            if AuthenticationError.__name__ in f"{type(error).__name__} {error.__cause__}":
                reason = NO_TOKEN_MESSAGE
            raise ConfigError(f"placement.address={address}: {reason}") from None
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise ConfigError if host:port refuses connections; `ray.init` would retry for long."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        reason = describe_read_error(error)
        raise ConfigError(f"placement.address={address}: {reason}") from None
    try:
        GcsClient(address=f"{host}:{port}")
    except AuthenticationError:
        raise ConfigError(f"placement.address={address}: {NO_TOKEN_MESSAGE}") from None
    except (RayError, RuntimeError):
        return  # ray.init reports any other problem
