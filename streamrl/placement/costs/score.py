"""What a forward pass over rollouts costs: references, reward models, values."""

import math

from streamrl.placement.costs.call_cost import CallCost
from streamrl.placement.costs.constants import CostConstants
from streamrl.placement.stage_timings import ScoreTiming
from streamrl.placement.workload import Workload


def groups_in_batch(workload: Workload, constants: CostConstants) -> int:
    """Groups that are scored at once: as many as have so many tokens together, at least one."""
    tokens = workload.group_size * workload.rollout_tokens
    return max(1, min(workload.groups_per_step, int(constants.score_tokens / tokens)))


def score_timing(work: CallCost, loading_s: float = 0.0) -> ScoreTiming:
    """Of a replica that waits so long for its weights in a step, spread over its batches."""
    constants, workload = work.constants, work.workload
    batch = groups_in_batch(workload, constants)
    batches = max(1, math.ceil(workload.groups_per_step / batch / work.dp_size))
    # Rollouts of a group too large for a batch are computed in parts.
    tokens = batch * workload.group_size * workload.rollout_tokens
    parts = batches * max(1, math.ceil(tokens / constants.score_tokens))
    parts = work.count_micro_batches(parts, workload.num_rollouts / work.dp_size)
    longer = work.bubble_factor(parts)
    begin_s = (
        work.all_reduces_per_layer * work.all_reduce_latency_s
        + work.expert_overhead_s
        + work.parallel_groups.pipeline.send_latency_s
    )
    compute = work.compute_s(work.forward_token_flops, constants.forward_flops_fraction)
    token_s = (
        compute
        + work.all_reduces_per_layer * work.all_reduce_token_s
        + work.expert_token_s
        + work.send_token_s
    )
    return ScoreTiming(
        replicas=work.dp_size,
        batch=batch,
        batch_s=constants.score_batch_s + (longer * begin_s * parts + loading_s) / batches,
        rollout_s=constants.score_rollout_s,
        token_s=token_s * longer,
    )


def rule_timing(constants: CostConstants) -> ScoreTiming:
    """Of a reward that computes without a model and without devices."""
    return ScoreTiming(
        1, batch=1, batch_s=constants.rule_group_s, rollout_s=constants.rule_rollout_s, token_s=0.0
    )
