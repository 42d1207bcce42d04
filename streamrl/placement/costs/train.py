"""What training costs: passes with their communication and bubbles, and updates."""

import math

from streamrl.placement.costs.call_cost import Work
from streamrl.placement.costs.flops import train_passes
from streamrl.placement.costs.traffic import SHARDS_PARAMETERS
from streamrl.placement.stage_timings import TrainTiming

SHARDS_OPTIMIZER, SHARDS_GRADIENTS = 1, 2
"""The stages of ZeRO from which on replicas share these out."""


def replica_tokens(work: Work) -> float:
    """Tokens that a replica trains between two updates."""
    return work.workload.tokens / work.workload.mini_batches / work.replicas


def fewest_micro_batches(work: Work) -> int:
    """Micro-batches of a replica between two updates, as large as they may be."""
    return max(1, math.ceil(replica_tokens(work) / work.workload.micro_batch_tokens))


def micro_batches(work: Work) -> int:
    """Micro-batches of a replica between two updates: more where that fills a pipeline."""
    rollouts = work.workload.rollouts / work.workload.mini_batches / work.replicas
    return work.filling(fewest_micro_batches(work), rollouts)


def train_timing(work: Work, moving_s: float = 0.0) -> TrainTiming:
    """Of all replicas of a model that is trained; with so long for its state in a step."""
    constants = work.constants
    passes = train_passes(constants)
    each = micro_batches(work)
    longer = work.with_bubble(each)
    # Backward there are as many sums again as forward, and as many more where that is repeated.
    sums = work.sums * (passes - 1)
    compute = work.compute_s(work.forward_token_flops, constants.train_flops_fraction)
    token_s = passes * compute + sums * work.sum_token_s + 2 * work.pass_token_s
    token_s += (passes - 1) * work.expert_token_s - _frozen_s(work, passes)
    begin_s = sums * work.sum_s + passes * work.experts_s + 2 * work.groups.pipeline.send_s
    return TrainTiming(
        shares=work.replicas,
        # Whoever counts micro-batches counts the fewest.
        micro_batch_s=(constants.micro_batch_s + longer * begin_s + _exposed_s(work))
        * (each / fewest_micro_batches(work)),
        token_s=token_s * longer,
        update_s=constants.update_s + _reduce_s(work) + _optimizer_s(work),
        step_s=constants.train_step_s + moving_s,
        round_s=constants.round_s,
    )


def _frozen_s(work: Work, passes: int) -> float:
    """Of a token's passes, what weights that are not trained save: products for their gradients.

    Adapters in their place have all their own products.
    """
    shape = work.shape
    if not shape.trained:
        return 0.0
    products = 2 * shape.active_matmul_params
    once = work.compute_s(products, work.constants.train_flops_fraction)
    return once * (1 - passes * 2 * shape.trained / products)


def _exposed_s(work: Work) -> float:
    """ZeRO's traffic in a micro-batch, as far as nothing hides it.

    From stage 2 on gradients are reduced at once; from stage 3 on weights are gathered forward and
    backward. Micro-batches of a pipeline follow one another, and so does this.
    """
    data, constants, stage = work.groups.data, work.constants, work.assignment.zero_stage
    if data.ranks == 1 or stage < SHARDS_GRADIENTS:
        return 0.0
    num_bytes = work.trained_params * constants.reduced_bytes
    if stage >= SHARDS_PARAMETERS:
        num_bytes += work.params * 2 * constants.weight_bytes
    whole = num_bytes * data.gather_byte_s + work.shape.layers * data.gather_s
    return constants.zero_exposed_fraction * whole


def _reduce_s(work: Work) -> float:
    """Gradients summed over the replicas; where these share out the optimizer, weights go back."""
    data, constants, stage = work.groups.data, work.constants, work.assignment.zero_stage
    if data.ranks == 1:
        return 0.0
    if stage < SHARDS_OPTIMIZER:
        bytes_twice = constants.reduced_bytes
        return data.all_reduce_s + work.trained_params * bytes_twice * data.all_reduce_byte_s
    num_bytes = constants.reduced_bytes if stage < SHARDS_GRADIENTS else 0
    if stage < SHARDS_PARAMETERS:
        num_bytes += constants.weight_bytes
    return 2 * data.gather_s + work.trained_params * num_bytes * data.gather_byte_s


def _optimizer_s(work: Work) -> float:
    """To read and write its state, and read gradients and write weights."""
    constants = work.constants
    num_bytes = 2 * constants.optimizer_bytes + constants.gradient_bytes + constants.weight_bytes
    is_shared = work.assignment.zero_stage >= SHARDS_OPTIMIZER
    params = work.shared_params if is_shared else work.params
    params *= work.shape.trained_part
    return params * num_bytes / (work.memory_bytes_per_s * constants.optimizer_memory_fraction)
