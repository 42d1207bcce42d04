"""FlexRLHF's guideline as a placement to compare with: rules, and no search.

Its rules (arXiv:2312.11819): two nodes or fewer are shared, reference and reward on halves of them
where one of those fits in one node; more are parted, the shadows of actor and critic with all that
only computes forward on one part, with 30 to 50 % of the devices for generation, so that both parts
take the same time; generators are replicated rather than spread over nodes; what is trained is
sharded by ZeRO-3.
"""

from collections.abc import Sequence

from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment
from streamrl.placement.search.hybridflow_parallel import ParallelismChoices, RoleAssignments
from streamrl.placement.search.partitions import list_node_edges

MAX_SHARED_NODES = 2
GENERATION_FRACTIONS = (0.3, 0.5)
"""The part of all devices that generation gets."""


def apply_guideline(choices: ParallelismChoices) -> RoleAssignments | None:
    """Devices and parallelism by its rules; None where they find none that fits."""
    cluster = choices.problem.cluster
    ways = [_place_interleaved, _place_colocated]
    if cluster.num_nodes > MAX_SHARED_NODES:
        ways.insert(0, _place_disaggregated)
    for way in ways:
        found = way(choices)
        if found is not None and choices.can_fit(found):
            return found
    return None


def _choose_by_rule(choices: ParallelismChoices, role: str, mesh: Mesh) -> CallAssignment | None:
    """ZeRO-3 for what is trained; the fewest tensor-parallel ranks for what is not."""
    found = [each for each in choices.list_options(role, mesh) if each.grid.pp_size == 1]
    if role in choices.trained_roles:
        found = [e for e in found if e.zero_stage == max(x.zero_stage for x in found)]
    return min(found, key=lambda each: each.grid.tp_size, default=None)


def _place_roles(choices: ParallelismChoices, meshes: dict[str, Mesh]) -> RoleAssignments | None:
    """Each role on its mesh; the generators of more ranks where those leave more room."""
    found: dict[str, CallAssignment] = {}
    for role, mesh in meshes.items():
        option = _choose_by_rule(choices, role, mesh)
        if option is None:
            return None
        found[role] = option
    generator = choices.generator_role
    options = sorted(
        choices.list_options(generator, meshes[generator]),
        key=lambda each: (each.grid.pp_size, each.grid.tp_size),
    )
    for option in options:
        if choices.can_fit(found | {generator: option}):
            return found | {generator: option}
    return None


def _place_colocated(choices: ParallelismChoices) -> RoleAssignments | None:
    whole = Mesh(0, choices.problem.cluster.num_devices)
    return _place_roles(choices, dict.fromkeys(choices.roles, whole))


def _place_interleaved(choices: ParallelismChoices) -> RoleAssignments | None:
    """Reference and reward on halves, if both are there and one of them fits in a node."""
    cluster = choices.problem.cluster
    lone = [role for role in ("reference", "reward") if role in choices.roles]
    halves = _split_halves(choices)
    if len(lone) < len(halves) or not halves:
        return None
    node = Mesh(0, list_node_edges(cluster)[1])
    if not any(choices.list_options(role, node) for role in lone):
        return None
    whole = Mesh(0, cluster.num_devices)
    return _place_roles(
        choices, dict.fromkeys(choices.roles, whole) | dict(zip(lone, halves, strict=True))
    )


def _split_halves(choices: ParallelismChoices) -> Sequence[Mesh]:
    cluster = choices.problem.cluster
    half = cluster.num_devices // 2
    edges = list_node_edges(cluster)
    splits = half in edges if cluster.num_nodes > 1 else cluster.num_devices % 2 == 0
    return [Mesh(0, half), Mesh(half, cluster.num_devices - half)] if splits else []


def _place_disaggregated(choices: ParallelismChoices) -> RoleAssignments | None:
    """The part for generation that comes nearest to equal times; scorers beside the trainers' gap.

    Scorers have devices of their own between both parts, as many as they need.
    """
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
            found = _place_roles(
                choices, _make_three_parts(choices, scorers, (at, end, cluster.num_devices))
            )
            if found is None:
                continue
            longest = _max_busy_s(choices, found)
            if best is None or longest < best[0]:
                best = (longest, found)
    return None if best is None else best[1]


def _make_three_parts(
    choices: ParallelismChoices, scorers: Sequence[str], edges: tuple[int, int, int]
) -> dict[str, Mesh]:
    at, end, size = edges
    return (
        {choices.generator_role: Mesh(0, at)}
        | {role: Mesh(at, end - at) for role in scorers}
        | {role: Mesh(end, size - end) for role in choices.roles if role in choices.trained_roles}
    )


def _max_busy_s(choices: ParallelismChoices, roles: RoleAssignments) -> float:
    """What the busiest mesh has to do."""
    wants: dict[Mesh, float] = {}
    for role, each in roles.items():
        wants[each.mesh] = wants.get(each.mesh, 0.0) + choices.alone_duration_s(role, each)
    return max(wants.values())
