"""Bytes of one device that a call holds: always, and while it computes."""

import math
from dataclasses import dataclass

from streamrl.placement.costs.call_cost import CallCost
from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.costs.generate import kv_token_bytes
from streamrl.placement.costs.score import groups_in_batch
from streamrl.placement.costs.traffic import SHARDS_PARAMETERS
from streamrl.placement.costs.train import (
    SHARDS_GRADIENTS,
    SHARDS_OPTIMIZER,
    num_micro_batches,
    replica_tokens,
)
from streamrl.placement.problem import CallMemory

GATHERED_LAYERS = 2
"""Of ZeRO stage 3: one computes while the next comes."""
KV_BLOCK_TOKENS = 128
"""Tokens of which vLLM keeps keys and values together: so many on a CPU, fewer on a GPU."""


@dataclass(frozen=True)
class TrainStateBytes:
    """Of what is trained, bytes of a device: weights, gradients, and what the optimizer has."""

    weights: float
    gradients: float
    optimizer: float

    @classmethod
    def from_call_cost(cls, work: CallCost) -> "TrainStateBytes":
        """With what the replicas share out."""
        constants, stage = work.constants, work.assignment.zero_stage
        part = work.shape.trained_fraction

        def share(num_bytes: float, from_stage: int) -> float:
            return num_bytes * (work.sharded_params if stage >= from_stage else work.device_params)

        # Adapters lie beside the weights that are frozen.
        held = 1 + part if work.shape.adapter_params else 1
        return cls(
            share(constants.weight_bytes * held, SHARDS_PARAMETERS),
            share(constants.gradient_bytes * part, SHARDS_GRADIENTS),
            share(constants.optimizer_bytes * part, SHARDS_OPTIMIZER),
        )

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer

    def offloaded_bytes(self, constants: CostConstants) -> float:
        """What is on the host while it rests."""
        optimizer = self.optimizer if constants.offloads_optimizer else 0.0
        return optimizer + (self.weights if constants.offloads_weights else 0.0)

    def resident_bytes(self, constants: CostConstants) -> float:
        """What stays on the device."""
        gradients = self.gradients if constants.offloads_weights else 0.0
        return self.total_bytes - gradients - self.offloaded_bytes(constants)


def train_memory(work: CallCost, *, rests: bool = False) -> CallMemory:
    """Weights, gradients and the optimizer's state; and a micro-batch's activations.

    rests: whether others have the devices in turn, so that some of it may be on the host.
    """
    state = TrainStateBytes.from_call_cost(work)
    kept = state.resident_bytes(work.constants) if rests else state.total_bytes
    active = _activation_bytes(work) + state.total_bytes - kept
    if work.assignment.zero_stage >= SHARDS_PARAMETERS and work.dp_size > 1:
        layer = work.device_params * work.pp_size / work.shape.layers
        active += GATHERED_LAYERS * layer * work.constants.weight_bytes
    return CallMemory(kept, active)


def _activation_bytes(work: CallCost) -> float:
    """Of as many micro-batches as are in the first of the pipeline's stages, and one's logits."""
    constants, shape = work.constants, work.shape
    each, tokens = num_micro_batches(work), max_train_tokens(work)
    layers = shape.layers / work.pp_size * min(work.pp_size, each)
    width = tokens * shape.hidden
    layer = width * constants.activation_bytes / work.tp_size
    if constants.recompute:
        return layers * width * constants.checkpoint_bytes + layer + _logit_bytes(work, tokens)
    return layers * layer + _logit_bytes(work, tokens)


def max_train_tokens(work: CallCost) -> float:
    """Of a micro-batch that is trained: as many as it may have, or as a pipeline divides them."""
    tokens = replica_tokens(work)
    if work.pp_size > 1:
        return tokens / num_micro_batches(work)
    return min(tokens, work.workload.micro_batch_tokens)


def _logit_bytes(work: CallCost, tokens: float) -> float:
    entries = 1 if work.shape.has_scalar_head else work.shape.vocab / work.tp_size
    return tokens * entries * work.constants.logit_bytes


def score_active_bytes(work: CallCost) -> float:
    """Of a batch that is scored: one layer's activations, and the logits."""
    tokens = max_score_tokens(work)
    layer = tokens * work.shape.hidden * work.constants.activation_bytes / work.tp_size
    return layer + _logit_bytes(work, tokens)


def max_score_tokens(work: CallCost) -> float:
    """Of a batch that is scored."""
    workload, constants = work.workload, work.constants
    batch = groups_in_batch(workload, constants) * workload.group_size
    return min(constants.score_tokens, batch * workload.rollout_tokens)


def serving_weight_bytes(work: CallCost) -> float:
    """Of weights that only compute forward."""
    return work.device_params * work.constants.served_bytes


def weight_load_s(work: CallCost) -> float:
    """To get weights that only compute forward from the host, once a step."""
    rests = work.constants.offloads_weights
    return serving_weight_bytes(work) * work.host_byte_s if rests else 0.0


def state_offload_s(work: CallCost) -> float:
    """To get what is trained from the host and to put it back, once a step."""
    return (
        2 * TrainStateBytes.from_call_cost(work).offloaded_bytes(work.constants) * work.host_byte_s
    )


def rollout_kv_bytes(work: CallCost, tokens: float) -> float:
    """Keys and values of so many tokens, in whole blocks."""
    tokens = math.ceil(tokens / KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS
    return tokens * kv_token_bytes(work.shape, work.tp_size, work.pp_size, work.constants)


def usable_bytes(memory_bytes: float, constants: CostConstants) -> float:
    """Of a device's memory."""
    return memory_bytes * (1 - constants.memory_reserve_fraction)
