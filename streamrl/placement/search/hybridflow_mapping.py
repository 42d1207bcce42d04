"""Which models share devices, and how many: HybridFlow's Algorithm 1 (arXiv:2409.19256).

Every set partition of the models, every allocation of nodes to its sets. What a set's roles do on
so many nodes is remembered. A placement costs its step time, by schedule; the paper's sum over
stages of the slowest set (`compute_d_cost`) may be asked for instead.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.problem import PlacementCosts, PlacementProblem
from streamrl.placement.search.hybridflow_parallel import ParallelismChoices
from streamrl.placement.search.partitions import iter_allocations, iter_set_partitions
from streamrl.placement.steady_state.estimator import compute_d_cost

RoleSet = tuple[str, ...]
BOUND_SLACK = 0.95
"""A bound from calls alone is trusted so far: alone and together they are timed in two ways."""
FIRST_ALLOCATIONS = 64
"""Allocations that are looked for to begin with."""


@dataclass(frozen=True)
class MeshAllocation:
    """Sets of roles and the mesh of each; `least_s` is the least that a step can take there."""

    role_sets: tuple[RoleSet, ...]
    meshes: tuple[Mesh, ...]
    lower_bound_s: float


class MappingSearch:
    """Algorithm 1 over units: roles that are never parted, as who trains a model and follows it.

    everywhere: whether the generator is in none of them but on all devices, as ReaL has it.
    """

    def __init__(
        self, choices: ParallelismChoices, units: Sequence[RoleSet], *, everywhere: bool = False
    ) -> None:
        self._choices = choices
        generator = choices.generator_role
        self._generator_mesh = Mesh(0, choices.problem.cluster.num_devices) if everywhere else None
        left = [tuple(r for r in unit if r != generator or not everywhere) for unit in units]
        self._role_sets = [unit for unit in left if unit]

    def iter_allocations(self, ahead: int) -> Iterator[MeshAllocation]:
        """All of them, but those where a role fits by itself in nothing of its mesh."""
        return self._iter_below(ahead, lambda: math.inf)

    def find_lowest(self, ahead: int, most: int) -> list[MeshAllocation]:
        """So many with the lowest bounds, in their order; of equal ones those that come first.

        What is sure not to be among them is not looked at.
        """
        kept: list[tuple[float, int, MeshAllocation]] = []
        found = self._iter_below(ahead, lambda: -kept[0][0] if len(kept) == most else math.inf)
        for i, each in enumerate(found):
            entry = (-each.lower_bound_s, -i, each)
            if len(kept) < most:
                heapq.heappush(kept, entry)
            else:
                heapq.heapreplace(kept, entry)
        return [each for _, _, each in sorted(kept, key=lambda entry: entry[:2], reverse=True)]

    def _iter_below(self, ahead: int, limit_s: Callable[[], float]) -> Iterator[MeshAllocation]:
        """Those whose bounds are below the limit of the moment."""
        least, cluster = _LowerBounds(self._choices, ahead), self._choices.problem.cluster
        shared = 0.0
        if self._generator_mesh is not None:
            shared = least.find_bound((self._choices.generator_role,), self._generator_mesh)
        for parts in iter_set_partitions(self._role_sets):
            sets = tuple(tuple(itertools.chain(*part)) for part in parts)

            def wanted(i: int, mesh: Mesh, sets: Sequence[RoleSet] = sets) -> bool:
                return shared + least.find_bound(sets[i], mesh) < limit_s()

            for meshes in iter_allocations(cluster, len(sets), wanted):
                own = zip(sets, meshes, strict=True)
                yield MeshAllocation(
                    sets, meshes, shared + max(least.find_bound(*each) for each in own)
                )

    def find_best(
        self, ahead: int = 0, *, streamed: bool = True, most: int | None = None
    ) -> tuple[Placement | None, int]:
        """The placement with the least step time, and how many allocations were scheduled.

        Those whose bound is not below the best one found are not; `most` ends the search earlier,
        with those of the lowest bounds seen.
        """
        best: tuple[float, Placement | None] = (math.inf, None)
        looked = 0
        for each in self._iter_by_bound(ahead, most):
            if each.lower_bound_s * BOUND_SLACK >= best[0]:
                break
            looked += 1
            for placement in self._iter_placements(each, ahead, streamed=streamed):
                seconds = self._choices.estimator.step_s(placement, best[0])
                if seconds < best[0]:
                    best = (seconds, placement)
        return best[1], looked

    def _iter_by_bound(self, ahead: int, most: int | None) -> Iterator[MeshAllocation]:
        """By their bounds; all of them, or so many."""
        if most is not None:
            yield from self.find_lowest(ahead, most)
            return
        # Seldom are more than a few asked for.
        count, given = FIRST_ALLOCATIONS, 0
        while True:
            found = self.find_lowest(ahead, count)
            yield from found[given:]
            if len(found) < count:
                return
            count, given = 4 * count, count

    def find_best_by_stages(self) -> Placement | None:
        """The one with the least `compute_d_cost`: on policy, with a barrier behind every stage."""
        problem, costs = self._choices.problem, self._choices.estimator.costs
        found = (
            placement
            for each in self.iter_allocations(0)
            for placement in self._iter_placements(each, 0, streamed=False)
            if not costs.explain_infeasible(placement)
        )
        return min(found, key=lambda each: _compute_d_cost(problem, each, costs), default=None)

    def _iter_placements(
        self, allocation: MeshAllocation, ahead: int, *, streamed: bool
    ) -> Iterator[Placement]:
        """Its fastest parallelism, with every grid that the generator may have: memory for keys
        and values is what the others leave, and decides between them.
        """
        roles: dict[str, CallAssignment] = {}
        for each, home in zip(allocation.role_sets, allocation.meshes, strict=True):
            found = self._choices.fit_on_mesh(each, home)
            if found is None:
                return
            roles |= found
        generator = self._choices.generator_role
        mesh = roles[generator].mesh if self._generator_mesh is None else self._generator_mesh
        for option in self._choices.list_options(generator, mesh):
            yield self._choices.make_placement(
                roles | {generator: option}, ahead, streamed=streamed
            )


class _LowerBounds:
    """What a set of roles has to do on a mesh in a step: the least, on policy; remembered."""

    def __init__(self, choices: ParallelismChoices, ahead: int) -> None:
        self._choices = choices
        self._steps_ahead = ahead
        self._bounds_s: dict[RoleSet, dict[Mesh, float]] = {}

    def find_bound(self, roles: RoleSet, mesh: Mesh) -> float:
        """Infinite where one of them fits by itself in nothing."""
        known = self._bounds_s.setdefault(roles, {})
        if mesh not in known:
            home = self._choices.canonical_mesh(mesh)
            known[mesh] = sum(self._compute_role_bound(role, home) for role in roles)
        return known[mesh]

    def _compute_role_bound(self, role: str, mesh: Mesh) -> float:
        found = self._choices.list_options(role, mesh)[:1]
        return self._choices.likely_busy_s(role, found[0], self._steps_ahead) if found else math.inf


def _compute_d_cost(
    problem: PlacementProblem, placement: Placement, costs: PlacementCosts
) -> float:
    return compute_d_cost(problem, placement, costs)
