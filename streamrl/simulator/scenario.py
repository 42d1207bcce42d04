"""All that a simulation depends on, and what follows of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamrl.buffer.assembly.micro_batch_schedule import Pace
from streamrl.dataflow import GENERATE, POLICY, Dataflow, Kind
from streamrl.engines.reference_config import ReferenceConfig
from streamrl.placement.placements import Placement
from streamrl.placement.run_options import Manner
from streamrl.placement.stage_timings import Timings
from streamrl.placement.workload import Workload
from streamrl.simulator.replicas.failures import Failures
from streamrl.stream.run_state import PipelineConfig
from streamrl.stream.weight_publisher import is_due


@dataclass(frozen=True)
class Scenario:
    """All that a simulation depends on."""

    dataflow: Dataflow
    placement: Placement
    timings: Timings
    workload: Workload
    steps: int
    seed: int
    manner: Manner
    failures: Failures | None

    @property
    def pace(self) -> Pace:
        """How trainers take a step: whole where calls wait, or it is updated several times."""
        workload = self.workload
        several = workload.updates > 1
        whole = several or workload.whole_steps or not self.placement.streamed
        return Pace(whole, workload.epochs, min(workload.mini_batches, workload.groups_per_step))

    @property
    def pipeline(self) -> PipelineConfig:
        """How its stages are coupled."""
        return PipelineConfig(
            max_staleness=self.placement.max_staleness,
            depth=self.manner.depth,
            on_stale=self.manner.on_stale,
            groups_per_step=self.workload.groups_per_step,
            micro_batch_tokens=self.workload.micro_batch_tokens,
            stall_s=math.inf,
        )

    @property
    def reference(self) -> ReferenceConfig:
        """When it moves, if it does."""
        return ReferenceConfig(every=self.manner.reference_every)

    @property
    def replicas(self) -> dict[str, int]:
        """How many of each role that is not trained."""
        timings = self.timings
        found = {}
        for role, calls in self.dataflow.roles.items():
            if calls[0].kind is Kind.GENERATE:
                found[role] = timings.generator.replicas
            elif calls[0].kind is Kind.SCORE:
                found[role] = timings.score[calls[0].stage].replicas
        return found

    def publish_s(self, role: str) -> float:
        """Until a version of a role is on its way to all who follow it."""
        followers = [call.stage for call in self.dataflow.calls if call.follows == role]
        weights = self.timings.weights
        return max((weights[s].publish_s for s in followers if s in weights), default=0.0)

    def publishes(self, role: str, version: int) -> bool:
        """Looked at is the last version."""
        return is_due(
            role,
            version,
            every=self.manner.publish_every,
            reference=self.reference,
            looked_at=version == self.steps,
        )

    @property
    def resides(self) -> bool:
        """Whether the generators have the very devices of the policy's trainer."""
        calls = self.placement.calls
        trained = [call for call in self.dataflow.of_kind(Kind.TRAIN) if call.role == POLICY]
        stages = (GENERATE.stage, *(call.stage for call in trained))
        return len({calls[stage].mesh if stage in calls else None for stage in stages}) == 1


def devices_of(scenario: Scenario, processes: Mapping[str, Sequence[str]]) -> dict[str, range]:
    """The devices of each process: of a replica its part of the mesh of its role."""
    found = {}
    for role, calls in scenario.dataflow.roles.items():
        placed = [
            scenario.placement.calls[c.stage] for c in calls if c.stage in scenario.placement.calls
        ]
        devices = placed[0].mesh.devices if placed else range(0)
        count = len(processes[role])
        for i, name in enumerate(processes[role]):
            first = i * len(devices) // count
            # Several on one device have the same.
            last = max((i + 1) * len(devices) // count, first + 1)
            found[name] = devices[first:last]
    return found
