"""What adapters cost on their way: these travel, and who follows merges them, at every version."""

from dataclasses import replace

from streamrl.placement.costs.approximate_traffic import RoughTraffic
from streamrl.placement.costs.param_shards import fullest_stage
from streamrl.placement.costs.traffic import Moved
from streamrl.placement.model_shapes import ModelShape
from streamrl.placement.placements import Assignment


class AdapterTraffic(RoughTraffic):
    """Traffic of shapes of which adapters are trained.

    Every device has the weights of the model directory through its host, all of them, adds what
    the adapters say, and holds a copy of its own of what comes of it.
    """

    def _move(self, shape: ModelShape, source: Assignment, target: Assignment) -> Moved:
        whole, part = replace(shape, trained=0), shape.trained_part
        moved = super()._move(whole, source, target)
        groups = target.mesh.groups(self._cluster)
        host = min(group.device.host_bytes_per_s for group in groups)
        itemsize, grid = self._constants.served_bytes, target.grid
        reading_s = shape.params * itemsize / (host * self._constants.host_fraction)
        return Moved(
            moved.seconds * part + reading_s,
            round(moved.received_bytes * part),
            round(moved.network_bytes * part),
            fullest_stage(whole, grid.stages, grid.tensor, target.expert) * itemsize,
        )
