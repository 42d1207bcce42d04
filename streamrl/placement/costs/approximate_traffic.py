"""What weights cost on their way, by formula: for a search, which asks for thousands of ways.

The formulas are those of even splits (arXiv:2409.19256, Table 2, and what follows from it for other
devices); the actual plan's bytes are `Traffic`'s.
"""

from streamrl.placement.costs.param_shards import fullest_stage
from streamrl.placement.costs.traffic import SHARDS_PARAMETERS, Moved, Traffic
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import ModelShape
from streamrl.placement.placements import Assignment


class RoughTraffic(Traffic):
    """Traffic without plans."""

    def _move(self, shape: ModelShape, source: Assignment, target: Assignment) -> Moved:
        itemsize = self._constants.served_bytes
        grid = target.grid
        wanted = fullest_stage(shape, grid.stages, grid.tensor, target.expert) * itemsize
        if source.mesh == target.mesh:
            received, network = self._within(shape, source, target, wanted)
        else:
            received, network = float(wanted), self._between(source.mesh, target.mesh, wanted)
        shares = source.mesh == target.mesh and self._one_type
        return Moved(
            self._rough_s(source.mesh, target.mesh, received, network),
            round(received),
            round(network),
            round(received) if shares else wanted,
        )

    def _within(
        self, shape: ModelShape, source: Assignment, target: Assignment, wanted: int
    ) -> tuple[float, float]:
        """What a rank lacks of what it serves, and what a node has to be sent for its ranks."""
        train, follow = source.grid, target.grid
        shards = source.zero_stage >= SHARDS_PARAMETERS
        ranks = train.stages * max(train.tensor, source.expert)
        holders = ranks * (train.replicas if shards else 1)
        own = _in_both(shape, source, target) * self._constants.served_bytes
        own /= max(train.stages, follow.stages) * (train.replicas if shards else 1)
        received = max(0.0, wanted - own)
        per_node = source.mesh.per_node(self._cluster)
        # The part of a model that the ranks of a node hold between them.
        here = min(1.0, per_node / holders)
        return received, per_node * min(received, wanted * (1 - here))

    def _between(self, source: Mesh, target: Mesh, wanted: int) -> float:
        """What passes the network of the node with most to receive or to send."""
        nodes = [self._cluster.node_of(device) for device in (source.first, target.first)]
        counts = (source.num_nodes(self._cluster), target.num_nodes(self._cluster))
        if nodes[0] == nodes[1] and counts == (1, 1):
            return 0.0
        sent = target.size * wanted / counts[0]
        return max(target.per_node(self._cluster) * wanted, sent)

    def _rough_s(self, source: Mesh, target: Mesh, received: float, network: float) -> float:
        devices = (source.first, target.first)
        link_s = max(self._link_s[device] for device in devices)
        network_s = max(self._network_s[self._cluster.node_of(device)] for device in devices)
        near = received if not network else 0.0
        if source != target and not network:
            near = max(near, received * target.size / source.size)
        return max(near * link_s, network * network_s)


def _in_both(shape: ModelShape, source: Assignment, target: Assignment) -> float:
    """Parameters of a stage that a rank trains and serves, at most.

    Ranks that have experts whole, and ranks that have parts of all, have parts of some in common.
    """
    split = max(source.grid.tensor, target.grid.tensor)
    wholes = (source.expert, target.expert)
    if max(wholes) == 1:
        return shape.params / split
    parts = [each.grid.tensor for each in (source, target) if each.expert == 1]
    routed = shape.routed_params / (max(wholes) * max(parts, default=1))
    return (shape.params - shape.routed_params) / split + routed
