"""From a placement to others on the meshes it has: every role on any of them, or on all devices.

Where memory is short, one role cannot move unless others are split further: what fits together is
worked out anew for each way to divide the roles among the meshes.
"""

import heapq
import itertools
import math
from collections.abc import Iterator

from streamrl.placement.meshes import Mesh
from streamrl.placement.search.hybridflow_parallel import Choices, Roles

MOST_PLACES = 4
"""Meshes that roles are divided among."""
LOOKED_AT = 192
"""Ways to do so, those of the least work for the busiest device."""


def rearranged(choices: Choices, roles: Roles, ahead: int, limit_s: float) -> Iterator[Roles]:
    """Other ways, as they fit together, that may be below the limit."""
    names, here = list(roles), tuple(each.mesh for each in roles.values())
    places = _places(choices, here)
    least = {
        (role, mesh): _least_s(choices, role, mesh, ahead) for role in names for mesh in places
    }
    ways = (
        (_busiest_s(meshes, [least[each] for each in zip(names, meshes, strict=True)]), meshes)
        for meshes in itertools.product(places, repeat=len(names))
        if meshes != here
    )
    for _, meshes in heapq.nsmallest(LOOKED_AT, (way for way in ways if way[0] < limit_s)):
        found = choices.fitted(dict(zip(names, meshes, strict=True)))
        if found is not None:
            yield found


def _places(choices: Choices, used: tuple[Mesh, ...]) -> list[Mesh]:
    """All devices, and the meshes that most roles are on."""
    whole = Mesh(0, choices.problem.cluster.size)
    ordered = sorted(set(used) - {whole}, key=lambda mesh: (-used.count(mesh), mesh))
    return [whole, *ordered[: MOST_PLACES - 1]]


def _least_s(choices: Choices, role: str, mesh: Mesh, ahead: int) -> float:
    found = choices.of(role, mesh)
    return choices.least_s(role, found[0], ahead) if found else math.inf


def _busiest_s(meshes: tuple[Mesh, ...], seconds: list[float]) -> float:
    return max(
        sum(s for mesh, s in zip(meshes, seconds, strict=True) if first in mesh.devices)
        for first in {mesh.first for mesh in meshes}
    )
