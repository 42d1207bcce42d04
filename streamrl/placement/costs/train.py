"""What training costs: passes with their communication and bubbles, and updates."""

import math

from streamrl.placement.costs.call_cost import CallCost
from streamrl.placement.costs.flops import train_passes
from streamrl.placement.costs.traffic import SHARDS_PARAMETERS
from streamrl.placement.stage_timings import TrainTiming

SHARDS_OPTIMIZER, SHARDS_GRADIENTS = 1, 2
"""The stages of ZeRO from which on replicas share these out."""


def replica_tokens(work: CallCost) -> float:
    """Tokens that a replica trains between two updates."""
    return work.workload.num_tokens / work.workload.mini_batches / work.dp_size


def min_micro_batches(work: CallCost) -> int:
    """Micro-batches of a replica between two updates, as large as they may be."""
    return max(1, math.ceil(replica_tokens(work) / work.workload.micro_batch_tokens))


def num_micro_batches(work: CallCost) -> int:
    """Micro-batches of a replica between two updates: more where that fills a pipeline."""
    rollouts = work.workload.num_rollouts / work.workload.mini_batches / work.dp_size
    return work.count_micro_batches(min_micro_batches(work), rollouts)


def train_timing(work: CallCost, moving_s: float = 0.0) -> TrainTiming:
    """Of all replicas of a model that is trained; with so long for its state in a step."""
    constants = work.constants
    passes = train_passes(constants)
    each = num_micro_batches(work)
    longer = work.bubble_factor(each)
    # Backward there are as many sums again as forward, and as many more where that is repeated.
    sums = work.all_reduces_per_layer * (passes - 1)
    compute = work.compute_s(work.forward_token_flops, constants.train_flops_fraction)
    token_s = passes * compute + sums * work.all_reduce_token_s + 2 * work.send_token_s
    token_s += (passes - 1) * work.expert_token_s - _frozen_savings_s(work, passes)
    begin_s = (
        sums * work.all_reduce_latency_s
        + passes * work.expert_overhead_s
        + 2 * work.parallel_groups.pipeline.send_latency_s
    )
    return TrainTiming(
        dp_size=work.dp_size,
        # Whoever counts micro-batches counts the fewest.
        micro_batch_s=(constants.micro_batch_s + longer * begin_s + _exposed_zero_s(work))
        * (each / min_micro_batches(work)),
        token_s=token_s * longer,
        update_s=constants.update_s + _reduce_s(work) + _optimizer_s(work),
        step_s=constants.train_step_s + moving_s,
        round_s=constants.round_s,
    )


def _frozen_savings_s(work: CallCost, passes: int) -> float:
    """Of a token's passes, what weights that are not trained save: products for their gradients.

    Adapters in their place have all their own products.
    """
    shape = work.shape
    if not shape.adapter_params:
        return 0.0
    products = 2 * shape.active_matmul_params
    once = work.compute_s(products, work.constants.train_flops_fraction)
    return once * (1 - passes * 2 * shape.adapter_params / products)


def _exposed_zero_s(work: CallCost) -> float:
    """ZeRO's traffic in a micro-batch, as far as nothing hides it.

    From stage 2 on gradients are reduced at once; from stage 3 on weights are gathered forward and
    backward. Micro-batches of a pipeline follow one another, and so does this.
    """
    data, constants, stage = work.parallel_groups.data, work.constants, work.assignment.zero_stage
    if data.ranks == 1 or stage < SHARDS_GRADIENTS:
        return 0.0
    num_bytes = work.trained_params * constants.reduced_bytes
    if stage >= SHARDS_PARAMETERS:
        num_bytes += work.device_params * 2 * constants.weight_bytes
    whole = num_bytes * data.all_gather_byte_s + work.shape.layers * data.all_gather_latency_s
    return constants.zero_exposed_fraction * whole


def _reduce_s(work: CallCost) -> float:
    """Gradients summed over the replicas; where these share out the optimizer, weights go back."""
    data, constants, stage = work.parallel_groups.data, work.constants, work.assignment.zero_stage
    if data.ranks == 1:
        return 0.0
    if stage < SHARDS_OPTIMIZER:
        bytes_twice = constants.reduced_bytes
        return (
            data.all_reduce_latency_s + work.trained_params * bytes_twice * data.all_reduce_byte_s
        )
    num_bytes = constants.reduced_bytes if stage < SHARDS_GRADIENTS else 0
    if stage < SHARDS_PARAMETERS:
        num_bytes += constants.weight_bytes
    return 2 * data.all_gather_latency_s + work.trained_params * num_bytes * data.all_gather_byte_s


def _optimizer_s(work: CallCost) -> float:
    """To read and write its state, and read gradients and write weights."""
    constants = work.constants
    num_bytes = 2 * constants.optimizer_bytes + constants.gradient_bytes + constants.weight_bytes
    is_shared = work.assignment.zero_stage >= SHARDS_OPTIMIZER
    params = work.sharded_params if is_shared else work.device_params
    params *= work.shape.trained_fraction
    return params * num_bytes / (work.memory_bytes_per_s * constants.optimizer_memory_fraction)
