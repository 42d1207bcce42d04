"""A run in virtual time: what a placement would do, by the books and the loops of real runs."""

from streamrl.simulator.quick_run import (
    part_workload,
    play,
    played_groups,
    played_s,
    simulated_s,
    steps_of,
)
from streamrl.simulator.replicas.failures import Crash, Failures
from streamrl.simulator.results import Simulated
from streamrl.simulator.simulation import simulate

__all__ = [
    "Crash",
    "Failures",
    "Simulated",
    "part_workload",
    "play",
    "played_groups",
    "played_s",
    "simulate",
    "simulated_s",
    "steps_of",
]
