"""Steady-state estimate of a placement: step time and idle time.

The estimate takes milliseconds to compute. The dataflow is unrolled over steps
(`list_scheduler.py`). A call waits for its columns, for versions within `max_staleness`, and for
devices; a busy mesh blocks all meshes that overlap it. With streaming, calls on separate devices
process the groups of a step as they arrive. Generation ahead overlaps all other calls, with
rollouts of several steps (`OverlappedGeneration`).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

from streamrl.placement.clusters import Cluster
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.costs.call_durations import STEP_CUTS, split_seconds
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.costs.generation_model import GenerationModel
from streamrl.planner.problem.problem import (
    CallMemory,
    PlacementEstimate,
    PlacementProblem,
)
from streamrl.planner.steady_state.jobs import (
    CallGraph,
    JobGraph,
    make_ahead_job,
    make_on_policy_job,
)
from streamrl.planner.steady_state.list_scheduler import ListScheduler

FINE_CUTS = STEP_CUTS[max(STEP_CUTS)]
"""Finest cuts of a step's groups: fractions of the groups, up to 1.0."""

PlacementKey = tuple[tuple[tuple[str, CallAssignment], ...], int, bool]


class PlacementEstimator:
    """Estimator of the placements of a problem; caches their step times.

    on_estimated: called for each step time that is not cached.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        costs: CostModel,
        on_estimated: Callable[[], None] = lambda: None,
    ) -> None:
        self.problem = problem
        self.costs = costs
        self._on_estimated = on_estimated
        self.call_graph = CallGraph.from_dataflow(problem.dataflow)
        num_greedy = self.call_graph.num_greedy
        self._ahead_generation = GenerationModel(problem.workload, num_greedy)
        self._on_policy_generation = GenerationModel(
            problem.workload, num_greedy, replaces_in_turn=True
        )
        self._step_durations_s: dict[PlacementKey, float] = {}

    def iter_estimated(self) -> Iterator[tuple[Placement, float]]:
        """Yield the feasible placements with an estimate, and their step times in seconds."""
        for (calls, ahead, streamed), seconds in self._step_durations_s.items():
            if seconds < math.inf:
                yield Placement(dict(calls), ahead, streamed), seconds

    def estimate_step_s(self, placement: Placement, limit_s: float = math.inf) -> float:
        """Return the seconds of a training step with this placement; inf if infeasible.

        If a lower bound reaches `limit_s`, return inf without scheduling.
        """
        key = make_placement_key(placement)
        seconds = self._step_durations_s.get(key)
        if seconds is None:
            self._on_estimated()
            seconds = math.inf
            # The cheapest reason first.
            if not (self.costs.explain_refusal(placement) or self.costs.explain_misfit(placement)):
                jobs, busy_s = self._make_job_graph(placement), 0.0
                if placement.max_staleness or limit_s < math.inf:
                    busy_s = jobs.find_max_busy_s(self._select_generation(placement))
                    if busy_s >= limit_s:
                        return math.inf
                # Without a common period the mean period counts, which may be too short.
                seconds = max(self._schedule_step_s(jobs), busy_s)
            self._step_durations_s[key] = seconds
        return seconds

    def estimate_min_generation_s(self, assignment: CallAssignment, ahead: int) -> float:
        """Return generation's busy seconds per step with a KV cache for all rollouts, at least."""
        timing = self.costs.predict_generator_timing(assignment, math.inf)
        return self._ahead_generation.estimate_saturated_step_s(timing, ahead)

    def _select_generation(self, placement: Placement) -> GenerationModel:
        return self._ahead_generation if placement.max_staleness else self._on_policy_generation

    def _make_job_graph(self, placement: Placement) -> JobGraph:
        problem, timings = self.problem, self.costs.predict_timings(placement)
        return JobGraph(self.call_graph, problem.workload, placement, timings, problem.run_options)

    def estimate(self, placement: Placement) -> PlacementEstimate:
        reason = self.costs.explain_infeasible(placement)
        if reason:
            return PlacementEstimate(math.inf, infeasible_reason=reason)
        step_s, calls = self.estimate_step_s(placement), placement.assignments
        jobs = self._make_job_graph(placement)
        busy_s = jobs.estimate_busy_s(self._select_generation(placement))
        used_device_s = sum(busy_s[stage] * calls[stage].mesh.size for stage in calls)
        cluster, workload = self.problem.cluster, self.problem.workload
        _, used_bytes, free_bytes = find_fullest_device(
            self.costs.predict_memory(placement), placement, cluster
        )
        return PlacementEstimate(
            step_s,
            workload.num_rollouts * workload.lengths.mean / step_s,
            {stage: max(0.0, 1 - seconds / step_s) for stage, seconds in busy_s.items()},
            max(0.0, 1 - used_device_s / step_s / cluster.num_devices),
            used_bytes,
            free_bytes,
        )

    def _schedule_step_s(self, jobs: JobGraph) -> float:
        """Return the step time of a feasible placement in the schedule of several steps."""
        placement, generation = jobs.placement, self._select_generation(jobs.placement)
        # Round up to whole publish intervals, if not every step is published.
        publish_every, window = jobs.publish_every, placement.max_staleness + 1
        window = -(-window // publish_every) * publish_every
        if placement.max_staleness:
            # Groups of all steps of the window arrive at the same time.
            ends = generation.find_completions_s(jobs.timings.generator, FINE_CUTS)
            spans = zip(
                split_seconds(1.0, FINE_CUTS), itertools.pairwise((0.0, *ends)), strict=True
            )
            jobs.completion_spans = [
                (fraction, (late - early) / window) for fraction, (early, late) in spans
            ]
        make_job = make_ahead_job if placement.max_staleness else make_on_policy_job
        scheduler = ListScheduler(
            jobs.build_jobs(make_job(jobs, generation)), jobs.overlaps, jobs.stopping_meshes
        )
        return scheduler.run(window=window, max_steps=6 * window + 5)


def make_placement_key(placement: Placement) -> PlacementKey:
    calls = tuple(sorted(placement.assignments.items(), key=lambda item: item[0]))
    return calls, placement.max_staleness, placement.is_streamed


def find_fullest_device(
    memory: Mapping[str, CallMemory], placement: Placement, cluster: Cluster
) -> tuple[int, float, float]:
    """Return the device with the fewest free bytes, its used bytes and its free bytes.

    memory: memory of a call per device, by stage.
    Used bytes are the resident bytes of all calls on the device and the largest active bytes.
    """
    worst = (0, 0.0, math.inf)
    # From the first device of a mesh to that of the next, devices hold the same calls or fewer.
    for device in sorted({call.mesh.first for call in placement.assignments.values()}):
        residents = [
            memory[stage]
            for stage, call in placement.assignments.items()
            if device in call.mesh.devices and stage in memory
        ]
        used = sum(call.resident_bytes for call in residents) + max(
            (call.active_bytes for call in residents), default=0.0
        )
        capacity = cluster.find_node_group(device).device.memory_bytes
        if capacity - used < worst[2]:
            worst = (device, used, capacity - used)
    return worst
