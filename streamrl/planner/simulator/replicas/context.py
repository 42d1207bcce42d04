"""Objects that all simulated processes of a run share."""

from collections.abc import Mapping
from dataclasses import dataclass

from streamrl.engines.reference_config import ReferenceConfig
from streamrl.planner.problem.stage_timings import StageTimings
from streamrl.planner.simulator.replicas.cpu_model import CpuModel
from streamrl.planner.simulator.replicas.device_leases import DeviceLeases
from streamrl.planner.simulator.replicas.recorder import ProcessRecordings
from streamrl.planner.simulator.replicas.simulated_prompts import CompletionLengths
from streamrl.planner.simulator.replicas.simulated_queue import SimulatedQueue
from streamrl.planner.simulator.replicas.weight_followers import SimulatedWeightRegistry


@dataclass
class SimulationContext:
    """Objects that all simulated processes of a run share.

    registries: weight registries by followed role; replaced when the trainers restart.
    max_open_rollouts: most rollouts that a generator works on, those in their environment included.
    """

    timings: StageTimings
    cpu: CpuModel
    queue: SimulatedQueue
    leases: DeviceLeases
    completions: CompletionLengths
    recordings: ProcessRecordings
    reference: ReferenceConfig
    registries: Mapping[str, SimulatedWeightRegistry]
    max_open_rollouts: int
