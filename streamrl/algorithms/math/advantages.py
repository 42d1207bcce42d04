"""Advantages: how much better a rollout, or a token of it, did than was to be expected.

Shapes: B rollouts, T positions. Scores are [B]. What is per token is [B, T], with `loss_mask` bool
true where the policy sampled; whatever stands elsewhere, NaN included, has no say, and the results
are 0 there. A group is the rows with the same integer in `group_ids` [B], wherever they lie. The
statistics are taken in float64, the results have the dtype of what came in.
"""

import torch
from torch import Tensor

from streamrl.algorithms.math.masks import apply_mask
from streamrl.algorithms.options import ADVANTAGE_SCALES, SINGLE_ROLLOUT_MODES


def _result_dtype(scores: Tensor) -> torch.dtype:
    return scores.dtype if scores.is_floating_point() else torch.float32


def group_relative_advantages(
    scores: Tensor,
    group_ids: Tensor,
    *,
    scale: str = "std",
    eps: float = 1e-6,
    unbiased: bool = True,
    single: str = "zero",
) -> Tensor:
    """Score minus the group's mean score, divided by what `scale` says: [B].

    "std" divides by the deviation of the group's scores, "batch" by that of all scores (`unbiased`:
    with n - 1), "mean" by the group's mean, both plus `eps`; "none" by nothing. Where the mean is
    not positive, "mean" gives 0. A group of equal scores gets exactly 0. A group of one has nothing
    to compare with: `single` is "zero", or "keep" for a baseline of 0 and a deviation of 1.

    Source: Shao et al. 2024 (DeepSeekMath, GRPO), section 4.1.2; "none" is Liu et al. 2025 (Dr.
    GRPO), "batch" Liu et al. 2025 (Tricks or Traps), "mean" Tajwar et al. 2026 (MaxRL). Raises
    ValueError on an unknown `scale` or `single`.
    """
    if scale not in ADVANTAGE_SCALES:
        raise ValueError(f"scale={scale!r}: must be one of {', '.join(ADVANTAGE_SCALES)}")
    values, groups = scores.double(), _GroupStatistics(group_ids)
    centred = groups.center_values(values)
    if scale == "std":
        centred = centred / (groups.group_std(centred, unbiased=unbiased) + eps)
    elif scale == "batch":
        everyone = _GroupStatistics(torch.zeros_like(group_ids))
        deviation = everyone.group_std(everyone.center_values(values), unbiased=unbiased)
        centred = centred / (deviation + eps)
    elif scale == "mean":
        mean = groups.group_mean(values)
        centred = torch.where(mean > 0, centred / (mean + eps), 0.0)
    kept = values / (1 + eps) if scale == "std" else values
    return _fill_single_rollouts(centred, kept, groups, single).to(_result_dtype(scores))


def leave_one_out_advantages(scores: Tensor, group_ids: Tensor, *, single: str = "zero") -> Tensor:
    """Score minus the mean score of the others in its group: [B].

    A group of one has no others: `single` is "zero", or "keep" for a baseline of 0. Source:
    Ahmadian et al. 2024 (RLOO). Raises ValueError on an unknown `single`.
    """
    values, groups = scores.double(), _GroupStatistics(group_ids)
    others = (groups.group_sizes - 1).clamp(min=1)
    advantages = groups.center_values(values) * groups.group_sizes / others
    return _fill_single_rollouts(advantages, values, groups, single).to(_result_dtype(scores))


def length_weighted_advantages(
    scores: Tensor, group_ids: Tensor, lengths: Tensor, *, single: str = "zero"
) -> Tensor:
    """Score minus the mean score of the group's tokens: [B].

    `lengths` [B] are the sampled tokens of the rollouts: a long one weighs more in the baseline,
    which makes it the one of least variance. A group of one is `single`: "zero", or "keep" for a
    baseline of 0. Source: Hao et al. 2025 (OPO). Raises ValueError on an unknown `single`.
    """
    values, weights, groups = scores.double(), lengths.double(), _GroupStatistics(group_ids)
    # From the centred scores, so that equal scores are exactly 0 here too.
    centred = groups.center_values(values)
    advantages = centred - groups.group_sum(weights * centred) / groups.group_sum(weights)
    return _fill_single_rollouts(advantages, values, groups, single).to(_result_dtype(scores))


def best_of_group_advantages(
    scores: Tensor,
    group_ids: Tensor,
    *,
    scale: str = "none",
    eps: float = 1e-6,
    unbiased: bool = True,
) -> Tensor:
    """For the best of each group its lead over the second best, for the others 0: [B].

    What the group's best score is more than it would be without this rollout: of 0 and 1, what
    pass@G gains by it. With `scale` "std" divided by the deviation of the group's scores. Source:
    Tang et al. 2025 (inference-time objectives). Raises ValueError for a group of one, or another
    scale.
    """
    if scale not in ("std", "none"):
        raise ValueError(f"scale={scale!r}: must be std or none")
    values, groups = scores.double(), _GroupStatistics(group_ids)
    if (groups.group_sizes == 1).any():
        raise ValueError("a group of one has no second best")
    best = groups.group_max(values)
    # With two at the top the lead is 0, for both of them.
    is_best = values == best
    second = groups.group_max(torch.where(is_best, -torch.inf, values))
    shared = groups.group_sum(is_best.double()) > 1
    lead = torch.where(is_best & ~shared, best - second, 0.0)
    if scale == "std":
        lead = lead / (groups.group_std(groups.center_values(values), unbiased=unbiased) + eps)
    return lead.to(_result_dtype(scores))


def gpg_advantages(scores: Tensor, group_ids: Tensor, *, single: str = "zero") -> Tensor:
    """Score minus the group's mean score, times rollouts over rollouts whose score is not 0: [B].

    The factor makes up for rollouts from which there is nothing to learn; it is of the whole
    batch. A group of one is `single`: "zero", or "keep" for a baseline of 0. Source: Chu et al.
    2025 (GPG). Raises ValueError on an unknown `single`.
    """
    values, groups = scores.double(), _GroupStatistics(group_ids)
    factor = len(values) / (values != 0).double().sum().clamp(min=1)
    advantages = factor * groups.center_values(values)
    return _fill_single_rollouts(advantages, factor * values, groups, single).to(
        _result_dtype(scores)
    )


def greedy_baseline_advantages(scores: Tensor, baseline_scores: Tensor) -> Tensor:
    """Score minus that of the prompt's greedy completion, `baseline_scores` [B]: [B].

    Source: Li et al. 2024 (ReMax).
    """
    return (scores - baseline_scores).to(_result_dtype(scores))


def decoupled_reward_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    weights: Tensor | None = None,
    eps: float = 1e-6,
    unbiased: bool = True,
) -> Tensor:
    """Each reward made group-relative by itself, then added up: [B].

    `rewards` [B, K], `weights` [K], 1 each if None. So a reward of wide spread does not drown the
    others. A reward of NaN says nothing of a rollout, and is left out for it. The paper whitens the
    sum over the batch, which is `masked_whiten`. Source: Liu et al. 2026 (GDPO).
    """
    total = torch.zeros(rewards.shape, dtype=torch.float64)
    for part, column in zip(total.unbind(-1), rewards.double().unbind(-1), strict=True):
        said = ~column.isnan()
        if said.any():
            part[said] = group_relative_advantages(
                column[said], group_ids[said], eps=eps, unbiased=unbiased
            )
    return (
        (total if weights is None else total * weights.double()).sum(-1).to(_result_dtype(rewards))
    )


def generalized_advantages(
    token_rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimates and returns, both [B, T].

    delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lam A_next, returns A + V; "next" is
    the next token that counts, so what a tool or an environment wrote is carried through, and a
    reward that stands there has no say. After the last token V is `bootstrap_values` [B], 0 if
    None: that of a rollout that was cut off need not be 0. Whitening is apart (`masked_whiten`).
    Source: Schulman et al. 2016 (GAE), equation 16.
    """
    rewards, estimates = (
        apply_mask(token_rewards.double(), loss_mask),
        apply_mask(values.double(), loss_mask),
    )
    advantages = torch.zeros_like(rewards)
    after = rewards.new_zeros(len(rewards))
    value_after = after if bootstrap_values is None else bootstrap_values.double()
    for t in reversed(range(rewards.shape[1])):
        counts = loss_mask[:, t]
        delta = rewards[:, t] + gamma * value_after - estimates[:, t]
        after = torch.where(counts, delta + gamma * lam * after, after)
        value_after = torch.where(counts, estimates[:, t], value_after)
        advantages[:, t] = apply_mask(after, counts)
    dtype = _result_dtype(values)
    return advantages.to(dtype), (advantages + estimates).to(dtype)


def reward_to_go(token_rewards: Tensor, loss_mask: Tensor, *, gamma: float) -> Tensor:
    """The discounted sum of rewards from each token on: [B, T].

    Tokens that do not count are carried through undiscounted. REINFORCE++ (Hu et al. 2025) whitens
    this over the step; its variant with a baseline whitens group-relative scores instead.
    """
    rewards = apply_mask(token_rewards.double(), loss_mask)
    returns = torch.zeros_like(rewards)
    after = rewards.new_zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        counts = loss_mask[:, t]
        after = torch.where(counts, rewards[:, t] + gamma * after, after)
        returns[:, t] = apply_mask(after, counts)
    return returns.to(_result_dtype(token_rewards))


def masked_whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8, unbiased: bool = True) -> Tensor:
    """`x` shifted and scaled to mean 0 and variance 1 over what the mask keeps: [B, T].

    Over tokens, so a long rollout weighs more. `eps` is added to the variance. Fewer than two
    tokens give 0.
    """
    kept, count = apply_mask(x.double(), mask), mask.sum()
    centred = apply_mask(kept - kept.sum() / count.clamp(min=1), mask)
    freedom = (count - 1 if unbiased else count).clamp(min=1)
    return (centred * (centred.square().sum() / freedom + eps).rsqrt()).to(_result_dtype(x))


class _GroupStatistics:
    """Statistics of the rows with the same id, float64, spread to the rows again: [B]."""

    def __init__(self, group_ids: Tensor) -> None:
        _, self._index = torch.unique(group_ids, return_inverse=True)
        self._num_groups = int(self._index.max()) + 1 if len(group_ids) else 0
        #: Rows in the group of each row.
        self.group_sizes = torch.bincount(self._index)[self._index]

    def group_sum(self, values: Tensor) -> Tensor:
        """The sum of the group."""
        return values.new_zeros(self._num_groups).index_add(0, self._index, values)[self._index]

    def group_mean(self, values: Tensor) -> Tensor:
        """The mean of the group."""
        return self.group_sum(values) / self.group_sizes

    def group_max(self, values: Tensor) -> Tensor:
        """The largest of the group."""
        empty = values.new_zeros(self._num_groups)
        best = empty.scatter_reduce(0, self._index, values, "amax", include_self=False)
        return best[self._index]

    def center_values(self, values: Tensor) -> Tensor:
        """Minus the mean of the group; exactly 0 where all of them are equal.

        The mean of equal numbers can be off by one rounding, which a division would blow up.
        """
        equal = self.group_max(values) == -self.group_max(-values)
        return torch.where(equal, 0.0, values - self.group_mean(values))

    def group_std(self, centred: Tensor, *, unbiased: bool) -> Tensor:
        """The standard deviation of the group."""
        freedom = (self.group_sizes - 1).clamp(min=1) if unbiased else self.group_sizes
        return (self.group_sum(centred.square()) / freedom).sqrt()


def _fill_single_rollouts(
    advantages: Tensor, kept: Tensor, groups: _GroupStatistics, single: str
) -> Tensor:
    if single not in SINGLE_ROLLOUT_MODES:
        raise ValueError(f"single={single!r}: must be one of {', '.join(SINGLE_ROLLOUT_MODES)}")
    alone = groups.group_sizes == 1
    return torch.where(alone, kept if single == "keep" else 0.0, advantages)
