"""How long collectives take: ring algorithms, over a node's links and the network between nodes."""

from dataclasses import dataclass

from streamrl.placement.clusters import Cluster
from streamrl.placement.costs.constants import Constants
from streamrl.placement.meshes import Mesh
from streamrl.resharding import Grid


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: so many, of which `near` share a node; others do so beside them.

    link_bytes_per_s: what a device gets within its node. network_bytes_per_s: what it gets between
    nodes when all devices of its node want some.
    """

    ranks: int
    near: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    constants: Constants

    @property
    def nodes(self) -> int:
        """How many nodes it is spread over."""
        return -(-self.ranks // self.near)

    @property
    def all_reduce_byte_s(self) -> float:
        """Of each byte of a buffer that is summed: reduced in parts, then gathered."""
        return 2 * self.gather_byte_s

    @property
    def gather_byte_s(self) -> float:
        """Of each byte of what all have in the end; as long for a reduction to parts.

        Within a node it goes around in near - 1 parts of near, and between nodes each rank of a
        node passes on its part.
        """
        within = (self.near - 1) / self.near / self.link_bytes_per_s
        between = (self.nodes - 1) / self.nodes / self.near / self.network_bytes_per_s
        return within + between

    @property
    def gather_s(self) -> float:
        """To gather, or reduce to parts, nothing."""
        if self.ranks == 1:
            return 0.0
        hops = (self.near - 1) * self.constants.link_hop_s
        hops += (self.nodes - 1) * self.constants.network_hop_s
        return self.constants.collective_s + hops

    @property
    def all_reduce_s(self) -> float:
        """To sum nothing."""
        return max(0.0, 2 * self.gather_s - self.constants.collective_s)

    @property
    def exchange_byte_s(self) -> float:
        """Of each byte that a rank has for all of them, as much for one as for another, itself
        included; within a node and between nodes at the same time.
        """
        within = (self.near - 1) / self.ranks / self.link_bytes_per_s
        between = (self.ranks - self.near) / self.ranks / self.network_bytes_per_s
        return max(within, between)

    @property
    def exchange_s(self) -> float:
        """To exchange nothing: everyone sends to everyone at once."""
        return self.send_s

    @property
    def send_byte_s(self) -> float:
        """Of each byte from one rank to the next."""
        if self.ranks == 1:
            return 0.0
        is_near = self.near == self.ranks
        return 1 / (self.link_bytes_per_s if is_near else self.network_bytes_per_s)

    @property
    def send_s(self) -> float:
        """To send nothing to the next."""
        if self.ranks == 1:
            return 0.0
        constants = self.constants
        is_near = self.near == self.ranks
        return constants.collective_s + (
            constants.link_hop_s if is_near else constants.network_hop_s
        )


@dataclass(frozen=True)
class Groups:
    """The kinds of groups of a grid on a mesh; all groups of one kind are alike."""

    tensor: Group
    pipeline: Group
    data: Group
    expert: Group


def groups_of(
    cluster: Cluster, mesh: Mesh, grid: Grid, constants: Constants, expert: int = 1
) -> Groups:
    """Ranks that far apart in the grid's order share a node while they fit."""
    per_node = mesh.per_node(cluster)
    kinds = mesh.groups(cluster)
    link = min(kind.device.link_bytes_per_s for kind in kinds) * constants.link_fraction
    network = min(kind.network / kind.devices for kind in kinds) * constants.network_fraction
    apart_pipeline = grid.tensor * (1 if grid.order == "hf" else grid.replicas)
    apart_data = grid.tensor * (grid.stages if grid.order == "hf" else 1)

    def group(ranks: int, apart: int) -> Group:
        near = max(1, min(ranks, per_node // apart))
        return Group(ranks, near, link, network, constants)

    tensor, data = group(grid.tensor, 1), group(grid.replicas, apart_data)
    # Tensor-parallel ranks first, then those of the replicas next to them.
    near = min(expert, max(1, tensor.near * data.near))
    return Groups(
        tensor,
        group(grid.stages, apart_pipeline),
        data,
        Group(expert, near, link, network, constants),
    )
