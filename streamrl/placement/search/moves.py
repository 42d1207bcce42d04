"""From a placement to others on the meshes it has: every role on any of them, or on all devices.

Where memory is short, one role cannot move unless others are split further: what fits together is
worked out anew for each way to divide the roles among the meshes.
"""

import heapq
import itertools
import math
from collections.abc import Iterator

from streamrl.placement.meshes import Mesh
from streamrl.placement.search.hybridflow_parallel import ParallelismChoices, RoleAssignments

MAX_MESHES = 4
"""Meshes that roles are divided among."""
MAX_REARRANGEMENTS = 192
"""Ways to do so, those of the least work for the busiest device."""


def iter_rearrangements(
    choices: ParallelismChoices, roles: RoleAssignments, ahead: int, limit_s: float
) -> Iterator[RoleAssignments]:
    """Other ways, as they fit together, that may be below the limit."""
    names, here = list(roles), tuple(each.mesh for each in roles.values())
    places = _list_meshes(choices, here)
    least = {
        (role, mesh): _min_busy_s(choices, role, mesh, ahead) for role in names for mesh in places
    }
    ways = (
        (_max_busy_s(meshes, [least[each] for each in zip(names, meshes, strict=True)]), meshes)
        for meshes in itertools.product(places, repeat=len(names))
        if meshes != here
    )
    for _, meshes in heapq.nsmallest(MAX_REARRANGEMENTS, (way for way in ways if way[0] < limit_s)):
        found = choices.fit_on_meshes(dict(zip(names, meshes, strict=True)))
        if found is not None:
            yield found


def _list_meshes(choices: ParallelismChoices, used: tuple[Mesh, ...]) -> list[Mesh]:
    """All devices, and the meshes that most roles are on."""
    whole = Mesh(0, choices.problem.cluster.num_devices)
    ordered = sorted(set(used) - {whole}, key=lambda mesh: (-used.count(mesh), mesh))
    return [whole, *ordered[: MAX_MESHES - 1]]


def _min_busy_s(choices: ParallelismChoices, role: str, mesh: Mesh, ahead: int) -> float:
    found = choices.list_options(role, mesh)
    return choices.min_busy_s(role, found[0], ahead) if found else math.inf


def _max_busy_s(meshes: tuple[Mesh, ...], seconds: list[float]) -> float:
    return max(
        sum(s for mesh, s in zip(meshes, seconds, strict=True) if first in mesh.devices)
        for first in {mesh.first for mesh in meshes}
    )
