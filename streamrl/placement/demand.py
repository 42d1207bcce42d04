"""What a run asks of a cluster, as data, and the check that it fits."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamrl.dataflow import Call
from streamrl.errors import ConfigError

LEAST_STORE_MB = 80
MODES = ("auto", "disaggregated", "colocated", "sequential")


@dataclass
class PlacementConfig:
    """Which stages share devices.

    mode: disaggregated gives every stage devices of its own, all busy at once; colocated has one
        pool for all, which take turns, with trainer and generator of a rank in one process;
        sequential lets one stage compute at a time (a baseline, and a way to debug); auto takes
        disaggregated, or colocated where that does not fit.
    slice_s: how long a stage of a colocated run has the pool before it may have to give way, s.
    address: an existing Ray cluster; empty starts a local instance for the run.
    cpus: CPU slots of the local instance; null takes as many as the run asks for.
    memory_mb: what the engines of a worker of a colocated run may hold together, MiB: weights,
        optimizer, gradients, activations, KV cache; where they do not fit, the KV cache is released
        while it trains. null is no bound.
    object_store_mb: size of the local instance's object store, MiB.
    """

    mode: str = "auto"
    address: str = ""
    cpus: int | None = None
    object_store_mb: int = 512
    slice_s: float = 1.0
    memory_mb: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            known = ", ".join(MODES)
            raise ConfigError(f"placement.mode={self.mode}: must be one of {known}")
        if self.cpus is not None and self.cpus < 1:
            raise ConfigError(f"placement.cpus={self.cpus}: must be at least 1")
        if self.slice_s <= 0:
            raise ConfigError(f"placement.slice_s={self.slice_s}: must be above 0")
        if self.memory_mb is not None and self.memory_mb < 1:
            raise ConfigError(f"placement.memory_mb={self.memory_mb}: must be at least 1")
        if self.memory_mb is not None and self.mode in ("disaggregated", "sequential"):
            raise ConfigError(
                f"placement.memory_mb={self.memory_mb}: of workers that both train and generate;"
                f" with placement.mode={self.mode} there are none"
            )
        if self.object_store_mb < LEAST_STORE_MB:
            raise ConfigError(
                f"placement.object_store_mb={self.object_store_mb}: must be at least"
                f" {LEAST_STORE_MB} MiB"
            )

    @property
    def one_at_a_time(self) -> bool:
        """True if all stages share one device lease."""
        return self.mode in ("sequential", "colocated")

    @property
    def is_colocated(self) -> bool:
        """True if trainer and generator of a rank share a process, and all stages a pool."""
        return self.mode == "colocated"


@dataclass(frozen=True)
class Demand:
    """`count` actors for the calls of a role, each with so much.

    role: what the actors are called. key: the setting that says how many. memory_gib: the least
    main memory one takes; it may well take more.
    """

    calls: Sequence[Call]
    role: str
    key: str
    count: int
    cpus: int = 1
    gpus: int = 0
    memory_gib: float = 0.0


@dataclass(frozen=True)
class Capacity:
    """What a cluster has. Memory is bounded only where the run brings its own, local instance."""

    cpus: float
    gpus: float
    memory_gib: float = math.inf


def total_cpus(demands: Sequence[Demand]) -> int:
    """CPU slots of all demands together."""
    return sum(d.count * d.cpus for d in demands)


@dataclass(frozen=True)
class Settled:
    """The mode a run is placed in and, where it was not the first choice, a line that says why."""

    mode: str
    note: str = ""


def settle(ways: Mapping[str, Sequence[Demand]], have: Capacity) -> Settled:
    """The first mode whose demands the cluster can hold. `ways` are those of each, best first.

    Raises ConfigError with the arithmetic of the first if none fits.
    """
    lacks = {mode: shortage(demands, have) for mode, demands in ways.items()}
    first = next(iter(lacks))
    for mode, lack in lacks.items():
        if not lack:
            note = "" if mode == first else f"placement: {mode}, as for {first} {lacks[first]}"
            return Settled(mode, note)
    raise ConfigError(lacks[first])


def check_fits(demands: Sequence[Demand], have: Capacity) -> None:
    """Raise ConfigError with the arithmetic if the cluster has too little of anything."""
    if lack := shortage(demands, have):
        raise ConfigError(lack)


def shortage(demands: Sequence[Demand], have: Capacity) -> str:
    """What the cluster has too little of, with the arithmetic; empty if it is enough."""
    parts: dict[str, tuple[Sequence[float], float]] = {
        "CPU slots": ([d.count * d.cpus for d in demands], have.cpus),
        "GPUs": ([d.count * d.gpus for d in demands], have.gpus),
        "GiB of memory": ([d.count * d.memory_gib for d in demands], have.memory_gib),
    }
    for what, (needs, held) in parts.items():
        if sum(needs) > held:
            terms = " + ".join(
                f"{need:.4g} for {d.count} {d.role} ({d.key})"
                for d, need in zip(demands, needs, strict=True)
                if need
            )
            return f"the run needs {sum(needs):.4g} {what} = {terms}; the cluster has {held:.4g}"
    return ""
