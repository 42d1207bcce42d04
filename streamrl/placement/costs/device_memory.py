"""What a placement holds on every device, what that leaves for keys and values, who is too much.

A device holds what all its calls keep, and what one of them computes with, as they take turns. Keys
and values get the rest, or what the run gives them; they give way to training, unless
`CostConstants.keeps_kv` has them stay, and never to scoring.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from streamrl.dataflow import CallKind
from streamrl.placement.clusters import GB, Cluster, DeviceSpec
from streamrl.placement.costs.call_memory import usable_bytes
from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Placement
from streamrl.placement.problem import CallMemory


@dataclass(frozen=True)
class CallFootprint:
    """A call on devices. One that samples gets the rest of a device for keys and values.

    memory: without those. weights: names what it keeps, which calls of one role on the same
    devices keep once. tokens: of the micro-batch or batch it computes with at a time, of one that
    samples those of its longest rollout. least_kv: bytes it cannot do without, of one rollout or as
    many as the run sets; step_kv: for all that it samples for a step; most_kv: for as many rollouts
    as may run at the same time.
    """

    kind: CallKind
    memory: CallMemory
    weights_key: str
    batch_tokens: float = 0.0
    min_kv_bytes: float = 0.0
    step_kv_bytes: float = 0.0
    max_kv_bytes: float = 0.0


@dataclass(frozen=True)
class DeviceRange:
    """Devices next to each other that the same calls hold, all of one kind."""

    mesh: Mesh
    device: DeviceSpec
    stages: tuple[str, ...]


def iter_device_ranges(placement: Placement, cluster: Cluster) -> Iterator[DeviceRange]:
    """All devices that have calls."""
    edges = {edge for start in cluster.group_starts for edge in (start,)}
    for assignment in placement.assignments.values():
        edges |= {assignment.mesh.first, assignment.mesh.first + assignment.mesh.size}
    for first, end in pairwise(sorted(edges)):
        mesh = Mesh(first, end - first)
        stages = tuple(s for s, each in placement.assignments.items() if each.mesh.overlaps(mesh))
        if stages:
            yield DeviceRange(mesh, cluster.find_node_group(first).device, stages)


@dataclass(frozen=True)
class MemoryItem:
    """Bytes that a call computes with, or of its keys and values."""

    stage: str
    num_bytes: float
    is_kv: bool = False


@dataclass(frozen=True)
class DeviceMemory:
    """Who holds what in a placement."""

    placement: Placement
    footprints: Mapping[str, CallFootprint]
    cluster: Cluster
    constants: CostConstants

    def kv_capacity_bytes(self, stage: str) -> float:
        """Bytes each device of a call that samples has for keys and values; less than 0 if none."""
        return min(
            self._free_kv_bytes(stretch)
            for stretch in self._device_ranges
            if stage in stretch.stages
        )

    def kv_cache_bytes(self, stage: str) -> float:
        """Of those, the bytes that it has a use for: what its engines are to be given."""
        holder, steps = self.footprints[stage], self.placement.max_staleness + 1
        return max(
            0.0,
            min(self.kv_capacity_bytes(stage), holder.max_kv_bytes, steps * holder.step_kv_bytes),
        )

    def memory_by_stage(self) -> dict[str, CallMemory]:
        """Of each call, on a device; of one that samples, with the KV cache it has use of.

        Weights that several calls compute with are the first one's.
        """
        found: dict[str, CallMemory] = {}
        seen: set[str] = set()
        for stage, holder in self.footprints.items():
            kept = 0.0 if holder.weights_key in seen else holder.memory.resident_bytes
            active = holder.memory.active_bytes
            if holder.kind is CallKind.GENERATE and self.constants.keeps_kv:
                kept += self.kv_cache_bytes(stage)
            elif holder.kind is CallKind.GENERATE:
                active += self.kv_cache_bytes(stage)
            found[stage] = CallMemory(kept, active)
            seen.add(holder.weights_key)
        return found

    def explain_infeasible(self) -> str:
        """Why the devices that lack most cannot hold it, in a line; empty if all can."""
        short = [(self._missing_bytes(stretch), stretch) for stretch in self._device_ranges]
        if not short:
            return ""  # nothing is placed yet
        most, worst = max(short, key=lambda each: each[0])
        return self._explain_shortage(worst) if most > 0 else ""

    @property
    def _device_ranges(self) -> list[DeviceRange]:
        return list(iter_device_ranges(self.placement, self.cluster))

    def _resident_bytes(self, stretch: DeviceRange) -> float:
        found = {
            self.footprints[s].weights_key: self.footprints[s].memory.resident_bytes
            for s in stretch.stages
        }
        return sum(found.values())

    def _free_kv_bytes(self, stretch: DeviceRange) -> float:
        """For keys and values."""
        room = usable_bytes(stretch.device.memory_bytes, self.constants)
        takes = self._active_beside_kv(stretch) + self._max_active_bytes(stretch, CallKind.GENERATE)
        return room - self._resident_bytes(stretch) - takes

    def _active_beside_kv(self, stretch: DeviceRange) -> float:
        """What others compute with while keys and values stay."""
        scores = self._max_active_bytes(stretch, CallKind.SCORE)
        return (
            max(scores, self._max_active_bytes(stretch, CallKind.TRAIN))
            if self.constants.keeps_kv
            else scores
        )

    def _max_active_bytes(self, stretch: DeviceRange, kind: CallKind) -> float:
        """What the calls of a kind compute with, keys and values apart: the one with most."""
        holders = (self.footprints[stage] for stage in stretch.stages)
        return max((each.memory.active_bytes for each in holders if each.kind is kind), default=0.0)

    def _peak_items(self, stretch: DeviceRange) -> list[MemoryItem]:
        """What is held at a time beside what is kept, at most."""
        own = {stage: self.footprints[stage] for stage in stretch.stages}
        worst = max(own, key=lambda stage: own[stage].memory.active_bytes)
        peak = [MemoryItem(worst, own[worst].memory.active_bytes)]
        stays = (CallKind.SCORE, CallKind.TRAIN) if self.constants.keeps_kv else (CallKind.SCORE,)
        for stage, each in own.items():
            if each.kind is not CallKind.GENERATE:
                continue
            beside = [other for other in own if own[other].kind in stays]
            found = [
                MemoryItem(stage, each.min_kv_bytes, is_kv=True),
                MemoryItem(stage, each.memory.active_bytes),
            ]
            if beside:
                most = max(beside, key=lambda other: own[other].memory.active_bytes)
                found.append(MemoryItem(most, own[most].memory.active_bytes))
            peak = max(peak, found, key=_sum_bytes)
        return peak

    def _missing_bytes(self, stretch: DeviceRange) -> float:
        """Bytes that a device has too little; less than 0 where some are left."""
        needed = self._resident_bytes(stretch) + _sum_bytes(self._peak_items(stretch))
        return needed - usable_bytes(stretch.device.memory_bytes, self.constants)

    def _explain_shortage(self, stretch: DeviceRange) -> str:
        """The sum of what is too much."""
        device, short = stretch.device, self._missing_bytes(stretch)
        room = usable_bytes(device.memory_bytes, self.constants)
        kept: dict[str, list[str]] = {}
        for stage in stretch.stages:
            kept.setdefault(self.footprints[stage].weights_key, []).append(stage)
        keeps = [
            f"{' and '.join(stages)} {_format_gb(self.footprints[stages[0]].memory.resident_bytes)}"
            for stages in kept.values()
        ]
        on_top = [self._describe_item(part) for part in self._peak_items(stretch) if part.num_bytes]
        return (
            f"devices {stretch.mesh}: {_format_gb(room + short)} GB on each"
            f" {device.name}, which has"
            f" {_format_gb(room)} of {_format_gb(device.memory_bytes)} to give,"
            f" {_format_gb(short)} too little: kept by"
            f" {', '.join(keeps)}; on top {', '.join(on_top)}"
        )

    def _describe_item(self, part: MemoryItem) -> str:
        holder = self.footprints[part.stage]
        what = _ACTIVE_MEMORY_TEXT[holder.kind].format(tokens=holder.batch_tokens)
        if part.is_kv:
            is_set = holder.min_kv_bytes == holder.max_kv_bytes
            what = "for keys and values" + ("" if is_set else " of one rollout")
        return f"{part.stage} {_format_gb(part.num_bytes)} {what}"


_ACTIVE_MEMORY_TEXT = {
    CallKind.GENERATE: "to lay down a version",
    CallKind.SCORE: "for {tokens:.0f} tokens at a time",
    CallKind.TRAIN: "for {tokens:.0f} tokens at a time",
}
"""What a call computes with memory of its own for."""


def _sum_bytes(parts: Sequence[MemoryItem]) -> float:
    return sum(part.num_bytes for part in parts)


def _format_gb(num_bytes: float) -> str:
    """With as many digits as what is little needs."""
    size = num_bytes / GB
    return f"{size:.1f}" if size >= 1 or not size else f"{size:.2g}"
