"""Time of collectives: ring algorithms over the links of a node and the network between nodes."""

from dataclasses import dataclass

from streamrl.placement.clusters import Cluster
from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.meshes import Mesh
from streamrl.resharding.grids import RankGrid


@dataclass(frozen=True)
class CollectiveGroup:
    """Ranks that communicate in a collective, `ranks_per_node` of them on each node.

    link_bytes_per_s: bandwidth of a device within its node.
    network_bytes_per_s: a device's share of the node's network when all devices of the node
      communicate.
    """

    ranks: int
    ranks_per_node: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    constants: CostConstants

    @property
    def num_nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    @property
    def all_reduce_byte_s(self) -> float:
        """Seconds per byte of an all-reduce's buffer: a reduce-scatter, then an all-gather."""
        return 2 * self.all_gather_byte_s

    @property
    def all_gather_byte_s(self) -> float:
        """Seconds per byte of an all-gather's result; a reduce-scatter takes equally long.

        With n ranks per node, (n - 1) / n of the buffer passes each link of the node, and each of
        the n ranks sends its own 1 / n between nodes.
        """
        within = (self.ranks_per_node - 1) / self.ranks_per_node / self.link_bytes_per_s
        between = (
            (self.num_nodes - 1) / self.num_nodes / self.ranks_per_node / self.network_bytes_per_s
        )
        return within + between

    @property
    def all_gather_latency_s(self) -> float:
        """Seconds of an all-gather or reduce-scatter besides the bytes."""
        if self.ranks == 1:
            return 0.0
        hops = (self.ranks_per_node - 1) * self.constants.link_hop_s
        hops += (self.num_nodes - 1) * self.constants.network_hop_s
        return self.constants.collective_s + hops

    @property
    def all_reduce_latency_s(self) -> float:
        return max(0.0, 2 * self.all_gather_latency_s - self.constants.collective_s)

    @property
    def all_to_all_byte_s(self) -> float:
        """Seconds per byte of a rank's send buffer in an all-to-all, its own part included.

        Traffic within a node and between nodes overlaps.
        """
        within = (self.ranks_per_node - 1) / self.ranks / self.link_bytes_per_s
        between = (self.ranks - self.ranks_per_node) / self.ranks / self.network_bytes_per_s
        return max(within, between)

    @property
    def send_byte_s(self) -> float:
        """Seconds per byte of a send to the next rank of the group; 0 for a single rank."""
        if self.ranks == 1:
            return 0.0
        is_near = self.ranks_per_node == self.ranks
        return 1 / (self.link_bytes_per_s if is_near else self.network_bytes_per_s)

    @property
    def send_latency_s(self) -> float:
        """Latency of a send, and of an all-to-all, in which all ranks send at once."""
        if self.ranks == 1:
            return 0.0
        constants = self.constants
        is_near = self.ranks_per_node == self.ranks
        return constants.collective_s + (
            constants.link_hop_s if is_near else constants.network_hop_s
        )


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups of a model on a mesh: a typical group for each dimension of parallelism.

    All groups of a dimension have equal sizes and bandwidths.
    """

    tensor: CollectiveGroup
    pipeline: CollectiveGroup
    data: CollectiveGroup
    expert: CollectiveGroup


def build_parallel_groups(
    cluster: Cluster, mesh: Mesh, grid: RankGrid, constants: CostConstants, expert: int = 1
) -> ParallelGroups:
    """Return the process groups of a model on a mesh, with the number of ranks that share a node.

    If neighbors in a group are s ranks apart in the grid's order, n / s of them share a node of n
    devices.
    expert: number of expert-parallel ranks.
    """
    per_node = mesh.count_devices_per_node(cluster)
    kinds = mesh.find_node_groups(cluster)
    link = min(kind.device.link_bytes_per_s for kind in kinds) * constants.link_fraction
    network = (
        min(kind.node_bytes_per_s / kind.devices_per_node for kind in kinds)
        * constants.network_fraction
    )
    pipeline_stride = grid.tp_size * (1 if grid.order == "hf" else grid.dp_size)
    data_stride = grid.tp_size * (grid.pp_size if grid.order == "hf" else 1)

    def group(ranks: int, stride: int) -> CollectiveGroup:
        ranks_per_node = max(1, min(ranks, per_node // stride))
        return CollectiveGroup(ranks, ranks_per_node, link, network, constants)

    tensor, data = group(grid.tp_size, 1), group(grid.dp_size, data_stride)
    # Expert groups take tensor-parallel ranks first, then the ranks of neighboring replicas.
    ranks_per_node = min(expert, max(1, tensor.ranks_per_node * data.ranks_per_node))
    return ParallelGroups(
        tensor,
        group(grid.pp_size, pipeline_stride),
        data,
        CollectiveGroup(expert, ranks_per_node, link, network, constants),
    )
