"""Bytes of one device that a call holds: always, and while it computes."""

import math
from dataclasses import dataclass

from streamrl.placement.costs.call_cost import Work
from streamrl.placement.costs.constants import Constants
from streamrl.placement.costs.generate import kv_token_bytes
from streamrl.placement.costs.score import groups_in_batch
from streamrl.placement.costs.traffic import SHARDS_PARAMETERS
from streamrl.placement.costs.train import (
    SHARDS_GRADIENTS,
    SHARDS_OPTIMIZER,
    micro_batches,
    replica_tokens,
)
from streamrl.placement.problem import CallMemory

LAYERS_GATHERED = 2
"""Of ZeRO stage 3: one computes while the next comes."""
BLOCK_TOKENS = 128
"""Tokens of which vLLM keeps keys and values together: so many on a CPU, fewer on a GPU."""


@dataclass(frozen=True)
class State:
    """Of what is trained, bytes of a device: weights, gradients, and what the optimizer has."""

    weights: float
    gradients: float
    optimizer: float

    @classmethod
    def of(cls, work: Work) -> "State":
        """With what the replicas share out."""
        constants, stage = work.constants, work.assignment.zero_stage
        part = work.shape.trained_part

        def share(num_bytes: float, from_stage: int) -> float:
            return num_bytes * (work.shared_params if stage >= from_stage else work.params)

        # Adapters lie beside the weights that are frozen.
        held = 1 + part if work.shape.trained else 1
        return cls(
            share(constants.weight_bytes * held, SHARDS_PARAMETERS),
            share(constants.gradient_bytes * part, SHARDS_GRADIENTS),
            share(constants.optimizer_bytes * part, SHARDS_OPTIMIZER),
        )

    @property
    def kept(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer

    def offloaded(self, constants: Constants) -> float:
        """What is on the host while it rests."""
        optimizer = self.optimizer if constants.offloads_optimizer else 0.0
        return optimizer + (self.weights if constants.offloads_weights else 0.0)

    def resting(self, constants: Constants) -> float:
        """What stays on the device."""
        gradients = self.gradients if constants.offloads_weights else 0.0
        return self.kept - gradients - self.offloaded(constants)


def train_memory(work: Work, *, rests: bool = False) -> CallMemory:
    """Weights, gradients and the optimizer's state; and a micro-batch's activations.

    rests: whether others have the devices in turn, so that some of it may be on the host.
    """
    state = State.of(work)
    kept = state.resting(work.constants) if rests else state.kept
    active = _activations(work) + state.kept - kept
    if work.assignment.zero_stage >= SHARDS_PARAMETERS and work.replicas > 1:
        layer = work.params * work.stages / work.shape.layers
        active += LAYERS_GATHERED * layer * work.constants.weight_bytes
    return CallMemory(kept, active)


def _activations(work: Work) -> float:
    """Of as many micro-batches as are in the first of the pipeline's stages, and one's logits."""
    constants, shape = work.constants, work.shape
    each, tokens = micro_batches(work), most_trained_tokens(work)
    layers = shape.layers / work.stages * min(work.stages, each)
    width = tokens * shape.hidden
    layer = width * constants.activation_bytes / work.tensor
    if constants.recompute:
        return layers * width * constants.checkpoint_bytes + layer + _logits(work, tokens)
    return layers * layer + _logits(work, tokens)


def most_trained_tokens(work: Work) -> float:
    """Of a micro-batch that is trained: as many as it may have, or as a pipeline divides them."""
    tokens = replica_tokens(work)
    if work.stages > 1:
        return tokens / micro_batches(work)
    return min(tokens, work.workload.micro_batch_tokens)


def _logits(work: Work, tokens: float) -> float:
    entries = 1 if work.shape.scalar_head else work.shape.vocab / work.tensor
    return tokens * entries * work.constants.logit_bytes


def score_active(work: Work) -> float:
    """Of a batch that is scored: one layer's activations, and the logits."""
    tokens = most_scored_tokens(work)
    layer = tokens * work.shape.hidden * work.constants.activation_bytes / work.tensor
    return layer + _logits(work, tokens)


def most_scored_tokens(work: Work) -> float:
    """Of a batch that is scored."""
    workload, constants = work.workload, work.constants
    batch = groups_in_batch(workload, constants) * workload.group_size
    return min(constants.score_tokens, batch * workload.rollout_tokens)


def served_bytes(work: Work) -> float:
    """Of weights that only compute forward."""
    return work.params * work.constants.served_bytes


def loading_s(work: Work) -> float:
    """To get weights that only compute forward from the host, once a step."""
    rests = work.constants.offloads_weights
    return served_bytes(work) * work.host_byte_s if rests else 0.0


def moving_s(work: Work) -> float:
    """To get what is trained from the host and to put it back, once a step."""
    return 2 * State.of(work).offloaded(work.constants) * work.host_byte_s


def rollout_kv_bytes(work: Work, tokens: float) -> float:
    """Keys and values of so many tokens, in whole blocks."""
    tokens = math.ceil(tokens / BLOCK_TOKENS) * BLOCK_TOKENS
    return tokens * kv_token_bytes(work.shape, work.tensor, work.stages, work.constants)


def usable(memory_bytes: float, constants: Constants) -> float:
    """Of a device's memory."""
    return memory_bytes * (1 - constants.memory_reserve_fraction)
