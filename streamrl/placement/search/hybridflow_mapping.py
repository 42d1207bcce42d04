"""Sets of models that share devices, and their sizes: HybridFlow's Algorithm 1 (arXiv:2409.19256).

The search enumerates every set partition of the models and every allocation of nodes to the sets,
and caches the fitted parallelism of a set on a mesh. The objective is the step time of the
schedule, where the paper's is the sum over stages of the slowest set.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.search.hybridflow_parallel import ParallelismChoices
from streamrl.placement.search.partitions import iter_allocations, iter_set_partitions

RoleSet = tuple[str, ...]
BOUND_SLACK = 0.95
"""Factor on lower bounds: the formulas for calls alone and calls in a schedule differ."""
FIRST_ALLOCATIONS = 64
"""Number of allocations in the first batch of a search by increasing lower bound."""


@dataclass(frozen=True)
class MeshAllocation:
    """Sets of roles, the mesh of each set, and a lower bound of the step time in seconds."""

    role_sets: tuple[RoleSet, ...]
    meshes: tuple[Mesh, ...]
    lower_bound_s: float


class MappingSearch:
    """Search over sets of roles and the devices of each set: HybridFlow's Algorithm 1.

    units: roles that stay together, such as a trained model and its followers.
    everywhere: place the generator on all devices instead of in a set, as ReaL does.
    """

    def __init__(
        self, choices: ParallelismChoices, units: Sequence[RoleSet], *, everywhere: bool = False
    ) -> None:
        self._choices = choices
        generator = choices.generator_role
        self._generator_mesh = Mesh(0, choices.problem.cluster.num_devices) if everywhere else None
        remaining_units = [
            tuple(r for r in unit if r != generator or not everywhere) for unit in units
        ]
        self._role_sets = [unit for unit in remaining_units if unit]

    def find_lowest(self, ahead: int, count: int) -> list[MeshAllocation]:
        """Return the `count` allocations with the lowest bounds of the step time, lowest first.

        Branches above the highest of the `count` lowest bounds so far are not enumerated.
        """
        heap: list[tuple[float, int, MeshAllocation]] = []
        allocations = self._iter_below(
            ahead, lambda: -heap[0][0] if len(heap) == count else math.inf
        )
        for i, allocation in enumerate(allocations):
            entry = (-allocation.lower_bound_s, -i, allocation)
            if len(heap) < count:
                heapq.heappush(heap, entry)
            else:
                heapq.heapreplace(heap, entry)
        return [
            allocation
            for _, _, allocation in sorted(heap, key=lambda entry: entry[:2], reverse=True)
        ]

    def _iter_below(self, ahead: int, limit_s: Callable[[], float]) -> Iterator[MeshAllocation]:
        """Yield allocations with a lower bound below the limit, which may fall meanwhile.

        Each role fits alone on the mesh of its set.
        """
        cluster = self._choices.problem.cluster

        @cache
        def find_bound(roles: RoleSet, mesh: Mesh) -> float:
            """Return the seconds of a set's work on a mesh, at least; inf if a role does not fit
            alone."""
            canonical = self._choices.find_canonical_mesh(mesh)
            return sum(self._compute_role_bound(role, canonical, ahead) for role in roles)

        shared = 0.0
        if self._generator_mesh is not None:
            shared = find_bound((self._choices.generator_role,), self._generator_mesh)
        for parts in iter_set_partitions(self._role_sets):
            sets = tuple(tuple(itertools.chain(*units)) for units in parts)

            def is_below_limit(i: int, mesh: Mesh, sets: Sequence[RoleSet] = sets) -> bool:
                """Return whether the bound of set number i on a mesh is below the limit."""
                return shared + find_bound(sets[i], mesh) < limit_s()

            for meshes in iter_allocations(cluster, len(sets), is_below_limit):
                placed_sets = zip(sets, meshes, strict=True)
                yield MeshAllocation(
                    sets,
                    meshes,
                    shared + max(find_bound(*placed_set) for placed_set in placed_sets),
                )

    def _compute_role_bound(self, role: str, mesh: Mesh, ahead: int) -> float:
        options = self._choices.list_options(role, mesh)[:1]
        return self._choices.estimate_busy_s(role, options[0], ahead) if options else math.inf

    def find_best(
        self, ahead: int = 0, *, streamed: bool = True, limit: int | None = None
    ) -> tuple[Placement | None, int]:
        """Return the placement with the shortest step, or None, and the number of allocations
        tried.

        An allocation is scheduled only while its lower bound is below the best step time so far.
        `limit` restricts the search to this many allocations, those with the lowest bounds.
        """
        best: tuple[float, Placement | None] = (math.inf, None)
        num_scheduled = 0
        for allocation in self._iter_by_bound(ahead, limit):
            if allocation.lower_bound_s * BOUND_SLACK >= best[0]:
                break
            num_scheduled += 1
            for placement in self._iter_placements(allocation, ahead, streamed=streamed):
                seconds = self._choices.estimator.estimate_step_s(placement, best[0])
                if seconds < best[0]:
                    best = (seconds, placement)
        return best[1], num_scheduled

    def _iter_by_bound(self, ahead: int, limit: int | None) -> Iterator[MeshAllocation]:
        if limit is not None:
            yield from self.find_lowest(ahead, limit)
            return
        # The search seldom needs more than a few allocations, so batches grow geometrically.
        count, num_yielded = FIRST_ALLOCATIONS, 0
        while True:
            allocations = self.find_lowest(ahead, count)
            yield from allocations[num_yielded:]
            if len(allocations) < count:
                return
            count, num_yielded = 4 * count, count

    def _iter_placements(
        self, allocation: MeshAllocation, ahead: int, *, streamed: bool
    ) -> Iterator[Placement]:
        """Yield a placement per parallelism of the generator, other roles at their fastest.

        The other roles decide how much memory the KV cache gets, and so which grid is best.
        """
        roles: dict[str, CallAssignment] = {}
        for role_set, mesh in zip(allocation.role_sets, allocation.meshes, strict=True):
            fitted = self._choices.fit_on_mesh(role_set, mesh)
            if fitted is None:
                return
            roles |= fitted
        generator = self._choices.generator_role
        generator_mesh = (
            roles[generator].mesh if self._generator_mesh is None else self._generator_mesh
        )
        for option in self._choices.list_options(generator, generator_mesh):
            yield self._choices.make_placement(
                roles | {generator: option}, ahead, streamed=streamed
            )
