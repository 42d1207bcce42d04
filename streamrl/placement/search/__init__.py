"""Which placement is best: exact and random search, rules, and an oracle. Pure."""

from streamrl.placement.search.front import Candidate, FrontPoint, Planned
from streamrl.placement.search.planning import PROPOSALS, plan
from streamrl.placement.search.rules import Rules, anything

__all__ = [
    "PROPOSALS",
    "Candidate",
    "FrontPoint",
    "Planned",
    "Rules",
    "anything",
    "plan",
]
