"""How long collectives take: ring algorithms, over a node's links and the network between nodes."""

from dataclasses import dataclass

from streamrl.placement.clusters import Cluster
from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.meshes import Mesh
from streamrl.resharding import RankGrid


@dataclass(frozen=True)
class CollectiveGroup:
    """Ranks that communicate: so many, of which `ranks_per_node` share a node; others do so beside
    them.

    link_bytes_per_s: what a device gets within its node. network_bytes_per_s: what it gets between
    nodes when all devices of its node want some.
    """

    ranks: int
    ranks_per_node: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    constants: CostConstants

    @property
    def num_nodes(self) -> int:
        """How many nodes it is spread over."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def all_reduce_byte_s(self) -> float:
        """Of each byte of a buffer that is summed: reduced in parts, then gathered."""
        return 2 * self.all_gather_byte_s

    @property
    def all_gather_byte_s(self) -> float:
        """Of each byte of what all have in the end; as long for a reduction to parts.

        Within a node it goes around in near - 1 parts of near, and between nodes each rank of a
        node passes on its part.
        """
        within = (self.ranks_per_node - 1) / self.ranks_per_node / self.link_bytes_per_s
        between = (
            (self.num_nodes - 1) / self.num_nodes / self.ranks_per_node / self.network_bytes_per_s
        )
        return within + between

    @property
    def all_gather_latency_s(self) -> float:
        """To gather, or reduce to parts, nothing."""
        if self.ranks == 1:
            return 0.0
        hops = (self.ranks_per_node - 1) * self.constants.link_hop_s
        hops += (self.num_nodes - 1) * self.constants.network_hop_s
        return self.constants.collective_s + hops

    @property
    def all_reduce_latency_s(self) -> float:
        """To sum nothing."""
        return max(0.0, 2 * self.all_gather_latency_s - self.constants.collective_s)

    @property
    def all_to_all_byte_s(self) -> float:
        """Of each byte that a rank has for all of them, as much for one as for another, itself
        included; within a node and between nodes at the same time.
        """
        within = (self.ranks_per_node - 1) / self.ranks / self.link_bytes_per_s
        between = (self.ranks - self.ranks_per_node) / self.ranks / self.network_bytes_per_s
        return max(within, between)

    @property
    def all_to_all_latency_s(self) -> float:
        """To exchange nothing: everyone sends to everyone at once."""
        return self.send_latency_s

    @property
    def send_byte_s(self) -> float:
        """Of each byte from one rank to the next."""
        if self.ranks == 1:
            return 0.0
        is_near = self.ranks_per_node == self.ranks
        return 1 / (self.link_bytes_per_s if is_near else self.network_bytes_per_s)

    @property
    def send_latency_s(self) -> float:
        """To send nothing to the next."""
        if self.ranks == 1:
            return 0.0
        constants = self.constants
        is_near = self.ranks_per_node == self.ranks
        return constants.collective_s + (
            constants.link_hop_s if is_near else constants.network_hop_s
        )


@dataclass(frozen=True)
class ParallelGroups:
    """The kinds of groups of a grid on a mesh; all groups of one kind are alike."""

    tensor: CollectiveGroup
    pipeline: CollectiveGroup
    data: CollectiveGroup
    expert: CollectiveGroup


def build_parallel_groups(
    cluster: Cluster, mesh: Mesh, grid: RankGrid, constants: CostConstants, expert: int = 1
) -> ParallelGroups:
    """Ranks that far apart in the grid's order share a node while they fit."""
    per_node = mesh.count_devices_per_node(cluster)
    kinds = mesh.find_node_groups(cluster)
    link = min(kind.device.link_bytes_per_s for kind in kinds) * constants.link_fraction
    network = (
        min(kind.node_bytes_per_s / kind.devices_per_node for kind in kinds)
        * constants.network_fraction
    )
    apart_pipeline = grid.tp_size * (1 if grid.order == "hf" else grid.dp_size)
    apart_data = grid.tp_size * (grid.pp_size if grid.order == "hf" else 1)

    def group(ranks: int, apart: int) -> CollectiveGroup:
        near = max(1, min(ranks, per_node // apart))
        return CollectiveGroup(ranks, near, link, network, constants)

    tensor, data = group(grid.tp_size, 1), group(grid.dp_size, apart_data)
    # Tensor-parallel ranks first, then those of the replicas next to them.
    near = min(expert, max(1, tensor.ranks_per_node * data.ranks_per_node))
    return ParallelGroups(
        tensor,
        group(grid.pp_size, apart_pipeline),
        data,
        CollectiveGroup(expert, near, link, network, constants),
    )
