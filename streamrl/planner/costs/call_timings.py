"""Timings of a call: a generator's decode step (roofline and overheads), scoring, training."""

import math

from streamrl.engines.models.model_shapes import ModelShape
from streamrl.planner.costs.call_cost import (
    EXPERT_ALL_TO_ALLS,
    FORWARD_BACKWARD_PASSES,
    SHARDS_PARAMETERS,
    CallCost,
    count_forward_flops,
    count_stage_params,
)
from streamrl.planner.costs.constants import (
    OPTIMIZER_MEMORY_FRACTION,
    ZERO_EXPOSED_FRACTION,
    CostConstants,
)
from streamrl.planner.problem.stage_timings import GeneratorTiming, ScoreTiming, TrainTiming


def count_kv_token_bytes(
    shape: ModelShape, tensor: int, stages: int, constants: CostConstants
) -> float:
    """Return bytes per device of a token's keys and values.

    tensor, stages: number of tensor-parallel ranks and of pipeline stages.
    Tensor-parallel ranks split the heads; with more ranks than heads, some ranks hold the same
    heads. Every rank holds the whole MLA latent.
    """
    split = 1 if shape.kv_latent_width else min(tensor, shape.kv_heads)
    return shape.count_kv_bytes_per_token(constants.kv_bytes) / split / stages


def count_decode_step_params(
    shape: ModelShape, tensor: int, stages: int, running: float, expert: int = 1
) -> float:
    """Return the parameters that a device reads in a decode step of `running` rollouts.

    tensor, stages, expert: number of tensor-parallel ranks, pipeline stages and expert-parallel
      ranks.
    A device reads only those experts that some token needs, assuming uniform random routing. With
    expert parallelism the tokens of all replicas of the expert group count.
    """
    params: float = sum(count_stage_params(shape, stages, tensor, expert)) / stages
    if not shape.has_scalar_head and not shape.has_tied_embeddings:
        # A decode step reads only a few rows of the embedding.
        params -= shape.vocab * shape.hidden / tensor / stages
    if not shape.experts:
        return params
    sharing_replicas = max(1.0, expert / tensor)
    # Probability that no token picks an expert when each picks k of n experts at random.
    unused_fraction: float = (1 - shape.experts_per_token / shape.experts) ** (
        running * sharing_replicas
    )
    split = expert if expert > 1 else tensor
    return params - shape.routed_params * unused_fraction / split / stages


def estimate_running_rollouts(cost: CallCost, kv_tokens: float) -> float:
    """Return how many rollouts a generator replica runs at a time.

    The rollouts per replica, `max_running` and the tokens that fit into the KV cache are limits.
    The estimate uses full lengths, because rollouts that start together reach full length together.
    """
    workload = cost.workload
    replica_rollouts = workload.sampled_workload.num_rollouts / cost.dp_size
    slots = kv_tokens / workload.rollout_tokens
    return max(1.0, min(replica_rollouts, cost.constants.max_running, slots))


def estimate_generator_timing(cost: CallCost, kv_room_bytes: float) -> GeneratorTiming:
    """Return the timing of a generator replica with `kv_room_bytes` of KV cache on each device.

    With p pipeline stages the rollouts form p batches that follow each other through the stages.
    Each batch gets a token in the time that all stages take for one batch. Weights are therefore
    read once per batch, and the time per rollout is spread over the stages.
    """
    shape, constants, stages = cost.shape, cost.constants, cost.pp_size
    kv_bytes = count_kv_token_bytes(shape, cost.tp_size, stages, constants)
    kv_tokens = max(0.0, kv_room_bytes) / kv_bytes
    running = estimate_running_rollouts(cost, kv_tokens)
    bytes_per_s = cost.memory_bytes_per_s * constants.decode_memory_fraction
    params_read = count_decode_step_params(
        shape, cost.tp_size, stages, running / stages, cost.ep_size
    )
    weights = params_read * constants.served_bytes
    communication_s = (
        cost.all_reduces_per_layer * stages * cost.all_reduce_latency_s
        + stages * cost.parallel_groups.pipeline.send_latency_s
    )
    exchanges = EXPERT_ALL_TO_ALLS * shape.moe_layers * cost.parallel_groups.expert.send_latency_s
    layers = constants.decode_layer_s * shape.layers
    prompt_flops = count_forward_flops(shape, 1, cost.workload.prompt_tokens)
    compute = cost.compute_s(2 * shape.active_matmul_params, constants.decode_flops_fraction)
    return GeneratorTiming(
        replicas=cost.dp_size,
        max_running=constants.max_running,
        kv_tokens=kv_tokens,
        weights_s=stages * weights / bytes_per_s,
        kv_token_s=kv_bytes / bytes_per_s,
        compute_rollout_s=compute,
        step_s=stages * constants.decode_step_s + layers + communication_s + exchanges,
        rollout_s=constants.decode_rollout_s + cost.communication_token_s,
        prefill_token_s=cost.compute_s(prompt_flops, constants.forward_flops_fraction)
        + cost.communication_token_s,
        begin_s=constants.begin_s,
        group_s=constants.decode_group_s,
    )


def count_groups_in_batch(cost: CallCost) -> int:
    """Return the groups per scoring batch: as many as `score_tokens` tokens hold, at least 1."""
    workload, constants = cost.workload, cost.constants
    if cost.is_scored_by_group:
        return 1
    tokens = workload.group_size * workload.rollout_tokens
    return max(1, min(workload.groups_per_step, int(constants.score_tokens / tokens)))


def estimate_score_timing(cost: CallCost, loading_s: float = 0.0) -> ScoreTiming:
    """Return the timing of a scoring replica.

    loading_s: time to load offloaded weights, once a step; the step's batches share this time.
    """
    constants, workload, shape = cost.constants, cost.workload, cost.shape
    batch = count_groups_in_batch(cost)
    batches = max(1, math.ceil(workload.groups_per_step / batch / cost.dp_size))
    # A group of more than `score_tokens` tokens is computed in several micro-batches.
    tokens = batch * workload.group_size * workload.rollout_tokens
    micro_batches = batches * max(1, math.ceil(tokens / constants.score_tokens))
    micro_batches = cost.count_micro_batches(micro_batches, workload.num_rollouts / cost.dp_size)
    bubble = cost.compute_bubble_factor(micro_batches)
    begin_s = (
        cost.all_reduces_per_layer * cost.all_reduce_latency_s
        + cost.expert_overhead_s
        + cost.parallel_groups.pipeline.send_latency_s
    )
    token_s = cost.compute_s(cost.forward_token_flops, constants.forward_flops_fraction)
    token_s += cost.communication_token_s
    if cost.is_sharded:
        begin_s += _compute_exposed_gather_s(cost)
    if cost.scores_from_host:
        # A layer is copied while the layer before computes; nothing hides the first.
        held = cost.device_params / (cost.fsdp_size if cost.is_sharded else 1)
        copy_s = held * constants.served_bytes * cost.host_byte_s
        hidden_s = min(tokens, constants.score_tokens) * token_s
        begin_s += copy_s / shape.layers + max(0.0, copy_s - hidden_s)
    return ScoreTiming(
        replicas=cost.dp_size,
        batch=batch,
        batch_s=constants.score_batch_s + (bubble * begin_s * micro_batches + loading_s) / batches,
        rollout_s=constants.score_rollout_s,
        token_s=token_s * bubble,
    )


def _compute_exposed_gather_s(cost: CallCost) -> float:
    """Return the seconds of a forward pass in which computation does not hide gathered weights."""
    data, num_bytes = cost.parallel_groups.data, cost.device_params * cost.constants.served_bytes
    traffic_s = num_bytes * data.all_gather_byte_s + cost.shape.layers * data.all_gather_latency_s
    return ZERO_EXPOSED_FRACTION * traffic_s


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
    passes = FORWARD_BACKWARD_PASSES + constants.recompute
    micro_batches = count_rank_micro_batches(cost)
    bubble = cost.compute_bubble_factor(micro_batches)
    # The backward pass has as many all-reduces as the forward pass, and again as many if it repeats
    # the forward pass.
    all_reduces = cost.all_reduces_per_layer * (passes - 1)
    compute = cost.compute_s(cost.forward_token_flops, constants.train_flops_fraction)
    token_s = passes * compute + all_reduces * cost.all_reduce_token_s + 2 * cost.send_token_s
    token_s += (passes - 1) * cost.expert_token_s - _compute_frozen_savings_s(cost, passes)
    if cost.keeps_inputs_on_host:
        # The inputs of layers go to the host and come back on the stream that computes.
        token_s += 2 * cost.shape.layers * cost.hidden_bytes * cost.host_byte_s
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
    return ZERO_EXPOSED_FRACTION * traffic_s


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
    if cost.updates_on_host:
        return params * num_bytes * cost.host_byte_s
    return params * num_bytes / (cost.memory_bytes_per_s * OPTIMIZER_MEMORY_FRACTION)
