"""Devices, grids and placements as text, in ReaL's notation, and timings to check by hand."""

from collections.abc import Mapping

from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.problem.stage_timings import GeneratorTiming
from streamrl.resharding.grids import RankGrid


def parse_mesh(devices: str) -> Mesh:
    """Return the mesh of the devices in a text such as "0-7" or "3"."""
    first, _, last = devices.partition("-")
    return Mesh(int(first), int(last or first) - int(first) + 1)


def make_assignment(
    grid: str, first: int = 0, *, zero_stage: int = 1, experts: int = 1
) -> CallAssignment:
    """Assign a grid such as "1-8-2" to consecutive devices from the first on."""
    ranks = RankGrid.from_text(grid)
    return CallAssignment(Mesh(first, ranks.num_ranks), ranks, zero_stage, experts)


def placement_from_meshes(
    meshes: Mapping[str, tuple[str, str]], *, max_staleness: int = 0
) -> Placement:
    """Build a placement from devices and grid by stage, such as {"generate": ("0-7", "1-2-4")}.

    The grid gives pipeline-, tensor- and data-parallel size.
    """
    calls = {
        stage: CallAssignment(parse_mesh(devices), RankGrid.from_text(grid))
        for stage, (devices, grid) in meshes.items()
    }
    return Placement(calls, max_staleness)


def sampler(
    decode_s: float,
    *,
    rollout_s: float = 0.0,
    replicas: int = 1,
    max_running: int = 1000,
    kv_tokens: float = 1e9,
) -> GeneratorTiming:
    """Return the timing of generators without prefill cost and with this cost per decode step."""
    return GeneratorTiming(
        replicas, max_running, kv_tokens, decode_s, 0.0, 0.0, 0.0, rollout_s, prefill_token_s=0.0
    )
