"""Placements on a part of the cluster, which may be faster than placements on the whole.

A mesh over unlike nodes runs at the slower speed and has the smaller memory. A cluster with more
devices than rollouts per step leaves devices idle.
"""

from collections.abc import Iterator
from dataclasses import replace

from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Placement
from streamrl.placement.problem import PlacementProblem


def iter_sub_problems(problem: PlacementProblem) -> Iterator[tuple[int, PlacementProblem]]:
    """Yield (first device, problem) for each part of the cluster that may be faster alone.

    A part has nodes of one type, and at most as many devices as a step has rollouts.
    """
    cluster, rollouts = problem.cluster, problem.workload.sampled_workload.num_rollouts
    for first, group in zip(cluster.group_starts, cluster.node_groups, strict=True):
        nodes = min(group.num_nodes, max(1, rollouts // group.devices_per_node))
        if len(cluster.node_groups) > 1 or nodes < group.num_nodes:
            sub_cluster = Cluster((replace(group, num_nodes=nodes),))
            yield first, replace(problem, cluster=sub_cluster)


def shift_devices(placement: Placement, first: int) -> Placement:
    """Add `first` to all device numbers: convert a placement on a part to the whole cluster."""
    calls = {
        stage: replace(assignment, mesh=Mesh(assignment.mesh.first + first, assignment.mesh.size))
        for stage, assignment in placement.assignments.items()
    }
    return replace(placement, assignments=calls)
