"""Timing of a generator: roofline of a decode step, and the overheads on top."""

from streamrl.engines.models.model_shapes import ModelShape
from streamrl.planner.costs.call_cost import EXPERT_ALL_TO_ALLS, CallCost
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.flops import count_token_flops
from streamrl.planner.costs.param_shards import count_stage_params
from streamrl.planner.problem.stage_timings import GeneratorTiming


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
    prompt_flops = count_token_flops(shape, cost.workload.prompt_tokens)
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
