"""Placements in ReaL's notation: devices and grid by stage."""

from collections.abc import Mapping

from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.resharding.grids import RankGrid


def placement_from_meshes(
    meshes: Mapping[str, tuple[str, str]], *, max_staleness: int = 0
) -> Placement:
    """Build a placement from devices and grid by stage, such as {"generate": ("0-7", "1-2-4")}.

    The grid gives pipeline-, tensor- and data-parallel size.
    """
    calls = {
        stage: CallAssignment(Mesh.from_text(devices), RankGrid.from_text(grid))
        for stage, (devices, grid) in meshes.items()
    }
    return Placement(calls, max_staleness)
