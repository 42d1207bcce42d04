"""The calls of a placement as jobs to unroll: what waits for what, and for how long it computes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from streamrl.dataflow import EMA_REFERENCE, POLICY, CallKind, Dataflow, ModelCall
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.run_options import RunOptions
from streamrl.placement.stage_timings import StageTimings, WeightsTiming
from streamrl.placement.steady_state.call_durations import (
    GenerationModel,
    choose_cuts,
    score_duration_s,
    split_seconds,
    train_duration,
)
from streamrl.placement.steady_state.list_scheduler import NO_MESH, JobDependency, StepJob
from streamrl.placement.workload import Workload


@dataclass(frozen=True)
class CallGraph:
    """A dataflow as jobs need it: the calls in order, and whose results each of them takes.

    Calls that generate are one job: they share replicas, and begin together.
    """

    calls: tuple[ModelCall, ...]
    sources: dict[str, list[str]]
    trained_roles: list[str]

    @classmethod
    def from_dataflow(cls, dataflow: Dataflow) -> "CallGraph":
        """Of this."""
        graph, ordered = dataflow.graph, dataflow.ordered_calls
        generate = dataflow.select_calls(CallKind.GENERATE)[0].stage
        kinds = {call.stage: call.kind for call in ordered}
        sources: dict[str, list[str]] = {}
        for call in ordered:
            found = (
                generate if kinds[source] is CallKind.GENERATE else source
                for source in graph.predecessors(call.stage)
            )
            sources[call.stage] = list(dict.fromkeys(found))
        return cls(tuple(ordered), sources, dataflow.trained_roles)

    @property
    def generate_call(self) -> ModelCall:
        """The first call."""
        return self.calls[0]

    @property
    def num_greedy(self) -> int:
        """Rollouts of each group that are sampled besides."""
        return sum(call.kind is CallKind.GENERATE for call in self.calls) - 1

    def count_rollouts(self, call: ModelCall, workload: Workload) -> int:
        """Rollouts of a group that a call scores."""
        return 1 if "greedy_ids" in call.needs else workload.group_size

    def find_leader(self, call: ModelCall) -> str:
        """The trained role whose versions a call follows; empty for none."""
        role = POLICY if call.followed_role == EMA_REFERENCE else call.followed_role
        return role if role in self.trained_roles else ""


@dataclass
class JobGraph:
    """All jobs, in the order in which they are added; whose results are to be had where.

    spells: of generation that is ahead, in what time about which part of the groups is complete.
    """

    call_graph: CallGraph
    workload: Workload
    placement: Placement
    timings: StageTimings
    run_options: RunOptions = field(default_factory=RunOptions)
    meshes: list[Mesh] = field(default_factory=list)
    overlaps: list[list[int]] = field(default_factory=list)
    jobs: list[StepJob] = field(default_factory=list)
    job_by_stage: dict[str, int] = field(default_factory=dict)
    train_jobs: list[int] = field(default_factory=list)
    completion_spans: Sequence[tuple[float, float]] = ()

    def __post_init__(self) -> None:
        trains = {call.stage for call in self.call_graph.calls if call.kind is CallKind.TRAIN}
        held = {
            stage: (each.mesh, stage in trains)
            for stage, each in self.placement.assignments.items()
        }
        used = list(dict.fromkeys(held.values()))
        self.meshes = [mesh for mesh, _ in used]
        # All trainers work as one: who shares devices with any of them waits for the step of all.
        trained = [mesh for mesh, is_trained in used if is_trained]
        self.overlaps = [
            [m for m, b in enumerate(used) if _are_exclusive(a, b, trained)] for a in used
        ]
        self._mesh_by_stage = {stage: used.index(each) for stage, each in held.items()}
        meshes = set(self.meshes)
        apart = any(not a.overlaps(b) for a in meshes for b in meshes)
        self.is_streamed = apart and self.placement.is_streamed

    def find_mesh(self, stage: str) -> int:
        """The number of a stage's mesh."""
        return self._mesh_by_stage.get(stage, NO_MESH)

    def choose_cuts(self, pieces: int) -> tuple[float, ...]:
        """How work of so many pieces is cut, where calls work on a step as it comes."""
        return choose_cuts(pieces if self.is_streamed else 1)

    @property
    def group_cuts(self) -> tuple[float, ...]:
        """Of generation and scoring."""
        return self.choose_cuts(self.workload.groups_per_step)

    @property
    def stopping_meshes(self) -> set[int]:
        """Meshes whose work stops generation that is ahead, though it has other devices.

        Of what is trained, if somebody scores on its devices and on those that generate: groups
        come one by one, so that one is soon there, and generation gives way while it waits.
        """
        if not (self.is_streamed and self.has_single_group_arrivals):
            return set()
        generate = self.placement.assignments[self.call_graph.generate_call.stage].mesh
        trains = [call for call in self.call_graph.calls if call.kind is CallKind.TRAIN]
        meshes = [self.placement.assignments[call.stage].mesh for call in trains]
        bridged = any(
            each.mesh.overlaps(generate) and any(each.mesh.overlaps(mesh) for mesh in meshes)
            for each in self._score_assignments
        )
        return {self.find_mesh(call.stage) for call in trains} if bridged else set()

    @property
    def _score_assignments(self) -> list[CallAssignment]:
        calls = self.placement.assignments
        scores = [call.stage for call in self.call_graph.calls if call.kind is CallKind.SCORE]
        return [calls[stage] for stage in scores if stage in calls]

    @property
    def refill_s(self) -> float:
        """On policy, from the end of a group that is filtered to where another is asked for."""
        if not self.workload.filtered_fraction:
            return 0.0
        judges = [call for call in self.call_graph.calls if "scores" in call.produces]
        timed = [call for call in judges if call.stage in self.timings.score]
        return 2 * self.timings.hop_s + sum(self._group_score_s(call) for call in timed)

    def score_duration_s(self, call: ModelCall) -> float:
        """All that a call scores for a step, of the replica that has the most."""
        timing, per_group = (
            self.timings.score[call.stage],
            self.call_graph.count_rollouts(call, self.workload),
        )
        seconds = score_duration_s(
            timing, self.workload, per_group, singly=self.has_single_group_arrivals
        )
        return seconds * self._sampled_per_trained(call)

    def _group_score_s(self, call: ModelCall) -> float:
        """One group that a call scores, by itself."""
        per_group = self.call_graph.count_rollouts(call, self.workload)
        timing, tokens = self.timings.score[call.stage], per_group * self.workload.rollout_tokens
        return timing.batch_duration_s(per_group, tokens)

    def _sampled_per_trained(self, call: ModelCall) -> float:
        """Groups that a call scores for each that is trained: who judges has the filtered, too."""
        return 1 / (1 - self.workload.filtered_fraction) if "scores" in call.produces else 1.0

    @property
    def publish_every(self) -> int:
        """Steps from one version that is published to the next: as many as may be ahead."""
        return min(self.run_options.publish_every, 1 + self.placement.max_staleness)

    @property
    def has_single_group_arrivals(self) -> bool:
        """Whether groups of a step are ready one by one: replicas that score take each at once."""
        return self.placement.is_streamed and self.workload.has_varied_lengths

    def find_weights_timing(self, stage: str) -> WeightsTiming:
        """A version's way to a stage."""
        return self.timings.weights.get(stage, WeightsTiming())

    def build_jobs(self, generate: StepJob) -> list[StepJob]:
        """All jobs of a step, with this one for generation; its needs are added here."""
        # Numbers first: who is needed may come later in a step, and earlier by a version.
        followers = [call for call in self.call_graph.calls if self._is_follower(call)]
        trains = [call for call in self.call_graph.calls if call.kind is CallKind.TRAIN]
        scores = [call for call in self.call_graph.calls if call.kind is CallKind.SCORE]
        count = len(followers) + 1 + len(scores)
        self.train_jobs = list(range(count, count + len(trains)))
        pulls = {}
        for call in followers:
            pulls[call.stage] = self._add_job(self._make_pull_job(call))
        first = self.call_graph.generate_call.stage
        self.job_by_stage[first] = len(self.jobs)
        self.jobs.append(self._make_generate_job(generate, pulls.get(first)))
        for call in scores:
            self.job_by_stage[call.stage] = self._add_job(
                self._make_score_job(call, pulls.get(call.stage))
            )
        for call in trains:
            self.job_by_stage[call.stage] = self._add_job(
                self._make_train_job(call, len(self.jobs))
            )
        return self.jobs

    def _add_job(self, job: StepJob) -> int:
        self.jobs.append(job)
        return len(self.jobs) - 1

    def _is_follower(self, call: ModelCall) -> bool:
        return call is self.call_graph.generate_call or (
            call.kind is CallKind.SCORE and bool(self.call_graph.find_leader(call))
        )

    def _make_pull_job(self, call: ModelCall) -> StepJob:
        """The version that a step may be generated with, on its way.

        Steps that wait for the same one, as not all are published, have it taken up by the first.
        """
        weights = self.find_weights_timing(call.stage)
        way = weights.publish_s + weights.pull_s - weights.pause_s
        lag, every = 1 + self.placement.max_staleness, self._find_version_interval(call)
        needs = [
            JobDependency(update, lag, True, delay_s=way, step_interval=every)
            for update in self.train_jobs
        ]
        mesh, pause = self.find_mesh(call.stage), (weights.pause_s,)
        return StepJob(call.stage, mesh, pause, needs, step_interval=every, first_step=lag)

    def _find_version_interval(self, call: ModelCall) -> int:
        """A reference that moves has a pace of its own."""
        return 1 if call.followed_role == EMA_REFERENCE else self.publish_every

    def _make_generate_job(self, job: StepJob, pull: int | None) -> StepJob:
        return replace(job, dependencies=[] if pull is None else [JobDependency(pull)])

    def _make_score_job(self, call: ModelCall, pull: int | None) -> StepJob:
        needs = self._make_data_dependencies(call)
        if pull is not None:
            needs.append(JobDependency(pull))
        seconds = 0.0
        if call.stage in self.timings.score:
            seconds = max(self.score_duration_s(call), self._interrupted_s(call))
        parts = split_seconds(seconds, self.group_cuts)
        return StepJob(call.stage, self.find_mesh(call.stage), parts, needs, is_queued=True)

    def _interrupted_s(self, call: ModelCall) -> float:
        """How long generation that is ahead stands still for groups that are scored as they come.

        It has a slice between two bursts, and in each of them waits for as long as a group takes.
        """
        if not self.has_single_group_arrivals or not self.placement.overlaps(
            call.stage, self.call_graph.generate_call.stage
        ):
            return 0.0
        group_s = self._group_score_s(call) * self._sampled_per_trained(call)
        groups, slice_s = self.workload.groups_per_step, self.run_options.slice_s
        bursts = sum(
            min(part * groups, seconds / (slice_s + group_s))
            for part, seconds in self.completion_spans
        )
        return bursts * group_s

    def _make_data_dependencies(
        self, call: ModelCall, *, whole: bool = False
    ) -> list[JobDependency]:
        hop_s, whole = self.timings.hop_s, whole or not self.is_streamed
        return [
            JobDependency(self.job_by_stage[source], is_whole=whole, delay_s=hop_s)
            for source in self.call_graph.sources[call.stage]
        ]

    def _make_train_job(self, call: ModelCall, j: int) -> StepJob:
        """Passes as groups come, then the rest, which waits for the version before to be gone."""
        timing = self.timings.train[call.role]
        work = train_duration(timing, self.workload)
        publish_s = max(
            (
                self.find_weights_timing(stage).publish_s
                for stage in self._list_follower_stages(call)
            ),
            default=0.0,
        )
        needs = self._make_data_dependencies(call, whole=self.workload.requires_whole_step)
        needs += [
            JobDependency(each, 1, True, delay_s=self.timings.step_s) for each in self.train_jobs
        ]
        every = self.publish_every
        needs.append(
            JobDependency(
                j, every, True, is_for_last_part=True, delay_s=publish_s, step_interval=every
            )
        )
        parts = split_seconds(work.passes_s, self.choose_cuts(work.micro_batches))
        parts = [*parts, work.final_s + timing.step_s]
        return StepJob(call.stage, self.find_mesh(call.stage), parts, needs, is_glued=True)

    def _list_follower_stages(self, call: ModelCall) -> Sequence[str]:
        return [
            c.stage for c in self.call_graph.calls if self.call_graph.find_leader(c) == call.role
        ]


def _are_exclusive(
    one: tuple[Mesh, bool], other: tuple[Mesh, bool], trained: Sequence[Mesh]
) -> bool:
    """Whether work on two meshes takes turns; of each, whether a model is trained there."""
    (mesh, trains), (another, others) = one, other
    if trains == others:
        return mesh.overlaps(another)
    apart = another if trains else mesh
    return any(each.overlaps(apart) for each in trained)


def make_on_policy_job(jobs: JobGraph, generation: GenerationModel) -> StepJob:
    """Generation on policy: all of a step at once, with nothing before and after it."""
    curve = generation.find_completions_s(jobs.timings.generator, jobs.group_cuts, jobs.refill_s)
    stage = jobs.call_graph.generate_call.stage
    return StepJob(stage, jobs.find_mesh(stage), (curve[-1],), result_times_s=curve)


def make_ahead_job(jobs: JobGraph, generation: GenerationModel) -> StepJob:
    """Generation steps ahead, where one step's rollouts go on beside the next one's."""
    stage = jobs.call_graph.generate_call.stage
    window = jobs.placement.max_staleness + 1
    stream = generation.find_rollout_profile(jobs.timings.generator, jobs.group_cuts, window)
    return StepJob(stage, jobs.find_mesh(stage), (0.0,), profile=stream)


def build_busy_jobs(jobs: JobGraph, generation: GenerationModel) -> tuple[list[StepJob], float]:
    """All jobs of a step, generation as one part; and how long that has its devices."""
    stage, timing = jobs.call_graph.generate_call.stage, jobs.timings.generator
    if jobs.placement.max_staleness:
        busy_s = generation.saturated_step_s(timing, jobs.placement.max_staleness)
    else:
        (busy_s,) = generation.find_completions_s(timing, (1.0,), jobs.refill_s)
    return jobs.build_jobs(StepJob(stage, jobs.find_mesh(stage), (busy_s,))), busy_s


def max_busy_s(jobs: JobGraph, every: Sequence[StepJob], within: Mesh | None = None) -> float:
    """What the device has to do that has most, of all or of a mesh: no step is shorter.

    Of devices between two meshes' beginnings all have to do the same, or less than the first.
    """
    work = [0.0] * len(jobs.meshes)
    for job in every:
        if job.mesh != NO_MESH:
            work[job.mesh] += sum(job.parts) / job.step_interval
    firsts = {mesh.first for mesh in jobs.meshes}
    if within is not None:
        firsts = {first for first in firsts if first in within.devices} | {within.first}
    return max(
        sum(
            seconds
            for mesh, seconds in zip(jobs.meshes, work, strict=True)
            if first in mesh.devices
        )
        for first in firsts
    )
