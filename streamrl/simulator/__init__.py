"""A run in virtual time: what a placement would do, by the books and the loops of real runs."""

from streamrl.simulator.failures import Failures
from streamrl.simulator.results import Simulated
from streamrl.simulator.simulation import simulate
from streamrl.simulator.world import Manner

__all__ = ["Failures", "Manner", "Simulated", "simulate"]
