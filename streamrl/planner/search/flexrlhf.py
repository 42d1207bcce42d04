"""FlexRLHF's guideline (arXiv:2312.11819) as a placement to compare with.

- A cluster of up to two nodes is shared by all roles; reference and reward get half of the devices
  each if one of the two fits into a node.
- A larger cluster is divided: generation gets 30 to 50 % of the devices, trained models the rest,
  so that generation and training take the same time.
- Generators are replicated instead of spread over nodes.
- Trained models are sharded by ZeRO-3.
"""

from collections.abc import Sequence

from streamrl.placement.meshes import Mesh, list_node_edges
from streamrl.placement.placements import CallAssignment
from streamrl.planner.search.hybridflow import ParallelismChoices, RoleAssignments

MAX_SHARED_NODES = 2
GENERATION_FRACTIONS = (0.3, 0.5)
"""Fraction of all devices for generation."""


def apply_guideline(choices: ParallelismChoices) -> RoleAssignments | None:
    """Return devices and parallelism by role as the guideline chooses them; None if none fit."""
    cluster = choices.problem.cluster
    strategies = [_place_interleaved, _place_colocated]
    if cluster.num_nodes > MAX_SHARED_NODES:
        strategies.insert(0, _place_disaggregated)
    for strategy in strategies:
        assignments = strategy(choices)
        if assignments is not None and choices.can_fit(assignments):
            return assignments
    return None


def _choose_by_rule(choices: ParallelismChoices, role: str, mesh: Mesh) -> CallAssignment | None:
    """Choose ZeRO-3 for a trained role, and the fewest tensor-parallel ranks for others."""
    options = [option for option in choices.list_options(role, mesh) if option.grid.pp_size == 1]
    if role in choices.trained_roles:
        options = [e for e in options if e.zero_stage == max(x.zero_stage for x in options)]
    return min(options, key=lambda option: option.grid.tp_size, default=None)


def _place_roles(choices: ParallelismChoices, meshes: dict[str, Mesh]) -> RoleAssignments | None:
    """Place each role by rule; a generator gets more tensor-parallel ranks if memory is short."""
    assignments: dict[str, CallAssignment] = {}
    for role, mesh in meshes.items():
        option = _choose_by_rule(choices, role, mesh)
        if option is None:
            return None
        assignments[role] = option
    generator = choices.generator_role
    options = sorted(
        choices.list_options(generator, meshes[generator]),
        key=lambda option: (option.grid.pp_size, option.grid.tp_size),
    )
    for option in options:
        if choices.can_fit(assignments | {generator: option}):
            return assignments | {generator: option}
    return None


def _place_colocated(choices: ParallelismChoices) -> RoleAssignments | None:
    all_devices = Mesh(0, choices.problem.cluster.num_devices)
    return _place_roles(choices, dict.fromkeys(choices.roles, all_devices))


def _place_interleaved(choices: ParallelismChoices) -> RoleAssignments | None:
    """Place reference and reward on half of the devices each, and all other roles on all devices.

    Return None unless both exist and one of the two fits into a node.
    """
    cluster = choices.problem.cluster
    scorers = [role for role in ("reference", "reward") if role in choices.roles]
    halves = _split_halves(choices)
    if len(scorers) < len(halves) or not halves:
        return None
    node = Mesh(0, list_node_edges(cluster)[1])
    if not any(choices.list_options(role, node) for role in scorers):
        return None
    all_devices = Mesh(0, cluster.num_devices)
    return _place_roles(
        choices, dict.fromkeys(choices.roles, all_devices) | dict(zip(scorers, halves, strict=True))
    )


def _split_halves(choices: ParallelismChoices) -> Sequence[Mesh]:
    """Return the halves of the cluster as meshes, for reference and reward; empty if impossible.

    Of several nodes none is split; a single node needs an even number of devices.
    """
    cluster = choices.problem.cluster
    half = cluster.num_devices // 2
    edges = list_node_edges(cluster)
    splits = half in edges if cluster.num_nodes > 1 else cluster.num_devices % 2 == 0
    return [Mesh(0, half), Mesh(half, cluster.num_devices - half)] if splits else []


def _place_disaggregated(choices: ParallelismChoices) -> RoleAssignments | None:
    """Place generator, scorers and trained roles apart; minimize the load of the busiest part."""
    cluster = choices.problem.cluster
    edges = list_node_edges(cluster)
    scorers = [
        r for r in choices.roles if r not in choices.trained_roles and r != choices.generator_role
    ]
    best: tuple[float, RoleAssignments] | None = None
    for at in edges[1:-1]:
        if not GENERATION_FRACTIONS[0] <= at / cluster.num_devices <= GENERATION_FRACTIONS[1]:
            continue
        for end in edges[edges.index(at) : -1] if scorers else [at]:
            if scorers and end == at:
                continue
            assignments = _place_roles(
                choices, _make_three_parts(choices, scorers, (at, end, cluster.num_devices))
            )
            if assignments is None:
                continue
            longest = _find_max_busy_s(choices, assignments)
            if best is None or longest < best[0]:
                best = (longest, assignments)
    return None if best is None else best[1]


def _make_three_parts(
    choices: ParallelismChoices, scorers: Sequence[str], edges: tuple[int, int, int]
) -> dict[str, Mesh]:
    """Return the mesh of each role; edges: first devices of scorers and trained roles, end."""
    at, end, size = edges
    return (
        {choices.generator_role: Mesh(0, at)}
        | {role: Mesh(at, end - at) for role in scorers}
        | {role: Mesh(end, size - end) for role in choices.roles if role in choices.trained_roles}
    )


def _find_max_busy_s(choices: ParallelismChoices, roles: RoleAssignments) -> float:
    busy_by_mesh: dict[Mesh, float] = {}
    for role, assignment in roles.items():
        busy_by_mesh[assignment.mesh] = busy_by_mesh.get(
            assignment.mesh, 0.0
        ) + choices.compute_alone_duration_s(role, assignment)
    return max(busy_by_mesh.values())
