"""Memory of a call per device: resident bytes, and active bytes held only while it computes."""

import math
from dataclasses import dataclass

from streamrl.planner.costs.call_cost import CallCost
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.generate_timing import count_kv_token_bytes
from streamrl.planner.costs.score_timing import count_groups_in_batch
from streamrl.planner.costs.traffic import SHARDS_PARAMETERS
from streamrl.planner.costs.train_timing import (
    SHARDS_GRADIENTS,
    SHARDS_OPTIMIZER,
    count_rank_micro_batches,
    count_replica_tokens,
)
from streamrl.planner.problem.problem import CallMemory

GATHERED_LAYERS = 2
"""With ZeRO stage 3, one layer computes while the next is gathered."""
NARROW_MLP = 1.5
"""Width of an MLP, in hidden widths, whose activations `activation_bytes` includes."""
KV_BLOCK_TOKENS = 128
"""Tokens of a KV cache block of vLLM on a CPU; blocks on a GPU are smaller."""


@dataclass(frozen=True)
class TrainStateBytes:
    """Bytes per device of a trained model: weights, gradients, optimizer state, and what an
    update needs besides.
    """

    weights: float
    gradients: float
    optimizer: float
    update: float

    @classmethod
    def from_call_cost(cls, cost: CallCost) -> "TrainStateBytes":
        constants, stage = cost.constants, cost.assignment.zero_stage
        trained_fraction = cost.shape.trained_fraction

        def share(num_bytes: float, from_stage: int) -> float:
            return num_bytes * (cost.sharded_params if stage >= from_stage else cost.device_params)

        # Adapters are held beside the frozen weights.
        copies = 1 + trained_fraction if cost.shape.adapter_params else 1
        gradient, optimizer = constants.gradient_bytes, constants.optimizer_bytes
        update = constants.update_bytes
        if constants.updates_on_host:
            # As DeepSpeed: before stage 3 gradients leave in the backward pass, and an update holds
            # two float32 copies of the shard.
            is_whole = stage < SHARDS_PARAMETERS
            gradient, optimizer, update = gradient * (not is_whole), 0, 2 * update * is_whole
        if stage == SHARDS_OPTIMIZER and cost.tp_size == 1:
            gradient += constants.raw_gradient_bytes
        return cls(
            share(constants.weight_bytes * copies, SHARDS_PARAMETERS),
            share(gradient * trained_fraction, SHARDS_GRADIENTS),
            share(optimizer * trained_fraction, SHARDS_OPTIMIZER),
            share(update * trained_fraction, SHARDS_OPTIMIZER),
        )

    @property
    def total_bytes(self) -> float:
        return self.weights + self.gradients + self.optimizer

    def offloaded_bytes(self, constants: CostConstants) -> float:
        optimizer = self.optimizer if constants.offloads_optimizer else 0.0
        return optimizer + (self.weights if constants.offloads_weights else 0.0)

    def compute_resident_bytes(self, constants: CostConstants) -> float:
        gradients = self.gradients if constants.offloads_weights else 0.0
        return self.total_bytes - gradients - self.offloaded_bytes(constants)


def train_memory(cost: CallCost, *, offload_idle: bool = False) -> CallMemory:
    """Return a training call's memory per device: its state and the activations of micro-batches.

    offload_idle: other calls share the devices in turn, so part of the state may move to the host.
    """
    state = TrainStateBytes.from_call_cost(cost)
    resident = state.compute_resident_bytes(cost.constants) if offload_idle else state.total_bytes
    activations = _compute_activation_bytes(cost)
    if cost.assignment.zero_stage >= SHARDS_GRADIENTS:
        # Reduced in buckets, gradients never exist as a whole, except for that of the head.
        activations += _count_head_params(cost) * cost.constants.head_gradient_bytes
    if cost.assignment.zero_stage >= SHARDS_PARAMETERS and cost.dp_size > 1:
        layers = GATHERED_LAYERS * cost.device_params * cost.pp_size / cost.shape.layers
        gathered = max(layers, min(cost.device_params, cost.constants.gathered_params))
        activations += gathered * cost.constants.weight_bytes
    return CallMemory(resident, max(activations, state.update) + state.total_bytes - resident)


def _compute_activation_bytes(cost: CallCost) -> float:
    """Return activation bytes of a training call's first pipeline stage, which holds the most.

    They are those of all micro-batches in flight, and the logits of one.
    """
    constants, shape = cost.constants, cost.shape
    micro_batches, tokens = count_rank_micro_batches(cost), find_max_train_tokens(cost)
    layers = shape.layers / cost.pp_size * min(cost.pp_size, micro_batches)
    width, layer = tokens * shape.hidden, _compute_layer_bytes(cost, tokens)
    if constants.recompute:
        return (
            layers * width * constants.checkpoint_bytes + layer + _compute_logit_bytes(cost, tokens)
        )
    return layers * layer + _compute_logit_bytes(cost, tokens)


def _compute_layer_bytes(cost: CallCost, tokens: float) -> float:
    constants, shape = cost.constants, cost.shape
    values = shape.hidden * constants.activation_bytes
    if not constants.recompute or shape.experts or cost.tp_size > 1:
        wider = max(0.0, shape.token_mlp_width - NARROW_MLP * shape.hidden)
        values += wider * constants.mlp_bytes
    return tokens * values / cost.tp_size


def find_max_train_tokens(cost: CallCost) -> float:
    tokens = count_replica_tokens(cost)
    if cost.pp_size > 1:
        return tokens / count_rank_micro_batches(cost)
    return min(tokens, cost.workload.micro_batch_tokens)


def _count_head_params(cost: CallCost) -> float:
    """Return the trained parameters of the output head on a device."""
    is_trained = not (cost.shape.adapter_params or cost.shape.has_scalar_head)
    return cost.shape.hidden * cost.shape.vocab / cost.tp_size * is_trained


def _compute_logit_bytes(cost: CallCost, tokens: float) -> float:
    entries = 1 if cost.shape.has_scalar_head else cost.shape.vocab / cost.tp_size
    return min(tokens, cost.constants.logit_tokens) * entries * cost.constants.logit_bytes


def score_active_bytes(cost: CallCost) -> float:
    """Return bytes to compute a scoring batch: the activations of a layer, and the logits."""
    tokens = find_max_score_tokens(cost)
    layer = tokens * cost.shape.hidden * cost.constants.activation_bytes / cost.tp_size
    return layer + _compute_logit_bytes(cost, tokens)


def find_max_score_tokens(cost: CallCost) -> float:
    workload, constants = cost.workload, cost.constants
    batch = count_groups_in_batch(workload, constants) * workload.group_size
    return min(constants.score_tokens, batch * workload.rollout_tokens)


def compute_serving_weight_bytes(cost: CallCost) -> float:
    return cost.device_params * cost.constants.served_bytes


def compute_layer_weight_bytes(cost: CallCost) -> float:
    """Return the bytes of the weights outside of layers, and of a layer."""
    outside = cost.shape.embedding_params / cost.shape.num_params
    return compute_serving_weight_bytes(cost) * (outside + (1 - outside) / cost.shape.layers)


def estimate_weight_load_s(cost: CallCost) -> float:
    is_offloaded = cost.constants.offloads_weights
    return compute_serving_weight_bytes(cost) * cost.host_byte_s if is_offloaded else 0.0


def estimate_state_offload_s(cost: CallCost) -> float:
    return (
        2 * TrainStateBytes.from_call_cost(cost).offloaded_bytes(cost.constants) * cost.host_byte_s
    )


def compute_rollout_kv_bytes(cost: CallCost, tokens: float) -> float:
    """Return KV cache bytes per device of a rollout with `tokens` tokens, in whole blocks."""
    tokens = math.ceil(tokens / KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
    return tokens * count_kv_token_bytes(cost.shape, cost.tp_size, cost.pp_size, cost.constants)


def compute_usable_bytes(memory_bytes: float, constants: CostConstants) -> float:
    return memory_bytes * (1 - constants.memory_reserve_fraction)
