"""Ways to divide roles into sets that share devices, and devices among sets."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from math import comb
from typing import TypeVar

from streamrl.dataflow import MOVED, Dataflow
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.problem import Problem

T = TypeVar("T")


def models(problem: Problem) -> list[tuple[str, ...]]:
    """Roles with devices, those that have one model together: who is trained, and who follows."""
    roles = placed_roles(problem)
    leaders = {role: _leader(problem.dataflow, role) for role in roles}
    return [
        tuple(role for role in roles if leaders[role] == leader)
        for leader in dict.fromkeys(leaders.values())
    ]


def placed_roles(problem: Problem) -> list[str]:
    """Roles with devices, in flow order."""
    placed = set(problem.stages)
    return [
        role
        for role, calls in problem.dataflow.roles.items()
        if any(call.stage in placed for call in calls)
    ]


def _leader(dataflow: Dataflow, role: str) -> str:
    follows = {call.follows for call in dataflow.roles[role]} - {"", MOVED}
    return min(follows, default=role)


def set_partitions(items: Sequence[T]) -> Iterator[list[list[T]]]:
    """Every way to divide them into sets; the sets in the order of their first items."""
    if not items:
        yield []
        return
    *before, last = items
    for parts in set_partitions(before):
        for i in range(len(parts)):
            yield [[*part, last] if i == j else part for j, part in enumerate(parts)]
        yield [*parts, [last]]


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as so many numbers from 1 on, in order."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(late - early for early, late in itertools.pairwise(edges))


def count_allocations(items: int, units: int) -> int:
    """How many allocations of so many units to sets of items there are, over all partitions."""
    return sum(comb(units - 1, len(parts) - 1) for parts in set_partitions(range(items)))


def any_mesh(number: int, mesh: Mesh) -> bool:
    """Each set may have each mesh."""
    return True


def allocations(
    cluster: Cluster, sets: int, wanted: Callable[[int, Mesh], bool] = any_mesh
) -> Iterator[tuple[Mesh, ...]]:
    """Disjoint meshes for so many sets, which are the whole cluster.

    On nodes that are many, whole ones, one set behind the other; on a single node, parts that a
    mesh may have. wanted: whether a set, by number, may have a mesh.
    """
    if cluster.num_nodes > 1:
        yield from _runs(node_edges(cluster), sets, wanted, ())
        return
    sizes = [size for size in range(1, cluster.size + 1) if cluster.size % size == 0]
    for chosen in itertools.product(sizes, repeat=sets):
        found = _packed(chosen, cluster.size) if sum(chosen) == cluster.size else None
        if found is not None and all(wanted(i, mesh) for i, mesh in enumerate(found)):
            yield found


def _runs(
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
            yield from _runs(edges[count:], sets - 1, wanted, (*before, mesh))


def _packed(sizes: Sequence[int], devices: int) -> tuple[Mesh, ...] | None:
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


def node_edges(cluster: Cluster) -> list[int]:
    """Where nodes begin, and where the last one ends."""
    edges = [0]
    for group in cluster.groups:
        edges += [edges[-1] + group.devices * (i + 1) for i in range(group.count)]
    return edges
