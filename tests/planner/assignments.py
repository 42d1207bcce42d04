"""Devices and grids of calls, as text."""

from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment
from streamrl.resharding.grids import RankGrid


def make_assignment(
    grid: str, first: int = 0, *, zero_stage: int = 1, experts: int = 1
) -> CallAssignment:
    """Assign a grid such as "1-8-2" to consecutive devices from the first on."""
    ranks = RankGrid.from_text(grid)
    return CallAssignment(Mesh(first, ranks.num_ranks), ranks, zero_stage, experts)
