"""Which actors a run needs and whether a cluster can hold them. Pure arithmetic."""

from streamrl.placement.demand import (
    Capacity,
    Demand,
    PlacementConfig,
    Settled,
    check_fits,
    settle,
    total_cpus,
)
from streamrl.placement.memory import WorkerMemory

__all__ = [
    "Capacity",
    "Demand",
    "PlacementConfig",
    "Settled",
    "WorkerMemory",
    "check_fits",
    "settle",
    "total_cpus",
]
