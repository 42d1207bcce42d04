"""Weight transfer cost with LoRA: only adapters travel, and the follower merges every version."""

from dataclasses import replace

from streamrl.placement.costs.approximate_traffic import ApproximateTraffic
from streamrl.placement.costs.param_shards import find_max_stage_params
from streamrl.placement.costs.traffic import TransferCost
from streamrl.placement.model_shapes import ModelShape
from streamrl.placement.placements import CallAssignment


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
            round(transfer.network_bytes * trained_fraction),
            find_max_stage_params(full_shape, grid.pp_size, grid.tp_size, target.ep_size)
            * itemsize,
        )
