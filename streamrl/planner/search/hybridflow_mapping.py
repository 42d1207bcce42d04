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
from streamrl.planner.search.hybridflow_parallel import ParallelismChoices
from streamrl.planner.search.partitions import (
    group_roles_by_model,
    iter_allocations,
    iter_set_partitions,
)

RoleSet = tuple[str, ...]
BOUND_SLACK = 0.95
"""Factor on lower bounds: the formulas for calls alone and calls in a schedule differ."""
FIRST_ALLOCATIONS = 64
"""Number of allocations in the first batch of a search by increasing lower bound."""
MAX_NODES_FOR_THREE_SETS = 8
"""On clusters of at most this many nodes, roles are also divided into three sets."""


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
    ) -> Placement | None:
        """Return the placement with the shortest step; None if none fits.

        An allocation is scheduled only while its lower bound is below the best step time so far.
        `limit` restricts the search to this many allocations, those with the lowest bounds.
        """
        best: tuple[float, Placement | None] = (math.inf, None)
        for allocation in self._iter_by_bound(ahead, limit):
            if allocation.lower_bound_s * BOUND_SLACK >= best[0]:
                break
            for placement in self._iter_placements(allocation, ahead, streamed=streamed):
                seconds = self._choices.estimator.estimate_step_s(placement, best[0])
                if seconds < best[0]:
                    best = (seconds, placement)
        return best[1]

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


def can_fit(choices: ParallelismChoices) -> bool:
    """Return whether a plain placement fits into memory.

    False does not exclude that a more elaborate placement fits.
    """
    cluster = choices.problem.cluster
    all_devices = Mesh(0, cluster.num_devices)
    if choices.fit_on_meshes(dict.fromkeys(choices.roles, all_devices)) is not None:
        return True
    for sets in _iter_divisions(choices):
        if len(sets) > 2 and cluster.num_nodes > MAX_NODES_FOR_THREE_SETS:  # noqa: PLR2004
            continue
        for meshes in iter_allocations(cluster, len(sets)):
            meshes_by_role = {
                role: mesh for roles, mesh in zip(sets, meshes, strict=True) for role in roles
            }
            if choices.fit_on_meshes(meshes_by_role) is not None:
                return True
    return False


def _iter_divisions(choices: ParallelismChoices) -> Iterator[Sequence[Sequence[str]]]:
    """Yield divisions of the roles into sets with devices of their own.

    Two sets: the roles of a model, all trained roles, or the generator; and the rest. Three sets:
    generator, trained roles, and scorers.
    """
    roles, generator, trained = choices.roles, choices.generator_role, choices.trained_roles
    separated = [
        *group_roles_by_model(choices.problem),
        tuple(role for role in roles if role in trained),
    ]
    for subset in dict.fromkeys([*separated, (generator,)]):
        rest = [role for role in roles if role not in subset]
        if rest:
            yield subset, rest
    scored = [role for role in roles if role not in trained and role != generator]
    if scored:
        yield (generator,), [role for role in roles if role in trained], scored
