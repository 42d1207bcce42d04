"""Rearrangements of roles: new assignments of all roles to the meshes in use and to all devices.

If memory is short, a single role cannot move unless others are split further. Each rearrangement is
therefore fitted anew as a whole.
"""

import heapq
import itertools
import math
from collections.abc import Iterator

from streamrl.placement.meshes import Mesh
from streamrl.placement.search.hybridflow_parallel import ParallelismChoices, RoleAssignments

MAX_MESHES = 4
"""Maximum number of meshes among which roles are redistributed."""
MAX_REARRANGEMENTS = 192
"""Rearrangements that are fitted: those with the least work of the busiest device."""


def iter_rearrangements(
    choices: ParallelismChoices, roles: RoleAssignments, ahead: int, limit_s: float
) -> Iterator[RoleAssignments]:
    """Yield other assignments of roles to meshes that fit and have a lower bound below `limit_s`.

    ahead: steps that generation runs ahead.
    """
    names, current = list(roles), tuple(role_mesh.mesh for role_mesh in roles.values())
    candidates = _list_meshes(choices, current)
    busy_s = {
        (role, mesh): _find_min_busy_s(choices, role, mesh, ahead)
        for role in names
        for mesh in candidates
    }
    bounded = (
        (
            _find_max_busy_s(
                meshes, [busy_s[role_mesh] for role_mesh in zip(names, meshes, strict=True)]
            ),
            meshes,
        )
        for meshes in itertools.product(candidates, repeat=len(names))
        if meshes != current
    )
    for _, meshes in heapq.nsmallest(
        MAX_REARRANGEMENTS, (entry for entry in bounded if entry[0] < limit_s)
    ):
        fitted = choices.fit_on_meshes(dict(zip(names, meshes, strict=True)))
        if fitted is not None:
            yield fitted


def _list_meshes(choices: ParallelismChoices, used: tuple[Mesh, ...]) -> list[Mesh]:
    """Return the mesh of all devices, and those meshes of `used` that hold the most roles."""
    all_devices = Mesh(0, choices.problem.cluster.num_devices)
    by_usage = sorted(set(used) - {all_devices}, key=lambda mesh: (-used.count(mesh), mesh))
    return [all_devices, *by_usage[: MAX_MESHES - 1]]


def _find_min_busy_s(choices: ParallelismChoices, role: str, mesh: Mesh, ahead: int) -> float:
    """Return a lower bound of the seconds of a role's work on a mesh; inf if the role does not
    fit."""
    options = choices.list_options(role, mesh)
    return choices.compute_min_busy_s(role, options[0], ahead) if options else math.inf


def _find_max_busy_s(meshes: tuple[Mesh, ...], seconds: list[float]) -> float:
    return max(
        sum(s for mesh, s in zip(meshes, seconds, strict=True) if first in mesh.devices)
        for first in {mesh.first for mesh in meshes}
    )
