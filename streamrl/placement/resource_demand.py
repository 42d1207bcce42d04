"""Resources that a run requests from a cluster, and the check that the cluster has them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamrl.dataflow import ModelCall
from streamrl.errors import ConfigError

SHARED_SLOTS = "slots"
"""Role name of the demand for devices that several roles share."""


@dataclass(frozen=True)
class ResourceDemand:
    """Resources that `count` equal actors of a role request.

    role: name of the actors; `SHARED_SLOTS`, with no calls, for devices that several roles share.
    setting: config key that determines the count.
    cpus, gpus, memory_gib: per actor; memory is a lower bound of main memory.
    resting_bytes: of /dev/shm that all actors of a node fill together.
    is_in_shared_slot: the actor computes in a slot that `SHARED_SLOTS` requests, and requests no
      resources itself.
    """

    calls: Sequence[ModelCall]
    role: str
    setting: str
    count: int
    cpus: int = 1
    gpus: int = 0
    memory_gib: float = 0.0
    resting_bytes: int = 0
    is_in_shared_slot: bool = False

    @property
    def requested_cpus(self) -> int:
        return 0 if self.is_in_shared_slot else self.count * self.cpus

    @property
    def requested_gpus(self) -> int:
        return 0 if self.is_in_shared_slot else self.count * self.gpus


#: Demands of a run in one placement mode, or the reason why the mode is impossible.
PlacementOption = Sequence[ResourceDemand] | str


@dataclass(frozen=True)
class ClusterCapacity:
    """CPU slots, GPUs and main memory of a cluster; inf memory unless the Ray instance is local."""

    cpus: float
    gpus: float
    memory_gib: float = math.inf


@dataclass(frozen=True)
class PlacementDecision:
    """Placement mode chosen for a run; `note` explains a mode other than the first choice."""

    mode: str
    note: str = ""


def choose_mode(
    options: Mapping[str, PlacementOption], capacity: ClusterCapacity
) -> PlacementDecision:
    """Return the first placement mode whose demands fit the cluster.

    options: demands by mode, in order of preference.

    Raise ConfigError with the obstacle of each mode if no mode fits.
    """
    obstacles = {
        mode: option if isinstance(option, str) else describe_shortage(option, capacity)
        for mode, option in options.items()
    }
    first = next(iter(obstacles))
    for mode, obstacle in obstacles.items():
        if not obstacle:
            reason = f"{first} is impossible: {obstacles[first]}"
            return PlacementDecision(mode, "" if mode == first else f"placement: {mode} ({reason})")
    others = [f"; {mode} is impossible: {obstacles[mode]}" for mode in obstacles if mode != first]
    raise ConfigError(obstacles[first] + "".join(others))


def check_fits(demands: Sequence[ResourceDemand], capacity: ClusterCapacity) -> None:
    """Raise ConfigError that lists the demands if their sum exceeds the cluster's capacity."""
    if shortage := describe_shortage(demands, capacity):
        raise ConfigError(shortage)


def describe_shortage(demands: Sequence[ResourceDemand], capacity: ClusterCapacity) -> str:
    """Return the first resource that the demands exceed, with their sum; empty if all fit."""
    parts: dict[str, tuple[Sequence[float], float]] = {
        "CPU slots": ([d.requested_cpus for d in demands], capacity.cpus),
        "GPUs": ([d.requested_gpus for d in demands], capacity.gpus),
        "GiB of memory": ([d.count * d.memory_gib for d in demands], capacity.memory_gib),
    }
    for resource, (needs, available) in parts.items():
        if sum(needs) > available:
            terms = " + ".join(
                f"{need:.4g} for {d.count} {d.role} ({d.setting})"
                for d, need in zip(demands, needs, strict=True)
                if need
            )
            return (
                f"the run needs {sum(needs):.4g} {resource} = {terms};"
                f" the cluster has {available:.4g}"
            )
    return ""
