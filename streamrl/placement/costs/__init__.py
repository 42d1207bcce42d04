"""Cost model: predicts seconds and bytes of a placement from shapes, devices and cost constants."""

from streamrl.placement.costs.constants import CPU_CONSTANTS, CostConstants
from streamrl.placement.costs.cost_model import CostModel
from streamrl.placement.costs.traffic import TransferCost, WeightTraffic

__all__ = ["CPU_CONSTANTS", "CostConstants", "CostModel", "TransferCost", "WeightTraffic"]
