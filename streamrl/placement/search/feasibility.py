"""Feasibility of a problem by memory alone: try a few plain ways to divide roles among devices."""

from collections.abc import Iterator, Sequence

from streamrl.placement.meshes import Mesh
from streamrl.placement.search.hybridflow_parallel import ParallelismChoices
from streamrl.placement.search.partitions import group_roles_by_model, iter_allocations

MAX_NODES_FOR_THREE_SETS = 8
"""On clusters of at most this many nodes, roles are also divided into three sets."""


def can_fit(choices: ParallelismChoices) -> bool:
    """Return whether a plain placement fits into memory; a more elaborate one may fit."""
    cluster = choices.problem.cluster
    all_devices = Mesh(0, cluster.num_devices)
    if choices.fit_on_meshes(dict.fromkeys(choices.roles, all_devices)) is not None:
        return True
    for sets in _iter_divisions(choices):
        if len(sets) > 2 and cluster.num_nodes > MAX_NODES_FOR_THREE_SETS:  # noqa: PLR2004
            continue
        for meshes in iter_allocations(cluster, len(sets)):
            meshes_by_role = {
                role: mesh for roles, mesh in zip(sets, meshes, strict=True) for role in roles
            }
            if choices.fit_on_meshes(meshes_by_role) is not None:
                return True
    return False


def _iter_divisions(choices: ParallelismChoices) -> Iterator[Sequence[Sequence[str]]]:
    """Yield divisions of the roles into sets with devices of their own.

    Two sets: the roles of a model, all trained roles, or the generator; and the rest. Three sets:
    generator, trained roles, and scorers.
    """
    roles, generator, trained = choices.roles, choices.generator_role, choices.trained_roles
    separated = [
        *group_roles_by_model(choices.problem),
        tuple(role for role in roles if role in trained),
    ]
    for subset in dict.fromkeys([*separated, (generator,)]):
        rest = [role for role in roles if role not in subset]
        if rest:
            yield subset, rest
    scored = [role for role in roles if role not in trained and role != generator]
    if scored:
        yield (generator,), [role for role in roles if role in trained], scored
