"""What a placement holds on every device, what that leaves for keys and values, who is too much.

A device holds what all its calls keep, and what one of them computes with, as they take turns. Keys
and values get the rest, or what the run gives them; they give way to training, unless
`Constants.keeps_kv` has them stay, and never to scoring.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from streamrl.dataflow import Kind
from streamrl.placement.clusters import GB, Cluster, Device
from streamrl.placement.costs.call_memory import usable
from streamrl.placement.costs.constants import Constants
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Placement
from streamrl.placement.problem import CallMemory


@dataclass(frozen=True)
class Holder:
    """A call on devices. One that samples gets the rest of a device for keys and values.

    memory: without those. weights: names what it keeps, which calls of one role on the same
    devices keep once. tokens: of the micro-batch or batch it computes with at a time, of one that
    samples those of its longest rollout. least_kv: bytes it cannot do without, of one rollout or as
    many as the run sets; step_kv: for all that it samples for a step; most_kv: for as many rollouts
    as may run at the same time.
    """

    kind: Kind
    memory: CallMemory
    weights: str
    tokens: float = 0.0
    least_kv: float = 0.0
    step_kv: float = 0.0
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
class Part:
    """Bytes that a call computes with, or of its keys and values."""

    stage: str
    num_bytes: float
    is_kv: bool = False


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

    def kv_cache(self, stage: str) -> float:
        """Of those, the bytes that it has a use for: what its engines are to be given."""
        holder, steps = self.holders[stage], self.placement.max_staleness + 1
        return max(0.0, min(self.kv_room(stage), holder.most_kv, steps * holder.step_kv))

    def memory(self) -> dict[str, CallMemory]:
        """Of each call, on a device; of one that samples, with the KV cache it has use of.

        Weights that several calls compute with are the first one's.
        """
        found: dict[str, CallMemory] = {}
        seen: set[str] = set()
        for stage, holder in self.holders.items():
            kept = 0.0 if holder.weights in seen else holder.memory.kept
            active = holder.memory.active
            if holder.kind is Kind.GENERATE and self.constants.keeps_kv:
                kept += self.kv_cache(stage)
            elif holder.kind is Kind.GENERATE:
                active += self.kv_cache(stage)
            found[stage] = CallMemory(kept, active)
            seen.add(holder.weights)
        return found

    def unfit(self) -> str:
        """Why the devices that lack most cannot hold it, in a line; empty if all can."""
        short = [(self._short(stretch), stretch) for stretch in self._stretches]
        if not short:
            return ""  # nothing is placed yet
        most, worst = max(short, key=lambda each: each[0])
        return self._why(worst) if most > 0 else ""

    @property
    def _stretches(self) -> list[Stretch]:
        return list(stretches(self.placement, self.cluster))

    def _kept(self, stretch: Stretch) -> float:
        found = {self.holders[s].weights: self.holders[s].memory.kept for s in stretch.stages}
        return sum(found.values())

    def _left(self, stretch: Stretch) -> float:
        """For keys and values."""
        room = usable(stretch.device.memory_bytes, self.constants)
        takes = self._beside_kv(stretch) + self._most(stretch, Kind.GENERATE)
        return room - self._kept(stretch) - takes

    def _beside_kv(self, stretch: Stretch) -> float:
        """What others compute with while keys and values stay."""
        scores = self._most(stretch, Kind.SCORE)
        return max(scores, self._most(stretch, Kind.TRAIN)) if self.constants.keeps_kv else scores

    def _most(self, stretch: Stretch, kind: Kind) -> float:
        """What the calls of a kind compute with, keys and values apart: the one with most."""
        holders = (self.holders[stage] for stage in stretch.stages)
        return max((each.memory.active for each in holders if each.kind is kind), default=0.0)

    def _peak(self, stretch: Stretch) -> list[Part]:
        """What is held at a time beside what is kept, at most."""
        own = {stage: self.holders[stage] for stage in stretch.stages}
        worst = max(own, key=lambda stage: own[stage].memory.active)
        peak = [Part(worst, own[worst].memory.active)]
        stays = (Kind.SCORE, Kind.TRAIN) if self.constants.keeps_kv else (Kind.SCORE,)
        for stage, each in own.items():
            if each.kind is not Kind.GENERATE:
                continue
            beside = [other for other in own if own[other].kind in stays]
            found = [Part(stage, each.least_kv, is_kv=True), Part(stage, each.memory.active)]
            if beside:
                most = max(beside, key=lambda other: own[other].memory.active)
                found.append(Part(most, own[most].memory.active))
            peak = max(peak, found, key=_total)
        return peak

    def _short(self, stretch: Stretch) -> float:
        """Bytes that a device has too little; less than 0 where some are left."""
        needed = self._kept(stretch) + _total(self._peak(stretch))
        return needed - usable(stretch.device.memory_bytes, self.constants)

    def _why(self, stretch: Stretch) -> str:
        """The sum of what is too much."""
        device, short = stretch.device, self._short(stretch)
        room = usable(device.memory_bytes, self.constants)
        kept: dict[str, list[str]] = {}
        for stage in stretch.stages:
            kept.setdefault(self.holders[stage].weights, []).append(stage)
        keeps = [
            f"{' and '.join(stages)} {_gb(self.holders[stages[0]].memory.kept)}"
            for stages in kept.values()
        ]
        on_top = [self._told(part) for part in self._peak(stretch) if part.num_bytes]
        return (
            f"devices {stretch.mesh}: {_gb(room + short)} GB on each {device.name}, which has"
            f" {_gb(room)} of {_gb(device.memory_bytes)} to give, {_gb(short)} too little: kept by"
            f" {', '.join(keeps)}; on top {', '.join(on_top)}"
        )

    def _told(self, part: Part) -> str:
        holder = self.holders[part.stage]
        what = _WORK[holder.kind].format(tokens=holder.tokens)
        if part.is_kv:
            is_set = holder.least_kv == holder.most_kv
            what = "for keys and values" + ("" if is_set else " of one rollout")
        return f"{part.stage} {_gb(part.num_bytes)} {what}"


_WORK = {
    Kind.GENERATE: "to lay down a version",
    Kind.SCORE: "for {tokens:.0f} tokens at a time",
    Kind.TRAIN: "for {tokens:.0f} tokens at a time",
}
"""What a call computes with memory of its own for."""


def _total(parts: Sequence[Part]) -> float:
    return sum(part.num_bytes for part in parts)


def _gb(num_bytes: float) -> str:
    """With as many digits as what is little needs."""
    size = num_bytes / GB
    return f"{size:.1f}" if size >= 1 or not size else f"{size:.2g}"
