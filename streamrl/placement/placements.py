"""A placement: the devices and the parallelism of every call of a dataflow, and how far ahead.

HybridFlow's sets of models that share devices, FlexRLHF's ratios and strategies, and ReaL's device
meshes per call are three ways to write one (`constructors.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from streamrl.dataflow import Dataflow, Kind
from streamrl.errors import ConfigError
from streamrl.files.typed_settings import read_settings
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.resharding import Grid

MOST_TENSOR = 8
"""Tensor parallelism beyond a node's usual size is not considered."""
MOST_STALENESS = 64
"""A bound beyond it is of no use, and all that it lets in would have to be unrolled."""


class Mode(Enum):
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
class Assignment:
    """The devices of a call, and its ranks on them: pipeline-tensor-data.

    zero_stage: what the replicas of a model that is trained shard, as in trainer.zero_stage.
    expert: ranks that share out the experts of a layer, each whole on one of them: neighbours among
    the tensor-parallel ranks and replicas of a stage. With 1 experts are split as all else is.
    """

    mesh: Mesh
    grid: Grid
    zero_stage: int = 1
    expert: int = 1

    def check(self, cluster: Cluster, place: str) -> None:
        """Raise ConfigError, naming `place`, unless it fits the cluster and the rules hold."""
        self.mesh.check(cluster, place)
        if self.grid.size != self.mesh.size:
            raise ConfigError(
                f"{place}: {self.grid} is {self.grid.size} ranks; devices {self.mesh} are"
                f" {self.mesh.size}"
            )
        within = min(MOST_TENSOR, self.mesh.per_node(cluster))
        if self.grid.tensor > within:
            raise ConfigError(
                f"{place}: {self.grid.tensor} tensor-parallel ranks: at most {within} on a node"
            )
        if self.zero_stage not in range(4):
            raise ConfigError(f"{place}.zero_stage={self.zero_stage}: must be from 0 to 3")
        within = self.grid.tensor * self.grid.replicas
        if self.expert < 1 or within % self.expert:
            raise ConfigError(
                f"{place}.expert={self.expert}: must divide the {within} ranks of a stage"
            )

    def __str__(self) -> str:
        experts = f" with {self.expert} expert ranks" if self.expert > 1 else ""
        return f"{self.grid} on {self.mesh}{experts}"


@dataclass(frozen=True)
class Placement:
    """An assignment for each call that has devices, by stage.

    A stage that is not there computes without any, as a reward that is a rule does. max_staleness:
    as in a run. streamed: whether calls on different devices work on a step's micro-batches as they
    come, or wait for all of it.
    """

    calls: Mapping[str, Assignment]
    max_staleness: int = 0
    streamed: bool = True

    def check(self, dataflow: Dataflow, cluster: Cluster) -> None:
        """Raise ConfigError naming the call that is not there, or cannot be so."""
        known = {call.stage: call for call in dataflow.calls}
        for stage, assignment in self.calls.items():
            if stage not in known:
                raise ConfigError(
                    f"placement.{stage}: no such call; the dataflow has {', '.join(known)}"
                )
            assignment.check(cluster, f"placement.{stage}")
        for stage, call in known.items():
            if call.kind is not Kind.SCORE and stage not in self.calls:
                raise ConfigError(f"placement.{stage}: missing; the call needs devices")
        if not 0 <= self.max_staleness <= MOST_STALENESS:
            raise ConfigError(
                f"placement.max_staleness={self.max_staleness}: must be from 0 to {MOST_STALENESS}"
            )

    def overlaps(self, one: str, other: str) -> bool:
        """Whether two calls have a device in common."""
        if one not in self.calls or other not in self.calls:
            return False
        return self.calls[one].mesh.overlaps(self.calls[other].mesh)

    def mode(self, dataflow: Dataflow) -> Mode:
        """What it is called."""
        generate = dataflow.of_kind(Kind.GENERATE)[0].stage
        train = dataflow.of_kind(Kind.TRAIN)[0].stage
        if not self.overlaps(generate, train):
            return Mode.ASYNCHRONOUS if self.max_staleness else Mode.DISAGGREGATED
        meshes = [assignment.mesh for assignment in self.calls.values()]
        return Mode.COLOCATED if len(set(meshes)) == 1 else Mode.SPLIT

    def with_staleness(self, max_staleness: int) -> "Placement":
        """The same with another bound."""
        return replace(self, max_staleness=max_staleness)

    def __str__(self) -> str:
        return "; ".join(f"{stage} {each}" for stage, each in self.calls.items())

    def to_dict(self) -> dict[str, Any]:
        """As plain values for JSON or YAML; `of_dict` is the inverse."""
        calls = {
            stage: {"devices": str(each.mesh), "grid": str(each.grid), "order": each.grid.order}
            | {"zero_stage": each.zero_stage}
            | ({"expert": each.expert} if each.expert > 1 else {})
            for stage, each in self.calls.items()
        }
        return {
            "calls": calls,
            "max_staleness": self.max_staleness,
            "streamed": self.streamed,
        }

    @classmethod
    def of_dict(cls, loose: Mapping[str, Any], *, place: str) -> "Placement":
        """Inverse of `to_dict`. Raises ConfigError naming `place` and the key that is wrong."""
        entry = read_settings(_PlacementEntry, loose, section=place)
        calls = {}
        for stage, values in entry.calls.items():
            section = f"{place}.calls.{stage}"
            calls[stage] = read_settings(_CallEntry, values, section=section).assignment(section)
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

    def assignment(self, place: str) -> Assignment:
        """What it says. Raises ConfigError naming `place`."""
        try:
            grid = Grid.parse(self.grid, self.order)
        except ValueError as error:
            raise ConfigError(f"{place}.grid: {error}") from None
        return Assignment(Mesh.parse(self.devices), grid, self.zero_stage, self.expert)
