"""One call's work on its devices: what all of its costs are computed from."""

from dataclasses import dataclass
from functools import cached_property

from streamrl.placement.clusters import Cluster, Device
from streamrl.placement.costs.collectives import Groups, groups_of
from streamrl.placement.costs.constants import Constants
from streamrl.placement.costs.flops import reached, routed_flops, token_flops
from streamrl.placement.costs.param_shards import fullest_stage
from streamrl.placement.model_shapes import BF16, ModelShape
from streamrl.placement.placements import Assignment
from streamrl.placement.workload import Workload

SUMS_PER_LAYER = 2
"""Forward, tensor-parallel ranks sum once behind attention and once behind the MLP."""
EXCHANGES = 2
"""Forward, expert-parallel ranks send tokens to their experts, and back."""


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
    def host_byte_s(self) -> float:
        """To move a byte to or from the host, of the device with the slowest link."""
        groups = self.assignment.mesh.groups(self.cluster)
        slowest = min(group.device.host_bytes_per_s for group in groups)
        return 1 / (slowest * self.constants.host_fraction)

    @cached_property
    def groups(self) -> Groups:
        """Who communicates with whom."""
        assignment = self.assignment
        return groups_of(
            self.cluster, assignment.mesh, assignment.grid, self.constants, assignment.expert
        )

    @property
    def expert(self) -> int:
        """Ranks that share out the experts of a layer."""
        return self.assignment.expert

    def compute_s(self, flops: float, fraction: float) -> float:
        """A token's FLOP, forward, on a whole replica whose devices reach this part.

        Of experts, every replica computes as much as its own tokens need, wherever they are.
        """
        routed = routed_flops(self.shape)
        constants, shape = self.constants, self.shape
        whole = self.device.flops_per_s * self.stages * self.tensor
        plain = reached(fraction, shape.hidden / self.tensor, constants)
        narrow = reached(fraction, self._expert_width, constants)
        return (flops - routed) / (whole * plain) + routed / (whole * narrow)

    @property
    def _expert_width(self) -> float:
        """Of the narrowest matrix that tokens are multiplied with in an expert."""
        width = min(self.shape.hidden, self.shape.intermediate)
        return width if self.expert > 1 else width / self.tensor

    @property
    def forward_token_flops(self) -> float:
        """Of a token of a rollout, forward."""
        return token_flops(self.shape, self.workload.rollout_tokens)

    @property
    def params(self) -> int:
        """Of the fullest device, were nothing shared out among replicas."""
        return fullest_stage(self.shape, self.stages, self.tensor, self.expert)

    @property
    def trained_params(self) -> float:
        """Of those, what is trained: adapters are split as the model is."""
        return self.params * self.shape.trained_part

    @property
    def shared_params(self) -> float:
        """Of the fullest device, where all that hold the same share it out."""
        routed = self.shape.routed_params / self.stages / self.expert if self.expert > 1 else 0.0
        holders = self.tensor * self.replicas / self.expert
        return (self.params - routed) / self.replicas + routed / holders

    @property
    def moe_layers(self) -> float:
        """Layers with experts in a stage."""
        return self.shape.moe_layers / self.stages

    @property
    def sums(self) -> float:
        """How often tensor-parallel ranks sum in a layer, forward: behind attention and behind the
        MLP; not behind experts that are whole on their ranks.
        """
        parted = self.shape.moe_layers / self.shape.layers if self.expert > 1 else 0.0
        return SUMS_PER_LAYER - parted

    @property
    def expert_token_s(self) -> float:
        """To send a token to its experts and back, in all layers of a stage.

        A copy goes to each expert, of which tensor-parallel ranks send a part each.
        """
        copies = self.shape.experts_per_token * self.width_bytes / self.tensor
        return EXCHANGES * self.moe_layers * copies * self.groups.expert.exchange_byte_s

    @property
    def experts_s(self) -> float:
        """To begin to, in all layers of a stage; and what experts take however few tokens come.

        The host sorts tokens; products are of whole blocks of rows, the last half empty.
        """
        exchanges = EXCHANGES * self.groups.expert.exchange_s
        return self.moe_layers * (exchanges + self.constants.expert_layer_s + self._padding_s)

    @property
    def _padding_s(self) -> float:
        constants, shape = self.constants, self.shape
        if not shape.experts:
            return 0.0
        part = reached(constants.forward_flops_fraction, self._expert_width, constants)
        rows = shape.experts * constants.expert_rows / 2
        split = self.expert if self.expert > 1 else self.tensor
        return 2 * rows * shape.expert_params / split / (self.device.flops_per_s * part)

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
