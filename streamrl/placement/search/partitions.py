"""Ways to divide roles into sets that share devices, and devices among sets."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from math import comb
from typing import TypeVar

from streamrl.dataflow import EMA_REFERENCE, Dataflow
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.problem import PlacementProblem

T = TypeVar("T")


def group_roles_by_model(problem: PlacementProblem) -> list[tuple[str, ...]]:
    """Roles with devices, those that have one model together: who is trained, and who follows."""
    roles = list_placed_roles(problem)
    leaders = {role: _find_leader(problem.dataflow, role) for role in roles}
    return [
        tuple(role for role in roles if leaders[role] == leader)
        for leader in dict.fromkeys(leaders.values())
    ]


def list_placed_roles(problem: PlacementProblem) -> list[str]:
    """Roles with devices, in flow order."""
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
    """Every way to divide them into sets; the sets in the order of their first items."""
    if not items:
        yield []
        return
    *before, last = items
    for parts in iter_set_partitions(before):
        for i in range(len(parts)):
            yield [[*part, last] if i == j else part for j, part in enumerate(parts)]
        yield [*parts, [last]]


def iter_compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as so many numbers from 1 on, in order."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(late - early for early, late in itertools.pairwise(edges))


def count_allocations(items: int, units: int) -> int:
    """How many allocations of so many units to sets of items there are, over all partitions."""
    return sum(comb(units - 1, len(parts) - 1) for parts in iter_set_partitions(range(items)))


def accept_any_mesh(number: int, mesh: Mesh) -> bool:
    """Each set may have each mesh."""
    return True


def iter_allocations(
    cluster: Cluster, sets: int, wanted: Callable[[int, Mesh], bool] = accept_any_mesh
) -> Iterator[tuple[Mesh, ...]]:
    """Disjoint meshes for so many sets, which are the whole cluster.

    On nodes that are many, whole ones, one set behind the other; on a single node, parts that a
    mesh may have. wanted: whether a set, by number, may have a mesh.
    """
    if cluster.num_nodes > 1:
        yield from _iter_runs(list_node_edges(cluster), sets, wanted, ())
        return
    sizes = [size for size in range(1, cluster.num_devices + 1) if cluster.num_devices % size == 0]
    for chosen in itertools.product(sizes, repeat=sets):
        found = (
            _pack_meshes(chosen, cluster.num_devices)
            if sum(chosen) == cluster.num_devices
            else None
        )
        if found is not None and all(wanted(i, mesh) for i, mesh in enumerate(found)):
            yield found


def _iter_runs(
    edges: Sequence[int],
    sets: int,
    wanted: Callable[[int, Mesh], bool],
    before: tuple[Mesh, ...],
) -> Iterator[tuple[Mesh, ...]]:
    """Runs of the nodes between these edges for so many sets more, behind those before."""
    first, number = edges[0], len(before)
    if sets == 1:
        rest = Mesh(first, edges[-1] - first)
        if wanted(number, rest):
            yield (*before, rest)
        return
    for count in range(1, len(edges) - sets + 1):
        mesh = Mesh(first, edges[count] - first)
        if wanted(number, mesh):
            yield from _iter_runs(edges[count:], sets - 1, wanted, (*before, mesh))


def _pack_meshes(sizes: Sequence[int], devices: int) -> tuple[Mesh, ...] | None:
    """The large ones first, each at the first multiple of its size that is free; None if none is.

    What divides one another always fits.
    """
    found: dict[int, Mesh] = {}
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        free = (
            mesh
            for first in range(0, devices - sizes[i] + 1, sizes[i])
            for mesh in (Mesh(first, sizes[i]),)
            if not any(mesh.overlaps(other) for other in found.values())
        )
        here = next(free, None)
        if here is None:
            return None
        found[i] = here
    return tuple(found[i] for i in range(len(sizes)))


def list_node_edges(cluster: Cluster) -> list[int]:
    """Where nodes begin, and where the last one ends."""
    edges = [0]
    for group in cluster.node_groups:
        edges += [edges[-1] + group.devices_per_node * (i + 1) for i in range(group.num_nodes)]
    return edges
