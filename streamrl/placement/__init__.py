"""Which actors a run needs, which devices they share, and whether a cluster can hold them. Pure."""

from streamrl.placement.config import PlacementConfig
from streamrl.placement.demand import (
    SLOTS,
    Capacity,
    Demand,
    Settled,
    Way,
    check_fits,
    settle,
    total_cpus,
)
from streamrl.placement.memory import WorkerMemory
from streamrl.placement.pools import STRATEGIES, SlotMap, lay_out

__all__ = [
    "SLOTS",
    "STRATEGIES",
    "Capacity",
    "Demand",
    "PlacementConfig",
    "Settled",
    "SlotMap",
    "Way",
    "WorkerMemory",
    "check_fits",
    "lay_out",
    "settle",
    "total_cpus",
]
