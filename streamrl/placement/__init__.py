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

__all__ = [
    "Capacity",
    "Demand",
    "PlacementConfig",
    "Settled",
    "check_fits",
    "settle",
    "total_cpus",
]
