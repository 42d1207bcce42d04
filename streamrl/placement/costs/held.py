"""Bytes of one device that a call holds: always, and while it computes."""

from streamrl.placement.costs.constants import Constants
from streamrl.placement.costs.generate import kv_token_bytes
from streamrl.placement.costs.score import groups_in_batch
from streamrl.placement.costs.tensors import fullest_stage
from streamrl.placement.costs.traffic import SHARDS_PARAMETERS
from streamrl.placement.costs.train import (
    SHARDS_GRADIENTS,
    SHARDS_OPTIMIZER,
    micro_batches,
    replica_tokens,
)
from streamrl.placement.costs.works import Work
from streamrl.placement.estimates import CallMemory
from streamrl.placement.shapes import ModelShape

LAYERS_GATHERED = 2
"""Of ZeRO stage 3: one computes while the next comes."""


def train_memory(work: Work) -> CallMemory:
    """Weights, gradients and the optimizer's state; and a micro-batch's activations."""
    constants, stage, replicas = work.constants, work.assignment.zero_stage, work.replicas
    params = fullest_stage(work.shape, work.stages, work.tensor)

    def share(num_bytes: int, from_stage: int) -> float:
        return num_bytes / replicas if stage >= from_stage else num_bytes

    each = (
        share(constants.weight_bytes, SHARDS_PARAMETERS)
        + share(constants.gradient_bytes, SHARDS_GRADIENTS)
        + share(constants.optimizer_bytes, SHARDS_OPTIMIZER)
    )
    active = _activations(work)
    if stage >= SHARDS_PARAMETERS and replicas > 1:
        layer = params * work.stages / work.shape.layers
        active += LAYERS_GATHERED * layer * constants.weight_bytes
    return CallMemory(params * each, active)


def _activations(work: Work) -> float:
    """Of as many micro-batches as are in the first of the pipeline's stages, and one's logits."""
    constants, shape = work.constants, work.shape
    each = micro_batches(work)
    tokens = replica_tokens(work) / each
    layers = shape.layers / work.stages * min(work.stages, each)
    width = tokens * shape.hidden
    layer = width * constants.activation_bytes / work.tensor
    if constants.recompute:
        return layers * width * constants.checkpoint_bytes + layer + _logits(work, tokens)
    return layers * layer + _logits(work, tokens)


def _logits(work: Work, tokens: float) -> float:
    entries = 1 if work.shape.scalar_head else work.shape.vocab / work.tensor
    return tokens * entries * work.constants.logit_bytes


def score_active(work: Work) -> float:
    """Of a batch that is scored: one layer's activations, and the logits."""
    workload, constants = work.workload, work.constants
    batch = groups_in_batch(workload, constants) * workload.group_size
    tokens = min(constants.score_tokens, batch * workload.rollout_tokens)
    layer = tokens * work.shape.hidden * constants.activation_bytes / work.tensor
    return layer + _logits(work, tokens)


def served_bytes(shape: ModelShape, work: Work) -> float:
    """Of weights that only compute forward."""
    return fullest_stage(shape, work.stages, work.tensor) * work.constants.served_bytes


def rollout_kv_bytes(work: Work, tokens: float) -> float:
    """Keys and values of so many tokens."""
    return tokens * kv_token_bytes(work.shape, work.tensor, work.stages, work.constants)


def usable(memory_bytes: float, constants: Constants) -> float:
    """Of a device's memory."""
    return memory_bytes * (1 - constants.memory_reserve_fraction)
