"""Weight transfer cost by formula, for a search that evaluates thousands of placements.

The formulas assume even splits (arXiv:2409.19256, Table 2, extended to separate devices).
`WeightTraffic` computes the exact bytes of the copy plan. With LoRA only adapters travel, and the
follower merges every version.
"""

from dataclasses import replace

from streamrl.placement.costs.param_shards import find_max_stage_params
from streamrl.placement.costs.traffic import SHARDS_PARAMETERS, TransferCost, WeightTraffic
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import ModelShape
from streamrl.placement.placements import CallAssignment


class ApproximateTraffic(WeightTraffic):
    """Estimator of weight transfer costs by formula instead of a copy plan."""

    def _compute_transfer(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment
    ) -> TransferCost:
        itemsize = self._constants.served_bytes
        grid = target.grid
        wanted_bytes = (
            find_max_stage_params(shape, grid.pp_size, grid.tp_size, target.ep_size) * itemsize
        )
        if source.mesh == target.mesh:
            received, network = self._estimate_same_mesh_bytes(shape, source, target, wanted_bytes)
        else:
            received, network = (
                float(wanted_bytes),
                self._cross_mesh_bytes(source.mesh, target.mesh, wanted_bytes),
            )
        is_aliased = source.mesh == target.mesh and self._has_one_dtype
        return TransferCost(
            self._approximate_duration_s(source.mesh, target.mesh, received, network),
            round(received),
            round(received) if is_aliased else wanted_bytes,
        )

    def _estimate_same_mesh_bytes(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment, wanted_bytes: int
    ) -> tuple[float, float]:
        """Return received bytes of a rank and network bytes of a node, on a shared mesh."""
        train, follow = source.grid, target.grid
        is_sharded = source.zero_stage >= SHARDS_PARAMETERS
        model_ranks = train.pp_size * max(train.tp_size, source.ep_size)
        holders = model_ranks * (train.dp_size if is_sharded else 1)
        kept = _count_shared_params(shape, source, target) * self._constants.served_bytes
        kept /= max(train.pp_size, follow.pp_size) * (train.dp_size if is_sharded else 1)
        received = max(0.0, wanted_bytes - kept)
        per_node = source.mesh.count_devices_per_node(self._cluster)
        # Fraction of the model that the ranks of one node hold together.
        node_fraction = min(1.0, per_node / holders)
        return received, per_node * min(received, wanted_bytes * (1 - node_fraction))

    def _cross_mesh_bytes(self, source: Mesh, target: Mesh, wanted_bytes: int) -> float:
        """Return network bytes of the busiest node when weights move to another mesh."""
        nodes = [self._cluster.find_node(device) for device in (source.first, target.first)]
        counts = (source.count_nodes(self._cluster), target.count_nodes(self._cluster))
        if nodes[0] == nodes[1] and counts == (1, 1):
            return 0.0
        sent = target.size * wanted_bytes / counts[0]
        return max(target.count_devices_per_node(self._cluster) * wanted_bytes, sent)

    def _approximate_duration_s(
        self, source: Mesh, target: Mesh, received: float, network: float
    ) -> float:
        """Return the time for `received` bytes of a rank, `network` bytes of the busiest node."""
        devices = (source.first, target.first)
        link_s = max(self._link_byte_s[device] for device in devices)
        network_s = max(self._network_byte_s[self._cluster.find_node(device)] for device in devices)
        link_bytes = received if not network else 0.0
        if source != target and not network:
            link_bytes = max(link_bytes, received * target.size / source.size)
        return max(link_bytes * link_s, network * network_s)


class LoraTraffic(ApproximateTraffic):
    """Estimator of weight transfer costs for models with LoRA adapters.

    Every device of the follower reads the whole base model through its host, adds the adapters, and
    keeps its own copy of the merged weights.
    """

    def _compute_transfer(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment
    ) -> TransferCost:
        full_shape, trained_fraction = replace(shape, adapter_params=0), shape.trained_fraction
        transfer = super()._compute_transfer(full_shape, source, target)
        groups = target.mesh.find_node_groups(self._cluster)
        host = min(group.device.host_bytes_per_s for group in groups)
        itemsize, grid = self._constants.served_bytes, target.grid
        reading_s = shape.num_params * itemsize / (host * self._constants.host_fraction)
        return TransferCost(
            transfer.seconds * trained_fraction + reading_s,
            round(transfer.received_bytes * trained_fraction),
            find_max_stage_params(full_shape, grid.pp_size, grid.tp_size, target.ep_size)
            * itemsize,
        )


def _count_shared_params(
    shape: ModelShape, source: CallAssignment, target: CallAssignment
) -> float:
    """Return the most parameters that a rank both trains and serves, before the pipeline split.

    With expert parallelism on one side only, ranks still share a part of the experts' slices.
    """
    split = max(source.grid.tp_size, target.grid.tp_size)
    ep_sizes = (source.ep_size, target.ep_size)
    if max(ep_sizes) == 1:
        return shape.num_params / split
    tp_sizes = [
        assignment.grid.tp_size for assignment in (source, target) if assignment.ep_size == 1
    ]
    routed = shape.routed_params / (max(ep_sizes) * max(tp_sizes, default=1))
    return (shape.num_params - shape.routed_params) / split + routed
