"""A run in virtual time: what a placement would do, by the books and the loops of real runs."""

from streamrl.simulator.failures import Crash, Failures
from streamrl.simulator.playing import play, played_groups, steps_of
from streamrl.simulator.results import Simulated
from streamrl.simulator.simulation import simulate

__all__ = ["Crash", "Failures", "Simulated", "play", "played_groups", "simulate", "steps_of"]
