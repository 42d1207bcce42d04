"""Whether anything fits: a few plain ways to divide roles among devices, by memory alone."""

from collections.abc import Iterator, Sequence

from streamrl.placement.meshes import Mesh
from streamrl.placement.search.hybridflow_parallel import ParallelismChoices
from streamrl.placement.search.partitions import group_roles_by_model, iter_allocations

MAX_NODES_FOR_THREE_SETS = 8
"""A cluster that has no more is also divided in three."""


def can_fit(choices: ParallelismChoices) -> bool:
    """Whether one of the plain placements fits; another may where none of these does."""
    cluster = choices.problem.cluster
    whole = Mesh(0, cluster.num_devices)
    if choices.fit_on_meshes(dict.fromkeys(choices.roles, whole)) is not None:
        return True
    for sets in _iter_divisions(choices):
        if len(sets) > 2 and cluster.num_nodes > MAX_NODES_FOR_THREE_SETS:  # noqa: PLR2004
            continue
        for meshes in iter_allocations(cluster, len(sets)):
            found = {role: mesh for roles, mesh in zip(sets, meshes, strict=True) for role in roles}
            if choices.fit_on_meshes(found) is not None:
                return True
    return False


def _iter_divisions(choices: ParallelismChoices) -> Iterator[Sequence[Sequence[str]]]:
    """Sets of roles: each model's from the others, what is trained from the rest, and both."""
    roles, generator, trained = choices.roles, choices.generator_role, choices.trained_roles
    alone = [
        *group_roles_by_model(choices.problem),
        tuple(role for role in roles if role in trained),
    ]
    for some in dict.fromkeys([*alone, (generator,)]):
        rest = [role for role in roles if role not in some]
        if rest:
            yield some, rest
    scored = [role for role in roles if role not in trained and role != generator]
    if scored:
        yield (generator,), [role for role in roles if role in trained], scored
