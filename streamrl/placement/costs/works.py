"""One call's work on its devices: what all of its costs are computed from."""

from dataclasses import dataclass
from functools import cached_property

from streamrl.placement.clusters import Cluster, Device
from streamrl.placement.costs.constants import Constants
from streamrl.placement.costs.flops import reached, token_flops
from streamrl.placement.costs.links import Groups, groups_of
from streamrl.placement.placements import Assignment
from streamrl.placement.shapes import BF16, ModelShape
from streamrl.placement.workload import Workload


@dataclass(frozen=True)
class Work:
    """A model of this shape on these devices, at a step's work."""

    shape: ModelShape
    assignment: Assignment
    workload: Workload
    cluster: Cluster
    constants: Constants

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self.assignment.grid.stages

    @property
    def tensor(self) -> int:
        """Tensor-parallel ranks."""
        return self.assignment.grid.tensor

    @property
    def replicas(self) -> int:
        """Replicas of the model."""
        return self.assignment.grid.replicas

    @cached_property
    def device(self) -> Device:
        """The slowest of its devices."""
        return self.assignment.mesh.slowest(self.cluster)

    @cached_property
    def memory_bytes_per_s(self) -> float:
        """Of the device with least."""
        groups = self.assignment.mesh.groups(self.cluster)
        return min(group.device.memory_bytes_per_s for group in groups)

    @cached_property
    def groups(self) -> Groups:
        """Who communicates with whom."""
        assignment = self.assignment
        return groups_of(self.cluster, assignment.mesh, assignment.grid, self.constants)

    def flops_per_s(self, fraction: float) -> float:
        """What a whole replica computes, where each device reaches this part, see `Constants`."""
        part = reached(fraction, self.shape, self.tensor, self.constants)
        return self.device.flops_per_s * part * self.stages * self.tensor

    @property
    def forward_token_flops(self) -> float:
        """Of a token of a rollout, forward."""
        return token_flops(self.shape, self.workload.rollout_tokens)

    @property
    def width_bytes(self) -> int:
        """Of a token's activations between layers."""
        return self.shape.hidden * BF16

    @property
    def sum_token_s(self) -> float:
        """To sum a token's activations over tensor-parallel ranks once in each layer of a stage."""
        layers = self.shape.layers / self.stages
        return layers * self.width_bytes * self.groups.tensor.all_reduce_byte_s

    @property
    def sum_s(self) -> float:
        """To begin to, once in each layer of a stage."""
        return self.shape.layers / self.stages * self.groups.tensor.all_reduce_s

    @property
    def pass_token_s(self) -> float:
        """To pass a token's activations on to the next stage."""
        return self.width_bytes * self.groups.pipeline.send_byte_s

    def filling(self, fewest: int, rollouts: float) -> int:
        """Micro-batches that so many rollouts are divided into: at least the fewest."""
        if self.stages == 1:
            return fewest
        wanted = min(self.stages * self.constants.stage_micro_batches, int(rollouts))
        return max(fewest, wanted)

    def with_bubble(self, micro_batches: float) -> float:
        """How much longer a pipeline takes for so many in a row than they alone would take it."""
        return 1 + (self.stages - 1) / max(1.0, micro_batches)
