"""Timing of training: forward and backward passes, their communication, and optimizer steps."""

import math

from streamrl.planner.costs.call_cost import CallCost
from streamrl.planner.costs.flops import train_passes
from streamrl.planner.costs.traffic import SHARDS_PARAMETERS
from streamrl.planner.problem.stage_timings import TrainTiming

SHARDS_OPTIMIZER, SHARDS_GRADIENTS = 1, 2
"""ZeRO stages that shard optimizer state and gradients over replicas."""


def count_replica_tokens(cost: CallCost) -> float:
    return cost.workload.num_tokens / cost.workload.mini_batches / cost.dp_size


def count_min_micro_batches(cost: CallCost) -> int:
    return max(1, math.ceil(count_replica_tokens(cost) / cost.workload.micro_batch_tokens))


def count_rank_micro_batches(cost: CallCost) -> int:
    """Return the micro-batches of a data-parallel replica between two updates.

    A pipeline has more than the fewest possible, because they shorten its bubbles.
    """
    rollouts = cost.workload.num_rollouts / cost.workload.mini_batches / cost.dp_size
    return cost.count_micro_batches(count_min_micro_batches(cost), rollouts)


def estimate_train_timing(cost: CallCost, moving_s: float = 0.0) -> TrainTiming:
    """Return the timing of a training call on all its replicas.

    moving_s: time per step to load the training state from the host and to offload it again.
    """
    constants = cost.constants
    passes = train_passes(constants)
    micro_batches = count_rank_micro_batches(cost)
    bubble = cost.compute_bubble_factor(micro_batches)
    # The backward pass has as many all-reduces as the forward pass, and again as many if it repeats
    # the forward pass.
    all_reduces = cost.all_reduces_per_layer * (passes - 1)
    compute = cost.compute_s(cost.forward_token_flops, constants.train_flops_fraction)
    token_s = passes * compute + all_reduces * cost.all_reduce_token_s + 2 * cost.send_token_s
    token_s += (passes - 1) * cost.expert_token_s - _compute_frozen_savings_s(cost, passes)
    begin_s = (
        all_reduces * cost.all_reduce_latency_s
        + passes * cost.expert_overhead_s
        + 2 * cost.parallel_groups.pipeline.send_latency_s
    )
    return TrainTiming(
        dp_size=cost.dp_size,
        # Callers multiply by the fewest micro-batches.
        micro_batch_s=(constants.micro_batch_s + bubble * begin_s + _compute_exposed_zero_s(cost))
        * (micro_batches / count_min_micro_batches(cost)),
        token_s=token_s * bubble,
        update_s=constants.update_s + _compute_reduce_s(cost) + _compute_optimizer_s(cost),
        step_s=constants.train_step_s + moving_s,
        round_s=constants.round_s,
    )


def _compute_frozen_savings_s(cost: CallCost, passes: int) -> float:
    """Return training seconds per token that LoRA saves on the frozen weights' gradients."""
    shape = cost.shape
    if not shape.adapter_params:
        return 0.0
    products = 2 * shape.active_matmul_params
    once = cost.compute_s(products, cost.constants.train_flops_fraction)
    return once * (1 - passes * 2 * shape.adapter_params / products)


def _compute_exposed_zero_s(cost: CallCost) -> float:
    """Return the seconds per micro-batch of ZeRO's traffic that computation does not hide.

    Stage 2 reduces gradients in every micro-batch; stage 3 also gathers weights twice.
    """
    data, constants, stage = cost.parallel_groups.data, cost.constants, cost.assignment.zero_stage
    if data.ranks == 1 or stage < SHARDS_GRADIENTS:
        return 0.0
    num_bytes = cost.trained_params * constants.reduced_bytes
    if stage >= SHARDS_PARAMETERS:
        num_bytes += cost.device_params * 2 * constants.weight_bytes
    traffic_s = num_bytes * data.all_gather_byte_s + cost.shape.layers * data.all_gather_latency_s
    return constants.zero_exposed_fraction * traffic_s


def _compute_reduce_s(cost: CallCost) -> float:
    data, constants, stage = cost.parallel_groups.data, cost.constants, cost.assignment.zero_stage
    if data.ranks == 1:
        return 0.0
    if stage < SHARDS_OPTIMIZER:
        element_bytes = constants.reduced_bytes
        return (
            data.all_reduce_latency_s + cost.trained_params * element_bytes * data.all_reduce_byte_s
        )
    # ZeRO reduces once per update (stage 1) or in every micro-batch (stage 2 on), and gathers
    # updated weights once per update (up to stage 2).
    num_bytes = constants.reduced_bytes if stage < SHARDS_GRADIENTS else 0
    if stage < SHARDS_PARAMETERS:
        num_bytes += constants.weight_bytes
    return 2 * data.all_gather_latency_s + cost.trained_params * num_bytes * data.all_gather_byte_s


def _compute_optimizer_s(cost: CallCost) -> float:
    constants = cost.constants
    num_bytes = 2 * constants.optimizer_bytes + constants.gradient_bytes + constants.weight_bytes
    is_shared = cost.assignment.zero_stage >= SHARDS_OPTIMIZER
    params = cost.sharded_params if is_shared else cost.device_params
    params *= cost.shape.trained_fraction
    if constants.updates_on_host:
        return params * num_bytes * cost.host_byte_s
    return params * num_bytes / (cost.memory_bytes_per_s * constants.optimizer_memory_fraction)
