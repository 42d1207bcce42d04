"""The planner: collects start placements, searches each staleness bound, and ranks the results."""

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from streamrl.engines.memory.gc_paused import pause_gc
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh, list_node_edges
from streamrl.placement.placements import Placement
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementEstimate, PlacementProblem
from streamrl.planner.search.annealing import AnnealingSearch, SearchState
from streamrl.planner.search.hybridflow import (
    MappingSearch,
    ParallelismChoices,
    SplitRules,
    allow_any_split,
    group_roles_by_model,
)
from streamrl.planner.steady_state.estimator import PlacementEstimator


@dataclass(frozen=True)
class PlacementCandidate:
    """Best placement of a kind, such as colocated."""

    label: str
    placement: Placement
    estimate: PlacementEstimate

    @property
    def step_s(self) -> float:
        return self.estimate.step_s


@dataclass(frozen=True)
class BoundOptimum:
    """Best placement within a staleness bound, and the next best ones to simulate beside it."""

    max_staleness: int
    candidate: PlacementCandidate
    runner_ups: Sequence[PlacementCandidate] = ()


@dataclass(frozen=True)
class ExcludedBound:
    """Staleness bound without a placement, or without a gain, and why."""

    max_staleness: int
    why: str


@dataclass(frozen=True)
class PlanResult:
    """Result of the planner's search.

    candidates: best placement of every kind, shortest step first; if none fits, they say why.
    points: best placement of each staleness bound, in ascending order.
    excluded_bounds: bounds without a placement.
    """

    candidates: Sequence[PlacementCandidate]
    points: Sequence[BoundOptimum]
    excluded_bounds: Sequence[ExcludedBound] = ()


DEFAULT_PROPOSALS = 1500
MAX_MODEL_ALLOCATIONS = 256
"""Maximum number of allocations with models together to schedule as starts."""
MAX_START_ALLOCATIONS = 24
"""Maximum number of allocations with separate roles to schedule as starts, lowest bounds first."""
MAX_AHEAD_ALLOCATIONS = 12
"""Same limit as MAX_START_ALLOCATIONS where generation runs ahead."""
MAX_RUNNER_UPS, RUNNER_UP_FRACTION = 2, 0.1
"""Placements on other devices to simulate beside the best of a bound, and how much longer their
estimated steps may be: the estimate errs by as much."""
NUM_SEARCHES = 3
"""Annealing searches per staleness bound, each from the best placement of another kind."""


@pause_gc()
def plan_placement(  # noqa: PLR0913
    problem: PlacementProblem,
    costs_of: Callable[[PlacementProblem], CostModel],
    *,
    max_staleness: Sequence[int] = (0,),
    seed: int = 0,
    rules: SplitRules = allow_any_split,
    proposals: int = DEFAULT_PROPOSALS,
    run_bound: int | None = None,
    on_estimated: Callable[[], None] = lambda: None,
) -> PlanResult:
    """Return the best placement for each staleness bound, the alternatives, and why they lost.

    costs_of: returns the cost model of a problem; also called for parts of the cluster, which may
      be faster alone.
    rules: allowed ZeRO stages per call and grid.
    proposals: proposals of the random search per staleness bound; see `PlacementPlanner.plan`.
    run_bound: staleness bound of the run, whose placement generates exactly so many steps ahead.
    on_estimated: called for each placement whose step time the search estimates.

    Equal seeds give equal plans.
    """
    bounds = sorted(set(max_staleness))

    def make_planner(planned: PlacementProblem) -> PlacementPlanner:
        return PlacementPlanner(planned, costs_of(planned), rules=rules, on_estimated=on_estimated)

    sub_placements: list[Placement] = []
    for first, sub_problem in iter_sub_problems(problem):
        plan = make_planner(sub_problem).plan(bounds, seed=seed, proposals=proposals)
        sub_placements += [
            point.candidate.placement.move_meshes(first.__add__) for point in plan.points
        ]
    return make_planner(problem).plan(
        bounds, seed=seed, proposals=proposals, known=sub_placements, run_bound=run_bound
    )


def iter_sub_problems(problem: PlacementProblem) -> Iterator[tuple[int, PlacementProblem]]:
    """Yield (first device, problem) for each part of the cluster that may be faster alone.

    A mesh over unlike nodes runs at the slower speed and has the smaller memory, and a cluster with
    more devices than rollouts per step leaves devices idle. So a part has nodes of one type, and at
    most as many devices as a step has rollouts.
    """
    cluster, rollouts = problem.cluster, problem.workload.sampled_workload.num_rollouts
    for first, group in zip(cluster.group_starts, cluster.node_groups, strict=True):
        nodes = min(group.num_nodes, max(1, rollouts // group.devices_per_node))
        if len(cluster.node_groups) > 1 or nodes < group.num_nodes:
            sub_cluster = Cluster((replace(group, num_nodes=nodes),))
            yield first, replace(problem, cluster=sub_cluster)


class PlacementPlanner:
    """Planner of a single placement problem; caches results.

    on_estimated: called for each placement whose step time the search estimates.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        costs: CostModel,
        *,
        rules: SplitRules = allow_any_split,
        on_estimated: Callable[[], None] = lambda: None,
    ) -> None:
        self.estimator = PlacementEstimator(problem, costs, on_estimated)
        self.choices = ParallelismChoices(self.estimator, rules=rules)
        self.model_mapping = MappingSearch(self.choices, group_roles_by_model(problem))
        self.role_mapping = MappingSearch(self.choices, [(role,) for role in self.choices.roles])
        self.shared_generator_mapping = MappingSearch(
            self.choices, group_roles_by_model(problem), everywhere=True
        )
        self._problem = problem
        # A policy that is published every n steps samples with versions up to n - 1 steps older.
        self._min_staleness = problem.run_options.publish_every - 1

    def plan(
        self,
        bounds: Sequence[int],
        *,
        seed: int,
        proposals: int,
        known: Sequence[Placement] = (),
        run_bound: int | None = None,
    ) -> PlanResult:
        """Find the best placement within each staleness bound.

        proposals: proposals of the random search per bound; half of them for bounds other than
          `run_bound`.
        known: placements at which the search also starts.
        run_bound: bound for which generation runs exactly so many steps ahead.
        """
        states = [*self.list_starts(), *(self._to_state(placement) for placement in known)]
        # Searches of higher bounds also start from the results of lower bounds.
        for bound in bounds:
            if bound < self._min_staleness:
                continue
            aheads = [bound] if bound == run_bound else None
            # Bounds beside the run's own are for comparison.
            tried = proposals if run_bound in (None, bound) else proposals // 2
            best = self.search_bound(bound, states, seed=seed, proposals=tried, aheads=aheads)
            if best is not None:
                states.append(best)
        # A placement found for one bound may be the best of another.
        for placement in self._list_best_of_kinds():
            for bound in bounds:
                if bound >= self._min_staleness:
                    self.estimator.estimate_step_s(replace(placement, max_staleness=bound))
        return self._build_result(bounds, run_bound)

    def list_starts(self) -> list[SearchState]:
        """Return the on-policy states at which the search starts.

        They are HybridFlow's Algorithm 1 three times (models stay together; roles are separate;
        generation takes all devices), and all roles on all devices.
        """
        placements = [
            self.model_mapping.find_best(limit=MAX_MODEL_ALLOCATIONS),
            self.role_mapping.find_best(limit=MAX_START_ALLOCATIONS),
            self.shared_generator_mapping.find_best(limit=MAX_START_ALLOCATIONS),
        ]
        states = [self._to_state(placement) for placement in placements if placement is not None]
        all_devices = Mesh(0, self._problem.cluster.num_devices)
        colocated = self.choices.fit_on_mesh(self.choices.roles, all_devices)
        return states if colocated is None else [*states, SearchState(dict(colocated))]

    def _to_state(self, placement: Placement) -> SearchState:
        stages = self.choices.stages_by_role
        roles = {role: placement.assignments[stages[role][0]] for role in self.choices.roles}
        return SearchState(roles, placement.max_staleness)

    def search_bound(
        self,
        bound: int,
        known: Sequence[SearchState],
        *,
        seed: int,
        proposals: int,
        aheads: Sequence[int] | None = None,
    ) -> SearchState | None:
        """Return the best state with generation at most `bound` steps ahead; None if none fits.

        known: states to start from.
        proposals: number of annealing proposals.
        aheads: allowed steps ahead; by default 0, `bound` and those of `known`.
        """
        if aheads is None:
            known_aheads = {0, bound} | {item.steps_ahead for item in known}
            aheads = sorted(
                ahead for ahead in known_aheads if self._min_staleness <= ahead <= bound
            )
        annealing = AnnealingSearch(self.choices, aheads, seed=seed)
        starts = [item for item in known if item.steps_ahead <= bound]
        if bound:
            starts += [replace(item, steps_ahead=bound) for item in starts]
            separate = self.role_mapping.find_best(bound, limit=MAX_AHEAD_ALLOCATIONS)
            starts += [self._to_state(separate)] if separate is not None else []
        for start in starts:
            annealing.estimate_state_step_s(start)
        # Start from several kinds: annealing rarely gets from kind to kind, because most placements
        # on the way are slower.
        kinds = sorted(self._list_best_of_kinds(aheads), key=self.estimator.estimate_step_s)
        ranked = [self._to_state(placement) for placement in kinds[:NUM_SEARCHES]]
        searched = [annealing.run(start, proposals // NUM_SEARCHES) for start in ranked]
        searched.sort(key=lambda item: item[1])
        # On larger clusters, schedules with generation ahead are too slow for several descents.
        if bound and not annealing.is_small_cluster:
            del searched[1:]
        descended = [annealing.descend_by_role(state, cost) for state, cost in searched]
        state, cost = min(descended, key=lambda item: item[1], default=(None, math.inf))
        return state if math.isfinite(cost) else None

    # Build the result from all evaluated placements.

    def _build_result(self, bounds: Sequence[int], run_bound: int | None) -> PlanResult:
        outcomes = [
            self._find_optimum(bound, min_ahead=bound if bound == run_bound else 0)
            for bound in bounds
        ]
        points = [outcome for outcome in outcomes if isinstance(outcome, BoundOptimum)]
        excluded = [outcome for outcome in outcomes if isinstance(outcome, ExcludedBound)]
        kinds = [self._make_candidate(placement) for placement in self._list_best_of_kinds()]
        kinds += self._iter_misfits({kind.label for kind in kinds})
        return PlanResult(sorted(kinds, key=lambda kind: kind.step_s), points, excluded)

    def _find_optimum(self, bound: int, *, min_ahead: int) -> BoundOptimum | ExcludedBound:
        """Return the best evaluated placement of a bound, else the reason."""
        min_ahead = max(min_ahead, self._min_staleness)
        if bound < self._min_staleness:
            tokens = f"tokens sampled just before a pull are {self._min_staleness} versions old"
            return ExcludedBound(bound, f"publish_every={self._min_staleness + 1}: {tokens}")
        feasible = [
            (placement, seconds)
            for placement, seconds in self.estimator.iter_estimated()
            if min_ahead <= placement.max_staleness <= bound
        ]
        if not feasible:
            return ExcludedBound(bound, "no evaluated placement fits")
        first: dict[tuple[Mesh, ...], tuple[Placement, float]] = {}
        for placement, seconds in sorted(feasible, key=lambda item: item[1]):
            meshes = tuple(call.mesh for call in placement.assignments.values())
            first.setdefault(meshes, (placement, seconds))
        ranked = list(first.values())[: 1 + MAX_RUNNER_UPS]
        limit_s = ranked[0][1] * (1 + RUNNER_UP_FRACTION)
        best, *others = [self._make_candidate(p) for p, seconds in ranked if seconds <= limit_s]
        return BoundOptimum(bound, best, others)

    def _make_candidate(self, placement: Placement) -> PlacementCandidate:
        return PlacementCandidate(
            self._format_kind(placement), placement, self.estimator.estimate(placement)
        )

    def _list_best_of_kinds(self, aheads: Sequence[int] | None = None) -> list[Placement]:
        """Return the best evaluated placement of every kind, at any or the allowed aheads."""
        best: dict[str, tuple[float, Placement]] = {}
        for placement, seconds in self.estimator.iter_estimated():
            ahead = placement.max_staleness
            if ahead >= self._min_staleness if aheads is None else ahead in aheads:
                kind = self._format_kind(placement)
                if kind not in best or seconds < best[kind][0]:
                    best[kind] = (seconds, placement)
        return [placement for _, placement in best.values()]

    def _format_kind(self, placement: Placement) -> str:
        """Return the kind of a placement: mode and steps ahead, as in "split, 2 ahead"."""
        mode = placement.classify_mode(self._problem.dataflow)
        steps = f", {placement.max_staleness} ahead" if placement.max_staleness else ""
        return f"{mode.value}{steps}"

    def _iter_misfits(self, feasible_kinds: Set[str]) -> Iterator[PlacementCandidate]:
        """Yield a plain placement, with the reason, of each kind without a feasible one."""
        cluster = self._problem.cluster
        all_devices = Mesh(0, cluster.num_devices)
        colocated = dict.fromkeys(self.choices.roles, all_devices)
        mesh_choices = [colocated]
        edges = list_node_edges(cluster)
        half = edges[len(edges) // 2] if cluster.num_nodes > 1 else cluster.num_devices // 2
        if half:
            halves = (Mesh(0, half), Mesh(half, cluster.num_devices - half))
            mesh_choices.append(
                {role: halves[role in self.choices.trained_roles] for role in colocated}
            )
        for meshes in mesh_choices:
            found = {role: self.choices.find_smallest(role, mesh) for role, mesh in meshes.items()}
            roles = {role: option for role, option in found.items() if option is not None}
            if len(roles) < len(found):
                continue
            placement = self.choices.make_placement(roles)
            if self._format_kind(placement) not in feasible_kinds:
                candidate = self._make_candidate(placement)
                if candidate.estimate.infeasible_reason:
                    yield candidate
