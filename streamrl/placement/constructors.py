"""Three ways to write a placement: sets of models, ratios of devices, a mesh for each call.

Sets are HybridFlow's (arXiv:2409.19256): models of one set share all its devices. Ratios are
FlexRLHF's (arXiv:2312.11819): a pool's devices, and which part of them a role has; its strategies
are the names of `pools.POOL_STRATEGIES`. Meshes per call are ReaL's (arXiv:2406.14088), the general
form, which `Placement` itself is.
"""

from collections.abc import Collection, Mapping, Sequence

from streamrl.dataflow import Dataflow, ModelCall
from streamrl.errors import ConfigError
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.pools import RolePool, lay_out_slots
from streamrl.resharding import RankGrid

StageGrids = Mapping[str, RankGrid]
"""How each call splits its model, by stage; one that is not named has a replica on each device."""


def find_model_role(call: ModelCall) -> str:
    """The role whose model a call computes with: its own, or the trained one it follows."""
    return call.followed_role or call.role


def placement_from_sets(
    dataflow: Dataflow,
    sets: Sequence[Collection[str]],
    sizes: Sequence[int],
    *,
    grids: StageGrids | None = None,
    max_staleness: int = 0,
) -> Placement:
    """Sets of models, named by role (policy, critic, reference, reward), on so many devices each.

    The policy's set generates and trains. A model in no set has no devices. Raises ConfigError for
    a model that is in two sets, or that the dataflow does not have.
    """
    known = {find_model_role(call) for call in dataflow.calls}
    named = [role for each in sets for role in each]
    for role in named:
        if role not in known:
            raise ConfigError(f"sets: {role}: the dataflow has {', '.join(sorted(known))}")
        if named.count(role) > 1:
            raise ConfigError(f"sets: {role} is in {named.count(role)} of them")
    meshes = {
        role: mesh
        for each, mesh in zip(sets, _make_consecutive_meshes(sizes), strict=True)
        for role in each
    }
    calls = {
        call.stage: _assign_mesh(meshes[find_model_role(call)], (grids or {}).get(call.stage))
        for call in dataflow.ordered_calls
        if find_model_role(call) in meshes
    }
    return Placement(calls, max_staleness)


def placement_from_ratios(
    dataflow: Dataflow,
    pools: Sequence[RolePool],
    sizes: Sequence[int],
    *,
    grids: StageGrids | None = None,
    max_staleness: int = 0,
) -> Placement:
    """Pools of so many devices each, and the part of its pool that each role has, above 0 to 1.

    Parts below 1 are laid side by side, from the beginning again where there is no room. A role in
    no pool has no devices. Raises ConfigError for a part that is no whole number of devices.
    """
    calls: dict[str, CallAssignment] = {}
    for pool, whole in zip(pools, _make_consecutive_meshes(sizes), strict=True):
        counts = {role: _count_devices(role, part, whole.size) for role, part in pool.items()}
        slots = lay_out_slots([pool], counts).slots
        for call in dataflow.ordered_calls:
            if call.role in slots:
                mesh = Mesh(whole.first + slots[call.role][0], len(slots[call.role]))
                calls[call.stage] = _assign_mesh(mesh, (grids or {}).get(call.stage))
    return Placement(calls, max_staleness)


def placement_from_meshes(
    meshes: Mapping[str, tuple[str, str]], *, max_staleness: int = 0
) -> Placement:
    """Devices and grid of each call, by stage, as {"generate": ("0-7", "1-2-4")}."""
    calls = {
        stage: _assign_mesh(Mesh.from_text(devices), _parse_grid(stage, grid))
        for stage, (devices, grid) in meshes.items()
    }
    return Placement(calls, max_staleness)


def _parse_grid(stage: str, text: str) -> RankGrid:
    try:
        return RankGrid.from_text(text)
    except ValueError as error:
        raise ConfigError(f"{stage}: {error}") from None


def _make_consecutive_meshes(sizes: Sequence[int]) -> list[Mesh]:
    return [Mesh(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _count_devices(role: str, part: float, size: int) -> int:
    count = round(part * size)
    if not 0 < part <= 1 or count < 1 or abs(count - part * size) > 1 / 1024:
        raise ConfigError(
            f"ratio of {role}: {part:g} of {size} devices: must be a whole number of them"
        )
    return count


def _assign_mesh(mesh: Mesh, grid: RankGrid | None) -> CallAssignment:
    return CallAssignment(mesh, grid or RankGrid(1, 1, mesh.size))
