"""Which models share devices, and how many: HybridFlow's Algorithm 1 (arXiv:2409.19256).

Every set partition of the models, every allocation of nodes to its sets. What a set's roles do on
so many nodes is remembered. A placement costs its step time, by schedule; the paper's sum over
stages of the slowest set (`d_cost`) may be asked for instead.
"""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from streamrl.placement.estimates import Costs, Problem
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Assignment, Placement
from streamrl.placement.schedule import d_cost
from streamrl.placement.search.parallel import Choices
from streamrl.placement.search.partitions import allocations, set_partitions

Unit = tuple[str, ...]
SLACK = 0.95
"""A bound from calls alone is trusted so far: alone and together they are timed in two ways."""


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
        cluster = self._choices.problem.cluster
        by_count = {
            count: [tuple((mesh, self._choices.home(mesh)) for mesh in each) for each in found]
            for count in range(1, len(self._units) + 1)
            if (found := list(allocations(cluster, count)))
        }
        least = _Least(self._choices, ahead)
        shared = 0.0
        if self._whole is not None:
            shared = least.of((self._choices.generator,), self._whole)
        for parts in set_partitions(self._units):
            sets = tuple(tuple(itertools.chain(*part)) for part in parts)
            for meshes in by_count.get(len(sets), ()):
                seconds = shared + max(
                    least.of(each, home) for each, (_, home) in zip(sets, meshes, strict=True)
                )
                if seconds < math.inf:
                    yield Allocation(sets, tuple(mesh for mesh, _ in meshes), seconds)

    def best(
        self, ahead: int = 0, *, streamed: bool = True, most: int | None = None
    ) -> tuple[Placement | None, int]:
        """The placement with the least step time, and how many allocations were scheduled.

        Those whose bound is not below the best one found are not; `most` ends the search earlier,
        with those of the lowest bounds seen.
        """
        best: tuple[float, Placement | None] = (math.inf, None)
        looked = 0
        found = self.allocations(ahead)
        if most is None:
            ordered = sorted(found, key=lambda each: each.least_s)
        else:
            ordered = heapq.nsmallest(most, found, key=lambda each: each.least_s)
        for each in ordered:
            if each.least_s * SLACK >= best[0]:
                break
            looked += 1
            for placement in self._placements(each, ahead, streamed=streamed):
                seconds = self._choices.estimator.step_s(placement, best[0])
                if seconds < best[0]:
                    best = (seconds, placement)
        return best[1], looked

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
        self._seconds: dict[tuple[Unit, Mesh], float] = {}

    def of(self, roles: Unit, mesh: Mesh) -> float:
        """Infinite where one of them fits by itself in nothing."""
        key = (roles, mesh)
        if key not in self._seconds:
            self._seconds[key] = sum(self._one(role, mesh) for role in roles)
        return self._seconds[key]

    def _one(self, role: str, mesh: Mesh) -> float:
        found = self._choices.of(role, mesh)[:1]
        return self._choices.likely_s(role, found[0], self._ahead) if found else math.inf


def _staged(problem: Problem, placement: Placement, costs: Costs) -> float:
    return d_cost(problem, placement, costs)
