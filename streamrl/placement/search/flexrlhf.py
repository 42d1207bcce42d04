"""FlexRLHF's guideline as a placement to compare with: rules, and no search.

Its rules (arXiv:2312.11819): two nodes or fewer are shared, reference and reward on halves of them
where one of those fits in one node; more are parted, the shadows of actor and critic with all that
only computes forward on one part, with 30 to 50 % of the devices for generation, so that both parts
take the same time; generators are replicated rather than spread over nodes; what is trained is
sharded by ZeRO-3.
"""

from collections.abc import Sequence

from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Assignment
from streamrl.placement.search.hybridflow_parallel import Choices, Roles
from streamrl.placement.search.partitions import node_edges

SCARCE_NODES = 2
GENERATES = (0.3, 0.5)
"""The part of all devices that generation gets."""


def guideline(choices: Choices) -> Roles | None:
    """Devices and parallelism by its rules; None where they find none that fits."""
    cluster = choices.problem.cluster
    ways = [_interleaved, _colocated]
    if cluster.num_nodes > SCARCE_NODES:
        ways.insert(0, _disaggregated)
    for way in ways:
        found = way(choices)
        if found is not None and choices.fits(found):
            return found
    return None


def _ruled(choices: Choices, role: str, mesh: Mesh) -> Assignment | None:
    """ZeRO-3 for what is trained; the fewest tensor-parallel ranks for what is not."""
    found = [each for each in choices.of(role, mesh) if each.grid.stages == 1]
    if role in choices.trained:
        found = [e for e in found if e.zero_stage == max(x.zero_stage for x in found)]
    return min(found, key=lambda each: each.grid.tensor, default=None)


def _placed(choices: Choices, meshes: dict[str, Mesh]) -> Roles | None:
    """Each role on its mesh; the generators of more ranks where those leave more room."""
    found: dict[str, Assignment] = {}
    for role, mesh in meshes.items():
        option = _ruled(choices, role, mesh)
        if option is None:
            return None
        found[role] = option
    generator = choices.generator
    options = sorted(
        choices.of(generator, meshes[generator]),
        key=lambda each: (each.grid.stages, each.grid.tensor),
    )
    for option in options:
        if choices.fits(found | {generator: option}):
            return found | {generator: option}
    return None


def _colocated(choices: Choices) -> Roles | None:
    whole = Mesh(0, choices.problem.cluster.size)
    return _placed(choices, dict.fromkeys(choices.roles, whole))


def _interleaved(choices: Choices) -> Roles | None:
    """Reference and reward on halves, if both are there and one of them fits in a node."""
    cluster = choices.problem.cluster
    lone = [role for role in ("reference", "reward") if role in choices.roles]
    halves = _halves(choices)
    if len(lone) < len(halves) or not halves:
        return None
    node = Mesh(0, node_edges(cluster)[1])
    if not any(choices.of(role, node) for role in lone):
        return None
    whole = Mesh(0, cluster.size)
    return _placed(
        choices, dict.fromkeys(choices.roles, whole) | dict(zip(lone, halves, strict=True))
    )


def _halves(choices: Choices) -> Sequence[Mesh]:
    cluster = choices.problem.cluster
    half = cluster.size // 2
    edges = node_edges(cluster)
    splits = half in edges if cluster.num_nodes > 1 else cluster.size % 2 == 0
    return [Mesh(0, half), Mesh(half, cluster.size - half)] if splits else []


def _disaggregated(choices: Choices) -> Roles | None:
    """The part for generation that comes nearest to equal times; scorers beside the trainers' gap.

    Scorers have devices of their own between both parts, as many as they need.
    """
    cluster = choices.problem.cluster
    edges = node_edges(cluster)
    scorers = [r for r in choices.roles if r not in choices.trained and r != choices.generator]
    best: tuple[float, Roles] | None = None
    for at in edges[1:-1]:
        if not GENERATES[0] <= at / cluster.size <= GENERATES[1]:
            continue
        for end in edges[edges.index(at) : -1] if scorers else [at]:
            if scorers and end == at:
                continue
            found = _placed(choices, _three(choices, scorers, (at, end, cluster.size)))
            if found is None:
                continue
            longest = _longest_s(choices, found)
            if best is None or longest < best[0]:
                best = (longest, found)
    return None if best is None else best[1]


def _three(
    choices: Choices, scorers: Sequence[str], edges: tuple[int, int, int]
) -> dict[str, Mesh]:
    at, end, size = edges
    return (
        {choices.generator: Mesh(0, at)}
        | {role: Mesh(at, end - at) for role in scorers}
        | {role: Mesh(end, size - end) for role in choices.roles if role in choices.trained}
    )


def _longest_s(choices: Choices, roles: Roles) -> float:
    """What the busiest mesh has to do."""
    wants: dict[Mesh, float] = {}
    for role, each in roles.items():
        wants[each.mesh] = wants.get(each.mesh, 0.0) + choices.alone_s(role, each)
    return max(wants.values())
