"""A run in virtual time: what a placement would do, by the books and the loops of real runs."""

from streamrl.simulator.failures import Crash, Failures
from streamrl.simulator.playing import (
    part_workload,
    play,
    played_groups,
    played_s,
    simulated_s,
    steps_of,
)
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
