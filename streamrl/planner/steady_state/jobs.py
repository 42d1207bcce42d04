"""Jobs of a training step for the list scheduler: dependencies and duration of every call."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from streamrl.dataflow import EMA_REFERENCE, POLICY, CallKind, Dataflow, ModelCall
from streamrl.placement.meshes import Mesh, find_max_load
from streamrl.placement.placements import Placement
from streamrl.planner.costs.call_durations import (
    choose_cuts,
    score_duration_s,
    split_seconds,
    train_duration,
)
from streamrl.planner.costs.generation_model import GenerationModel
from streamrl.planner.problem.problem import RunOptions
from streamrl.planner.problem.stage_timings import StageTimings, WeightsTiming
from streamrl.planner.problem.workload import Workload
from streamrl.planner.steady_state.list_scheduler import NO_MESH, JobDependency, StepJob


@dataclass(frozen=True)
class CallGraph:
    """Model calls of a dataflow in flow order.

    sources: by stage, the stages that produce the columns which that stage needs.
    Generating calls form a single job: they share replicas and start together.
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
        """First generating call, which stands for all generating calls."""
        return self.calls[0]

    @property
    def num_greedy(self) -> int:
        """Greedy rollouts per group, in addition to the `group_size` sampled rollouts."""
        return sum(call.kind is CallKind.GENERATE for call in self.calls) - 1

    def count_rollouts(self, call: ModelCall, workload: Workload) -> int:
        return 1 if "greedy_ids" in call.needs else workload.group_size

    def find_leader(self, call: ModelCall) -> str:
        role = POLICY if call.followed_role == EMA_REFERENCE else call.followed_role
        return role if role in self.trained_roles else ""


@dataclass
class JobGraph:
    """Builder of the jobs of a step; `build_jobs` fills `jobs`, and a job's number is its index.

    meshes: meshes of the placement; a mesh that trains and also serves other calls is listed twice.
    overlaps[m]: numbers of the meshes that cannot compute at the same time as mesh m.
    job_by_stage, train_jobs: number of a stage's job, and numbers of all train jobs.
    completion_spans: with generation ahead, pairs of a fraction of a step's groups and the seconds
      in which this fraction completes.
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
        # All trainers end their step together, so a call that shares devices with any trainer
        # waits for all trainers.
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
        return self._mesh_by_stage.get(stage, NO_MESH)

    def choose_cuts(self, pieces: int) -> tuple[float, ...]:
        """Return the fractions of a job's work at which its results reach the next stage.

        pieces: units that the work can be divided into. Without streaming the only cut is 1.0.
        """
        return choose_cuts(pieces if self.is_streamed else 1)

    @property
    def group_cuts(self) -> tuple[float, ...]:
        return self.choose_cuts(self.workload.groups_per_step)

    @property
    def stopping_meshes(self) -> set[int]:
        """Meshes on which work stops generation ahead, although generation has other devices.

        These are the trainers' meshes if a scoring call shares devices with both training and
        generation. Groups arrive one by one, so scoring soon waits for the trainer, and generation
        yields its devices to the waiting call.
        """
        if not (self.is_streamed and self.has_single_group_arrivals):
            return set()
        overlaps, generate = self.placement.overlaps, self.call_graph.generate_call.stage
        calls = self.call_graph.calls
        trains = [call.stage for call in calls if call.kind is CallKind.TRAIN]
        is_bridged = any(
            overlaps(call.stage, generate) and any(overlaps(call.stage, s) for s in trains)
            for call in calls
            if call.kind is CallKind.SCORE
        )
        return {self.find_mesh(stage) for stage in trains} if is_bridged else set()

    def score_duration_s(self, call: ModelCall) -> float:
        timing = self.timings.score[call.stage]
        per_group = self.call_graph.count_rollouts(call, self.workload)
        seconds = score_duration_s(
            timing, self.workload, per_group, singly=self.has_single_group_arrivals
        )
        return seconds * self._compute_sampled_per_trained(call)

    def _compute_sampled_per_trained(self, call: ModelCall) -> float:
        """Return the groups scored per trained group; the judge scores filtered groups too."""
        return 1 / (1 - self.workload.filtered_fraction) if "scores" in call.produces else 1.0

    @property
    def publish_every(self) -> int:
        """Steps from a published version to the next, at most `max_staleness` + 1."""
        return min(self.run_options.publish_every, 1 + self.placement.max_staleness)

    @property
    def has_single_group_arrivals(self) -> bool:
        """Whether groups of a step become ready one by one, so that each is scored on arrival."""
        return self.placement.is_streamed and self.workload.has_varied_lengths

    def find_weights_timing(self, stage: str) -> WeightsTiming:
        return self.timings.weights.get(stage, WeightsTiming())

    def estimate_busy_s(self, generation: GenerationModel) -> dict[str, float]:
        """Return, by stage, the seconds per step in which it keeps devices busy."""
        busy_s = dict.fromkeys((call.stage for call in self.call_graph.calls), 0.0)
        for call in self.call_graph.calls:
            if call.stage not in self.placement.assignments:
                continue
            if self._is_follower(call):
                pull = self._make_pull_job(call)
                busy_s[call.stage] += sum(pull.parts) / pull.step_interval
            if call.stage in self.timings.score:
                busy_s[call.stage] += self.score_duration_s(call)
            elif call.kind is CallKind.TRAIN:
                train = self.timings.train[call.role]
                busy_s[call.stage] += train_duration(train, self.workload).total_s + train.step_s
        timing, stage = self.timings.generator, self.call_graph.generate_call.stage
        if ahead := self.placement.max_staleness:
            busy_s[stage] += generation.estimate_saturated_step_s(timing, ahead)
        else:
            busy_s[stage] += generation.find_completions_s(timing, (1.0,))[0]
        return busy_s

    def find_max_busy_s(self, generation: GenerationModel) -> float:
        """Return the busiest device's busy seconds per step; no step is shorter."""
        calls, busy_s = self.placement.assignments, self.estimate_busy_s(generation)
        return find_max_load([(call.mesh, busy_s[stage]) for stage, call in calls.items()])

    def build_jobs(self, generate: StepJob) -> list[StepJob]:
        """Return all jobs of a step.

        generate: the generation job, still without its dependencies.
        """
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
        pull = pulls.get(generate_stage)
        dependencies = [] if pull is None else [JobDependency(pull)]
        self.jobs.append(replace(generate, dependencies=dependencies))
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
        """Return the job in which a follower pulls new weights for a step.

        Of the steps that use the same published version, the first makes the pull.
        """
        weights = self.find_weights_timing(call.stage)
        delay_s = weights.publish_s + weights.pull_s - weights.pause_s
        lag = 1 + self.placement.max_staleness
        # An EMA reference changes in every step.
        interval = 1 if call.followed_role == EMA_REFERENCE else self.publish_every
        dependencies = [
            JobDependency(update, lag, True, delay_s=delay_s, step_interval=interval)
            for update in self.train_jobs
        ]
        mesh, pause = self.find_mesh(call.stage), (weights.pause_s,)
        return StepJob(
            call.stage, mesh, pause, dependencies, step_interval=interval, first_step=lag
        )

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
        """Return seconds per step in which a scoring call interrupts generation on shared devices.

        Groups are scored one by one as they finish; generation keeps the devices for at least
        `slice_s` between two groups.
        """
        if not self.has_single_group_arrivals or not self.placement.overlaps(
            call.stage, self.call_graph.generate_call.stage
        ):
            return 0.0
        rollouts = self.call_graph.count_rollouts(call, self.workload)
        group_s = self.timings.score[call.stage].batch_duration_s(
            rollouts, rollouts * self.workload.rollout_tokens
        ) * self._compute_sampled_per_trained(call)
        groups, slice_s = self.workload.groups_per_step, self.run_options.slice_s
        bursts = sum(
            min(fraction * groups, seconds / (slice_s + group_s))
            for fraction, seconds in self.completion_spans
        )
        return bursts * group_s

    def _make_data_dependencies(
        self, call: ModelCall, *, is_whole: bool = False
    ) -> list[JobDependency]:
        """Depend on the stages that produce the columns; is_whole: of all groups of the step."""
        hop_s, is_whole = self.timings.hop_s, is_whole or not self.is_streamed
        return [
            JobDependency(self.job_by_stage[source], is_whole=is_whole, delay_s=hop_s)
            for source in self.call_graph.sources[call.stage]
        ]

    def _make_train_job(self, call: ModelCall, job_index: int) -> StepJob:
        """Return the job of a training call.

        Its parts but the last are forward and backward passes, which run as groups arrive. The last
        part, the final update, waits until the followers' last version is published.
        """
        timing = self.timings.train[call.role]
        duration = train_duration(timing, self.workload)
        publish_s = max(
            (
                self.find_weights_timing(other.stage).publish_s
                for other in self.call_graph.calls
                if self.call_graph.find_leader(other) == call.role
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


def _are_exclusive(
    first: tuple[Mesh, bool], second: tuple[Mesh, bool], trained: Sequence[Mesh]
) -> bool:
    """Return whether work on two (mesh, is training) pairs cannot run at the same time."""
    (mesh, trains), (other_mesh, other_trains) = first, second
    if trains == other_trains:
        return mesh.overlaps(other_mesh)
    untrained_mesh = other_mesh if trains else mesh
    return any(train_mesh.overlaps(untrained_mesh) for train_mesh in trained)


def make_on_policy_job(jobs: JobGraph, generation: GenerationModel) -> StepJob:
    """Return the generation job on policy: the rollouts of a step all start together."""
    curve = generation.find_completions_s(jobs.timings.generator, jobs.group_cuts)
    stage = jobs.call_graph.generate_call.stage
    return StepJob(stage, jobs.find_mesh(stage), (curve[-1],), result_times_s=curve)


def make_ahead_job(jobs: JobGraph, generation: GenerationModel) -> StepJob:
    stage = jobs.call_graph.generate_call.stage
    window = jobs.placement.max_staleness + 1
    profile = generation.find_rollout_profile(jobs.timings.generator, jobs.group_cuts, window)
    return StepJob(stage, jobs.find_mesh(stage), (0.0,), profile=profile)
