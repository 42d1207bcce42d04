"""Parts of a cluster that may be better off alone: what is on them is a placement on all of it.

Where nodes are unlike, whoever has some of both is as slow as the slower, and fits where both fit.
Where there are more devices than rollouts in a step, some have nothing to do.
"""

from collections.abc import Iterator
from dataclasses import replace

from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import Placement
from streamrl.placement.problem import Problem


def parts(problem: Problem) -> Iterator[tuple[int, Problem]]:
    """The same on each part, and the part's first device."""
    cluster, rollouts = problem.cluster, problem.workload.sampled.rollouts
    for first, group in zip(cluster.starts, cluster.groups, strict=True):
        nodes = min(group.count, max(1, rollouts // group.devices))
        if len(cluster.groups) > 1 or nodes < group.count:
            part = Cluster((replace(group, count=nodes),))
            yield first, replace(problem, cluster=part)


def moved(placement: Placement, first: int) -> Placement:
    """A placement on a part of a cluster, as one on all of it."""
    calls = {
        stage: replace(each, mesh=Mesh(each.mesh.first + first, each.mesh.size))
        for stage, each in placement.calls.items()
    }
    return replace(placement, calls=calls)
