"""What a placement would do, worked out: step time, idle time and staleness in milliseconds.

The dataflow is unrolled over steps (`list_scheduler.py`). A call waits for its columns, for the
versions that `max_staleness` asks for and for devices: a mesh is busy while one is that overlaps
it. Calls on devices of their own work on a step's groups as they come, where that is streamed.
Generation that is ahead goes on beside all of it, with the rollouts of several steps
(`overlapping_steps.py`).
"""

import itertools
import math
from collections.abc import Iterator, Mapping

from streamrl.dataflow import CallKind
from streamrl.placement.clusters import Cluster
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.problem import (
    CallMemory,
    PlacementCosts,
    PlacementEstimate,
    PlacementProblem,
)
from streamrl.placement.steady_state.call_durations import (
    STEP_CUTS,
    GenerationModel,
    split_seconds,
    train_duration,
)
from streamrl.placement.steady_state.jobs import (
    CallGraph,
    JobGraph,
    build_busy_jobs,
    make_ahead_job,
    make_on_policy_job,
    max_busy_s,
)
from streamrl.placement.steady_state.list_scheduler import ListScheduler, UnrolledSchedule
from streamrl.placement.steady_state.utilization import SteadyState

FINE_CUTS = STEP_CUTS[max(STEP_CUTS)]
"""How a step's groups are looked at, where it counts when they come."""

PlacementKey = tuple[tuple[tuple[str, CallAssignment], ...], int, bool]


def estimate_placement(
    problem: PlacementProblem, placement: Placement, costs: PlacementCosts
) -> PlacementEstimate:
    """What this placement would do; see Estimator, for many of one problem."""
    return PlacementEstimator(problem, costs).estimate(placement)


class PlacementEstimator:
    """Estimates placements of one problem, and remembers their step times."""

    def __init__(self, problem: PlacementProblem, costs: PlacementCosts) -> None:
        self.problem = problem
        self.costs = costs
        self.call_graph = CallGraph.from_dataflow(problem.dataflow)
        # Ahead, what is filtered is made up for by what is sampled beside it.
        sampled, replaced = problem.workload.sampled_workload, problem.workload.filtered_fraction
        self._ahead_generation = GenerationModel(
            sampled, self.call_graph.num_greedy, replaced=replaced
        )
        self._on_policy_generation = GenerationModel(problem.workload, self.call_graph.num_greedy)
        self._step_durations_s: dict[PlacementKey, float] = {}

    def iter_estimated(self) -> Iterator[tuple[Placement, float]]:
        """All placements that were looked at, with their step times."""
        for (calls, ahead, streamed), seconds in self._step_durations_s.items():
            yield Placement(dict(calls), ahead, streamed), seconds

    def step_s(self, placement: Placement, limit_s: float = math.inf) -> float:
        """Seconds from one update to the next; infinite where it cannot be.

        So it may be where that is not below the limit: what is known to be is not scheduled.
        """
        key = make_placement_key(placement)
        if key not in self._step_durations_s:
            seconds = math.inf
            if not self.costs.explain_infeasible(placement):
                if limit_s < math.inf and self._max_busy_s(placement) >= limit_s:
                    return math.inf
                jobs, run = self.schedule_jobs(placement)
                seconds = self._period_s(jobs, run)
            self._step_durations_s[key] = seconds
        return self._step_durations_s[key]

    def _max_busy_s(self, placement: Placement) -> float:
        """The work of the mesh that has most, with those that overlap it: no step is shorter."""
        jobs = self._make_job_graph(placement)
        return max_busy_s(jobs, build_busy_jobs(jobs, self.select_generation(placement))[0])

    def select_generation(self, placement: Placement) -> GenerationModel:
        """Of a step, as the placement has it sampled."""
        return self._ahead_generation if placement.max_staleness else self._on_policy_generation

    def _make_job_graph(self, placement: Placement) -> JobGraph:
        problem, timings = self.problem, self.costs.predict_timings(placement)
        return JobGraph(self.call_graph, problem.workload, placement, timings, problem.run_options)

    def estimate(self, placement: Placement) -> PlacementEstimate:
        """All there is to say of it."""
        why = self.costs.explain_infeasible(placement)
        if why:
            return PlacementEstimate.make_infeasible(why)
        jobs, run = self.schedule_jobs(placement)
        step_s = self._period_s(jobs, run)
        generate = jobs.job_by_stage[self.call_graph.generate_call.stage]
        steady = SteadyState(
            jobs.jobs, generate, jobs.meshes, jobs.overlaps, run, placement.max_staleness
        )
        cluster, workload = self.problem.cluster, self.problem.workload
        _, held, left = find_fullest_device(
            self.costs.predict_memory(placement), placement, cluster
        )
        return PlacementEstimate(
            step_s,
            workload.num_rollouts * workload.lengths.mean / step_s,
            steady.idle_fractions(),
            steady.device_idle_fraction(cluster),
            held,
            left,
            steady.mean_staleness(),
            steady.list_intervals(),
        )

    def schedule_jobs(self, placement: Placement) -> tuple[JobGraph, UnrolledSchedule]:
        """The jobs of a placement that fits, and when they are done."""
        jobs, generation = self._make_job_graph(placement), self.select_generation(placement)
        # Of whole turns, where not every step has a version.
        every, window = jobs.publish_every, placement.max_staleness + 1
        window = -(-window // every) * every
        if placement.max_staleness:
            # Of as many steps at once.
            ends = generation.find_completions_s(jobs.timings.generator, FINE_CUTS)
            spells = zip(
                split_seconds(1.0, FINE_CUTS), itertools.pairwise((0.0, *ends)), strict=True
            )
            jobs.completion_spans = [
                (part, (late - early) / window) for part, (early, late) in spells
            ]
        begin = make_ahead_job if placement.max_staleness else make_on_policy_job
        unroller = ListScheduler(
            jobs.build_jobs(begin(jobs, generation)), jobs.overlaps, jobs.stopping_meshes
        )
        run = unroller.run(window=window, most=6 * window + 5)
        if placement.max_staleness:
            # Steps that never come to be alike are a mean of some.
            run.period_s = max(run.period_s, self._max_busy_s(placement))
        return jobs, run

    def _period_s(self, jobs: JobGraph, run: UnrolledSchedule) -> float:
        """Not below what the cores of a shared machine have to do."""
        timings = jobs.timings
        if not timings.cores:
            return run.period_s
        workload = self.problem.workload
        generator = timings.generator
        busy_s = generator.replicas * self._ahead_generation.saturated_step_s(
            generator, jobs.placement.max_staleness
        )
        for call in self.call_graph.calls:
            if call.kind is CallKind.TRAIN:
                timing = timings.train[call.role]
                busy_s += timing.dp_size * train_duration(timing, workload).total_s
            elif call.stage in timings.score:
                busy_s += timings.score[call.stage].replicas * jobs.score_duration_s(call)
        busy_s += workload.groups_per_step * timings.bookkeeping_s
        return max(run.period_s, busy_s / timings.cores)


def make_placement_key(placement: Placement) -> PlacementKey:
    """What tells placements apart."""
    calls = tuple(sorted(placement.assignments.items(), key=lambda each: each[0]))
    return calls, placement.max_staleness, placement.is_streamed


def find_fullest_device(
    memory: Mapping[str, CallMemory], placement: Placement, cluster: Cluster
) -> tuple[int, float, float]:
    """The device with the fewest bytes left, what calls keep of it and who takes most, and those
    left.
    """
    worst = (0, 0.0, math.inf)
    firsts = {edge for each in placement.assignments.values() for edge in (each.mesh.first,)}
    for device in sorted(firsts):
        here = [
            memory[stage]
            for stage, each in placement.assignments.items()
            if device in each.mesh.devices and stage in memory
        ]
        held = sum(each.resident_bytes for each in here) + max(
            (each.active_bytes for each in here), default=0.0
        )
        room = cluster.find_node_group(device).device.memory_bytes
        if room - held < worst[2]:
            worst = (device, held, room - held)
    return worst


def compute_d_cost(problem: PlacementProblem, placement: Placement, costs: PlacementCosts) -> float:
    """HybridFlow's cost of a mapping (arXiv:2409.19256, Algorithm 1), s.

    Generation, preparation and training follow one another; within each, calls on the same mesh do,
    and the slowest mesh counts.
    """
    total = 0.0
    for kind in CallKind:
        per_mesh: dict[str, float] = {}
        for call in problem.dataflow.select_calls(kind):
            assignment = placement.assignments.get(call.stage)
            if assignment is not None:
                mesh = str(assignment.mesh)
                seconds = costs.call_duration_s(call.stage, assignment)
                per_mesh[mesh] = per_mesh.get(mesh, 0.0) + seconds
        total += max(per_mesh.values(), default=0.0)
    return total
