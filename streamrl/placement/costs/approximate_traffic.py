"""What weights cost on their way, by formula: for a search, which asks for thousands of ways.

The formulas are those of even splits (arXiv:2409.19256, Table 2, and what follows from it for other
devices); the actual plan's bytes are `Traffic`'s.
"""

from streamrl.placement.costs.param_shards import max_stage_params
from streamrl.placement.costs.traffic import SHARDS_PARAMETERS, TransferCost, WeightTraffic
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import ModelShape
from streamrl.placement.placements import CallAssignment


class ApproximateTraffic(WeightTraffic):
    """Traffic without plans."""

    def _compute_transfer(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment
    ) -> TransferCost:
        itemsize = self._constants.served_bytes
        grid = target.grid
        wanted = max_stage_params(shape, grid.pp_size, grid.tp_size, target.ep_size) * itemsize
        if source.mesh == target.mesh:
            received, network = self._same_mesh_bytes(shape, source, target, wanted)
        else:
            received, network = (
                float(wanted),
                self._cross_mesh_bytes(source.mesh, target.mesh, wanted),
            )
        shares = source.mesh == target.mesh and self._has_one_dtype
        return TransferCost(
            self._approximate_duration_s(source.mesh, target.mesh, received, network),
            round(received),
            round(network),
            round(received) if shares else wanted,
        )

    def _same_mesh_bytes(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment, wanted: int
    ) -> tuple[float, float]:
        """What a rank lacks of what it serves, and what a node has to be sent for its ranks."""
        train, follow = source.grid, target.grid
        shards = source.zero_stage >= SHARDS_PARAMETERS
        ranks = train.pp_size * max(train.tp_size, source.ep_size)
        holders = ranks * (train.dp_size if shards else 1)
        own = _shared_params(shape, source, target) * self._constants.served_bytes
        own /= max(train.pp_size, follow.pp_size) * (train.dp_size if shards else 1)
        received = max(0.0, wanted - own)
        per_node = source.mesh.count_devices_per_node(self._cluster)
        # The part of a model that the ranks of a node hold between them.
        here = min(1.0, per_node / holders)
        return received, per_node * min(received, wanted * (1 - here))

    def _cross_mesh_bytes(self, source: Mesh, target: Mesh, wanted: int) -> float:
        """What passes the network of the node with most to receive or to send."""
        nodes = [self._cluster.find_node(device) for device in (source.first, target.first)]
        counts = (source.count_nodes(self._cluster), target.count_nodes(self._cluster))
        if nodes[0] == nodes[1] and counts == (1, 1):
            return 0.0
        sent = target.size * wanted / counts[0]
        return max(target.count_devices_per_node(self._cluster) * wanted, sent)

    def _approximate_duration_s(
        self, source: Mesh, target: Mesh, received: float, network: float
    ) -> float:
        devices = (source.first, target.first)
        link_s = max(self._link_byte_s[device] for device in devices)
        network_s = max(self._network_byte_s[self._cluster.find_node(device)] for device in devices)
        near = received if not network else 0.0
        if source != target and not network:
            near = max(near, received * target.size / source.size)
        return max(near * link_s, network * network_s)


def _shared_params(shape: ModelShape, source: CallAssignment, target: CallAssignment) -> float:
    """Parameters of a stage that a rank trains and serves, at most.

    Ranks that have experts whole, and ranks that have parts of all, have parts of some in common.
    """
    split = max(source.grid.tp_size, target.grid.tp_size)
    wholes = (source.ep_size, target.ep_size)
    if max(wholes) == 1:
        return shape.num_params / split
    parts = [each.grid.tp_size for each in (source, target) if each.ep_size == 1]
    routed = shape.routed_params / (max(wholes) * max(parts, default=1))
    return (shape.num_params - shape.routed_params) / split + routed
