"""Scenario: the inputs of a simulation, and the settings derived from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamrl.buffer.assembly.micro_batch_schedule import UpdatePlan
from streamrl.dataflow import GENERATE_CALL, POLICY, CallKind, Dataflow
from streamrl.engines.reference_config import ReferenceConfig
from streamrl.placement.placements import Placement
from streamrl.planner.problem.problem import RunOptions
from streamrl.planner.problem.stage_timings import StageTimings
from streamrl.planner.problem.workload import Workload
from streamrl.planner.simulator.replicas.failures import FailureModel
from streamrl.stream.run_state import PipelineConfig
from streamrl.stream.weight_publisher import is_publish_due


@dataclass(frozen=True)
class SimulationScenario:
    """Inputs of a simulation: run, placement, timings, number of steps, seed and failures."""

    dataflow: Dataflow
    placement: Placement
    timings: StageTimings
    workload: Workload
    steps: int
    seed: int
    run_options: RunOptions
    failures: FailureModel | None

    @property
    def pace(self) -> UpdatePlan:
        """When a step's micro-batches may start, and how many updates and epochs the step has.

        A step waits for all its groups if a call needs the whole step, if it has several updates,
        or if the placement is not streamed.
        """
        workload = self.workload
        has_several_updates = workload.num_updates > 1
        waits_for_step = (
            has_several_updates or workload.requires_whole_step or not self.placement.is_streamed
        )
        return UpdatePlan(
            waits_for_step, workload.epochs, min(workload.mini_batches, workload.groups_per_step)
        )

    @property
    def pipeline_config(self) -> PipelineConfig:
        """Section `pipeline` of the simulated run's config.

        `stall_s` is infinite because virtual time can jump.
        """
        return PipelineConfig(
            max_staleness=self.placement.max_staleness,
            depth=self.run_options.depth,
            on_stale=self.run_options.on_stale,
            groups_per_step=self.workload.groups_per_step,
            micro_batch_tokens=self.workload.micro_batch_tokens,
            stall_s=math.inf,
        )

    @property
    def reference_config(self) -> ReferenceConfig:
        return ReferenceConfig(every=self.run_options.reference_every)

    @property
    def max_open_rollouts(self) -> int:
        """Most rollouts that a generator works on, those in their environment included."""
        return self.run_options.open_episodes or self.timings.generator.max_running

    @property
    def replica_counts(self) -> dict[str, int]:
        timings = self.timings
        counts = {}
        for role, calls in self.dataflow.calls_by_role.items():
            if calls[0].kind is CallKind.GENERATE:
                counts[role] = timings.generator.replicas
            elif calls[0].kind is CallKind.SCORE:
                counts[role] = timings.score[calls[0].stage].replicas
        return counts

    def estimate_publish_s(self, role: str) -> float:
        followers = [call.stage for call in self.dataflow.calls if call.followed_role == role]
        weights = self.timings.weights
        return max((weights[s].publish_s for s in followers if s in weights), default=0.0)

    def is_publish_due(self, role: str, version: int) -> bool:
        """Return whether a role's version is published; the version of the last step always is."""
        return is_publish_due(
            role,
            version,
            every=self.run_options.publish_every,
            reference=self.reference_config,
            forced=version == self.steps,
        )

    @property
    def is_colocated(self) -> bool:
        calls = self.placement.assignments
        trained = [
            call for call in self.dataflow.select_calls(CallKind.TRAIN) if call.role == POLICY
        ]
        stages = (GENERATE_CALL.stage, *(call.stage for call in trained))
        return len({calls[stage].mesh if stage in calls else None for stage in stages}) == 1


def assign_devices(
    scenario: SimulationScenario, processes: Mapping[str, Sequence[str]]
) -> dict[str, range]:
    """Return the devices of each process: an equal part of the mesh of its role.

    processes: process names by role.
    """
    devices_by_process = {}
    for role, calls in scenario.dataflow.calls_by_role.items():
        assignments = [
            scenario.placement.assignments[c.stage]
            for c in calls
            if c.stage in scenario.placement.assignments
        ]
        devices = assignments[0].mesh.devices if assignments else range(0)
        count = len(processes[role])
        for i, name in enumerate(processes[role]):
            first = i * len(devices) // count
            # Replicas that share one device all get that device.
            last = max((i + 1) * len(devices) // count, first + 1)
            devices_by_process[name] = devices[first:last]
    return devices_by_process
