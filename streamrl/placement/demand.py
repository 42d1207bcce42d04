"""What a run asks of a cluster, as data, and the check that it fits."""

from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.dataflow import Call
from streamrl.errors import ConfigError

LEAST_STORE_MB = 80
MODES = ("auto", "disaggregated", "sequential")


@dataclass
class PlacementConfig:
    """Which stages share devices.

    mode: disaggregated gives every stage devices of its own, all busy at once; sequential lets one
        stage compute at a time (a baseline, and a way to debug); auto takes disaggregated.
    address: an existing Ray cluster; empty starts a local instance for the run.
    cpus: CPU slots of the local instance; null takes as many as the run asks for.
    object_store_mb: size of the local instance's object store, MiB.
    """

    mode: str = "auto"
    address: str = ""
    cpus: int | None = None
    object_store_mb: int = 512

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            known = ", ".join(MODES)
            raise ConfigError(f"placement.mode={self.mode}: must be one of {known}")
        if self.cpus is not None and self.cpus < 1:
            raise ConfigError(f"placement.cpus={self.cpus}: must be at least 1")
        if self.object_store_mb < LEAST_STORE_MB:
            raise ConfigError(
                f"placement.object_store_mb={self.object_store_mb}: must be at least"
                f" {LEAST_STORE_MB} MiB"
            )

    @property
    def one_at_a_time(self) -> bool:
        """True if all stages share one device lease."""
        return self.mode == "sequential"


@dataclass(frozen=True)
class Demand:
    """`count` actors for a call, each with so many CPU slots and GPUs; `key` is their setting."""

    call: Call
    role: str
    key: str
    count: int
    cpus: int = 1
    gpus: int = 0


def total(demands: Sequence[Demand]) -> tuple[int, int]:
    """CPU slots and GPUs of all demands together."""
    return (
        sum(d.count * d.cpus for d in demands),
        sum(d.count * d.gpus for d in demands),
    )


def check_fits(demands: Sequence[Demand], *, cpus: float, gpus: float) -> None:
    """Raise ConfigError with the arithmetic if the cluster has too few CPU slots or GPUs."""
    need_cpus, need_gpus = total(demands)
    for what, need, have in (("CPU slots", need_cpus, cpus), ("GPUs", need_gpus, gpus)):
        if need > have:
            each = [(d, d.cpus if what == "CPU slots" else d.gpus) for d in demands]
            terms = " + ".join(f"{d.count * n} {d.role} ({d.key})" for d, n in each if n)
            raise ConfigError(f"the run needs {need} {what} = {terms}; the cluster has {have:g}")
