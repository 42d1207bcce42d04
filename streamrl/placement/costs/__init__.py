"""What calls cost: seconds and bytes, from shapes, devices and constants. Pure."""

from streamrl.placement.costs.constants import CPU, Constants
from streamrl.placement.costs.cost_model import CostModel
from streamrl.placement.costs.traffic import Moved, Traffic

__all__ = ["CPU", "Constants", "CostModel", "Moved", "Traffic"]
