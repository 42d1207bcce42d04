"""Timing of scoring: forward passes of reference, reward and value models over rollouts."""

import math

from streamrl.planner.costs.call_cost import CallCost
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.problem.stage_timings import ScoreTiming
from streamrl.planner.problem.workload import Workload


def count_groups_in_batch(workload: Workload, constants: CostConstants) -> int:
    """Return the groups per scoring batch: as many as `score_tokens` tokens hold, at least 1."""
    tokens = workload.group_size * workload.rollout_tokens
    return max(1, min(workload.groups_per_step, int(constants.score_tokens / tokens)))


def estimate_score_timing(cost: CallCost, loading_s: float = 0.0) -> ScoreTiming:
    """Return the timing of a scoring replica.

    loading_s: time to load offloaded weights, once a step; the step's batches share this time.
    """
    constants, workload = cost.constants, cost.workload
    batch = count_groups_in_batch(workload, constants)
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
    if constants.scores_from_host:
        begin_s += cost.device_params * constants.served_bytes * cost.host_byte_s
    compute = cost.compute_s(cost.forward_token_flops, constants.forward_flops_fraction)
    return ScoreTiming(
        replicas=cost.dp_size,
        batch=batch,
        batch_s=constants.score_batch_s + (bubble * begin_s * micro_batches + loading_s) / batches,
        rollout_s=constants.score_rollout_s,
        token_s=(compute + cost.communication_token_s) * bubble,
    )


def estimate_rule_timing(constants: CostConstants) -> ScoreTiming:
    return ScoreTiming(
        1, batch=1, batch_s=constants.rule_group_s, rollout_s=constants.rule_rollout_s, token_s=0.0
    )
