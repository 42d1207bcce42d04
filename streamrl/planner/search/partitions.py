"""Partitions of roles into sets that share devices, and divisions of the devices among the sets."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from streamrl.dataflow import EMA_REFERENCE, Dataflow
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh, list_node_edges
from streamrl.planner.problem.problem import PlacementProblem

T = TypeVar("T")


def group_roles_by_model(problem: PlacementProblem) -> list[tuple[str, ...]]:
    """Group the roles with devices by model: a trained role together with its followers."""
    roles = list_placed_roles(problem)
    leaders = {role: _find_leader(problem.dataflow, role) for role in roles}
    return [
        tuple(role for role in roles if leaders[role] == leader)
        for leader in dict.fromkeys(leaders.values())
    ]


def list_placed_roles(problem: PlacementProblem) -> list[str]:
    placed = set(problem.placed_stages)
    return [
        role
        for role, calls in problem.dataflow.calls_by_role.items()
        if any(call.stage in placed for call in calls)
    ]


def _find_leader(dataflow: Dataflow, role: str) -> str:
    follows = {call.followed_role for call in dataflow.calls_by_role[role]} - {"", EMA_REFERENCE}
    return min(follows, default=role)


def iter_set_partitions(items: Sequence[T]) -> Iterator[list[list[T]]]:
    """Yield every way to split items into nonempty sets; sets are ordered by their first item.

    Example: [1, 2, 3] gives 5 partitions, from [[1, 2, 3]] to [[1], [2], [3]] (Bell numbers).
    """
    if not items:
        yield []
        return
    *before, last = items
    # The last item joins any set of a partition of the other items, or forms its own set.
    for subsets in iter_set_partitions(before):
        for i in range(len(subsets)):
            yield [[*subset, last] if i == j else subset for j, subset in enumerate(subsets)]
        yield [*subsets, [last]]


def accept_any_mesh(number: int, mesh: Mesh) -> bool:
    return True


def iter_allocations(
    cluster: Cluster, sets: int, accepts: Callable[[int, Mesh], bool] = accept_any_mesh
) -> Iterator[tuple[Mesh, ...]]:
    """Yield every way to divide the whole cluster into disjoint meshes, one per set of roles.

    Of several nodes, each set gets consecutive whole nodes; of a single node, a part that a mesh
    may have. `accepts(i, mesh)` says whether set number i may have the mesh.
    """
    if cluster.num_nodes > 1:
        yield from _iter_runs(list_node_edges(cluster), sets, accepts, ())
        return
    sizes = [size for size in range(1, cluster.num_devices + 1) if cluster.num_devices % size == 0]
    for chosen_sizes in itertools.product(sizes, repeat=sets):
        meshes = (
            _pack_meshes(chosen_sizes, cluster.num_devices)
            if sum(chosen_sizes) == cluster.num_devices
            else None
        )
        if meshes is not None and all(accepts(i, mesh) for i, mesh in enumerate(meshes)):
            yield meshes


def _iter_runs(
    edges: Sequence[int], sets: int, accepts: Callable[[int, Mesh], bool], before: tuple[Mesh, ...]
) -> Iterator[tuple[Mesh, ...]]:
    """Yield `before`, then runs of the nodes between `edges` for `sets` further sets."""
    first, number = edges[0], len(before)
    if sets == 1:
        rest = Mesh(first, edges[-1] - first)
        if accepts(number, rest):
            yield (*before, rest)
        return
    for count in range(1, len(edges) - sets + 1):
        mesh = Mesh(first, edges[count] - first)
        if accepts(number, mesh):
            yield from _iter_runs(edges[count:], sets - 1, accepts, (*before, mesh))


def _pack_meshes(sizes: Sequence[int], devices: int) -> tuple[Mesh, ...] | None:
    """Return disjoint meshes of these sizes in a node, large meshes first; None without room.

    A mesh starts at a multiple of its size. Sizes that divide each other always fit.
    """
    mesh_by_set: dict[int, Mesh] = {}
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        free_meshes = (
            mesh
            for first in range(0, devices - sizes[i] + 1, sizes[i])
            for mesh in (Mesh(first, sizes[i]),)
            if not any(mesh.overlaps(other) for other in mesh_by_set.values())
        )
        free_mesh = next(free_meshes, None)
        if free_mesh is None:
            return None
        mesh_by_set[i] = free_mesh
    return tuple(mesh_by_set[i] for i in range(len(sizes)))
