"""One call's work on its devices: what all of its costs are computed from."""

from dataclasses import dataclass
from functools import cached_property

from streamrl.placement.clusters import Cluster, DeviceSpec
from streamrl.placement.costs.collectives import ParallelGroups, build_parallel_groups
from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.costs.flops import achieved_fraction, routed_flops, token_flops
from streamrl.placement.costs.param_shards import max_stage_params
from streamrl.placement.model_shapes import BF16_BYTES, ModelShape
from streamrl.placement.placements import CallAssignment
from streamrl.placement.workload import Workload

ALL_REDUCES_PER_LAYER = 2
"""Forward, tensor-parallel ranks sum once behind attention and once behind the MLP."""
EXPERT_ALL_TO_ALLS = 2
"""Forward, expert-parallel ranks send tokens to their experts, and back."""


@dataclass(frozen=True)
class CallCost:
    """A model of this shape on these devices, at a step's work."""

    shape: ModelShape
    assignment: CallAssignment
    workload: Workload
    cluster: Cluster
    constants: CostConstants

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return self.assignment.grid.pp_size

    @property
    def tp_size(self) -> int:
        """Tensor-parallel ranks."""
        return self.assignment.grid.tp_size

    @property
    def dp_size(self) -> int:
        """Replicas of the model."""
        return self.assignment.grid.dp_size

    @cached_property
    def slowest_device(self) -> DeviceSpec:
        """The slowest of its devices."""
        return self.assignment.mesh.find_slowest_device(self.cluster)

    @cached_property
    def memory_bytes_per_s(self) -> float:
        """Of the device with least."""
        groups = self.assignment.mesh.find_node_groups(self.cluster)
        return min(group.device.memory_bytes_per_s for group in groups)

    @cached_property
    def host_byte_s(self) -> float:
        """To move a byte to or from the host, of the device with the slowest link."""
        groups = self.assignment.mesh.find_node_groups(self.cluster)
        slowest = min(group.device.host_bytes_per_s for group in groups)
        return 1 / (slowest * self.constants.host_fraction)

    @cached_property
    def parallel_groups(self) -> ParallelGroups:
        """Who communicates with whom."""
        assignment = self.assignment
        return build_parallel_groups(
            self.cluster, assignment.mesh, assignment.grid, self.constants, assignment.ep_size
        )

    @property
    def ep_size(self) -> int:
        """Ranks that share out the experts of a layer."""
        return self.assignment.ep_size

    def compute_s(self, flops: float, fraction: float) -> float:
        """A token's FLOP, forward, on a whole replica whose devices reach this part.

        Of experts, every replica computes as much as its own tokens need, wherever they are.
        """
        routed = routed_flops(self.shape)
        constants, shape = self.constants, self.shape
        whole = self.slowest_device.flops_per_s * self.pp_size * self.tp_size
        plain = achieved_fraction(fraction, shape.hidden / self.tp_size, constants)
        narrow = achieved_fraction(fraction, self._expert_width, constants)
        return (flops - routed) / (whole * plain) + routed / (whole * narrow)

    @property
    def _expert_width(self) -> float:
        """Of the narrowest matrix that tokens are multiplied with in an expert."""
        width = min(self.shape.hidden, self.shape.intermediate)
        return width if self.ep_size > 1 else width / self.tp_size

    @property
    def forward_token_flops(self) -> float:
        """Of a token of a rollout, forward."""
        return token_flops(self.shape, self.workload.rollout_tokens)

    @property
    def device_params(self) -> int:
        """Of the fullest device, were nothing shared out among replicas."""
        return max_stage_params(self.shape, self.pp_size, self.tp_size, self.ep_size)

    @property
    def trained_params(self) -> float:
        """Of those, what is trained: adapters are split as the model is."""
        return self.device_params * self.shape.trained_fraction

    @property
    def sharded_params(self) -> float:
        """Of the fullest device, where all that hold the same share it out."""
        routed = self.shape.routed_params / self.pp_size / self.ep_size if self.ep_size > 1 else 0.0
        holders = self.tp_size * self.dp_size / self.ep_size
        return (self.device_params - routed) / self.dp_size + routed / holders

    @property
    def moe_layers(self) -> float:
        """Layers with experts in a stage."""
        return self.shape.moe_layers / self.pp_size

    @property
    def all_reduces_per_layer(self) -> float:
        """How often tensor-parallel ranks sum in a layer, forward: behind attention and behind the
        MLP; not behind experts that are whole on their ranks.
        """
        parted = self.shape.moe_layers / self.shape.layers if self.ep_size > 1 else 0.0
        return ALL_REDUCES_PER_LAYER - parted

    @property
    def expert_token_s(self) -> float:
        """To send a token to its experts and back, in all layers of a stage.

        A copy goes to each expert, of which tensor-parallel ranks send a part each.
        """
        copies = self.shape.experts_per_token * self.hidden_bytes / self.tp_size
        return (
            EXPERT_ALL_TO_ALLS
            * self.moe_layers
            * copies
            * self.parallel_groups.expert.all_to_all_byte_s
        )

    @property
    def expert_overhead_s(self) -> float:
        """To begin to, in all layers of a stage; and what experts take however few tokens come.

        The host sorts tokens; products are of whole blocks of rows, the last half empty.
        """
        exchanges = EXPERT_ALL_TO_ALLS * self.parallel_groups.expert.all_to_all_latency_s
        return self.moe_layers * (
            exchanges + self.constants.expert_layer_s + self._expert_padding_s
        )

    @property
    def _expert_padding_s(self) -> float:
        constants, shape = self.constants, self.shape
        if not shape.experts:
            return 0.0
        part = achieved_fraction(constants.forward_flops_fraction, self._expert_width, constants)
        rows = shape.experts * constants.expert_rows / 2
        split = self.ep_size if self.ep_size > 1 else self.tp_size
        return 2 * rows * shape.expert_params / split / (self.slowest_device.flops_per_s * part)

    @property
    def hidden_bytes(self) -> int:
        """Of a token's activations between layers."""
        return self.shape.hidden * BF16_BYTES

    @property
    def all_reduce_token_s(self) -> float:
        """To sum a token's activations over tensor-parallel ranks once in each layer of a stage."""
        layers = self.shape.layers / self.pp_size
        return layers * self.hidden_bytes * self.parallel_groups.tensor.all_reduce_byte_s

    @property
    def all_reduce_latency_s(self) -> float:
        """To begin to, once in each layer of a stage."""
        return self.shape.layers / self.pp_size * self.parallel_groups.tensor.all_reduce_latency_s

    @property
    def send_token_s(self) -> float:
        """To pass a token's activations on to the next stage."""
        return self.hidden_bytes * self.parallel_groups.pipeline.send_byte_s

    def count_micro_batches(self, fewest: int, rollouts: float) -> int:
        """Micro-batches that so many rollouts are divided into: at least the fewest."""
        if self.pp_size == 1:
            return fewest
        wanted = min(self.pp_size * self.constants.stage_micro_batches, int(rollouts))
        return max(fewest, wanted)

    def bubble_factor(self, micro_batches: float) -> float:
        """How much longer a pipeline takes for so many in a row than they alone would take it."""
        return 1 + (self.pp_size - 1) / max(1.0, micro_batches)
