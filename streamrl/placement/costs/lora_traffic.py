"""What adapters cost on their way: these travel, and who follows merges them, at every version."""

from dataclasses import replace

from streamrl.placement.costs.approximate_traffic import ApproximateTraffic
from streamrl.placement.costs.param_shards import max_stage_params
from streamrl.placement.costs.traffic import TransferCost
from streamrl.placement.model_shapes import ModelShape
from streamrl.placement.placements import CallAssignment


class LoraTraffic(ApproximateTraffic):
    """Traffic of shapes of which adapters are trained.

    Every device has the weights of the model directory through its host, all of them, adds what
    the adapters say, and holds a copy of its own of what comes of it.
    """

    def _compute_transfer(
        self, shape: ModelShape, source: CallAssignment, target: CallAssignment
    ) -> TransferCost:
        whole, part = replace(shape, adapter_params=0), shape.trained_fraction
        moved = super()._compute_transfer(whole, source, target)
        groups = target.mesh.find_node_groups(self._cluster)
        host = min(group.device.host_bytes_per_s for group in groups)
        itemsize, grid = self._constants.served_bytes, target.grid
        reading_s = shape.num_params * itemsize / (host * self._constants.host_fraction)
        return TransferCost(
            moved.seconds * part + reading_s,
            round(moved.received_bytes * part),
            round(moved.network_bytes * part),
            max_stage_params(whole, grid.pp_size, grid.tp_size, target.ep_size) * itemsize,
        )
