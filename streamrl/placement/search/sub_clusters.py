"""Parts of a cluster that may be better off alone: what is on them is a placement on all of it.

Where nodes are unlike, whoever has some of both is as slow as the slower, and fits where both fit.
Where there are more devices than rollouts in a step, some have nothing to do.
"""

from collections.abc import Iterator
from dataclasses import replace

from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Placement
from streamrl.placement.problem import PlacementProblem


def iter_sub_problems(problem: PlacementProblem) -> Iterator[tuple[int, PlacementProblem]]:
    """The same on each part, and the part's first device."""
    cluster, rollouts = problem.cluster, problem.workload.sampled_workload.num_rollouts
    for first, group in zip(cluster.group_starts, cluster.node_groups, strict=True):
        nodes = min(group.num_nodes, max(1, rollouts // group.devices_per_node))
        if len(cluster.node_groups) > 1 or nodes < group.num_nodes:
            part = Cluster((replace(group, num_nodes=nodes),))
            yield first, replace(problem, cluster=part)


def shift_devices(placement: Placement, first: int) -> Placement:
    """A placement on a part of a cluster, as one on all of it."""
    calls = {
        stage: replace(each, mesh=Mesh(each.mesh.first + first, each.mesh.size))
        for stage, each in placement.assignments.items()
    }
    return replace(placement, assignments=calls)
