"""What a run asks of a cluster, as data, and the check that it fits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamrl.dataflow import ModelCall
from streamrl.errors import ConfigError

SHARED_SLOTS = "slots"
"""What asks for the devices of roles that share them."""


@dataclass(frozen=True)
class ResourceDemand:
    """`count` actors for the calls of a role, each with so much.

    role: what the actors are called; SLOTS, without calls, for devices that several roles share.
    key: the setting that says how many. shares: what one takes is a part of such a slot.
    memory_gib: the least main memory one takes; it may well take more.
    """

    calls: Sequence[ModelCall]
    role: str
    setting: str
    count: int
    cpus: int = 1
    gpus: int = 0
    memory_gib: float = 0.0
    is_in_shared_slot: bool = False

    @property
    def requested_cpus(self) -> int:
        """CPU slots of a cluster that all of them ask for."""
        return 0 if self.is_in_shared_slot else self.count * self.cpus

    @property
    def requested_gpus(self) -> int:
        """GPUs of a cluster that all of them ask for."""
        return 0 if self.is_in_shared_slot else self.count * self.gpus


#: What a run asks for in a mode, or why it cannot be placed so.
PlacementOption = Sequence[ResourceDemand] | str


@dataclass(frozen=True)
class ClusterCapacity:
    """What a cluster has. Memory is bounded only where the run brings its own, local instance."""

    cpus: float
    gpus: float
    memory_gib: float = math.inf


def sum_cpus(demands: Sequence[ResourceDemand]) -> int:
    """CPU slots of all demands together."""
    return sum(demand.requested_cpus for demand in demands)


@dataclass(frozen=True)
class PlacementDecision:
    """The mode a run is placed in and, where it was not the first choice, a line that says why."""

    mode: str
    note: str = ""


def choose_mode(ways: Mapping[str, PlacementOption], have: ClusterCapacity) -> PlacementDecision:
    """The first mode whose demands the cluster can hold. `ways` are best first.

    Raises ConfigError with what is in the way of each if none fits.
    """
    lacks = {mode: _explain_obstacle(way, have) for mode, way in ways.items()}
    first = next(iter(lacks))
    for mode, lack in lacks.items():
        if not lack:
            note = "" if mode == first else f"placement: {mode}, as for {first} {lacks[first]}"
            return PlacementDecision(mode, note)
    others = [f"; {mode} is no way out: {lacks[mode]}" for mode in lacks if mode != first]
    raise ConfigError(lacks[first] + "".join(others))


def _explain_obstacle(way: PlacementOption, have: ClusterCapacity) -> str:
    return way if isinstance(way, str) else describe_shortage(way, have)


def check_fits(demands: Sequence[ResourceDemand], have: ClusterCapacity) -> None:
    """Raise ConfigError with the arithmetic if the cluster has too little of anything."""
    if lack := describe_shortage(demands, have):
        raise ConfigError(lack)


def describe_shortage(demands: Sequence[ResourceDemand], have: ClusterCapacity) -> str:
    """What the cluster has too little of, with the arithmetic; empty if it is enough."""
    parts: dict[str, tuple[Sequence[float], float]] = {
        "CPU slots": ([d.requested_cpus for d in demands], have.cpus),
        "GPUs": ([d.requested_gpus for d in demands], have.gpus),
        "GiB of memory": ([d.count * d.memory_gib for d in demands], have.memory_gib),
    }
    for what, (needs, held) in parts.items():
        if sum(needs) > held:
            terms = " + ".join(
                f"{need:.4g} for {d.count} {d.role} ({d.setting})"
                for d, need in zip(demands, needs, strict=True)
                if need
            )
            return f"the run needs {sum(needs):.4g} {what} = {terms}; the cluster has {held:.4g}"
    return ""
