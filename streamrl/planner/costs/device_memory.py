"""Memory of every device of a placement, and the bytes left for the KV cache.

A device holds the resident bytes of all its calls, and the active bytes of one call, as calls take
turns. The KV cache gets the rest, or the size that the run sets. The KV cache is released during
training unless `CostConstants.keeps_kv` is set, and stays during scoring.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from streamrl.dataflow import CallKind
from streamrl.placement.clusters import GB, Cluster, DeviceSpec
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Placement
from streamrl.planner.costs.call_memory import compute_usable_bytes
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.problem.problem import CallMemory


@dataclass(frozen=True)
class CallFootprint:
    """Memory needs of a call on each of its devices; a generating call also has a KV cache.

    memory: resident and active bytes, without the KV cache.
    weights_key: identifies the resident weights; calls with equal keys on a device share them.
    batch_tokens: tokens of a micro-batch or scoring batch; of a generating call, those of the
      longest rollout.
    min_kv_bytes: KV cache of the longest rollout, or the size that the run sets.
    step_kv_bytes: KV cache of all rollouts of a step.
    max_kv_bytes: KV cache of the maximum of concurrent rollouts.
    """

    kind: CallKind
    memory: CallMemory
    weights_key: str
    batch_tokens: float = 0.0
    min_kv_bytes: float = 0.0
    step_kv_bytes: float = 0.0
    max_kv_bytes: float = 0.0

    def with_more(self, added: CallMemory) -> "CallFootprint":
        """Return the footprint of a call that holds `added` besides."""
        resident = self.memory.resident_bytes + added.resident_bytes
        active = self.memory.active_bytes + added.active_bytes
        return replace(self, memory=CallMemory(resident, active))


@dataclass(frozen=True)
class DeviceRange:
    """Adjacent devices of the same type that hold the same calls."""

    mesh: Mesh
    device: DeviceSpec
    stages: tuple[str, ...]


def iter_device_ranges(placement: Placement, cluster: Cluster) -> Iterator[DeviceRange]:
    """Yield the ranges of devices with the same calls; devices without calls are left out."""
    edges = set(cluster.group_starts)
    for assignment in placement.assignments.values():
        edges |= {assignment.mesh.first, assignment.mesh.first + assignment.mesh.size}
    for first, end in pairwise(sorted(edges)):
        mesh = Mesh(first, end - first)
        stages = tuple(s for s, call in placement.assignments.items() if call.mesh.overlaps(mesh))
        if stages:
            yield DeviceRange(mesh, cluster.find_node_group(first).device, stages)


@dataclass(frozen=True)
class MemoryItem:
    """Item of a device's peak memory: the active bytes of a call, or a KV cache."""

    stage: str
    num_bytes: float
    is_kv: bool = False


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of all calls of a placement, added up per device."""

    placement: Placement
    footprints: Mapping[str, CallFootprint]
    cluster: Cluster
    constants: CostConstants

    def compute_kv_capacity_bytes(self, stage: str) -> float:
        """Return the bytes left for a generating stage's KV cache on its fullest device.

        The result is negative if memory is short.
        """
        return min(
            self._free_kv_bytes(device_range)
            for device_range in self._device_ranges
            if stage in device_range.stages
        )

    def compute_kv_cache_bytes(self, stage: str) -> float:
        """Return the KV cache bytes per device that a stage's engines can fill.

        Besides the free memory, the number of concurrent rollouts limits them.
        """
        footprint, steps = self.footprints[stage], self.placement.max_staleness + 1
        return max(
            0.0,
            min(
                self.compute_kv_capacity_bytes(stage),
                footprint.max_kv_bytes,
                steps * footprint.step_kv_bytes,
            ),
        )

    def compute_memory_by_stage(self) -> dict[str, CallMemory]:
        """Return, by stage, the memory of a call per device, including the used KV cache.

        Weights that several calls share count for the first of these calls.
        """
        memory: dict[str, CallMemory] = {}
        seen: set[str] = set()
        for stage, footprint in self.footprints.items():
            resident = 0.0 if footprint.weights_key in seen else footprint.memory.resident_bytes
            active = footprint.memory.active_bytes
            if footprint.kind is CallKind.GENERATE and self.constants.keeps_kv:
                resident += self.compute_kv_cache_bytes(stage)
            elif footprint.kind is CallKind.GENERATE:
                active += self.compute_kv_cache_bytes(stage)
            memory[stage] = CallMemory(resident, active)
            seen.add(footprint.weights_key)
        return memory

    def explain_infeasible(self) -> str:
        shortages = [
            (self._compute_missing_bytes(device_range), device_range)
            for device_range in self._device_ranges
        ]
        if not shortages:
            return ""  # no call is placed yet
        missing, fullest = max(shortages, key=lambda entry: entry[0])
        return self._explain_shortage(fullest) if missing > 0 else ""

    @property
    def _device_ranges(self) -> list[DeviceRange]:
        return list(iter_device_ranges(self.placement, self.cluster))

    def _compute_resident_bytes(self, device_range: DeviceRange) -> float:
        bytes_by_key = {
            self.footprints[s].weights_key: self.footprints[s].memory.resident_bytes
            for s in device_range.stages
        }
        return sum(bytes_by_key.values())

    def _free_kv_bytes(self, device_range: DeviceRange) -> float:
        usable = compute_usable_bytes(device_range.device.memory_bytes, self.constants)
        active = self._find_max_active_bytes(device_range, self._kinds_beside_kv)
        active += self._find_max_active_bytes(device_range, (CallKind.GENERATE,))
        return usable - self._compute_resident_bytes(device_range) - active

    @property
    def _kinds_beside_kv(self) -> Sequence[CallKind]:
        """Kinds of calls that compute while a generator holds its KV cache."""
        kinds = (CallKind.SCORE, CallKind.TRAIN)
        return kinds if self.constants.keeps_kv else kinds[:1]

    def _find_max_active_bytes(self, device_range: DeviceRange, kinds: Sequence[CallKind]) -> float:
        footprints = (self.footprints[stage] for stage in device_range.stages)
        return max(
            (footprint.memory.active_bytes for footprint in footprints if footprint.kind in kinds),
            default=0.0,
        )

    def _list_peak_items(self, device_range: DeviceRange) -> list[MemoryItem]:
        """Return the active bytes and the KV cache at the memory peak of a device in the range.

        Resident bytes are left out.
        """
        footprints = {stage: self.footprints[stage] for stage in device_range.stages}
        worst = max(footprints, key=lambda stage: footprints[stage].memory.active_bytes)
        peak = [MemoryItem(worst, footprints[worst].memory.active_bytes)]
        # Either the call with the largest active bytes computes, or a generator holds its KV cache
        # while a call that tolerates the KV cache computes.
        for stage, footprint in footprints.items():
            if footprint.kind is not CallKind.GENERATE:
                continue
            others = [
                other for other in footprints if footprints[other].kind in self._kinds_beside_kv
            ]
            items = [
                MemoryItem(stage, footprint.min_kv_bytes, is_kv=True),
                MemoryItem(stage, footprint.memory.active_bytes),
            ]
            if others:
                largest = max(others, key=lambda other: footprints[other].memory.active_bytes)
                items.append(MemoryItem(largest, footprints[largest].memory.active_bytes))
            peak = max(peak, items, key=_sum_bytes)
        return peak

    def _compute_missing_bytes(self, device_range: DeviceRange) -> float:
        needed = self._compute_resident_bytes(device_range) + _sum_bytes(
            self._list_peak_items(device_range)
        )
        return needed - compute_usable_bytes(device_range.device.memory_bytes, self.constants)

    def _explain_shortage(self, device_range: DeviceRange) -> str:
        device, missing = device_range.device, self._compute_missing_bytes(device_range)
        usable = compute_usable_bytes(device.memory_bytes, self.constants)
        stages_by_key: dict[str, list[str]] = {}
        for stage in device_range.stages:
            stages_by_key.setdefault(self.footprints[stage].weights_key, []).append(stage)
        resident = [
            f"{' and '.join(stages)} {_format_gb(self.footprints[stages[0]].memory.resident_bytes)}"
            for stages in stages_by_key.values()
        ]
        active = [
            self._describe_item(item)
            for item in self._list_peak_items(device_range)
            if item.num_bytes
        ]
        return (
            f"devices {device_range.mesh}: needs {_format_gb(usable + missing)} GB per"
            f" {device.name};"
            f" {_format_gb(usable)} of {_format_gb(device.memory_bytes)} GB usable,"
            f" {_format_gb(missing)} GB short: resident"
            f" {', '.join(resident)}; active {', '.join(active)}"
        )

    def _describe_item(self, item: MemoryItem) -> str:
        footprint = self.footprints[item.stage]
        purpose = _ACTIVE_MEMORY_TEXT[footprint.kind].format(tokens=footprint.batch_tokens)
        if item.is_kv:
            is_set = footprint.min_kv_bytes == footprint.max_kv_bytes
            purpose = "for keys and values" + ("" if is_set else " of one rollout")
        return f"{item.stage} {_format_gb(item.num_bytes)} {purpose}"


_ACTIVE_MEMORY_TEXT = {
    CallKind.GENERATE: "to load a version",
    CallKind.SCORE: "for {tokens:.0f} tokens at a time",
    CallKind.TRAIN: "for {tokens:.0f} tokens at a time",
}
"""Purpose of a call's active bytes, in `explain_infeasible`."""


def _sum_bytes(items: Sequence[MemoryItem]) -> float:
    return sum(item.num_bytes for item in items)


def _format_gb(num_bytes: float) -> str:
    """Return gigabytes with a decimal place, or with two significant digits below 1 GB."""
    size = num_bytes / GB
    return f"{size:.1f}" if size >= 1 or not size else f"{size:.2g}"
