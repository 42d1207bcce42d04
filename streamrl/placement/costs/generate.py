"""What sampling costs: the roofline of a decode step, and what comes on top of it."""

from streamrl.placement.costs.call_cost import EXPERT_ALL_TO_ALLS, CallCost
from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.costs.flops import token_flops
from streamrl.placement.costs.param_shards import stage_params
from streamrl.placement.model_shapes import ModelShape
from streamrl.placement.stage_timings import GeneratorTiming


def kv_token_bytes(shape: ModelShape, tensor: int, stages: int, constants: CostConstants) -> float:
    """Of one device, a token's keys and values.

    Tensor-parallel ranks split the heads; where there are fewer, some hold the same. What is
    compressed (MLA) all of them hold.
    """
    split = 1 if shape.kv_latent_width else min(tensor, shape.kv_heads)
    return shape.kv_bytes_per_token(constants.kv_bytes) / split / stages


def decode_step_params(
    shape: ModelShape, tensor: int, stages: int, running: float, expert: int = 1
) -> float:
    """Of one device, the parameters that a decode step of so many rollouts reads.

    Of experts those that at least one of them passes, if each picks its own at random; where they
    are shared out, those of all replicas that share them.
    """
    held: float = sum(stage_params(shape, stages, tensor, expert)) / stages
    if not shape.has_scalar_head and not shape.has_tied_embeddings:
        # Of the embedding a step looks up a few rows.
        held -= shape.vocab * shape.hidden / tensor / stages
    if not shape.experts:
        return held
    sharers = max(1.0, expert / tensor)
    missed: float = (1 - shape.experts_per_token / shape.experts) ** (running * sharers)
    split = expert if expert > 1 else tensor
    return held - shape.routed_params * missed / split / stages


def running_rollouts(work: CallCost, kv_tokens: float) -> float:
    """How many a replica samples at a time, about: as many as there are, and have room.

    Those that begin together are at their longest together, too.
    """
    workload = work.workload
    here = workload.sampled_workload.num_rollouts / work.dp_size
    slots = kv_tokens / workload.rollout_tokens
    return max(1.0, min(here, work.constants.max_running, slots))


def generator_timing(work: CallCost, kv_room_bytes: float) -> GeneratorTiming:
    """Of a replica whose devices have so many bytes each for keys and values.

    With pipeline stages the rollouts fall into as many parts, which follow one another through the
    stages: each gets a token in the time that all stages take for a part. So weights are read once
    for each part, and what depends on the rollouts is spread over the stages.
    """
    shape, constants, stages = work.shape, work.constants, work.pp_size
    kv_bytes = kv_token_bytes(shape, work.tp_size, stages, constants)
    kv_tokens = max(0.0, kv_room_bytes) / kv_bytes
    running = running_rollouts(work, kv_tokens)
    memory = work.memory_bytes_per_s * constants.decode_memory_fraction
    read = decode_step_params(shape, work.tp_size, stages, running / stages, work.ep_size)
    weights = read * constants.served_bytes
    sums = (
        work.all_reduces_per_layer * stages * work.all_reduce_latency_s
        + stages * work.parallel_groups.pipeline.send_latency_s
    )
    exchanges = (
        EXPERT_ALL_TO_ALLS * shape.moe_layers * work.parallel_groups.expert.all_to_all_latency_s
    )
    layers = constants.decode_layer_s * shape.layers
    compute = work.compute_s(2 * shape.active_matmul_params, constants.decode_flops_fraction)
    return GeneratorTiming(
        replicas=work.dp_size,
        max_running=constants.max_running,
        kv_tokens=kv_tokens,
        weights_s=stages * weights / memory,
        kv_token_s=kv_bytes / memory,
        compute_rollout_s=compute,
        step_s=stages * constants.decode_step_s + layers + sums + exchanges,
        rollout_s=constants.decode_rollout_s
        + work.all_reduces_per_layer * work.all_reduce_token_s
        + work.expert_token_s
        + work.send_token_s,
        prefill_token_s=_prefill_token_s(work),
        begin_s=constants.begin_s,
        group_s=constants.decode_group_s,
    )


def _prefill_token_s(work: CallCost) -> float:
    """Of a prompt's token: the stages follow one another, and each computes its part."""
    flops = token_flops(work.shape, work.workload.prompt_tokens)
    compute = work.compute_s(flops, work.constants.forward_flops_fraction)
    return (
        compute
        + work.all_reduces_per_layer * work.all_reduce_token_s
        + work.expert_token_s
        + work.send_token_s
    )
