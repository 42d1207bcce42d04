"""What a placement holds on every device, what that leaves for keys and values, who is too much.

A device holds what all its calls keep, and what one of them computes with, as they take turns. Keys
and values get the rest; they give way to training, but not to scoring.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from streamrl.dataflow import Kind
from streamrl.placement.clusters import GB, Cluster, Device
from streamrl.placement.costs.constants import Constants
from streamrl.placement.costs.held import usable
from streamrl.placement.estimates import CallMemory
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Placement


@dataclass(frozen=True)
class Holder:
    """A call on devices. One that samples gets the rest of a device for keys and values.

    memory: without those. weights: names what it keeps, which calls of one role on the same
    devices keep once. least_kv: bytes for one rollout. most_kv: for all it may be given.
    """

    kind: Kind
    memory: CallMemory
    weights: str
    least_kv: float = 0.0
    most_kv: float = 0.0


@dataclass(frozen=True)
class Stretch:
    """Devices next to each other that the same calls hold, all of one kind."""

    mesh: Mesh
    device: Device
    stages: tuple[str, ...]


def stretches(placement: Placement, cluster: Cluster) -> Iterator[Stretch]:
    """All devices that have calls."""
    edges = {edge for start in cluster.starts for edge in (start,)}
    for assignment in placement.calls.values():
        edges |= {assignment.mesh.first, assignment.mesh.first + assignment.mesh.size}
    for first, end in pairwise(sorted(edges)):
        mesh = Mesh(first, end - first)
        stages = tuple(s for s, each in placement.calls.items() if each.mesh.overlaps(mesh))
        if stages:
            yield Stretch(mesh, cluster.group_of(first).device, stages)


@dataclass(frozen=True)
class Holdings:
    """Who holds what in a placement."""

    placement: Placement
    holders: Mapping[str, Holder]
    cluster: Cluster
    constants: Constants

    def kv_room(self, stage: str) -> float:
        """Bytes each device of a call that samples has for keys and values; less than 0 if none."""
        return min(self._left(stretch) for stretch in self._stretches if stage in stretch.stages)

    def memory(self) -> dict[str, CallMemory]:
        """Of each call, on a device; of one that samples, with the KV cache it has use of.

        Weights that several calls compute with are the first one's.
        """
        found: dict[str, CallMemory] = {}
        seen: set[str] = set()
        for stage, holder in self.holders.items():
            kept = 0.0 if holder.weights in seen else holder.memory.kept
            active = holder.memory.active
            if holder.kind is Kind.GENERATE:
                active += max(0.0, min(self.kv_room(stage), holder.most_kv))
            found[stage] = CallMemory(kept, active)
            seen.add(holder.weights)
        return found

    def unfit(self) -> str:
        """Why devices cannot hold it, in a line; empty if they can."""
        return next(filter(None, map(self._too_much, self._stretches)), "")

    @property
    def _stretches(self) -> list[Stretch]:
        return list(stretches(self.placement, self.cluster))

    def _kept(self, stretch: Stretch) -> float:
        found = {self.holders[s].weights: self.holders[s].memory.kept for s in stretch.stages}
        return sum(found.values())

    def _left(self, stretch: Stretch) -> float:
        """For keys and values."""
        room = usable(stretch.device.memory_bytes, self.constants)
        takes = self._most(stretch, Kind.SCORE) + self._most(stretch, Kind.GENERATE)
        return room - self._kept(stretch) - takes

    def _most(self, stretch: Stretch, kind: Kind) -> float:
        """What the calls of a kind compute with, keys and values apart: the one with most."""
        holders = (self.holders[stage] for stage in stretch.stages)
        return max((each.memory.active for each in holders if each.kind is kind), default=0.0)

    def _too_much(self, stretch: Stretch) -> str:
        room = usable(stretch.device.memory_bytes, self.constants)
        active = {stage: self.holders[stage].memory.active for stage in stretch.stages}
        for stage in stretch.stages:
            if self._samples(stage):
                active[stage] += self.holders[stage].least_kv + self._most(stretch, Kind.SCORE)
        worst = max(active, key=active.__getitem__)
        needed = self._kept(stretch) + active[worst]
        if needed <= room:
            return ""
        keeps = ", ".join(
            f"{stage} {_gb(self.holders[stage].memory.kept)}" for stage in stretch.stages
        )
        what = "one rollout's keys and values" if self._samples(worst) else "its micro-batch"
        return (
            f"devices {stretch.mesh}: {_gb(needed)} GB on each {stretch.device.name}, which has"
            f" {_gb(room)} of {_gb(stretch.device.memory_bytes)} to give: kept by {keeps};"
            f" {worst} computes with {_gb(active[worst])} for {what}"
        )

    def _samples(self, stage: str) -> bool:
        return self.holders[stage].kind is Kind.GENERATE


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.1f}"
