"""The whole search: where to begin, where to go on from there, and what to say in the end."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace

from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Placement, PlacementMode
from streamrl.placement.problem import PlacementCosts, PlacementProblem
from streamrl.placement.search.annealing import AnnealingSearch, SearchState
from streamrl.placement.search.flexrlhf import apply_guideline
from streamrl.placement.search.hybridflow_mapping import MappingSearch
from streamrl.placement.search.hybridflow_parallel import ParallelismChoices, RoleAssignments
from streamrl.placement.search.pareto import (
    ExcludedBound,
    ParetoPoint,
    PlacementCandidate,
    PlanResult,
    compare_to_winner,
    find_dominated,
    find_pareto_front,
)
from streamrl.placement.search.partitions import group_roles_by_model, list_node_edges
from streamrl.placement.search.split_rules import SplitRules, allow_any_split
from streamrl.placement.search.sub_clusters import iter_sub_problems, shift_devices
from streamrl.placement.steady_state.estimator import PlacementEstimator

WHOLE_STEPS_SUFFIX = ", by whole steps"
"""Of a kind, whose calls wait for all of a step though they have other devices."""
DEFAULT_PROPOSALS = 1500
MAX_START_ALLOCATIONS = 24
"""Allocations with every role apart that are scheduled to begin with: those of the least bound."""
MAX_CONFIRMATIONS = 5
"""So many of the best are looked at with exact costs until one fits."""
DEFAULT_RUNNERS_UP = 2
"""That many more are told of each bound, where they are wanted."""
RUNNER_UP_TOLERANCE = 0.05
"""Of the best step, what they may take longer."""
MAX_RUNNER_UP_CANDIDATES = 24
"""So many of the best are looked at for them: some are but the same on other devices."""
MAX_AHEAD_ALLOCATIONS = 12
"""Likewise, with generation ahead."""
NUM_SEARCHES = 3
"""Searches begin from so many, each the best of another kind."""


def plan_placement(  # noqa: PLR0913
    problem: PlacementProblem,
    costs_of: Callable[[PlacementProblem], PlacementCosts],
    *,
    max_staleness: Sequence[int] = (0,),
    seed: int = 0,
    rules: SplitRules = allow_any_split,
    streamed: Sequence[bool] = (True, False),
    proposals: int = DEFAULT_PROPOSALS,
    runners_up: int = 0,
    own: int | None = None,
) -> PlanResult:
    """The best placement under each bound of staleness, what else there was, and why it lost.

    costs_of: those of the problem, and of the same on a part of its cluster that may be better off
    alone. rules: how calls may be split. streamed: whether calls on different devices may work on
    a step as it comes, or wait for all of it. proposals: of the random search, for each bound.
    runners_up: how many more of each bound are told, for whoever knows better than the schedule.
    own: one of the bounds, of which the best that generates just so far ahead is told besides.
    The same seed gives the same plan.
    """
    bounds = sorted(set(max_staleness))
    alone: list[Placement] = []
    for first, part in iter_sub_problems(problem):
        planner = PlacementPlanner(
            part, costs_of(part), rules=rules, streamed=streamed, runners_up=runners_up
        )
        for point in planner.plan(bounds, seed=seed, proposals=proposals).front:
            best = (point.candidate, *point.runners_up)
            alone += [shift_devices(each.placement, first) for each in best]
    costs = costs_of(problem)
    planner = PlacementPlanner(
        problem, costs, rules=rules, streamed=streamed, runners_up=runners_up
    )
    return planner.plan(bounds, seed=seed, proposals=proposals, known=alone, own=own)


class PlacementPlanner:
    """Plans one problem; what it has worked out once is kept."""

    def __init__(
        self,
        problem: PlacementProblem,
        costs: PlacementCosts,
        *,
        rules: SplitRules = allow_any_split,
        streamed: Sequence[bool] = (True, False),
        runners_up: int = 0,
    ) -> None:
        self.estimator = PlacementEstimator(problem, costs.approximate_costs)
        self.exact_estimator = PlacementEstimator(problem, costs)
        self.choices = ParallelismChoices(self.estimator, rules=rules)
        self.model_mapping = MappingSearch(self.choices, group_roles_by_model(problem))
        self.role_mapping = MappingSearch(self.choices, [(role,) for role in self.choices.roles])
        self.shared_generator_mapping = MappingSearch(
            self.choices, group_roles_by_model(problem), everywhere=True
        )
        self._problem = problem
        # Who publishes seldom samples with what is older by the last step before.
        self._min_staleness = problem.run_options.publish_every - 1
        self._allowed_streaming = streamed
        self._num_runners_up = runners_up
        self._known_placements: list[Placement] = []

    def plan(
        self,
        bounds: Sequence[int],
        *,
        seed: int,
        proposals: int,
        known: Sequence[Placement] = (),
        own: int | None = None,
    ) -> PlanResult:
        """See `plan`. known: placements to begin from, too, and to tell where they are near."""
        self._known_placements = [] if not self._num_runners_up else list(known)
        found = [*self.list_starts(), *(self._to_state(placement) for placement in known)]
        for bound in bounds:
            if bound < self._min_staleness:
                continue
            aheads = [bound] if bound == own else None
            best = self.search_bound(bound, found, seed=seed, proposals=proposals, aheads=aheads)
            if best is not None:
                found.append(best)
        return self._build_result(bounds, own)

    def list_starts(self) -> list[SearchState]:
        """On policy: Algorithm 1's, with models together, roles apart, and generation on all
        devices; everything on all devices; and the guideline's.
        """
        found = [
            self.model_mapping.find_best()[0],
            self.role_mapping.find_best(most=MAX_START_ALLOCATIONS)[0],
            self.shared_generator_mapping.find_best(most=MAX_START_ALLOCATIONS)[0],
        ]
        states = [self._to_state(placement) for placement in found if placement is not None]
        plain = (self._place_colocated(), apply_guideline(self.choices))
        return states + [SearchState(dict(roles)) for roles in plain if roles is not None]

    def _place_colocated(self) -> RoleAssignments | None:
        whole = Mesh(0, self._problem.cluster.num_devices)
        return self.choices.fit_on_mesh(self.choices.roles, whole)

    def _to_state(self, placement: Placement) -> SearchState:
        stages = self.choices.stages_by_role
        roles = {role: placement.assignments[stages[role][0]] for role in self.choices.roles}
        return SearchState(roles, placement.max_staleness, placement.is_streamed)

    def search_bound(
        self,
        bound: int,
        known: Sequence[SearchState],
        *,
        seed: int,
        proposals: int,
        aheads: Sequence[int] | None = None,
    ) -> SearchState | None:
        """The best found with generation at most `bound` steps ahead, or one of `aheads`."""
        if aheads is None:
            known_aheads = {0, bound} | {each.steps_ahead for each in known}
            aheads = sorted(
                ahead for ahead in known_aheads if self._min_staleness <= ahead <= bound
            )
        annealing = AnnealingSearch(
            self.choices, aheads, seed=seed, streamed=self._allowed_streaming
        )
        starts = [each for each in known if each.steps_ahead <= bound]
        if bound:
            starts += [replace(each, steps_ahead=bound) for each in starts]
            apart, _ = self.role_mapping.find_best(bound, most=MAX_AHEAD_ALLOCATIONS)
            starts += [self._to_state(apart)] if apart is not None else []
        for start in starts:
            annealing.state_step_s(start)
        # Of each kind one: from one kind to another there are many steps for the worse.
        every = sorted(self._list_best_of_kinds(aheads), key=self.estimator.step_s)
        kinds = [each for each in every if each.is_streamed] or every
        ranked = [self._to_state(placement) for placement in kinds[:NUM_SEARCHES]]
        found = [annealing.run(start, proposals // NUM_SEARCHES) for start in ranked]
        found.sort(key=lambda each: each[1])
        # Schedules with generation ahead take too long for more, where there are many.
        if bound and not annealing.is_small_cluster:
            del found[1:]
        descended = [annealing.descend_by_role(state, cost) for state, cost in found]
        state, cost = min(descended, key=lambda each: each[1], default=(None, math.inf))
        if not bound and state is not None and not annealing.is_small_cluster:
            state, cost = annealing.rearrange_roles(state, cost)
        return state if math.isfinite(cost) else None

    def to_placement(self, state: SearchState) -> Placement:
        """The placement a search stopped at."""
        return self.choices.make_placement(
            state.assignments, state.steps_ahead, streamed=state.is_streamed
        )

    # What there is to say.

    def _build_result(self, bounds: Sequence[int], own: int | None) -> PlanResult:
        found = [self._confirm_best(bound) for bound in bounds]
        under = [each for each in found if isinstance(each, ParetoPoint)]
        absent = [each for each in found if isinstance(each, ExcludedBound)]
        best = min((each.candidate for each in under), key=lambda each: each.step_s, default=None)
        # Those that lost are not worth the plans of their weights.
        kinds = [self._make_candidate(self.estimator, each) for each in self._list_best_of_kinds()]
        kinds += self._iter_misfits({each.label for each in kinds})
        just = None if own is None else self._confirm_best(own, least=own)
        if best is None:
            return PlanResult(None, kinds, (), absent, just)
        told = [compare_to_winner(best, each) for each in kinds if each.label != best.label]
        candidates = sorted([best, *told], key=lambda each: each.step_s)
        front = find_pareto_front(under)
        absent += find_dominated(under, front)
        absent.sort(key=lambda each: each.max_staleness)
        return PlanResult(best, candidates, front, absent, just)

    def _confirm_best(self, bound: int, *, least: int = 0) -> ParetoPoint | ExcludedBound:
        """Of all that were looked at and keep the bound, the first that exact costs confirm.

        least: steps that it has to generate ahead.
        """
        least = max(least, self._min_staleness)
        if bound < self._min_staleness:
            tokens = (
                f"tokens of the last step before a version are {self._min_staleness} versions old"
            )
            return ExcludedBound(bound, f"publish_every={self._min_staleness + 1}: {tokens}")
        fit = (
            (seconds, i, placement)
            for i, (placement, seconds) in enumerate(self.estimator.iter_estimated())
            if least <= placement.max_staleness <= bound and math.isfinite(seconds)
        )
        refused, ranked = [], heapq.nsmallest(max(MAX_CONFIRMATIONS, MAX_RUNNER_UP_CANDIDATES), fit)
        for i, (_, _, placement) in enumerate(ranked[:MAX_CONFIRMATIONS]):
            found = self._make_candidate(self.exact_estimator, placement)
            if not found.estimate.infeasible_reason:
                near = list(self._iter_near_known(range(least, bound + 1), found))
                told = [each.placement for each in near]
                left = [each for each in ranked[i + 1 :] if each[2] not in told]
                return ParetoPoint(bound, found, near + self._find_runners_up(found, left))
            refused.append(f"{found.label}: {found.estimate.infeasible_reason}")
        if not refused:
            return ExcludedBound(bound, "nothing that was looked at fits")
        return ExcludedBound(
            bound,
            f"of all that seemed to fit, none of the best ({len(refused)} of them) does once the"
            f" bytes of its weights are planned; {refused[0]}",
        )

    def _iter_near_known(
        self, aheads: range, best: PlacementCandidate
    ) -> Iterator[PlacementCandidate]:
        """Of those that were known, the ones that are near: of a cluster's part, whose best is then
        among what is told of all of it."""
        for i, placement in enumerate(self._known_placements):
            is_told = placement == best.placement or placement in self._known_placements[:i]
            if is_told or placement.max_staleness not in aheads:
                continue
            found = self._make_candidate(self.exact_estimator, placement)
            if found.step_s <= best.step_s * (1 + RUNNER_UP_TOLERANCE):
                yield found

    def _find_runners_up(
        self, best: PlacementCandidate, ranked: Sequence[tuple[float, int, Placement]]
    ) -> list[PlacementCandidate]:
        """Those that come next and are near; of those that take the same time, one."""
        found: list[PlacementCandidate] = []
        last = best.step_s
        for seconds, _, placement in ranked:
            if len(found) == self._num_runners_up or seconds > best.step_s * (
                1 + RUNNER_UP_TOLERANCE
            ):
                break
            if math.isclose(seconds, last):
                continue
            last, other = seconds, self._make_candidate(self.exact_estimator, placement)
            if not other.estimate.infeasible_reason:
                found.append(other)
        return found

    def _make_candidate(
        self, estimator: PlacementEstimator, placement: Placement
    ) -> PlacementCandidate:
        return PlacementCandidate(
            self._format_kind(placement), placement, estimator.estimate(placement)
        )

    def _list_best_of_kinds(self, aheads: Sequence[int] | None = None) -> list[Placement]:
        """Of all that were looked at and generate so far ahead, the best of every kind."""
        best: dict[str, tuple[float, Placement]] = {}
        for placement, seconds in self.estimator.iter_estimated():
            ahead = placement.max_staleness
            is_asked = ahead >= self._min_staleness if aheads is None else ahead in aheads
            if math.isfinite(seconds) and is_asked:
                kind = self._format_kind(placement)
                if kind not in best or seconds < best[kind][0]:
                    best[kind] = (seconds, placement)
        return [placement for _, placement in best.values()]

    def _format_kind(self, placement: Placement) -> str:
        mode = placement.classify_mode(self._problem.dataflow)
        steps = f", {placement.max_staleness} ahead" if placement.max_staleness else ""
        whole = not placement.is_streamed and mode is not PlacementMode.COLOCATED
        return f"{mode.value}{steps}{WHOLE_STEPS_SUFFIX if whole else ''}"

    def _iter_misfits(self, known: Set[str]) -> Iterator[PlacementCandidate]:
        """Of kinds of which nothing fits, the plainest, which says why."""
        cluster = self._problem.cluster
        whole = Mesh(0, cluster.num_devices)
        plain = dict.fromkeys(self.choices.roles, whole)
        ways = [plain]
        edges = list_node_edges(cluster)
        half = edges[len(edges) // 2] if cluster.num_nodes > 1 else cluster.num_devices // 2
        if half:
            halves = (Mesh(0, half), Mesh(half, cluster.num_devices - half))
            ways.append({role: halves[role in self.choices.trained_roles] for role in plain})
        for meshes in ways:
            roles = {role: self.choices.find_smallest(role, mesh) for role, mesh in meshes.items()}
            placement = self.choices.make_placement(roles)
            if self._format_kind(placement) not in known:
                found = self._make_candidate(self.estimator, placement)
                if found.estimate.infeasible_reason:
                    yield found
