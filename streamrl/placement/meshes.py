"""Meshes that a call may run on: consecutive devices of one node or of several.

The search tries whole nodes and parts of a node, which may be uneven, as 5 and 3 of 8 devices.
ReaL's device meshes (arXiv:2406.14088), whose parts divide the node and start at a multiple of
their size, are the even ones.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster, DeviceSpec, NodeGroup


@dataclass(frozen=True, order=True)
class Mesh:
    """Consecutive devices of a cluster: `first` to `first + size - 1`, written as "0-7" or "3"."""

    first: int
    size: int

    @property
    def devices(self) -> range:
        return range(self.first, self.first + self.size)

    def overlaps(self, other: "Mesh") -> bool:
        return self.first < other.first + other.size and other.first < self.first + self.size

    def check_on_cluster(self, cluster: Cluster, location: str) -> None:
        """Raise ConfigError, naming `location`, unless the cluster has the devices."""
        if self.first + self.size > cluster.num_devices:
            raise ConfigError(
                f"{location}: needs devices {self}; the cluster has {cluster.num_devices}: lower"
                " the ranks and replicas, or share devices by placement.mode"
            )

    def find_divided_ranks(self, tp_size: int, cluster: Cluster) -> Sequence[int]:
        """Return the first `tp_size` tensor-parallel ranks' devices that two nodes share, or ()."""
        for edge in list_node_edges(cluster):
            first = edge - (edge - self.first) % tp_size
            if self.first <= first < edge < self.first + self.size:
                return range(first, first + tp_size)
        return ()

    def count_nodes(self, cluster: Cluster) -> int:
        return cluster.find_node(self.first + self.size - 1) - cluster.find_node(self.first) + 1

    def find_node_groups(self, cluster: Cluster) -> list[NodeGroup]:
        bounds = (self.first, self.first + self.size)
        return [
            group
            for group, start in zip(cluster.node_groups, cluster.group_starts, strict=True)
            if start < bounds[1] and bounds[0] < start + group.num_devices
        ]

    def count_devices_per_node(self, cluster: Cluster) -> int:
        """Return how many devices the mesh uses of a node; of unlike nodes, the fewest.

        A mesh of several nodes, parts of the first and the last, has its largest part.
        """
        sizes = [group.devices_per_node for group in self.find_node_groups(cluster)]
        start = max(start for start in cluster.group_starts if start <= self.first)
        of_first = sizes[0] - (self.first - start) % sizes[0]
        return min(self.size, *sizes, max(of_first, self.size - of_first))

    def find_slowest_device(self, cluster: Cluster) -> DeviceSpec:
        """Return the mesh's device with the fewest FLOP/s; ranks in lockstep run at its speed."""
        return min(
            (group.device for group in self.find_node_groups(cluster)),
            key=lambda kind: kind.flops_per_s,
        )

    def __str__(self) -> str:
        last = self.first + self.size - 1
        return f"{self.first}-{last}" if last > self.first else f"{self.first}"


def find_max_load(loads: Collection[tuple[Mesh, float]]) -> float:
    """Return the load of the busiest device, the sum over all meshes that contain the device.

    loads: pairs of a mesh and the load of each of its devices. Between the first devices of two
      meshes, all devices have the same load as the earlier of the two or less, so only first
      devices are checked.
    """
    return max(
        sum(load for mesh, load in loads if mesh.first <= first < mesh.first + mesh.size)
        for first in {mesh.first for mesh, _ in loads}
    )


MAX_UNEVEN_DEVICES = 16
"""Largest node of which every part is tried; of larger ones, parts at some edges only."""


def iter_meshes(cluster: Cluster, *, has_uneven: bool = False) -> Iterator[Mesh]:
    """Yield the even meshes of devices of one type that a cluster allows, small ones first.

    has_uneven: yield all parts of a single node, uneven ones last.
    """
    for group, start in zip(cluster.node_groups, cluster.group_starts, strict=True):
        for size in range(1, group.devices_per_node):
            if group.devices_per_node % size == 0:
                yield from (Mesh(start + at, size) for at in range(0, group.num_devices, size))
    edges = itertools.combinations(list_node_edges(cluster), 2)
    runs = [Mesh(first, last - first) for first, last in edges]
    for mesh in sorted(runs, key=lambda mesh: (mesh.size, mesh.first)):
        if len({group.device.name for group in mesh.find_node_groups(cluster)}) == 1:
            yield mesh
    if has_uneven and cluster.num_nodes == 1:
        size = cluster.num_devices
        for first, last in itertools.combinations(list_part_edges(cluster), 2):
            if size % (last - first) or first % (last - first):
                yield Mesh(first, last - first)


def list_part_edges(cluster: Cluster) -> list[int]:
    """Return the devices of a single node at which parts may begin, and the number of devices."""
    size = cluster.num_devices
    edges = {*range(0, size, -(-size // MAX_UNEVEN_DEVICES)), size}
    for part in range(1, size):
        if size % part == 0:
            edges |= {part, size - part}
    return sorted(edges)


def list_node_edges(cluster: Cluster) -> list[int]:
    """Return the number of the first device of every node, and the number of devices."""
    edges = [0]
    for group in cluster.node_groups:
        edges += [edges[-1] + group.devices_per_node * (i + 1) for i in range(group.num_nodes)]
    return edges
