"""Jobs of a placement for the list scheduler: dependencies and durations of every call."""

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
    """Calls in flow order, and the calls whose results each of them takes.

    Generating calls form one job: they share replicas and start together.
    """

    calls: tuple[ModelCall, ...]
    sources: dict[str, list[str]]
    trained_roles: list[str]

    @classmethod
    def from_dataflow(cls, dataflow: Dataflow) -> "CallGraph":
        graph, ordered = dataflow.graph, dataflow.ordered_calls
        generate = dataflow.select_calls(CallKind.GENERATE)[0].stage
        kinds = {call.stage: call.kind for call in ordered}
        sources: dict[str, list[str]] = {}
        for call in ordered:
            sources_of_call = (
                generate if kinds[source] is CallKind.GENERATE else source
                for source in graph.predecessors(call.stage)
            )
            sources[call.stage] = list(dict.fromkeys(sources_of_call))
        return cls(tuple(ordered), sources, dataflow.trained_roles)

    @property
    def generate_call(self) -> ModelCall:
        """First generating call."""
        return self.calls[0]

    @property
    def num_greedy(self) -> int:
        """Greedy rollouts per group, besides group_size."""
        return sum(call.kind is CallKind.GENERATE for call in self.calls) - 1

    def count_rollouts(self, call: ModelCall, workload: Workload) -> int:
        """Return the rollouts per group that a call scores."""
        return 1 if "greedy_ids" in call.needs else workload.group_size

    def find_leader(self, call: ModelCall) -> str:
        """Return the trained role whose versions a call follows; empty for none."""
        role = POLICY if call.followed_role == EMA_REFERENCE else call.followed_role
        return role if role in self.trained_roles else ""


@dataclass
class JobGraph:
    """Builder of the jobs of a step, numbered in the order of `jobs`.

    completion_spans: with generation ahead, (fraction of the groups, seconds in which they
      complete).
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
        mesh_kinds = {
            stage: (mesh_kind.mesh, stage in trains)
            for stage, mesh_kind in self.placement.assignments.items()
        }
        distinct_kinds = list(dict.fromkeys(mesh_kinds.values()))
        self.meshes = [mesh for mesh, _ in distinct_kinds]
        # All trainers end their step together, so a call that shares devices with one waits for
        # all.
        trained = [mesh for mesh, is_trained in distinct_kinds if is_trained]
        self.overlaps = [
            [m for m, b in enumerate(distinct_kinds) if _are_exclusive(a, b, trained)]
            for a in distinct_kinds
        ]
        self._mesh_by_stage = {
            stage: distinct_kinds.index(mesh_kind) for stage, mesh_kind in mesh_kinds.items()
        }
        meshes = set(self.meshes)
        is_disaggregated = any(not a.overlaps(b) for a in meshes for b in meshes)
        self.is_streamed = is_disaggregated and self.placement.is_streamed

    def find_mesh(self, stage: str) -> int:
        """Return the number of a stage's mesh."""
        return self._mesh_by_stage.get(stage, NO_MESH)

    def choose_cuts(self, pieces: int) -> tuple[float, ...]:
        """Return the cuts of work with so many pieces; one cut if calls do not stream."""
        return choose_cuts(pieces if self.is_streamed else 1)

    @property
    def group_cuts(self) -> tuple[float, ...]:
        """Cuts of generation and scoring."""
        return self.choose_cuts(self.workload.groups_per_step)

    @property
    def stopping_meshes(self) -> set[int]:
        """Meshes whose work stops generation ahead although it has other devices.

        They are the trainers' meshes if a scoring call shares devices with both training and
        generation. Groups arrive one by one, so scoring soon waits for the trainer, and generation
        yields its devices to the waiting call.
        """
        if not (self.is_streamed and self.has_single_group_arrivals):
            return set()
        generate = self.placement.assignments[self.call_graph.generate_call.stage].mesh
        trains = [call for call in self.call_graph.calls if call.kind is CallKind.TRAIN]
        meshes = [self.placement.assignments[call.stage].mesh for call in trains]
        bridged = any(
            scorer.mesh.overlaps(generate) and any(scorer.mesh.overlaps(mesh) for mesh in meshes)
            for scorer in self._score_assignments
        )
        return {self.find_mesh(call.stage) for call in trains} if bridged else set()

    @property
    def _score_assignments(self) -> list[CallAssignment]:
        calls = self.placement.assignments
        scores = [call.stage for call in self.call_graph.calls if call.kind is CallKind.SCORE]
        return [calls[stage] for stage in scores if stage in calls]

    @property
    def refill_s(self) -> float:
        """On policy, time from the end of a filtered group to the request of its replacement."""
        if not self.workload.filtered_fraction:
            return 0.0
        judges = [call for call in self.call_graph.calls if "scores" in call.produces]
        timed_judges = [call for call in judges if call.stage in self.timings.score]
        return 2 * self.timings.hop_s + sum(self._group_score_s(call) for call in timed_judges)

    def score_duration_s(self, call: ModelCall) -> float:
        """Return seconds of scoring for a step, on the replica with the most groups."""
        timing, per_group = (
            self.timings.score[call.stage],
            self.call_graph.count_rollouts(call, self.workload),
        )
        seconds = score_duration_s(
            timing, self.workload, per_group, singly=self.has_single_group_arrivals
        )
        return seconds * self._sampled_per_trained(call)

    def _group_score_s(self, call: ModelCall) -> float:
        """Return seconds to score a single group."""
        per_group = self.call_graph.count_rollouts(call, self.workload)
        timing, tokens = self.timings.score[call.stage], per_group * self.workload.rollout_tokens
        return timing.batch_duration_s(per_group, tokens)

    def _sampled_per_trained(self, call: ModelCall) -> float:
        """Return scored groups per trained group; the judge also scores filtered groups."""
        return 1 / (1 - self.workload.filtered_fraction) if "scores" in call.produces else 1.0

    @property
    def publish_every(self) -> int:
        """Steps between published versions, at most the staleness window."""
        return min(self.run_options.publish_every, 1 + self.placement.max_staleness)

    @property
    def has_single_group_arrivals(self) -> bool:
        """Whether groups of a step become ready one by one, so that scorers take each at once."""
        return self.placement.is_streamed and self.workload.has_varied_lengths

    def find_weights_timing(self, stage: str) -> WeightsTiming:
        return self.timings.weights.get(stage, WeightsTiming())

    def build_jobs(self, generate: StepJob) -> list[StepJob]:
        """Return all jobs of a step; `generate` is the generation job without its dependencies."""
        # Train jobs are numbered first: pull jobs depend on those of an earlier step.
        followers = [call for call in self.call_graph.calls if self._is_follower(call)]
        trains = [call for call in self.call_graph.calls if call.kind is CallKind.TRAIN]
        scores = [call for call in self.call_graph.calls if call.kind is CallKind.SCORE]
        count = len(followers) + 1 + len(scores)
        self.train_jobs = list(range(count, count + len(trains)))
        pulls = {}
        for call in followers:
            pulls[call.stage] = self._add_job(self._make_pull_job(call))
        generate_stage = self.call_graph.generate_call.stage
        self.job_by_stage[generate_stage] = len(self.jobs)
        self.jobs.append(self._make_generate_job(generate, pulls.get(generate_stage)))
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
        """Return the job that pulls the version for a step.

        Steps that use the same published version share the pull of the first of them.
        """
        weights = self.find_weights_timing(call.stage)
        delay_s = weights.publish_s + weights.pull_s - weights.pause_s
        lag, interval = 1 + self.placement.max_staleness, self._find_version_interval(call)
        dependencies = [
            JobDependency(update, lag, True, delay_s=delay_s, step_interval=interval)
            for update in self.train_jobs
        ]
        mesh, pause = self.find_mesh(call.stage), (weights.pause_s,)
        return StepJob(
            call.stage, mesh, pause, dependencies, step_interval=interval, first_step=lag
        )

    def _find_version_interval(self, call: ModelCall) -> int:
        """Return the interval of versions; an EMA reference is updated at its own interval."""
        return 1 if call.followed_role == EMA_REFERENCE else self.publish_every

    def _make_generate_job(self, job: StepJob, pull: int | None) -> StepJob:
        return replace(job, dependencies=[] if pull is None else [JobDependency(pull)])

    def _make_score_job(self, call: ModelCall, pull: int | None) -> StepJob:
        dependencies = self._make_data_dependencies(call)
        if pull is not None:
            dependencies.append(JobDependency(pull))
        seconds = 0.0
        if call.stage in self.timings.score:
            seconds = max(self.score_duration_s(call), self._interrupted_s(call))
        parts = split_seconds(seconds, self.group_cuts)
        return StepJob(call.stage, self.find_mesh(call.stage), parts, dependencies, is_queued=True)

    def _interrupted_s(self, call: ModelCall) -> float:
        """Return the seconds per step in which scoring takes the devices from generation.

        Applies where both share devices and generation already samples for the next step. Groups
        are scored one by one as they finish; generation keeps the devices for at least `slice_s`
        between two groups, and each group holds them for the time of its scoring.
        """
        if not self.has_single_group_arrivals or not self.placement.overlaps(
            call.stage, self.call_graph.generate_call.stage
        ):
            return 0.0
        group_s = self._group_score_s(call) * self._sampled_per_trained(call)
        groups, slice_s = self.workload.groups_per_step, self.run_options.slice_s
        bursts = sum(
            min(fraction * groups, seconds / (slice_s + group_s))
            for fraction, seconds in self.completion_spans
        )
        return bursts * group_s

    def _make_data_dependencies(
        self, call: ModelCall, *, is_whole: bool = False
    ) -> list[JobDependency]:
        hop_s, is_whole = self.timings.hop_s, is_whole or not self.is_streamed
        return [
            JobDependency(self.job_by_stage[source], is_whole=is_whole, delay_s=hop_s)
            for source in self.call_graph.sources[call.stage]
        ]

    def _make_train_job(self, call: ModelCall, job_index: int) -> StepJob:
        """Return the train job: passes as groups arrive; the rest follows the last publication."""
        timing = self.timings.train[call.role]
        duration = train_duration(timing, self.workload)
        publish_s = max(
            (
                self.find_weights_timing(stage).publish_s
                for stage in self._list_follower_stages(call)
            ),
            default=0.0,
        )
        dependencies = self._make_data_dependencies(
            call, is_whole=self.workload.requires_whole_step
        )
        dependencies += [
            JobDependency(train_job, 1, True, delay_s=self.timings.step_s)
            for train_job in self.train_jobs
        ]
        interval = self.publish_every
        dependencies.append(
            JobDependency(
                job_index,
                interval,
                True,
                is_for_last_part=True,
                delay_s=publish_s,
                step_interval=interval,
            )
        )
        parts = split_seconds(duration.passes_s, self.choose_cuts(duration.micro_batches))
        parts = [*parts, duration.final_s + timing.step_s]
        return StepJob(call.stage, self.find_mesh(call.stage), parts, dependencies, is_glued=True)

    def _list_follower_stages(self, call: ModelCall) -> Sequence[str]:
        return [
            c.stage for c in self.call_graph.calls if self.call_graph.find_leader(c) == call.role
        ]


def _are_exclusive(
    first: tuple[Mesh, bool], second: tuple[Mesh, bool], trained: Sequence[Mesh]
) -> bool:
    """Return whether work on two meshes cannot run at the same time.

    first, second: a mesh, and whether the work on it is training. trained: meshes of all models
    that are trained.
    """
    (mesh, trains), (other_mesh, other_trains) = first, second
    if trains == other_trains:
        return mesh.overlaps(other_mesh)
    untrained_mesh = other_mesh if trains else mesh
    return any(train_mesh.overlaps(untrained_mesh) for train_mesh in trained)


def make_on_policy_job(jobs: JobGraph, generation: GenerationModel) -> StepJob:
    """Return the generation job on policy: a whole step at once."""
    curve = generation.find_completions_s(jobs.timings.generator, jobs.group_cuts, jobs.refill_s)
    stage = jobs.call_graph.generate_call.stage
    return StepJob(stage, jobs.find_mesh(stage), (curve[-1],), result_times_s=curve)


def make_ahead_job(jobs: JobGraph, generation: GenerationModel) -> StepJob:
    """Return the generation job with generation ahead, where rollouts of several steps overlap."""
    stage = jobs.call_graph.generate_call.stage
    window = jobs.placement.max_staleness + 1
    profile = generation.find_rollout_profile(jobs.timings.generator, jobs.group_cuts, window)
    return StepJob(stage, jobs.find_mesh(stage), (0.0,), profile=profile)


def build_busy_jobs(jobs: JobGraph, generation: GenerationModel) -> tuple[list[StepJob], float]:
    """Return the jobs of a step with generation as one part, and the seconds of that part."""
    stage, timing = jobs.call_graph.generate_call.stage, jobs.timings.generator
    if jobs.placement.max_staleness:
        busy_s = generation.saturated_step_s(timing, jobs.placement.max_staleness)
    else:
        (busy_s,) = generation.find_completions_s(timing, (1.0,), jobs.refill_s)
    return jobs.build_jobs(StepJob(stage, jobs.find_mesh(stage), (busy_s,))), busy_s


def max_busy_s(
    jobs: JobGraph, jobs_of_step: Sequence[StepJob], within: Mesh | None = None
) -> float:
    """Return the load of the busiest device, of all or within a mesh; no step is shorter.

    Between the starts of two meshes all devices have the same load or less than the first, so only
    first devices are checked.
    """
    mesh_s = [0.0] * len(jobs.meshes)
    for job in jobs_of_step:
        if job.mesh != NO_MESH:
            mesh_s[job.mesh] += sum(job.parts) / job.step_interval
    firsts = {mesh.first for mesh in jobs.meshes}
    if within is not None:
        firsts = {first for first in firsts if first in within.devices} | {within.first}
    return max(
        sum(
            seconds
            for mesh, seconds in zip(jobs.meshes, mesh_s, strict=True)
            if first in mesh.devices
        )
        for first in firsts
    )
