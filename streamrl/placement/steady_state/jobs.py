"""The calls of a placement as jobs to unroll: what waits for what, and for how long it computes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from streamrl.dataflow import MOVED, POLICY, Call, Dataflow, Kind
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Assignment, Placement
from streamrl.placement.run_options import Manner
from streamrl.placement.stage_timings import Timings, WeightsTiming
from streamrl.placement.steady_state.call_durations import (
    Generation,
    cuts_of,
    score_s,
    spread,
    training,
)
from streamrl.placement.steady_state.list_scheduler import NOWHERE, Job, Need
from streamrl.placement.workload import Workload


@dataclass(frozen=True)
class Flow:
    """A dataflow as jobs need it: the calls in order, and whose results each of them takes.

    Calls that generate are one job: they share replicas, and begin together.
    """

    calls: tuple[Call, ...]
    sources: dict[str, list[str]]
    trained: list[str]

    @classmethod
    def of(cls, dataflow: Dataflow) -> "Flow":
        """Of this."""
        graph, ordered = dataflow.graph, dataflow.ordered
        generate = dataflow.of_kind(Kind.GENERATE)[0].stage
        kinds = {call.stage: call.kind for call in ordered}
        sources: dict[str, list[str]] = {}
        for call in ordered:
            found = (
                generate if kinds[source] is Kind.GENERATE else source
                for source in graph.predecessors(call.stage)
            )
            sources[call.stage] = list(dict.fromkeys(found))
        return cls(tuple(ordered), sources, dataflow.trained)

    @property
    def generate(self) -> Call:
        """The first call."""
        return self.calls[0]

    @property
    def greedy(self) -> int:
        """Rollouts of each group that are sampled besides."""
        return sum(call.kind is Kind.GENERATE for call in self.calls) - 1

    def per_group(self, call: Call, workload: Workload) -> int:
        """Rollouts of a group that a call scores."""
        return 1 if "greedy_ids" in call.needs else workload.group_size

    def leader(self, call: Call) -> str:
        """The trained role whose versions a call follows; empty for none."""
        role = POLICY if call.follows == MOVED else call.follows
        return role if role in self.trained else ""


@dataclass
class Jobs:
    """All jobs, in the order in which they are added; whose results are to be had where.

    spells: of generation that is ahead, in what time about which part of the groups is complete.
    """

    flow: Flow
    workload: Workload
    placement: Placement
    timings: Timings
    manner: Manner = field(default_factory=Manner)
    devices: list[Mesh] = field(default_factory=list)
    overlaps: list[list[int]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    by_stage: dict[str, int] = field(default_factory=dict)
    updates: list[int] = field(default_factory=list)
    spells: Sequence[tuple[float, float]] = ()

    def __post_init__(self) -> None:
        trains = {call.stage for call in self.flow.calls if call.kind is Kind.TRAIN}
        held = {stage: (each.mesh, stage in trains) for stage, each in self.placement.calls.items()}
        used = list(dict.fromkeys(held.values()))
        self.devices = [mesh for mesh, _ in used]
        # All trainers work as one: who shares devices with any of them waits for the step of all.
        trained = [mesh for mesh, is_trained in used if is_trained]
        self.overlaps = [[m for m, b in enumerate(used) if _exclude(a, b, trained)] for a in used]
        self._mesh = {stage: used.index(each) for stage, each in held.items()}
        meshes = set(self.devices)
        apart = any(not a.overlaps(b) for a in meshes for b in meshes)
        self.in_parts = apart and self.placement.streamed

    def mesh(self, stage: str) -> int:
        """The number of a stage's mesh."""
        return self._mesh.get(stage, NOWHERE)

    def cuts(self, pieces: int) -> tuple[float, ...]:
        """How work of so many pieces is cut, where calls work on a step as it comes."""
        return cuts_of(pieces if self.in_parts else 1)

    @property
    def group_cuts(self) -> tuple[float, ...]:
        """Of generation and scoring."""
        return self.cuts(self.workload.groups_per_step)

    @property
    def stops(self) -> set[int]:
        """Meshes whose work stops generation that is ahead, though it has other devices.

        Of what is trained, if somebody scores on its devices and on those that generate: groups
        come one by one, so that one is soon there, and generation gives way while it waits.
        """
        if not (self.in_parts and self.trickles):
            return set()
        generate = self.placement.calls[self.flow.generate.stage].mesh
        trains = [call for call in self.flow.calls if call.kind is Kind.TRAIN]
        meshes = [self.placement.calls[call.stage].mesh for call in trains]
        bridged = any(
            each.mesh.overlaps(generate) and any(each.mesh.overlaps(mesh) for mesh in meshes)
            for each in self._scoring
        )
        return {self.mesh(call.stage) for call in trains} if bridged else set()

    @property
    def _scoring(self) -> list[Assignment]:
        calls = self.placement.calls
        scores = [call.stage for call in self.flow.calls if call.kind is Kind.SCORE]
        return [calls[stage] for stage in scores if stage in calls]

    @property
    def link_s(self) -> float:
        """On policy, from the end of a group that is filtered to where another is asked for."""
        if not self.workload.filtered:
            return 0.0
        judges = [call for call in self.flow.calls if "scores" in call.produces]
        timed = [call for call in judges if call.stage in self.timings.score]
        return 2 * self.timings.hop_s + sum(self._group_s(call) for call in timed)

    def scores_s(self, call: Call) -> float:
        """All that a call scores for a step, of the replica that has the most."""
        timing, per_group = self.timings.score[call.stage], self.flow.per_group(call, self.workload)
        seconds = score_s(timing, self.workload, per_group, singly=self.trickles)
        return seconds * self._sampled(call)

    def _group_s(self, call: Call) -> float:
        """One group that a call scores, by itself."""
        per_group = self.flow.per_group(call, self.workload)
        timing, tokens = self.timings.score[call.stage], per_group * self.workload.rollout_tokens
        return timing.batch_of(per_group, tokens)

    def _sampled(self, call: Call) -> float:
        """Groups that a call scores for each that is trained: who judges has the filtered, too."""
        return 1 / (1 - self.workload.filtered) if "scores" in call.produces else 1.0

    @property
    def publish_every(self) -> int:
        """Steps from one version that is published to the next: as many as may be ahead."""
        return min(self.manner.publish_every, 1 + self.placement.max_staleness)

    @property
    def trickles(self) -> bool:
        """Whether groups of a step are ready one by one: replicas that score take each at once."""
        return self.placement.streamed and self.workload.varied

    def weights(self, stage: str) -> WeightsTiming:
        """A version's way to a stage."""
        return self.timings.weights.get(stage, WeightsTiming())

    def build(self, generate: Job) -> list[Job]:
        """All jobs of a step, with this one for generation; its needs are added here."""
        # Numbers first: who is needed may come later in a step, and earlier by a version.
        followers = [call for call in self.flow.calls if self._pulls(call)]
        trains = [call for call in self.flow.calls if call.kind is Kind.TRAIN]
        scores = [call for call in self.flow.calls if call.kind is Kind.SCORE]
        count = len(followers) + 1 + len(scores)
        self.updates = list(range(count, count + len(trains)))
        pulls = {}
        for call in followers:
            pulls[call.stage] = self._add(self._pull(call))
        first = self.flow.generate.stage
        self.by_stage[first] = len(self.jobs)
        self.jobs.append(self._generate(generate, pulls.get(first)))
        for call in scores:
            self.by_stage[call.stage] = self._add(self._score(call, pulls.get(call.stage)))
        for call in trains:
            self.by_stage[call.stage] = self._add(self._train(call, len(self.jobs)))
        return self.jobs

    def _add(self, job: Job) -> int:
        self.jobs.append(job)
        return len(self.jobs) - 1

    def _pulls(self, call: Call) -> bool:
        return call is self.flow.generate or (
            call.kind is Kind.SCORE and bool(self.flow.leader(call))
        )

    def _pull(self, call: Call) -> Job:
        """The version that a step may be generated with, on its way.

        Steps that wait for the same one, as not all are published, have it taken up by the first.
        """
        weights = self.weights(call.stage)
        way = weights.publish_s + weights.pull_s - weights.pause_s
        lag, every = 1 + self.placement.max_staleness, self._every(call)
        needs = [Need(update, lag, True, delay_s=way, every=every) for update in self.updates]
        mesh, pause = self.mesh(call.stage), (weights.pause_s,)
        return Job(call.stage, mesh, pause, needs, every=every, first=lag)

    def _every(self, call: Call) -> int:
        """A reference that moves has a pace of its own."""
        return 1 if call.follows == MOVED else self.publish_every

    def _generate(self, job: Job, pull: int | None) -> Job:
        return replace(job, needs=[] if pull is None else [Need(pull)])

    def _score(self, call: Call, pull: int | None) -> Job:
        needs = self._sources(call)
        if pull is not None:
            needs.append(Need(pull))
        seconds = 0.0
        if call.stage in self.timings.score:
            seconds = max(self.scores_s(call), self._bursts_s(call))
        parts = spread(seconds, self.group_cuts)
        return Job(call.stage, self.mesh(call.stage), parts, needs, queued=True)

    def _bursts_s(self, call: Call) -> float:
        """How long generation that is ahead stands still for groups that are scored as they come.

        It has a slice between two bursts, and in each of them waits for as long as a group takes.
        """
        if not self.trickles or not self.placement.overlaps(call.stage, self.flow.generate.stage):
            return 0.0
        group_s = self._group_s(call) * self._sampled(call)
        groups, slice_s = self.workload.groups_per_step, self.manner.slice_s
        bursts = sum(
            min(part * groups, seconds / (slice_s + group_s)) for part, seconds in self.spells
        )
        return bursts * group_s

    def _sources(self, call: Call, *, whole: bool = False) -> list[Need]:
        hop_s, whole = self.timings.hop_s, whole or not self.in_parts
        return [
            Need(self.by_stage[source], whole=whole, delay_s=hop_s)
            for source in self.flow.sources[call.stage]
        ]

    def _train(self, call: Call, j: int) -> Job:
        """Passes as groups come, then the rest, which waits for the version before to be gone."""
        timing = self.timings.train[call.role]
        work = training(timing, self.workload)
        publish_s = max((self.weights(stage).publish_s for stage in self._led(call)), default=0.0)
        needs = self._sources(call, whole=self.workload.whole_steps)
        needs += [Need(each, 1, True, delay_s=self.timings.step_s) for each in self.updates]
        every = self.publish_every
        needs.append(Need(j, every, True, last=True, delay_s=publish_s, every=every))
        parts = spread(work.passes_s, self.cuts(work.micro_batches))
        parts = [*parts, work.last_s + timing.step_s]
        return Job(call.stage, self.mesh(call.stage), parts, needs, glued=True)

    def _led(self, call: Call) -> Sequence[str]:
        return [c.stage for c in self.flow.calls if self.flow.leader(c) == call.role]


def _exclude(one: tuple[Mesh, bool], other: tuple[Mesh, bool], trained: Sequence[Mesh]) -> bool:
    """Whether work on two meshes takes turns; of each, whether a model is trained there."""
    (mesh, trains), (another, others) = one, other
    if trains == others:
        return mesh.overlaps(another)
    apart = another if trains else mesh
    return any(each.overlaps(apart) for each in trained)


def burst(jobs: Jobs, generation: Generation) -> Job:
    """Generation on policy: all of a step at once, with nothing before and after it."""
    curve = generation.completion(jobs.timings.generator, jobs.group_cuts, jobs.link_s)
    stage = jobs.flow.generate.stage
    return Job(stage, jobs.mesh(stage), (curve[-1],), curve=curve)


def standing(jobs: Jobs, generation: Generation) -> Job:
    """Generation steps ahead, where one step's rollouts go on beside the next one's."""
    stage = jobs.flow.generate.stage
    window = jobs.placement.max_staleness + 1
    stream = generation.stream(jobs.timings.generator, jobs.group_cuts, window)
    return Job(stage, jobs.mesh(stage), (0.0,), stream=stream)


def busy(jobs: Jobs, generation: Generation) -> tuple[list[Job], float]:
    """All jobs of a step, generation as one part; and how long that has its devices."""
    stage, timing = jobs.flow.generate.stage, jobs.timings.generator
    if jobs.placement.max_staleness:
        busy_s = generation.saturated_s(timing, jobs.placement.max_staleness)
    else:
        (busy_s,) = generation.completion(timing, (1.0,), jobs.link_s)
    return jobs.build(Job(stage, jobs.mesh(stage), (busy_s,))), busy_s


def busiest_s(jobs: Jobs, every: Sequence[Job], within: Mesh | None = None) -> float:
    """What the device has to do that has most, of all or of a mesh: no step is shorter.

    Of devices between two meshes' beginnings all have to do the same, or less than the first.
    """
    work = [0.0] * len(jobs.devices)
    for job in every:
        if job.mesh != NOWHERE:
            work[job.mesh] += sum(job.parts) / job.every
    firsts = {mesh.first for mesh in jobs.devices}
    if within is not None:
        firsts = {first for first in firsts if first in within.devices} | {within.first}
    return max(
        sum(
            seconds
            for mesh, seconds in zip(jobs.devices, work, strict=True)
            if first in mesh.devices
        )
        for first in firsts
    )
