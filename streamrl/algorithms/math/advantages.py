"""Rewards per token, and advantages of rollouts or tokens over a baseline.

Shapes: B rollouts, T positions. Scores are [B]. Per-token tensors are [B, T], with `loss_mask` bool
true where the policy sampled. Values outside the mask, NaN included, have no effect, and results
are 0 there. A group consists of the rows with equal integers in `group_ids` [B], in any order.
Statistics use float64; results have the dtype of the input. Time passes by tokens, or by turns:
`TurnSteps` sums [B, T] to [B, K], one entry per turn, and spreads results over the tokens of turns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from streamrl.algorithms.math.tokens import apply_mask
from streamrl.messages import has_equal_scores


def _get_result_dtype(scores: Tensor) -> torch.dtype:
    return scores.dtype if scores.is_floating_point() else torch.float32


def group_relative_advantages(
    scores: Tensor,
    group_ids: Tensor,
    *,
    scale: str = "std",
    eps: float = 1e-6,
    single: str = "zero",
) -> Tensor:
    """Return score minus the group's mean score, divided according to `scale`: [B].

    "std" divides by the standard deviation of the group's scores, "batch" by that of all scores
    (with n - 1), "mean" by the group's mean, each plus `eps`; "none" does not divide. If the mean
    is not positive, "mean" gives 0. A group of equal scores gets exactly 0. For a group with a
    single rollout, `single` is "zero", or "keep" for a baseline of 0 and a deviation of 1. Example:
    scores 1, 0, 0, 1 with "none" give 0.5, -0.5, -0.5, 0.5.

    Source: Shao et al. 2024 (DeepSeekMath, GRPO), section 4.1.2; "none" is Liu et al. 2025 (Dr.
    GRPO), "batch" Liu et al. 2025 (Tricks or Traps), "mean" Tajwar et al. 2026 (MaxRL).
    """
    values, groups = scores.double(), _GroupStatistics(group_ids)
    centered = groups.center_values(values)
    if scale == "std":
        centered = centered / (groups.group_std(centered) + eps)
    elif scale == "batch":
        batch = _GroupStatistics(torch.zeros_like(group_ids))
        deviation = batch.group_std(batch.center_values(values))
        centered = centered / (deviation + eps)
    elif scale == "mean":
        mean = groups.group_mean(values)
        centered = torch.where(mean > 0, centered / (mean + eps), 0.0)
    elif scale != "none":
        raise ValueError(f"scale={scale!r}: must be std, batch, mean or none")
    single_values = values / (1 + eps) if scale == "std" else values
    filled = _fill_single_rollouts(centered, single_values, groups, single)
    return filled.to(_get_result_dtype(scores))


def leave_one_out_advantages(scores: Tensor, group_ids: Tensor, *, single: str = "zero") -> Tensor:
    """Return score minus the mean score of the other rollouts in the group: [B].

    For a group with a single rollout, `single` is "zero", or "keep" for a baseline of 0. Source:
    Ahmadian et al. 2024 (RLOO).
    """
    values, groups = scores.double(), _GroupStatistics(group_ids)
    num_others = (groups.group_sizes - 1).clamp(min=1)
    # s - mean of the others = (s - mean of all) n / (n - 1)
    advantages = groups.center_values(values) * groups.group_sizes / num_others
    return _fill_single_rollouts(advantages, values, groups, single).to(_get_result_dtype(scores))


def length_weighted_advantages(
    scores: Tensor, group_ids: Tensor, lengths: Tensor, *, single: str = "zero"
) -> Tensor:
    """Return score minus the group's mean score weighted by length: [B].

    `lengths` [B] are the sampled tokens of the rollouts; a group without any gets its plain mean.
    The weights give the baseline of least variance. For a group with a single rollout, `single` is
    "zero", or "keep" for a baseline of 0. Source: Hao et al. 2025 (OPO).
    """
    values, weights, groups = scores.double(), lengths.double(), _GroupStatistics(group_ids)
    # Start from centered scores, so that equal scores give exactly 0.
    centered = groups.center_values(values)
    baseline = groups.group_sum(weights * centered) / groups.group_sum(weights).clamp(min=1)
    advantages = centered - baseline
    return _fill_single_rollouts(advantages, values, groups, single).to(_get_result_dtype(scores))


def best_of_group_advantages(
    scores: Tensor,
    group_ids: Tensor,
    *,
    scale: str = "none",
    eps: float = 1e-6,
) -> Tensor:
    """Return the lead of each group's best rollout over the second best; 0 for all others: [B].

    The lead is the decrease of the group's best score without this rollout; for scores 0 and 1, its
    contribution to pass@G. Scores 0.2, 0.9, 0.6 give 0, 0.3, 0; a single rollout gets 0. `scale`
    "std" divides by the standard deviation of the group's scores. Source: Tang et al. 2025
    (inference-time objectives). Raises ValueError for a different scale.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale={scale!r}: must be std or none")
    values, groups = scores.double(), _GroupStatistics(group_ids)
    best = groups.group_max(values)
    # Rollouts that tie for the best have a lead of 0.
    is_best = has_equal_scores(values, best)
    second = groups.group_max(torch.where(is_best, -torch.inf, values))
    has_lead = is_best & (groups.group_sum(is_best.double()) == 1) & (groups.group_sizes > 1)
    lead = torch.where(has_lead, best - second, 0.0)
    if scale == "std":
        lead = lead / (groups.group_std(groups.center_values(values)) + eps)
    return lead.to(_get_result_dtype(scores))


def gpg_advantages(scores: Tensor, group_ids: Tensor, *, single: str = "zero") -> Tensor:
    """Return score minus the group's mean score, divided by the share of nonzero scores: [B].

    The division compensates for rollouts without a gradient; the share is that of the batch. For a
    group with a single rollout, `single` is "zero", or "keep" for a baseline of 0. Source: Chu et
    al. 2025 (GPG).
    """
    values, groups = scores.double(), _GroupStatistics(group_ids)
    factor = len(values) / (values != 0).double().sum().clamp(min=1)
    advantages = factor * groups.center_values(values)
    filled = _fill_single_rollouts(advantages, factor * values, groups, single)
    return filled.to(_get_result_dtype(scores))


def greedy_baseline_advantages(scores: Tensor, baseline_scores: Tensor) -> Tensor:
    """Return score minus the score of the prompt's greedy completion, `baseline_scores` [B]: [B].

    Source: Li et al. 2024 (ReMax).
    """
    return (scores - baseline_scores).to(_get_result_dtype(scores))


def decoupled_reward_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    weights: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Return the weighted sum of the group-relative advantages of each reward: [B].

    `rewards` [B, K]; `weights` [K], default 1 each. Normalizing each reward separately keeps a
    reward of wide spread from dominating. A NaN reward is left out for its rollout. The paper also
    whitens the sum over the batch: use `masked_whiten`. Source: Liu et al. 2026 (GDPO).
    """
    total = torch.zeros(rewards.shape, dtype=torch.float64)
    for advantages, column in zip(total.unbind(-1), rewards.double().unbind(-1), strict=True):
        is_known = ~column.isnan()
        if is_known.any():
            advantages[is_known] = group_relative_advantages(
                column[is_known], group_ids[is_known], eps=eps
            )
    weighted = total if weights is None else total * weights.double()
    return weighted.sum(-1).to(_get_result_dtype(rewards))


def generalized_advantages(
    token_rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Return generalized advantage estimates and returns, both [B, T].

    delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lam A_next, returns A + V. "next" is
    the next token inside the mask: tokens of tools and environments are skipped, and rewards on
    them are ignored. After the last token V is 0. `lam` may differ between rollouts, [B]. For
    whitening use `masked_whiten`. Source: Schulman et al. 2016 (GAE), equation 16.
    """
    rewards = apply_mask(token_rewards.double(), loss_mask)
    estimates = apply_mask(values.double(), loss_mask)
    advantages = torch.zeros_like(rewards)
    next_advantage = next_value = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        is_counted = loss_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - estimates[:, t]
        next_advantage = torch.where(
            is_counted, delta + gamma * lam * next_advantage, next_advantage
        )
        next_value = torch.where(is_counted, estimates[:, t], next_value)
        advantages[:, t] = apply_mask(next_advantage, is_counted)
    dtype = _get_result_dtype(values)
    return advantages.to(dtype), (advantages + estimates).to(dtype)


def length_adaptive_lambda(lengths: Tensor, *, alpha: float) -> Tensor:
    """Return lambda = 1 - 1 / (alpha length) of each rollout, at least 0: [B] float64.

    Weights of deltas decline over a constant share of a rollout. Example: alpha 0.05 and lengths 10
    and 200 give 0 and 0.9. Source: Yue et al. 2025 (VAPO).
    """
    return 1 - 1 / (alpha * lengths.double()).clamp(min=1)


def reward_to_go(token_rewards: Tensor, loss_mask: Tensor, *, gamma: float) -> Tensor:
    """Return the discounted sum of rewards from each token on: [B, T].

    Tokens outside the mask are skipped without discount. REINFORCE++ (Hu et al. 2025) whitens the
    result over the step; its variant with a baseline whitens group-relative scores instead.
    """
    rewards = apply_mask(token_rewards.double(), loss_mask)
    returns = torch.zeros_like(rewards)
    next_return = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        is_counted = loss_mask[:, t]
        next_return = torch.where(is_counted, rewards[:, t] + gamma * next_return, next_return)
        returns[:, t] = apply_mask(next_return, is_counted)
    return returns.to(_get_result_dtype(token_rewards))


class TurnSteps:
    """The turns of each rollout as steps of time: K is the largest number of turns.

    `turn_ids` [B, T]: on the tokens that the policy sampled a positive number, equal within a turn
    and larger in each later turn; 0 on all other tokens. `mask` bool [B, K]: turns that exist.
    """

    def __init__(self, turn_ids: Tensor) -> None:
        self._is_sampled = turn_ids > 0
        last_ids = turn_ids.cummax(-1).values
        self._is_first = last_ids > torch.nn.functional.pad(last_ids[:, :-1], (1, 0))
        self._index = (self._is_first.cumsum(-1) - 1).clamp(min=0)
        counts = self._is_first.sum(-1, keepdim=True)
        # Without any turn, still one that does not exist: rows of no entries cannot be gathered.
        most = max(1, int(counts.max()))
        self.mask = torch.arange(most, device=turn_ids.device) < counts

    def sum_tokens(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [B, T] over the sampled tokens of each turn: [B, K]."""
        # Sums of integers, such as a single state of 64 bits, must stay exact.
        exact = values.double() if values.is_floating_point() else values
        sums = exact.new_zeros(self.mask.shape)
        return sums.scatter_add(1, self._index, exact.where(self._is_sampled, 0)).to(values.dtype)

    def select_first(self, values: Tensor) -> Tensor:
        """Return `values` [B, T] at the first sampled token of each turn: [B, K]."""
        return self.sum_tokens(values.where(self._is_first, 0))

    def spread(self, values: Tensor) -> Tensor:
        """Return `values` [B, K] on the sampled tokens of each turn, 0 elsewhere: [B, T]."""
        return values.gather(1, self._index).where(self._is_sampled, 0)


def turn_relative_advantages(
    turn_rewards: Tensor,
    turn_mask: Tensor,
    group_ids: Tensor,
    *,
    gamma: float,
    scale: str = "none",
) -> Tensor:
    """Return the return from each turn on minus the group's mean return from that turn on: [B, K].

    `turn_rewards` and `turn_mask` [B, K] are 0 and false after the end of an episode, and an
    episode that has ended counts with a return of 0. So the baseline of a turn is the same whether
    or not an episode reaches it. Turns that no episode of a group reaches count nowhere.
    A mean over the episodes that still run is not offered: which of them run depends on the actions
    before, and the sum of rewards normalized in this way rewards or punishes each further turn.
    `scale` as in `group_relative_advantages`. Source: Shao et al. 2024 (DeepSeekMath), section
    4.1.3, with returns in place of normalized rewards.
    """
    returns = reward_to_go(
        turn_rewards, torch.ones_like(turn_rewards, dtype=torch.bool), gamma=gamma
    )
    num_turns = returns.shape[1]
    _, group_index = torch.unique(group_ids, return_inverse=True)
    ids = group_index[:, None] * num_turns + torch.arange(num_turns, device=group_index.device)
    advantages, is_reached = torch.zeros_like(returns), torch.isin(ids, ids[turn_mask])
    advantages[is_reached] = group_relative_advantages(
        returns[is_reached], ids[is_reached], scale=scale
    )
    return advantages


def anchor_advantages(
    turn_rewards: Tensor,
    turn_states: Tensor,
    group_ids: Tensor,
    *,
    gamma: float,
    scale: str = "none",
    depth_weights: Sequence[float] = (1.0,),
) -> Tensor:
    """Return the return from each turn on minus the mean return of its anchor group: [B, K].

    An anchor group consists of the turns of a prompt's episodes with equal states of the
    environment, `turn_states` [B, K] int64; state 0, no state, is in none. A turn alone in its
    group gets 0. `turn_rewards` [B, K] are 0 after the end of an episode. `scale` as in
    `group_relative_advantages`. Source: Feng et al. 2025 (GiGPO, arXiv:2505.10978), equations 6 to
    8.

    With several `depth_weights`, a turn is also in groups whose k = 1, 2, ... states before it are
    equal, too. It gets the mean of its advantages in the groups that have other turns, with the
    weight of each k. Source: He et al. 2026 (HGPO, arXiv:2602.22817).
    """
    returns = reward_to_go(
        turn_rewards, torch.ones_like(turn_rewards, dtype=torch.bool), gamma=gamma
    )
    totals, weights = torch.zeros_like(returns), torch.zeros_like(returns)
    keys, states = [group_ids[:, None].expand_as(turn_states).long()], turn_states
    has_states = torch.ones_like(turn_states, dtype=torch.bool)
    for depth_weight in depth_weights:
        keys, has_states = [*keys, states], has_states & (states != 0)
        if not has_states.any():
            break
        _, anchors, sizes = torch.unique(
            torch.stack([key[has_states] for key in keys]),
            dim=1,
            return_inverse=True,
            return_counts=True,
        )
        weight = depth_weight * (sizes[anchors] > 1)
        parts = group_relative_advantages(returns[has_states], anchors, scale=scale)
        totals[has_states] += weight * parts
        weights[has_states] += weight
        states = torch.nn.functional.pad(states[:, :-1], (1, 0))
    return totals / weights.where(weights > 0, 1.0)


def optimal_token_advantages(
    token_rewards: Tensor,
    score_norms: Tensor,
    loss_mask: Tensor,
    group_ids: Tensor,
    *,
    gamma: float,
    single: str = "zero",
) -> Tensor:
    """Return the return from each token on minus the group's baseline of least variance: [B, T].

    The baseline of a group's n-th sampled tokens is sum(W G) / sum(W) over the rollouts that have
    one. G is the return from the token on, and W the sum of `score_norms` [B, T], squared norms of
    the gradients of logprobs, up to the token. A token that only one rollout of the group reaches
    has baseline 0. For a group of one rollout, `single` is "zero", or "keep" for a baseline of 0.
    Source: Li et al. 2026 (OTB, arXiv:2602.07078).
    """
    returns = reward_to_go(token_rewards.double(), loss_mask, gamma=gamma)
    energy = apply_mask(score_norms.double(), loss_mask).cumsum(-1)
    groups, (num_rows, width) = _GroupStatistics(group_ids), loss_mask.shape
    _, group_index = torch.unique(group_ids, return_inverse=True)
    ids = (group_index[:, None] * width + loss_mask.cumsum(-1) - 1)[loss_mask]
    values, weights, tokens = returns[loss_mask], energy[loss_mask], _GroupStatistics(ids)
    # Start from centered returns, so that equal returns give exactly 0.
    centered = tokens.center_values(values)
    total = tokens.group_sum(weights)
    baseline = tokens.group_sum(weights * centered) / total.where(total > 0, 1.0)
    is_alone = groups.group_sizes[:, None].expand(num_rows, width)[loss_mask] == 1
    kept = torch.where(is_alone, values if single == "keep" else 0.0, values)
    advantages = torch.zeros_like(returns)
    advantages[loss_mask] = torch.where(tokens.group_sizes > 1, centered - baseline, kept)
    return advantages.to(_get_result_dtype(token_rewards))


def lagrangian_advantages(
    reward_advantages: Tensor, cost_advantages: Tensor, *, multiplier: float
) -> Tensor:
    """Return advantages of reward and cost combined: (A_R - lambda A_C) / (1 + lambda).

    lambda is `multiplier`; all shapes are equal. The division keeps the scale, and so the effective
    learning rate, independent of lambda. Source: Dai et al. 2024 (Safe RLHF).
    """
    return (reward_advantages - multiplier * cost_advantages) / (1 + multiplier)


def masked_whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Return `x` normalized to mean 0 and variance 1 over the mask: [B, T].

    Statistics are over tokens, so long rollouts weigh more. `eps` is added to the variance. Fewer
    than two tokens give 0.
    """
    kept, count = apply_mask(x.double(), mask), mask.sum()
    centered = apply_mask(kept - kept.sum() / count.clamp(min=1), mask)
    variance = centered.square().sum() / (count - 1).clamp(min=1)
    return (centered * (variance + eps).rsqrt()).to(_get_result_dtype(x))


def soft_overlong_penalty(
    lengths: Tensor, *, max_length: int, buffer: int, factor: float = 1.0
) -> Tensor:
    """Return the penalty of long completions, from 0 to -factor: [B] float32.

    0 up to `max_length - buffer` tokens, then linear, -factor from `max_length` on. `lengths` [B]
    are the sampled tokens. Example: max_length 100, buffer 20, factor 1 give -0.5 at 90 tokens.
    Source: Yu et al. 2025 (DAPO).
    """
    excess = (lengths - (max_length - buffer)).double() / buffer
    return (-factor * excess.clamp(0, 1)).float()


def make_token_rewards(
    scores: Tensor, loss_mask: Tensor, penalties: Tensor | None = None
) -> Tensor:
    """Return token rewards: the score on the last sampled token, minus all `penalties`: [B, T].

    `scores` [B]; `penalties` [B, T], for example KL times its weight. 0 where `loss_mask` is false.
    """
    positions = torch.arange(loss_mask.shape[1], device=loss_mask.device)
    last_position = torch.where(loss_mask, positions, -1).amax(-1, keepdim=True)
    rewards = apply_mask(scores[:, None].expand(loss_mask.shape), positions == last_position)
    return rewards if penalties is None else rewards - apply_mask(penalties, loss_mask)


class _GroupStatistics:
    """Sum, mean, maximum and deviation of values in each group, repeated per rollout: [B]."""

    def __init__(self, group_ids: Tensor) -> None:
        _, self._index = torch.unique(group_ids, return_inverse=True)
        self._num_groups = int(self._index.max()) + 1 if len(group_ids) else 0
        #: Rows in the group of each row.
        self.group_sizes = torch.bincount(self._index)[self._index]

    def group_sum(self, values: Tensor) -> Tensor:
        return values.new_zeros(self._num_groups).index_add(0, self._index, values)[self._index]

    def group_mean(self, values: Tensor) -> Tensor:
        return self.group_sum(values) / self.group_sizes

    def group_max(self, values: Tensor) -> Tensor:
        empty = values.new_zeros(self._num_groups)
        best = empty.scatter_reduce(0, self._index, values, "amax", include_self=False)
        return best[self._index]

    def center_values(self, values: Tensor) -> Tensor:
        """Subtract the group's mean; exactly 0 if `has_equal_scores` of the group.

        Dividing by the tiny deviation would blow up a rounding error.
        """
        equal = has_equal_scores(-self.group_max(-values), self.group_max(values))
        return torch.where(equal, 0.0, values - self.group_mean(values))

    def group_std(self, centered: Tensor) -> Tensor:
        """Return the standard deviation in each group, given `center_values` of the values: [B]."""
        return (self.group_sum(centered.square()) / (self.group_sizes - 1).clamp(min=1)).sqrt()


def _fill_single_rollouts(
    advantages: Tensor, single_values: Tensor, groups: _GroupStatistics, single: str
) -> Tensor:
    """Replace the advantages of groups with a single rollout: by `single_values` or by 0.

    `single`: "keep" takes `single_values`, "zero" takes 0.
    """
    is_single = groups.group_sizes == 1
    return torch.where(is_single, single_values if single == "keep" else 0.0, advantages)
