"""A placement: the devices and the parallelism of every call of a dataflow, and how far ahead.

HybridFlow's sets of models that share devices, FlexRLHF's ratios and strategies, and ReaL's device
meshes per call are three ways to write one (`constructors.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from streamrl.dataflow import CallKind, Dataflow
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import read_settings
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.resharding import RankGrid

MAX_TP_SIZE = 8
"""Tensor parallelism beyond a node's usual size is not considered."""
MAX_STALENESS = 64
"""A bound beyond it is of no use, and all that it lets in would have to be unrolled."""


class PlacementMode(Enum):
    """What a placement is called: which calls share devices, and how far ahead it generates."""

    COLOCATED = "colocated"
    """All calls on the same devices, one after the other."""
    SPLIT = "split"
    """Some share devices, others do not, and generation shares with training."""
    DISAGGREGATED = "disaggregated"
    """Generation and training of the policy have no device in common; on policy."""
    ASYNCHRONOUS = "asynchronous"
    """Likewise, and generation may be steps ahead."""


@dataclass(frozen=True)
class CallAssignment:
    """The devices of a call, and its ranks on them: pipeline-tensor-data.

    zero_stage: what the replicas of a model that is trained shard, as in trainer.zero_stage.
    expert: ranks that share out the experts of a layer, each whole on one of them: neighbours among
    the tensor-parallel ranks and replicas of a stage. With 1 experts are split as all else is.
    """

    mesh: Mesh
    grid: RankGrid
    zero_stage: int = 1
    ep_size: int = 1

    def check_on_cluster(self, cluster: Cluster, place: str) -> None:
        """Raise ConfigError, naming `place`, unless it fits the cluster and the rules hold."""
        self.mesh.check_on_cluster(cluster, place)
        if self.grid.num_ranks != self.mesh.size:
            raise ConfigError(
                f"{place}: {self.grid} is {self.grid.num_ranks} ranks; devices {self.mesh} are"
                f" {self.mesh.size}"
            )
        within = min(MAX_TP_SIZE, self.mesh.count_devices_per_node(cluster))
        if self.grid.tp_size > within:
            raise ConfigError(
                f"{place}: {self.grid.tp_size} tensor-parallel ranks: at most {within} on a node"
            )
        if self.zero_stage not in range(4):
            raise ConfigError(f"{place}.zero_stage={self.zero_stage}: must be from 0 to 3")
        within = self.grid.tp_size * self.grid.dp_size
        if self.ep_size < 1 or within % self.ep_size:
            raise ConfigError(
                f"{place}.expert={self.ep_size}: must divide the {within} ranks of a stage"
            )

    def __str__(self) -> str:
        experts = f" with {self.ep_size} expert ranks" if self.ep_size > 1 else ""
        return f"{self.grid} on {self.mesh}{experts}"


@dataclass(frozen=True)
class Placement:
    """An assignment for each call that has devices, by stage.

    A stage that is not there computes without any, as a reward that is a rule does. max_staleness:
    as in a run. streamed: whether calls on different devices work on a step's micro-batches as they
    come, or wait for all of it.
    """

    assignments: Mapping[str, CallAssignment]
    max_staleness: int = 0
    is_streamed: bool = True

    def check_valid(self, dataflow: Dataflow, cluster: Cluster) -> None:
        """Raise ConfigError naming the call that is not there, or cannot be so."""
        known = {call.stage: call for call in dataflow.calls}
        for stage, assignment in self.assignments.items():
            if stage not in known:
                raise ConfigError(
                    f"placement.{stage}: no such call; the dataflow has {', '.join(known)}"
                )
            assignment.check_on_cluster(cluster, f"placement.{stage}")
        for stage, call in known.items():
            if call.kind is not CallKind.SCORE and stage not in self.assignments:
                raise ConfigError(f"placement.{stage}: missing; the call needs devices")
        if not 0 <= self.max_staleness <= MAX_STALENESS:
            raise ConfigError(
                f"placement.max_staleness={self.max_staleness}: must be from 0 to {MAX_STALENESS}"
            )

    def overlaps(self, one: str, other: str) -> bool:
        """Whether two calls have a device in common."""
        if one not in self.assignments or other not in self.assignments:
            return False
        return self.assignments[one].mesh.overlaps(self.assignments[other].mesh)

    def classify_mode(self, dataflow: Dataflow) -> PlacementMode:
        """What it is called."""
        generate = dataflow.select_calls(CallKind.GENERATE)[0].stage
        train = dataflow.select_calls(CallKind.TRAIN)[0].stage
        if not self.overlaps(generate, train):
            return PlacementMode.ASYNCHRONOUS if self.max_staleness else PlacementMode.DISAGGREGATED
        meshes = [assignment.mesh for assignment in self.assignments.values()]
        return PlacementMode.COLOCATED if len(set(meshes)) == 1 else PlacementMode.SPLIT

    def with_staleness(self, max_staleness: int) -> "Placement":
        """The same with another bound."""
        return replace(self, max_staleness=max_staleness)

    def __str__(self) -> str:
        return "; ".join(f"{stage} {each}" for stage, each in self.assignments.items())

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON or YAML; `from_dict` is the inverse."""
        calls = {
            stage: {"devices": str(each.mesh), "grid": str(each.grid), "order": each.grid.order}
            | {"zero_stage": each.zero_stage}
            | ({"expert": each.ep_size} if each.ep_size > 1 else {})
            for stage, each in self.assignments.items()
        }
        return {
            "calls": calls,
            "max_staleness": self.max_staleness,
            "streamed": self.is_streamed,
        }

    @classmethod
    def from_dict(cls, loose: Mapping[str, Any], *, place: str) -> "Placement":
        """Inverse of `to_dict`. Raises ConfigError naming `place` and the key that is wrong."""
        entry = read_settings(_PlacementEntry, loose, section=place)
        calls = {}
        for stage, values in entry.calls.items():
            section = f"{place}.calls.{stage}"
            calls[stage] = read_settings(_CallEntry, values, section=section).to_assignment(section)
        return cls(calls, entry.max_staleness, entry.streamed)


@dataclass
class _PlacementEntry:
    """A placement as a file has it."""

    calls: dict[str, Any]
    max_staleness: int = 0
    streamed: bool = True


@dataclass
class _CallEntry:
    """A call of it."""

    devices: str
    grid: str
    order: str = "hf"
    zero_stage: int = 1
    expert: int = 1

    def to_assignment(self, place: str) -> CallAssignment:
        """What it says. Raises ConfigError naming `place`."""
        try:
            grid = RankGrid.from_text(self.grid, self.order)
        except ValueError as error:
            raise ConfigError(f"{place}.grid: {error}") from None
        return CallAssignment(Mesh.from_text(self.devices), grid, self.zero_stage, self.expert)
