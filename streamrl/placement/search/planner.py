"""The whole search: where to begin, where to go on from there, and what to say in the end."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace

from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Mode, Placement
from streamrl.placement.problem import Costs, Problem
from streamrl.placement.search.annealing import Annealing, State
from streamrl.placement.search.flexrlhf import guideline
from streamrl.placement.search.hybridflow_mapping import Mapping
from streamrl.placement.search.hybridflow_parallel import Choices, Roles
from streamrl.placement.search.pareto import (
    Absent,
    Candidate,
    FrontPoint,
    Planned,
    compared,
    outdone,
    pareto,
)
from streamrl.placement.search.partitions import models, node_edges
from streamrl.placement.search.split_rules import Rules, anything
from streamrl.placement.search.sub_clusters import moved, parts
from streamrl.placement.steady_state.estimator import Estimator

BY_WHOLE_STEPS = ", by whole steps"
"""Of a kind, whose calls wait for all of a step though they have other devices."""
PROPOSALS = 1500
APART = 24
"""Allocations with every role apart that are scheduled to begin with: those of the least bound."""
CONFIRMED = 5
"""So many of the best are looked at with exact costs until one fits."""
RUNNERS_UP = 2
"""That many more are told of each bound, where they are wanted."""
NEAR = 0.05
"""Of the best step, what they may take longer."""
LOOKED = 24
"""So many of the best are looked at for them: some are but the same on other devices."""
APART_AHEAD = 12
"""Likewise, with generation ahead."""
SEARCHED = 3
"""Searches begin from so many, each the best of another kind."""


def plan(  # noqa: PLR0913
    problem: Problem,
    costs_of: Callable[[Problem], Costs],
    *,
    max_staleness: Sequence[int] = (0,),
    seed: int = 0,
    rules: Rules = anything,
    streamed: Sequence[bool] = (True, False),
    proposals: int = PROPOSALS,
    runners_up: int = 0,
    own: int | None = None,
) -> Planned:
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
    for first, part in parts(problem):
        planner = Planner(
            part, costs_of(part), rules=rules, streamed=streamed, runners_up=runners_up
        )
        for point in planner.plan(bounds, seed=seed, proposals=proposals).front:
            best = (point.candidate, *point.next)
            alone += [moved(each.placement, first) for each in best]
    costs = costs_of(problem)
    planner = Planner(problem, costs, rules=rules, streamed=streamed, runners_up=runners_up)
    return planner.plan(bounds, seed=seed, proposals=proposals, known=alone, own=own)


class Planner:
    """Plans one problem; what it has worked out once is kept."""

    def __init__(
        self,
        problem: Problem,
        costs: Costs,
        *,
        rules: Rules = anything,
        streamed: Sequence[bool] = (True, False),
        runners_up: int = 0,
    ) -> None:
        self.estimator = Estimator(problem, costs.rough)
        self.exact = Estimator(problem, costs)
        self.choices = Choices(self.estimator, rules=rules)
        self.by_model = Mapping(self.choices, models(problem))
        self.by_role = Mapping(self.choices, [(role,) for role in self.choices.roles])
        self.generating = Mapping(self.choices, models(problem), everywhere=True)
        self._problem = problem
        # Who publishes seldom samples with what is older by the last step before.
        self._least = problem.manner.publish_every - 1
        self._streamed = streamed
        self._runners_up = runners_up
        self._known: list[Placement] = []

    def plan(
        self,
        bounds: Sequence[int],
        *,
        seed: int,
        proposals: int,
        known: Sequence[Placement] = (),
        own: int | None = None,
    ) -> Planned:
        """See `plan`. known: placements to begin from, too, and to tell where they are near."""
        self._known = [] if not self._runners_up else list(known)
        found = [*self.starts(), *(self._state(placement) for placement in known)]
        for bound in bounds:
            if bound < self._least:
                continue
            aheads = [bound] if bound == own else None
            best = self.search(bound, found, seed=seed, proposals=proposals, aheads=aheads)
            if best is not None:
                found.append(best)
        return self._said(bounds, own)

    def starts(self) -> list[State]:
        """On policy: Algorithm 1's, with models together, roles apart, and generation on all
        devices; everything on all devices; and the guideline's.
        """
        found = [
            self.by_model.best()[0],
            self.by_role.best(most=APART)[0],
            self.generating.best(most=APART)[0],
        ]
        states = [self._state(placement) for placement in found if placement is not None]
        plain = (self._colocated(), guideline(self.choices))
        return states + [State(dict(roles)) for roles in plain if roles is not None]

    def _colocated(self) -> Roles | None:
        whole = Mesh(0, self._problem.cluster.size)
        return self.choices.together(self.choices.roles, whole)

    def _state(self, placement: Placement) -> State:
        stages = self.choices.stages
        roles = {role: placement.calls[stages[role][0]] for role in self.choices.roles}
        return State(roles, placement.max_staleness, placement.streamed)

    def search(
        self,
        bound: int,
        known: Sequence[State],
        *,
        seed: int,
        proposals: int,
        aheads: Sequence[int] | None = None,
    ) -> State | None:
        """The best found with generation at most `bound` steps ahead, or one of `aheads`."""
        if aheads is None:
            known_aheads = {0, bound} | {each.ahead for each in known}
            aheads = sorted(ahead for ahead in known_aheads if self._least <= ahead <= bound)
        annealing = Annealing(self.choices, aheads, seed=seed, streamed=self._streamed)
        starts = [each for each in known if each.ahead <= bound]
        if bound:
            starts += [replace(each, ahead=bound) for each in starts]
            apart, _ = self.by_role.best(bound, most=APART_AHEAD)
            starts += [self._state(apart)] if apart is not None else []
        for start in starts:
            annealing.cost_s(start)
        # Of each kind one: from one kind to another there are many steps for the worse.
        every = sorted(self._best_of_kinds(aheads), key=self.estimator.step_s)
        kinds = [each for each in every if each.streamed] or every
        ranked = [self._state(placement) for placement in kinds[:SEARCHED]]
        found = [annealing.run(start, proposals // SEARCHED) for start in ranked]
        found.sort(key=lambda each: each[1])
        # Schedules with generation ahead take too long for more, where there are many.
        if bound and not annealing.is_small:
            del found[1:]
        descended = [annealing.descend(state, cost) for state, cost in found]
        state, cost = min(descended, key=lambda each: each[1], default=(None, math.inf))
        if not bound and state is not None and not annealing.is_small:
            state, cost = annealing.rearrange(state, cost)
        return state if math.isfinite(cost) else None

    def placement(self, state: State) -> Placement:
        """The placement a search stopped at."""
        return self.choices.placement(state.roles, state.ahead, streamed=state.streamed)

    # What there is to say.

    def _said(self, bounds: Sequence[int], own: int | None) -> Planned:
        found = [self._best(bound) for bound in bounds]
        under = [each for each in found if isinstance(each, FrontPoint)]
        absent = [each for each in found if isinstance(each, Absent)]
        best = min((each.candidate for each in under), key=lambda each: each.step_s, default=None)
        # Those that lost are not worth the plans of their weights.
        kinds = [self._candidate(self.estimator, each) for each in self._best_of_kinds()]
        kinds += self._misfits({each.label for each in kinds})
        just = None if own is None else self._best(own, least=own)
        if best is None:
            return Planned(None, kinds, (), absent, just)
        told = [compared(best, each) for each in kinds if each.label != best.label]
        candidates = sorted([best, *told], key=lambda each: each.step_s)
        front = pareto(under)
        absent += outdone(under, front)
        absent.sort(key=lambda each: each.max_staleness)
        return Planned(best, candidates, front, absent, just)

    def _best(self, bound: int, *, least: int = 0) -> FrontPoint | Absent:
        """Of all that were looked at and keep the bound, the first that exact costs confirm.

        least: steps that it has to generate ahead.
        """
        least = max(least, self._least)
        if bound < self._least:
            tokens = f"tokens of the last step before a version are {self._least} versions old"
            return Absent(bound, f"publish_every={self._least + 1}: {tokens}")
        fit = (
            (seconds, i, placement)
            for i, (placement, seconds) in enumerate(self.estimator.seen())
            if least <= placement.max_staleness <= bound and math.isfinite(seconds)
        )
        refused, ranked = [], heapq.nsmallest(max(CONFIRMED, LOOKED), fit)
        for i, (_, _, placement) in enumerate(ranked[:CONFIRMED]):
            found = self._candidate(self.exact, placement)
            if not found.estimate.unfit:
                near = list(self._known_near(range(least, bound + 1), found))
                told = [each.placement for each in near]
                left = [each for each in ranked[i + 1 :] if each[2] not in told]
                return FrontPoint(bound, found, near + self._next(found, left))
            refused.append(f"{found.label}: {found.estimate.unfit}")
        if not refused:
            return Absent(bound, "nothing that was looked at fits")
        return Absent(
            bound,
            f"of all that seemed to fit, none of the best ({len(refused)} of them) does once the"
            f" bytes of its weights are planned; {refused[0]}",
        )

    def _known_near(self, aheads: range, best: Candidate) -> Iterator[Candidate]:
        """Of those that were known, the ones that are near: of a cluster's part, whose best is then
        among what is told of all of it."""
        for i, placement in enumerate(self._known):
            is_told = placement == best.placement or placement in self._known[:i]
            if is_told or placement.max_staleness not in aheads:
                continue
            found = self._candidate(self.exact, placement)
            if found.step_s <= best.step_s * (1 + NEAR):
                yield found

    def _next(
        self, best: Candidate, ranked: Sequence[tuple[float, int, Placement]]
    ) -> list[Candidate]:
        """Those that come next and are near; of those that take the same time, one."""
        found: list[Candidate] = []
        last = best.step_s
        for seconds, _, placement in ranked:
            if len(found) == self._runners_up or seconds > best.step_s * (1 + NEAR):
                break
            if math.isclose(seconds, last):
                continue
            last, other = seconds, self._candidate(self.exact, placement)
            if not other.estimate.unfit:
                found.append(other)
        return found

    def _candidate(self, estimator: Estimator, placement: Placement) -> Candidate:
        return Candidate(self._kind(placement), placement, estimator.estimate(placement))

    def _best_of_kinds(self, aheads: Sequence[int] | None = None) -> list[Placement]:
        """Of all that were looked at and generate so far ahead, the best of every kind."""
        best: dict[str, tuple[float, Placement]] = {}
        for placement, seconds in self.estimator.seen():
            ahead = placement.max_staleness
            is_asked = ahead >= self._least if aheads is None else ahead in aheads
            if math.isfinite(seconds) and is_asked:
                kind = self._kind(placement)
                if kind not in best or seconds < best[kind][0]:
                    best[kind] = (seconds, placement)
        return [placement for _, placement in best.values()]

    def _kind(self, placement: Placement) -> str:
        mode = placement.mode(self._problem.dataflow)
        steps = f", {placement.max_staleness} ahead" if placement.max_staleness else ""
        whole = not placement.streamed and mode is not Mode.COLOCATED
        return f"{mode.value}{steps}{BY_WHOLE_STEPS if whole else ''}"

    def _misfits(self, known: Set[str]) -> Iterator[Candidate]:
        """Of kinds of which nothing fits, the plainest, which says why."""
        cluster = self._problem.cluster
        whole = Mesh(0, cluster.size)
        plain = dict.fromkeys(self.choices.roles, whole)
        ways = [plain]
        edges = node_edges(cluster)
        half = edges[len(edges) // 2] if cluster.num_nodes > 1 else cluster.size // 2
        if half:
            halves = (Mesh(0, half), Mesh(half, cluster.size - half))
            ways.append({role: halves[role in self.choices.trained] for role in plain})
        for meshes in ways:
            roles = {role: self.choices.any_of(role, mesh) for role, mesh in meshes.items()}
            placement = self.choices.placement(roles)
            if self._kind(placement) not in known:
                found = self._candidate(self.estimator, placement)
                if found.estimate.unfit:
                    yield found
