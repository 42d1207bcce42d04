"""Cost factors of a call, a stage's model on its devices; timings of all stages use them."""

from dataclasses import dataclass
from functools import cached_property

from streamrl.placement.clusters import Cluster, DeviceSpec
from streamrl.placement.costs.collectives import ParallelGroups, build_parallel_groups
from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.costs.flops import (
    compute_achieved_fraction,
    count_token_flops,
    routed_flops,
)
from streamrl.placement.costs.param_shards import find_max_stage_params
from streamrl.placement.model_shapes import BF16_BYTES, ModelShape
from streamrl.placement.placements import CallAssignment
from streamrl.placement.workload import Workload

ALL_REDUCES_PER_LAYER = 2
"""Tensor-parallel all-reduces of a layer's forward pass: after attention and after the MLP."""
EXPERT_ALL_TO_ALLS = 2
"""Expert-parallel all-to-alls of a layer's forward pass: dispatch and combine."""


@dataclass(frozen=True)
class CallCost:
    """Cost factors of a model on the devices of its assignment, for the workload of a step."""

    shape: ModelShape
    assignment: CallAssignment
    workload: Workload
    cluster: Cluster
    constants: CostConstants

    @property
    def pp_size(self) -> int:
        return self.assignment.grid.pp_size

    @property
    def tp_size(self) -> int:
        return self.assignment.grid.tp_size

    @property
    def dp_size(self) -> int:
        return self.assignment.grid.dp_size

    @cached_property
    def slowest_device(self) -> DeviceSpec:
        return self.assignment.mesh.find_slowest_device(self.cluster)

    @cached_property
    def memory_bytes_per_s(self) -> float:
        groups = self.assignment.mesh.find_node_groups(self.cluster)
        return min(group.device.memory_bytes_per_s for group in groups)

    @cached_property
    def host_byte_s(self) -> float:
        """Seconds per byte between a device and its host, over the slowest such link."""
        groups = self.assignment.mesh.find_node_groups(self.cluster)
        slowest = min(group.device.host_bytes_per_s for group in groups)
        return 1 / (slowest * self.constants.host_fraction)

    @cached_property
    def parallel_groups(self) -> ParallelGroups:
        assignment = self.assignment
        return build_parallel_groups(
            self.cluster, assignment.mesh, assignment.grid, self.constants, assignment.ep_size
        )

    @property
    def ep_size(self) -> int:
        return self.assignment.ep_size

    def compute_s(self, flops: float, fraction: float) -> float:
        """Return the seconds that a replica computes for `flops`, the forward FLOPs of a token.

        fraction: achieved fraction of peak FLOP/s for wide matrices.
        Expert parallelism does not change the FLOPs of a replica: as many as its own tokens need.
        """
        routed = routed_flops(self.shape)
        constants, shape = self.constants, self.shape
        peak_flops_per_s = self.slowest_device.flops_per_s * self.pp_size * self.tp_size
        dense_fraction = compute_achieved_fraction(fraction, shape.hidden / self.tp_size, constants)
        expert_fraction = compute_achieved_fraction(fraction, self._expert_width, constants)
        return (flops - routed) / (peak_flops_per_s * dense_fraction) + routed / (
            peak_flops_per_s * expert_fraction
        )

    @property
    def _expert_width(self) -> float:
        """Smallest dimension of an expert's matrices on a rank; narrow matrices compute slower."""
        width = min(self.shape.hidden, self.shape.intermediate)
        return width if self.ep_size > 1 else width / self.tp_size

    @property
    def forward_token_flops(self) -> float:
        return count_token_flops(self.shape, self.workload.rollout_tokens)

    @property
    def device_params(self) -> int:
        """Parameters on the fullest device, before any ZeRO sharding."""
        return find_max_stage_params(self.shape, self.pp_size, self.tp_size, self.ep_size)

    @property
    def trained_params(self) -> float:
        """Trained part of `device_params`: everything, or with LoRA the adapters.

        Adapters are split over ranks like the model.
        """
        return self.device_params * self.shape.trained_fraction

    @property
    def sharded_params(self) -> float:
        """Parameters on the fullest device if ZeRO shards each over all ranks with a copy."""
        routed = self.shape.routed_params / self.pp_size / self.ep_size if self.ep_size > 1 else 0.0
        holders = self.tp_size * self.dp_size / self.ep_size
        return (self.device_params - routed) / self.dp_size + routed / holders

    @property
    def moe_layers(self) -> float:
        return self.shape.moe_layers / self.pp_size

    @property
    def all_reduces_per_layer(self) -> float:
        """Mean tensor-parallel all-reduces per layer of a forward pass.

        With expert parallelism a rank holds whole experts, so expert layers need no all-reduce
        after the MLP.
        """
        expert_layers = self.shape.moe_layers / self.shape.layers if self.ep_size > 1 else 0.0
        return ALL_REDUCES_PER_LAYER - expert_layers

    @property
    def expert_token_s(self) -> float:
        """Seconds of expert-parallel all-to-alls per token, over all layers of a pipeline stage.

        A copy of the token goes to each of its experts; each tensor-parallel rank sends a part of
        the copy.
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
        """Fixed seconds per micro-batch in the expert layers of a pipeline stage.

        They are the latency of all-to-alls, the host's sorting of tokens, and padding: grouped
        GEMMs compute whole blocks of rows, and the last block of an expert is half empty on
        average.
        """
        exchanges = EXPERT_ALL_TO_ALLS * self.parallel_groups.expert.send_latency_s
        return self.moe_layers * (
            exchanges + self.constants.expert_layer_s + self._expert_padding_s
        )

    @property
    def _expert_padding_s(self) -> float:
        constants, shape = self.constants, self.shape
        if not shape.experts:
            return 0.0
        fraction = compute_achieved_fraction(
            constants.forward_flops_fraction, self._expert_width, constants
        )
        rows = shape.experts * constants.expert_rows / 2
        split = self.ep_size if self.ep_size > 1 else self.tp_size
        return 2 * rows * shape.expert_params / split / (self.slowest_device.flops_per_s * fraction)

    @property
    def hidden_bytes(self) -> int:
        return self.shape.hidden * BF16_BYTES

    @property
    def all_reduce_token_s(self) -> float:
        """Seconds per token of an all-reduce in every layer of a pipeline stage."""
        layers = self.shape.layers / self.pp_size
        return layers * self.hidden_bytes * self.parallel_groups.tensor.all_reduce_byte_s

    @property
    def all_reduce_latency_s(self) -> float:
        """Latency of an all-reduce in every layer of a pipeline stage, summed over the layers."""
        return self.shape.layers / self.pp_size * self.parallel_groups.tensor.all_reduce_latency_s

    @property
    def send_token_s(self) -> float:
        """Seconds per token to send activations to the next pipeline stage."""
        return self.hidden_bytes * self.parallel_groups.pipeline.send_byte_s

    @property
    def communication_token_s(self) -> float:
        """Seconds per token that ranks communicate in a forward pass of a pipeline stage."""
        all_reduces_s = self.all_reduces_per_layer * self.all_reduce_token_s
        return all_reduces_s + self.expert_token_s + self.send_token_s

    def count_micro_batches(self, fewest: int, rollouts: float) -> int:
        """Return the micro-batches into which a replica splits `rollouts` rollouts.

        They are at least `fewest`; a pipeline splits into more, which shortens its bubbles.
        """
        if self.pp_size == 1:
            return fewest
        target = min(self.pp_size * self.constants.stage_micro_batches, int(rollouts))
        return max(fewest, target)

    def compute_bubble_factor(self, micro_batches: float) -> float:
        """Return the slowdown, at least 1, by pipeline bubbles in a sequence of micro-batches."""
        # A pipeline of p stages takes m + p - 1 slots for m micro-batches.
        return 1 + (self.pp_size - 1) / max(1.0, micro_batches)
