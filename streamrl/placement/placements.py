"""A placement: devices and parallelism of every call of a dataflow, and the staleness bound."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

from streamrl.dataflow import CallKind, Dataflow
from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.resharding.grids import RankGrid

MAX_TP_SIZE = 8
"""Largest tensor-parallel size of a call; a node usually has 8 devices."""
MAX_STALENESS = 64
"""The steady-state estimate unrolls every step in flight, so its cost grows with the bound."""


class PlacementMode(Enum):
    """Class of a placement by the sharing of devices and by generation ahead of training."""

    COLOCATED = "colocated"
    """All calls on the same devices, in turn."""
    SPLIT = "split"
    """Some calls share devices; generation shares devices with training."""
    DISAGGREGATED = "disaggregated"
    """Generation and training of the policy share no device; on policy."""
    ASYNCHRONOUS = "asynchronous"
    """Disaggregated, and generation may run steps ahead."""


@dataclass(frozen=True)
class CallAssignment:
    """Mesh of a call and its rank grid: pipeline-, tensor- and data-parallel size.

    zero_stage: ZeRO stage of a trained model, as in trainer.zero_stage; 3 of a scoring one whose
      data-parallel ranks share its weights.
    ep_size: expert-parallel ranks among the tensor- and data-parallel ranks of a pipeline stage;
      each holds whole experts. With 1, experts are split like all other tensors.
    is_offloaded: the call's state rests in host memory although the run's config does not say so:
      trainer.offload_optimizer of a trained model, scorer.offload of a scoring one.
    checkpointing: value of trainer.gradient_checkpointing, unless the config has one.
    copies: groups of data-parallel ranks that ZeRO shards apart, each with a copy of the model.
    """

    mesh: Mesh
    grid: RankGrid
    zero_stage: int = 1
    ep_size: int = 1
    is_offloaded: bool = False
    checkpointing: bool | str = False
    copies: int = 1

    def __str__(self) -> str:
        experts = f" with {self.ep_size} expert ranks" if self.ep_size > 1 else ""
        saved = ", gradient_checkpointing" * bool(self.checkpointing)
        saved += f"={self.checkpointing}" * isinstance(self.checkpointing, str)
        saved += ", offloaded" * self.is_offloaded + f", {self.copies} copies" * (self.copies > 1)
        return f"{self.grid} on {self.mesh}{experts}{saved}"


@dataclass(frozen=True)
class Placement:
    """Devices and parallelism of each stage, by stage name, and the staleness bound.

    A missing stage computes without devices, such as a rule-based reward.
    max_staleness: as in a run.
    is_streamed: whether calls on separate devices process micro-batches of a step as they arrive,
      or wait for the whole step.
    """

    assignments: Mapping[str, CallAssignment]
    max_staleness: int = 0
    is_streamed: bool = True

    def check_on_cluster(
        self, cluster: Cluster, sections: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Raise ConfigError unless the cluster has the devices, and the bound is in range.

        sections: config section of the ranks of each stage, which messages name.
        """
        for stage, assignment in self.assignments.items():
            section, mesh = sections.get(stage, f"placement.{stage}"), assignment.mesh
            mesh.check_on_cluster(cluster, section)
            limit = min(MAX_TP_SIZE, mesh.count_devices_per_node(cluster))
            tp_size = assignment.grid.tp_size
            setting = f"{section}.tensor_parallel={tp_size}"
            if tp_size > limit:
                raise ConfigError(f"{setting}: must be at most {limit}, to be on one node")
            if devices := mesh.find_divided_ranks(tp_size, cluster):
                ends = f"{devices[0]}-{devices[-1]}"
                raise ConfigError(f"{setting}: must divide a node's devices; {ends} are on two")
        if not 0 <= self.max_staleness <= MAX_STALENESS:
            raise ConfigError(
                f"pipeline.max_staleness={self.max_staleness}: must be from 0 to {MAX_STALENESS}"
            )

    def move_meshes(self, find_first: Callable[[int], int]) -> "Placement":
        """Return the placement with each mesh moved.

        find_first: new first device of the mesh that begins at a device.
        """
        calls = {
            stage: replace(call, mesh=Mesh(find_first(call.mesh.first), call.mesh.size))
            for stage, call in self.assignments.items()
        }
        return replace(self, assignments=calls)

    def overlaps(self, stage: str, other: str) -> bool:
        if stage not in self.assignments or other not in self.assignments:
            return False
        return self.assignments[stage].mesh.overlaps(self.assignments[other].mesh)

    def classify_mode(self, dataflow: Dataflow) -> PlacementMode:
        generate = dataflow.select_calls(CallKind.GENERATE)[0].stage
        train = dataflow.select_calls(CallKind.TRAIN)[0].stage
        if not self.overlaps(generate, train):
            return PlacementMode.ASYNCHRONOUS if self.max_staleness else PlacementMode.DISAGGREGATED
        meshes = [assignment.mesh for assignment in self.assignments.values()]
        return PlacementMode.COLOCATED if len(set(meshes)) == 1 else PlacementMode.SPLIT

    def __str__(self) -> str:
        return "; ".join(f"{stage} {assignment}" for stage, assignment in self.assignments.items())

    def to_dict(self) -> dict[str, Any]:
        """Convert the placement to plain values for JSON."""
        calls = {
            stage: {
                "devices": str(assignment.mesh),
                "grid": str(assignment.grid),
                "order": assignment.grid.order,
                "zero_stage": assignment.zero_stage,
                "offloaded": assignment.is_offloaded,
                "checkpointing": assignment.checkpointing,
            }
            for stage, assignment in self.assignments.items()
        }
        return {"calls": calls, "max_staleness": self.max_staleness, "streamed": self.is_streamed}
