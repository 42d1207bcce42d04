"""Simulator: predict the metrics of a run under a placement.

The simulator runs the stream's own loops, ledger and admission control on a virtual clock.
"""

from streamrl.simulator.quick_run import (
    choose_num_steps,
    estimate_quick_run_groups,
    estimate_quick_run_s,
    estimate_simulation_s,
    run_quick_simulation,
    split_workload,
)
from streamrl.simulator.replicas.failures import FailureModel, NodeCrash
from streamrl.simulator.results import SimulationResult
from streamrl.simulator.simulation import run_simulation

__all__ = [
    "FailureModel",
    "NodeCrash",
    "SimulationResult",
    "choose_num_steps",
    "estimate_quick_run_groups",
    "estimate_quick_run_s",
    "estimate_simulation_s",
    "run_quick_simulation",
    "run_simulation",
    "split_workload",
]
