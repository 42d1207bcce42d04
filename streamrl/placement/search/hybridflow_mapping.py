"""Which models share devices, and how many: HybridFlow's Algorithm 1 (arXiv:2409.19256).

Every set partition of the models, every allocation of nodes to its sets. What a set's roles do on
so many nodes is remembered. A placement costs its step time, by schedule; the paper's sum over
stages of the slowest set (`d_cost`) may be asked for instead.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Assignment, Placement
from streamrl.placement.problem import Costs, Problem
from streamrl.placement.search.hybridflow_parallel import Choices
from streamrl.placement.search.partitions import allocations, set_partitions
from streamrl.placement.steady_state.estimator import d_cost

Unit = tuple[str, ...]
SLACK = 0.95
"""A bound from calls alone is trusted so far: alone and together they are timed in two ways."""
FIRST = 64
"""Allocations that are looked for to begin with."""


@dataclass(frozen=True)
class Allocation:
    """Sets of roles and the mesh of each; `least_s` is the least that a step can take there."""

    sets: tuple[Unit, ...]
    meshes: tuple[Mesh, ...]
    least_s: float


class Mapping:
    """Algorithm 1 over units: roles that are never parted, as who trains a model and follows it.

    everywhere: whether the generator is in none of them but on all devices, as ReaL has it.
    """

    def __init__(
        self, choices: Choices, units: Sequence[Unit], *, everywhere: bool = False
    ) -> None:
        self._choices = choices
        generator = choices.generator
        self._whole = Mesh(0, choices.problem.cluster.size) if everywhere else None
        left = [tuple(r for r in unit if r != generator or not everywhere) for unit in units]
        self._units = [unit for unit in left if unit]

    def allocations(self, ahead: int) -> Iterator[Allocation]:
        """All of them, but those where a role fits by itself in nothing of its mesh."""
        return self._below(ahead, lambda: math.inf)

    def lowest(self, ahead: int, most: int) -> list[Allocation]:
        """So many with the lowest bounds, in their order; of equal ones those that come first.

        What is sure not to be among them is not looked at.
        """
        kept: list[tuple[float, int, Allocation]] = []
        found = self._below(ahead, lambda: -kept[0][0] if len(kept) == most else math.inf)
        for i, each in enumerate(found):
            entry = (-each.least_s, -i, each)
            if len(kept) < most:
                heapq.heappush(kept, entry)
            else:
                heapq.heapreplace(kept, entry)
        return [each for _, _, each in sorted(kept, key=lambda entry: entry[:2], reverse=True)]

    def _below(self, ahead: int, limit_s: Callable[[], float]) -> Iterator[Allocation]:
        """Those whose bounds are below the limit of the moment."""
        least, cluster = _Least(self._choices, ahead), self._choices.problem.cluster
        shared = 0.0
        if self._whole is not None:
            shared = least.of((self._choices.generator,), self._whole)
        for parts in set_partitions(self._units):
            sets = tuple(tuple(itertools.chain(*part)) for part in parts)

            def wanted(i: int, mesh: Mesh, sets: Sequence[Unit] = sets) -> bool:
                return shared + least.of(sets[i], mesh) < limit_s()

            for meshes in allocations(cluster, len(sets), wanted):
                own = zip(sets, meshes, strict=True)
                yield Allocation(sets, meshes, shared + max(least.of(*each) for each in own))

    def best(
        self, ahead: int = 0, *, streamed: bool = True, most: int | None = None
    ) -> tuple[Placement | None, int]:
        """The placement with the least step time, and how many allocations were scheduled.

        Those whose bound is not below the best one found are not; `most` ends the search earlier,
        with those of the lowest bounds seen.
        """
        best: tuple[float, Placement | None] = (math.inf, None)
        looked = 0
        for each in self._ordered(ahead, most):
            if each.least_s * SLACK >= best[0]:
                break
            looked += 1
            for placement in self._placements(each, ahead, streamed=streamed):
                seconds = self._choices.estimator.step_s(placement, best[0])
                if seconds < best[0]:
                    best = (seconds, placement)
        return best[1], looked

    def _ordered(self, ahead: int, most: int | None) -> Iterator[Allocation]:
        """By their bounds; all of them, or so many."""
        if most is not None:
            yield from self.lowest(ahead, most)
            return
        # Seldom are more than a few asked for.
        count, given = FIRST, 0
        while True:
            found = self.lowest(ahead, count)
            yield from found[given:]
            if len(found) < count:
                return
            count, given = 4 * count, count

    def best_by_stages(self) -> Placement | None:
        """The one with the least `d_cost`: on policy, with a barrier behind every stage."""
        problem, costs = self._choices.problem, self._choices.estimator.costs
        found = (
            placement
            for each in self.allocations(0)
            for placement in self._placements(each, 0, streamed=False)
            if not costs.unfit(placement)
        )
        return min(found, key=lambda each: _staged(problem, each, costs), default=None)

    def _placements(
        self, allocation: Allocation, ahead: int, *, streamed: bool
    ) -> Iterator[Placement]:
        """Its fastest parallelism, with every grid that the generator may have: memory for keys
        and values is what the others leave, and decides between them.
        """
        roles: dict[str, Assignment] = {}
        for each, home in zip(allocation.sets, allocation.meshes, strict=True):
            found = self._choices.together(each, home)
            if found is None:
                return
            roles |= found
        generator = self._choices.generator
        mesh = roles[generator].mesh if self._whole is None else self._whole
        for option in self._choices.of(generator, mesh):
            yield self._choices.placement(roles | {generator: option}, ahead, streamed=streamed)


class _Least:
    """What a set of roles has to do on a mesh in a step: the least, on policy; remembered."""

    def __init__(self, choices: Choices, ahead: int) -> None:
        self._choices = choices
        self._ahead = ahead
        self._seconds: dict[Unit, dict[Mesh, float]] = {}

    def of(self, roles: Unit, mesh: Mesh) -> float:
        """Infinite where one of them fits by itself in nothing."""
        known = self._seconds.setdefault(roles, {})
        if mesh not in known:
            home = self._choices.home(mesh)
            known[mesh] = sum(self._one(role, home) for role in roles)
        return known[mesh]

    def _one(self, role: str, mesh: Mesh) -> float:
        found = self._choices.of(role, mesh)[:1]
        return self._choices.likely_s(role, found[0], self._ahead) if found else math.inf


def _staged(problem: Problem, placement: Placement, costs: Costs) -> float:
    return d_cost(problem, placement, costs)
