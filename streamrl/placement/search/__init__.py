"""Which placement is best: exact and random search, rules, and an oracle. Pure."""

from streamrl.placement.search.feasibility import can_fit
from streamrl.placement.search.hybridflow_parallel import Choices
from streamrl.placement.search.pareto import Absent, Candidate, FrontPoint, Planned, compared
from streamrl.placement.search.planner import BY_WHOLE_STEPS, PROPOSALS, RUNNERS_UP, plan
from streamrl.placement.search.split_rules import Rules, anything

__all__ = [
    "BY_WHOLE_STEPS",
    "PROPOSALS",
    "RUNNERS_UP",
    "Absent",
    "Candidate",
    "Choices",
    "FrontPoint",
    "Planned",
    "Rules",
    "anything",
    "can_fit",
    "compared",
    "plan",
]
