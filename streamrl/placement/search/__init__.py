"""Searches for the best placement: set partitions, annealing, published rules, exhaustive
search."""

from streamrl.placement.search.feasibility import can_fit
from streamrl.placement.search.hybridflow_parallel import ParallelismChoices
from streamrl.placement.search.pareto import (
    ExcludedBound,
    ParetoPoint,
    PlacementCandidate,
    PlanResult,
    compare_to_winner,
)
from streamrl.placement.search.planner import (
    DEFAULT_PROPOSALS,
    DEFAULT_RUNNERS_UP,
    WHOLE_STEPS_SUFFIX,
    plan_placement,
)
from streamrl.placement.search.split_rules import SplitRules, allow_any_split

__all__ = [
    "DEFAULT_PROPOSALS",
    "DEFAULT_RUNNERS_UP",
    "WHOLE_STEPS_SUFFIX",
    "ExcludedBound",
    "ParallelismChoices",
    "ParetoPoint",
    "PlacementCandidate",
    "PlanResult",
    "SplitRules",
    "allow_any_split",
    "can_fit",
    "compare_to_winner",
    "plan_placement",
]
