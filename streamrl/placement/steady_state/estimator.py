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

from streamrl.dataflow import Kind
from streamrl.placement.clusters import Cluster
from streamrl.placement.placements import Assignment, Placement
from streamrl.placement.problem import CallMemory, Costs, Estimate, Problem
from streamrl.placement.steady_state.call_durations import PARTS, Generation, spread, training
from streamrl.placement.steady_state.jobs import Flow, Jobs, burst, busiest_s, busy, standing
from streamrl.placement.steady_state.list_scheduler import Unrolled, Unroller
from streamrl.placement.steady_state.utilization import Steady

FINE = PARTS[max(PARTS)]
"""How a step's groups are looked at, where it counts when they come."""

Key = tuple[tuple[tuple[str, Assignment], ...], int, bool]


def estimate(problem: Problem, placement: Placement, costs: Costs) -> Estimate:
    """What this placement would do; see Estimator, for many of one problem."""
    return Estimator(problem, costs).estimate(placement)


class Estimator:
    """Estimates placements of one problem, and remembers their step times."""

    def __init__(self, problem: Problem, costs: Costs) -> None:
        self.problem = problem
        self.costs = costs
        self.flow = Flow.of(problem.dataflow)
        # Ahead, what is filtered is made up for by what is sampled beside it.
        sampled, replaced = problem.workload.sampled, problem.workload.filtered
        self._ahead = Generation(sampled, self.flow.greedy, replaced=replaced)
        self._on_policy = Generation(problem.workload, self.flow.greedy)
        self._step_s: dict[Key, float] = {}

    def seen(self) -> Iterator[tuple[Placement, float]]:
        """All placements that were looked at, with their step times."""
        for (calls, ahead, streamed), seconds in self._step_s.items():
            yield Placement(dict(calls), ahead, streamed), seconds

    def step_s(self, placement: Placement, limit_s: float = math.inf) -> float:
        """Seconds from one update to the next; infinite where it cannot be.

        So it may be where that is not below the limit: what is known to be is not scheduled.
        """
        key = key_of(placement)
        if key not in self._step_s:
            seconds = math.inf
            if not self.costs.unfit(placement):
                if limit_s < math.inf and self._busiest_s(placement) >= limit_s:
                    return math.inf
                jobs, run = self.schedule(placement)
                seconds = self._period_s(jobs, run)
            self._step_s[key] = seconds
        return self._step_s[key]

    def _busiest_s(self, placement: Placement) -> float:
        """The work of the mesh that has most, with those that overlap it: no step is shorter."""
        jobs = self._jobs(placement)
        return busiest_s(jobs, busy(jobs, self.generation(placement))[0])

    def generation(self, placement: Placement) -> Generation:
        """Of a step, as the placement has it sampled."""
        return self._ahead if placement.max_staleness else self._on_policy

    def _jobs(self, placement: Placement) -> Jobs:
        problem, timings = self.problem, self.costs.timings(placement)
        return Jobs(self.flow, problem.workload, placement, timings, problem.manner)

    def estimate(self, placement: Placement) -> Estimate:
        """All there is to say of it."""
        why = self.costs.unfit(placement)
        if why:
            return Estimate.infeasible(why)
        jobs, run = self.schedule(placement)
        step_s = self._period_s(jobs, run)
        generate = jobs.by_stage[self.flow.generate.stage]
        steady = Steady(
            jobs.jobs, generate, jobs.devices, jobs.overlaps, run, placement.max_staleness
        )
        cluster, workload = self.problem.cluster, self.problem.workload
        _, held, left = fullest(self.costs.memory(placement), placement, cluster)
        return Estimate(
            step_s,
            workload.rollouts * workload.lengths.mean / step_s,
            steady.idle(),
            steady.device_idle(cluster),
            held,
            left,
            steady.staleness(),
            steady.timeline(),
        )

    def schedule(self, placement: Placement) -> tuple[Jobs, Unrolled]:
        """The jobs of a placement that fits, and when they are done."""
        jobs, generation = self._jobs(placement), self.generation(placement)
        # Of whole turns, where not every step has a version.
        every, window = jobs.publish_every, placement.max_staleness + 1
        window = -(-window // every) * every
        if placement.max_staleness:
            # Of as many steps at once.
            ends = generation.completion(jobs.timings.generator, FINE)
            spells = zip(spread(1.0, FINE), itertools.pairwise((0.0, *ends)), strict=True)
            jobs.spells = [(part, (late - early) / window) for part, (early, late) in spells]
        begin = standing if placement.max_staleness else burst
        unroller = Unroller(jobs.build(begin(jobs, generation)), jobs.overlaps, jobs.stops)
        run = unroller.run(window=window, most=6 * window + 5)
        if placement.max_staleness:
            # Steps that never come to be alike are a mean of some.
            run.period_s = max(run.period_s, self._busiest_s(placement))
        return jobs, run

    def _period_s(self, jobs: Jobs, run: Unrolled) -> float:
        """Not below what the cores of a shared machine have to do."""
        timings = jobs.timings
        if not timings.cores:
            return run.period_s
        workload = self.problem.workload
        generator = timings.generator
        busy_s = generator.replicas * self._ahead.saturated_s(
            generator, jobs.placement.max_staleness
        )
        for call in self.flow.calls:
            if call.kind is Kind.TRAIN:
                timing = timings.train[call.role]
                busy_s += timing.shares * training(timing, workload).total_s
            elif call.stage in timings.score:
                busy_s += timings.score[call.stage].replicas * jobs.scores_s(call)
        busy_s += workload.groups_per_step * timings.books_s
        return max(run.period_s, busy_s / timings.cores)


def key_of(placement: Placement) -> Key:
    """What tells placements apart."""
    calls = tuple(sorted(placement.calls.items(), key=lambda each: each[0]))
    return calls, placement.max_staleness, placement.streamed


def fullest(
    memory: Mapping[str, CallMemory], placement: Placement, cluster: Cluster
) -> tuple[int, float, float]:
    """The device with the fewest bytes left, what calls keep of it and who takes most, and those
    left.
    """
    worst = (0, 0.0, math.inf)
    firsts = {edge for each in placement.calls.values() for edge in (each.mesh.first,)}
    for device in sorted(firsts):
        here = [
            memory[stage]
            for stage, each in placement.calls.items()
            if device in each.mesh.devices and stage in memory
        ]
        held = sum(each.kept for each in here) + max((each.active for each in here), default=0.0)
        room = cluster.group_of(device).device.memory_bytes
        if room - held < worst[2]:
            worst = (device, held, room - held)
    return worst


def d_cost(problem: Problem, placement: Placement, costs: Costs) -> float:
    """HybridFlow's cost of a mapping (arXiv:2409.19256, Algorithm 1), s.

    Generation, preparation and training follow one another; within each, calls on the same mesh do,
    and the slowest mesh counts.
    """
    total = 0.0
    for kind in Kind:
        per_mesh: dict[str, float] = {}
        for call in problem.dataflow.of_kind(kind):
            assignment = placement.calls.get(call.stage)
            if assignment is not None:
                mesh = str(assignment.mesh)
                seconds = costs.call_s(call.stage, assignment)
                per_mesh[mesh] = per_mesh.get(mesh, 0.0) + seconds
        total += max(per_mesh.values(), default=0.0)
    return total
