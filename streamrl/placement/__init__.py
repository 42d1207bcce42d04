"""Which actors a run needs and whether a cluster can hold them. Pure arithmetic."""

from streamrl.placement.demand import Demand, PlacementConfig, check_fits, total

__all__ = ["Demand", "PlacementConfig", "check_fits", "total"]
