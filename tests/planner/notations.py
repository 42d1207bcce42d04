"""Placements of tests, in three notations: sets of models, ratios of devices, a mesh per call.

- Sets (HybridFlow, arXiv:2409.19256): the models of a set share all devices of the set.
- Ratios (FlexRLHF, arXiv:2312.11819): the devices of a pool, and the part of them that each role
  has. `pools.POOL_STRATEGIES` names the strategies of the paper.
- Meshes (ReaL, arXiv:2406.14088): devices and grid per call, the general form, which `Placement`
  stores.
"""

from collections.abc import Collection, Mapping, Sequence

from streamrl.dataflow import Dataflow
from streamrl.errors import ConfigError
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.pools import RolePool, lay_out_slots
from streamrl.resharding.grids import RankGrid

StageGrids = Mapping[str, RankGrid]
"""Parallelism by stage; a stage without a grid has one replica per device."""


def placement_from_sets(
    dataflow: Dataflow,
    sets: Sequence[Collection[str]],
    sizes: Sequence[int],
    *,
    grids: StageGrids | None = None,
    max_staleness: int = 0,
) -> Placement:
    """Build a placement from sets of models that share devices (HybridFlow's notation).

    `sets[i]`, given as role names, takes the next `sizes[i]` devices. The policy's set both
    generates and trains. A model outside all sets has no devices. `grids` sets the parallelism by
    stage. Raise ConfigError for a model in two sets, or a model that the dataflow lacks.
    """
    dataflow_roles = {call.model_role for call in dataflow.calls}
    set_roles = [role for roles in sets for role in roles]
    for role in set_roles:
        if role not in dataflow_roles:
            raise ConfigError(f"sets: {role}: the dataflow has {', '.join(sorted(dataflow_roles))}")
        if set_roles.count(role) > 1:
            raise ConfigError(f"sets: {role} is in {set_roles.count(role)} sets; must be in one")
    meshes = {
        role: mesh
        for roles, mesh in zip(sets, _make_consecutive_meshes(sizes), strict=True)
        for role in roles
    }
    calls = {
        call.stage: _assign_mesh(meshes[call.model_role], (grids or {}).get(call.stage))
        for call in dataflow.ordered_calls
        if call.model_role in meshes
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
    """Build a placement from pools and each role's fraction of its pool (FlexRLHF's notation).

    `pools[i]` takes the next `sizes[i]` devices and maps each role to its fraction, above 0 and at
    most 1. Fractions below 1 lie side by side and start again at the first device when the pool is
    full. A role outside all pools has no devices. Raise ConfigError if a fraction of a pool is not
    a whole number of devices.
    """
    calls: dict[str, CallAssignment] = {}
    for pool, pool_mesh in zip(pools, _make_consecutive_meshes(sizes), strict=True):
        counts = {role: _count_devices(role, ratio, pool_mesh.size) for role, ratio in pool.items()}
        slots = lay_out_slots([pool], counts).slots
        for call in dataflow.ordered_calls:
            if call.role in slots:
                mesh = Mesh(pool_mesh.first + slots[call.role][0], len(slots[call.role]))
                calls[call.stage] = _assign_mesh(mesh, (grids or {}).get(call.stage))
    return Placement(calls, max_staleness)


def placement_from_meshes(
    meshes: Mapping[str, tuple[str, str]], *, max_staleness: int = 0
) -> Placement:
    """Build a placement from devices and grid by stage, such as {"generate": ("0-7", "1-2-4")}.

    The grid gives pipeline-, tensor- and data-parallel size.
    """
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


def _count_devices(role: str, ratio: float, size: int) -> int:
    count = round(ratio * size)
    if not 0 < ratio <= 1 or count < 1 or abs(count - ratio * size) > 1 / 1024:
        raise ConfigError(
            f"ratio of {role}: {ratio:g} of {size} devices: must be a whole number of devices"
        )
    return count


def _assign_mesh(mesh: Mesh, grid: RankGrid | None) -> CallAssignment:
    return CallAssignment(mesh, grid or RankGrid(1, 1, mesh.size))
