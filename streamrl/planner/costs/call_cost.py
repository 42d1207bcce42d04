"""Cost factors of a call, a stage's model on its devices; timings of all stages use them.

Parameters per device are exact counts, summed over the device's shards of all tensors. A product
with a matrix of n parameters takes 2n FLOPs per token. Attention takes 2 * 2 * length * width FLOPs
per token and layer (queries times keys, weights times values), as ReaL counts them
(arXiv:2406.14088): the causal mask is not subtracted.
"""

from dataclasses import dataclass, replace
from functools import cache, cached_property

from streamrl.engines.models.model_shapes import BF16_BYTES, ModelShape
from streamrl.engines.trainer_config import OFFLOAD, TrainerConfig
from streamrl.placement.clusters import Cluster, DeviceSpec
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment
from streamrl.planner.costs.constants import (
    EXPERT_ROWS,
    HOST_FRACTION,
    STAGE_MICRO_BATCHES,
    CostConstants,
)
from streamrl.planner.problem.problem import RunMemory
from streamrl.planner.problem.workload import Workload
from streamrl.resharding.grids import RankGrid
from streamrl.resharding.tensor_specs import ModelSpec, TensorSpec, split_stages_evenly

SHARDS_PARAMETERS = 3
"""ZeRO stage that shards the weights over replicas."""


@cache
def build_model_spec(shape: ModelShape, itemsize: int) -> ModelSpec:
    return shape.to_model_spec(itemsize)


@cache
def count_stage_params(
    shape: ModelShape, stages: int, tensor: int, expert: int = 1
) -> tuple[int, ...]:
    """Return the parameters of a tensor-parallel rank in each pipeline stage.

    stages, tensor, expert: number of pipeline stages, of tensor-parallel and of expert-parallel
      ranks.
    Every rank holds unsplit tensors, such as routers, and repeated KV heads if there are fewer
    heads than ranks. With `expert` > 1 a rank holds whole experts instead of slices. Raise
    ValueError if a dimension does not divide.
    """
    if expert > 1 and (not shape.experts or shape.experts % expert):
        raise ValueError(f"{shape.experts} experts over {expert} expert ranks")
    spec = build_model_spec(shape, 1)
    stage_of: list[int] = []
    for stage, count in enumerate(split_stages_evenly(spec.num_pipeline_positions, stages)):
        stage_of += [stage] * count
    params = [0] * stages
    sizes: dict[object, int] = {}
    for tensor_spec in spec.tensors:
        cut = (tensor_spec.shape, tensor_spec.split_dim, tensor_spec.components)
        if cut not in sizes:
            sizes[cut] = _find_max_rank_elements(tensor_spec, shape, tensor, expert)
        for stage in {stage_of[position] for position in tensor_spec.pipeline_positions}:
            params[stage] += sizes[cut]
    return tuple(params)


def find_max_stage_params(shape: ModelShape, stages: int, tensor: int, expert: int = 1) -> int:
    """Return the parameters of a tensor-parallel rank in the largest pipeline stage.

    Raise ValueError if a dimension of the model does not divide.
    """
    return max(count_stage_params(shape, stages, tensor, expert))


def _find_max_rank_elements(spec: TensorSpec, shape: ModelShape, tensor: int, expert: int) -> int:
    if expert > 1 and is_expert_tensor(spec, shape):
        expert_elements = spec.numel // (shape.experts + shape.shared_experts)
        routed = expert_elements * shape.experts // expert
        if not shape.shared_experts:
            return routed
        return (
            routed + _find_max_split_elements(spec, tensor) * shape.shared_experts // spec.shape[0]
        )
    return _find_max_split_elements(spec, tensor)


def _find_max_split_elements(spec: TensorSpec, tensor: int) -> int:
    return max(
        sum(box.numel for box in spec.split_tensor(index, tensor)) for index in range(tensor)
    )


def is_expert_tensor(spec: TensorSpec, shape: ModelShape) -> bool:
    """Return whether a tensor stacks the weights of all experts of a layer."""
    return (
        bool(shape.experts)
        and spec.shape[:1] == (shape.experts + shape.shared_experts,)
        and spec.split_dim is not None
    )


FORWARD_BACKWARD_PASSES = 3
"""Cost of forward and backward together, in forward passes, without recomputation."""


def count_forward_flops(shape: ModelShape, tokens: float, squared_lengths: float) -> float:
    """Return the FLOPs of a forward pass over `tokens` tokens.

    squared_lengths: sum of the squared lengths of the tokens' sequences, for attention. The
      embedding is a look-up without FLOPs.
    """
    attention = 4 * shape.layers * shape.heads * shape.head_dim * squared_lengths
    return 2 * shape.active_matmul_params * tokens + attention


def compute_achieved_fraction(fraction: float, width: float, constants: CostConstants) -> float:
    """Return the fraction of peak FLOP/s that products with matrices of this width achieve.

    fraction: limit for wide matrices; at width `constants.half_width` half of it is achieved.
    """
    return fraction * width / (width + constants.half_width)


@dataclass(frozen=True)
class CollectiveGroup:
    """Ranks that communicate in a collective, `ranks_per_node` of them on each node.

    link_bytes_per_s: bandwidth of a device within its node.
    network_bytes_per_s: a device's share of the node's network when all devices of the node
      communicate.
    """

    ranks: int
    ranks_per_node: int
    link_bytes_per_s: float
    network_bytes_per_s: float
    constants: CostConstants

    @property
    def num_nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)

    @property
    def all_reduce_byte_s(self) -> float:
        """Seconds per byte of an all-reduce's buffer: a reduce-scatter, then an all-gather."""
        return 2 * self.all_gather_byte_s

    @property
    def all_gather_byte_s(self) -> float:
        """Seconds per byte of an all-gather's result; a reduce-scatter takes equally long.

        With n ranks per node, (n - 1) / n of the buffer passes each link of the node, and each of
        the n ranks sends its own 1 / n between nodes.
        """
        within = (self.ranks_per_node - 1) / self.ranks_per_node / self.link_bytes_per_s
        between = (
            (self.num_nodes - 1) / self.num_nodes / self.ranks_per_node / self.network_bytes_per_s
        )
        return within + between

    @property
    def all_gather_latency_s(self) -> float:
        """Seconds of an all-gather or reduce-scatter besides the bytes."""
        if self.ranks == 1:
            return 0.0
        hops = (self.ranks_per_node - 1) * self.constants.link_hop_s
        hops += (self.num_nodes - 1) * self.constants.network_hop_s
        return self.constants.collective_s + hops

    @property
    def all_reduce_latency_s(self) -> float:
        return max(0.0, 2 * self.all_gather_latency_s - self.constants.collective_s)

    @property
    def all_to_all_byte_s(self) -> float:
        """Seconds per byte of a rank's send buffer in an all-to-all, its own part included.

        Traffic within a node and between nodes overlaps.
        """
        within = (self.ranks_per_node - 1) / self.ranks / self.link_bytes_per_s
        between = (self.ranks - self.ranks_per_node) / self.ranks / self.network_bytes_per_s
        return max(within, between)

    @property
    def send_byte_s(self) -> float:
        """Seconds per byte of a send to the next rank of the group; 0 for a single rank."""
        if self.ranks == 1:
            return 0.0
        is_near = self.ranks_per_node == self.ranks
        return 1 / (self.link_bytes_per_s if is_near else self.network_bytes_per_s)

    @property
    def send_latency_s(self) -> float:
        """Latency of a send, and of an all-to-all, in which all ranks send at once."""
        if self.ranks == 1:
            return 0.0
        constants = self.constants
        is_near = self.ranks_per_node == self.ranks
        return constants.collective_s + (
            constants.link_hop_s if is_near else constants.network_hop_s
        )


@dataclass(frozen=True)
class ParallelGroups:
    """Process groups of a model on a mesh: a typical group for each dimension of parallelism.

    All groups of a dimension have equal sizes and bandwidths.
    """

    tensor: CollectiveGroup
    pipeline: CollectiveGroup
    data: CollectiveGroup
    expert: CollectiveGroup


def build_parallel_groups(
    cluster: Cluster, mesh: Mesh, grid: RankGrid, constants: CostConstants, expert: int = 1
) -> ParallelGroups:
    """Return the process groups of a model on a mesh, with the number of ranks that share a node.

    If neighbors in a group are s ranks apart in the grid's order, n / s of them share a node of n
    devices.
    expert: number of expert-parallel ranks.
    """
    per_node = mesh.count_devices_per_node(cluster)
    kinds = mesh.find_node_groups(cluster)
    link = min(kind.device.link_bytes_per_s for kind in kinds) * constants.link_fraction
    network = (
        min(kind.node_bytes_per_s / kind.devices_per_node for kind in kinds)
        * constants.network_fraction
    )
    pipeline_stride = grid.tp_size * (1 if grid.order == "hf" else grid.dp_size)
    data_stride = grid.tp_size * (grid.pp_size if grid.order == "hf" else 1)

    def group(ranks: int, stride: int) -> CollectiveGroup:
        ranks_per_node = max(1, min(ranks, per_node // stride))
        return CollectiveGroup(ranks, ranks_per_node, link, network, constants)

    tensor, data = group(grid.tp_size, 1), group(grid.dp_size, data_stride)
    # Expert groups take tensor-parallel ranks first, then the ranks of neighboring replicas.
    ranks_per_node = min(expert, max(1, tensor.ranks_per_node * data.ranks_per_node))
    return ParallelGroups(
        tensor,
        group(grid.pp_size, pipeline_stride),
        data,
        CollectiveGroup(expert, ranks_per_node, link, network, constants),
    )


ALL_REDUCES_PER_LAYER = 2
"""Tensor-parallel all-reduces of a layer's forward pass: after attention and after the MLP."""
EXPERT_ALL_TO_ALLS = 2
"""Expert-parallel all-to-alls of a layer's forward pass: dispatch and combine."""


@dataclass(frozen=True)
class CallCost:
    """Cost factors of a model on the devices of its assignment, for the workload of a step.

    run_memory: see `PlacementProblem`.
    trainer: settings of the trainer of this size whose ranks compute the call; None for other
      calls, and for layouts that streamrl does not train.
    is_scored_by_group: whether no forward pass has rollouts of two groups.
    """

    shape: ModelShape
    assignment: CallAssignment
    workload: Workload
    cluster: Cluster
    constants: CostConstants
    run_memory: RunMemory | None = None
    trainer: TrainerConfig | None = None
    is_scored_by_group: bool = False

    @property
    def pp_size(self) -> int:
        return self.assignment.grid.pp_size

    @property
    def tp_size(self) -> int:
        return self.assignment.grid.tp_size

    @property
    def dp_size(self) -> int:
        return self.assignment.grid.dp_size

    @property
    def fsdp_size(self) -> int:
        """Data-parallel ranks over which ZeRO shards a copy of the model."""
        return self.dp_size // self.assignment.copies

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
        return 1 / (slowest * HOST_FRACTION)

    @cached_property
    def parallel_groups(self) -> ParallelGroups:
        assignment, grid = self.assignment, replace(self.assignment.grid, dp_size=self.fsdp_size)
        return build_parallel_groups(
            self.cluster, assignment.mesh, grid, self.constants, assignment.ep_size
        )

    @property
    def on_gpu(self) -> bool:
        return not self.cluster.is_cpu

    @property
    def updates_on_host(self) -> bool:
        """Whether the optimizer's state stays in host memory.

        The state is read and written as fast as the link between device and host.
        """
        return self.on_gpu and self.trainer is not None and self.trainer.offload_optimizer

    @property
    def keeps_inputs_on_host(self) -> bool:
        trainer = self.trainer
        return self.on_gpu and trainer is not None and trainer.gradient_checkpointing == OFFLOAD

    @property
    def scores_from_host(self) -> bool:
        """Whether a scoring model of its own rests in host memory, one copy per node."""
        if not self.on_gpu or self.run_memory is None or self.trainer is not None:
            return False
        return self.run_memory.scores_from_host or self.assignment.is_offloaded

    @property
    def is_sharded(self) -> bool:
        """Whether a run's data-parallel ranks each hold a part of the weights, and gather layers.

        False for generators, which are never sharded so, and for other systems.
        """
        stage = self.assignment.zero_stage
        return self.run_memory is not None and stage >= SHARDS_PARAMETERS and self.fsdp_size > 1

    @property
    def ep_size(self) -> int:
        return self.assignment.ep_size

    def compute_s(self, flops: float, fraction: float) -> float:
        """Return the seconds that a replica computes for `flops`, the forward FLOPs of a token.

        fraction: achieved fraction of peak FLOP/s for wide matrices.
        Expert parallelism does not change the FLOPs of a replica: as many as its own tokens need.
        """
        constants, shape = self.constants, self.shape
        # In the experts that routers choose for a token, over all layers.
        routed = 2 * shape.moe_layers * shape.experts_per_token * shape.expert_params
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
        return count_forward_flops(self.shape, 1, self.workload.rollout_tokens)

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
        rows = shape.experts * EXPERT_ROWS / 2
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
        target = min(self.pp_size * STAGE_MICRO_BATCHES, int(rollouts))
        return max(fewest, target)

    def compute_bubble_factor(self, micro_batches: float) -> float:
        """Return the slowdown, at least 1, by pipeline bubbles in a sequence of micro-batches."""
        # A pipeline of p stages takes m + p - 1 slots for m micro-batches.
        return 1 + (self.pp_size - 1) / max(1.0, micro_batches)
