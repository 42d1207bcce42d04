"""Metrics of the rollouts of a micro-batch, as sums that are added over a training step."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from streamrl.buffer.micro_batch_schedule import RolloutIndex
from streamrl.messages import (
    TRUNCATIONS,
    Columns,
    count_samples,
    find_first_samples,
    find_replayed_uid,
    has_equal_scores,
    is_component_column,
    split_token_column,
    sum_over_samples,
)

_TRUNCATION_CODES = tuple(reason.value for reason in TRUNCATIONS)


def sum_rollouts(
    groups: Mapping[str, Columns], picks: Sequence[RolloutIndex], derived: Mapping[str, Columns]
) -> dict[str, float]:
    """Sum scores, costs and reward components of included rollouts, and tokens of all that ended.

    Replays do not count.

    `picks` are (uid, index of the rollout in its group), with all samples of an episode, which
    count as one rollout. A group with an included rollout counts once, with its first. `derived`
    has the column `included` of each group. Keys are names of metrics; `sampled_max`, the most
    sampled tokens of a rollout, is a maximum instead of a sum.
    """
    sums = {
        "rollouts": 0.0,
        "included": 0.0,
        "groups": 0.0,
        "equal_score_groups": 0.0,
        "score_sum": 0.0,
        "score_squared_sum": 0.0,
        "sampled_sum": 0.0,
        "sampled_max": 0.0,
        "probability_sum": 0.0,
        "truncated_sum": 0.0,
    }
    sampled = {uid: _sum_sampled_tokens(columns) for uid, columns in groups.items()}
    for uid, index in picks:
        if find_replayed_uid(uid) is not None or index not in sampled[uid]:
            continue  # of an older policy, or not the first sample of its episode
        columns = groups[uid]
        score, (tokens, probability) = float(columns["scores"][index]), sampled[uid][index]
        scores = columns["scores"][derived[uid]["included"]]
        if index == 0 and scores.size:
            sums["groups"] += 1
            sums["equal_score_groups"] += bool(has_equal_scores(scores.min(), scores.max()))
        sums["rollouts"] += 1
        sums["sampled_sum"] += tokens
        sums["probability_sum"] += probability
        sums["sampled_max"] = max(sums["sampled_max"], tokens)
        sums["truncated_sum"] += columns["finish_reason"][index] in _TRUNCATION_CODES
        if not derived[uid]["included"][index]:
            continue
        sums["included"] += 1
        sums["score_sum"] += score
        sums["score_squared_sum"] += score * score
        for name in columns:
            if is_component_column(name):
                _add_component(sums, name, float(columns[name][index]))
        if "costs" in columns:
            sums["cost_sum"] = sums.get("cost_sum", 0.0) + float(columns["costs"][index])
    return sums


def _add_component(sums: dict[str, float], name: str, value: float) -> None:
    """Add a rollout's reward component to the sums of that component.

    NaN means that the reward does not apply to the rollout, so only other values are counted.
    """
    key, amount = (f"{name}_absent", 1.0) if math.isnan(value) else (f"{name}_sum", value)
    sums.setdefault(f"{name}_sum", 0.0)
    sums[key] = sums.get(key, 0.0) + amount


def _sum_sampled_tokens(columns: Columns) -> dict[int, tuple[float, float]]:
    """Return number and summed probability of the sampled tokens of each episode.

    By the index of the episode's first rollout; probabilities are those when sampled.
    """
    samples = count_samples(columns)
    lengths = sum_over_samples(columns["lengths"], samples)
    masks = split_token_column(columns["loss_mask"], lengths)
    logprobs = split_token_column(columns["generator_logprobs"], lengths)
    firsts = find_first_samples(samples).tolist()
    return {
        first: (float(mask.sum()), float(np.exp(row[mask], dtype=np.float64).sum()))
        for first, mask, row in zip(firsts, masks, logprobs, strict=True)
    }
