"""Application of an algorithm: from columns to advantages, and from a micro-batch to a summed loss.

Losses are plain sums, so micro-batches and ranks can be added up.
`AlgorithmSettings.compute_loss_denominator` gives the single divisor at the end of the step.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from streamrl.algorithms.algorithm import Algorithm, AlgorithmSettings, TokenLossInput
from streamrl.algorithms.correction import NO_CORRECTION
from streamrl.algorithms.math.advantages import (
    TurnSteps,
    make_token_rewards,
    masked_whiten,
    soft_overlong_penalty,
)
from streamrl.algorithms.math.correction import (
    divergence_sums,
    importance_weights,
    interpolated_proximal,
    off_policy_sequence_mask,
    rejection_mask,
    weight_sums,
)
from streamrl.algorithms.math.losses import aggregate_loss_sum, critic_token_losses
from streamrl.algorithms.math.tokens import (
    apply_mask,
    kl_estimate,
    masked_row_sum,
    probability_ratio,
)
from streamrl.algorithms.math.training_metrics import SHARED_CRITIC_PREFIX
from streamrl.errors import AlgorithmError
from streamrl.messages import REF_TOP_LOGPROBS, ROLLOUTS, TOKEN_SCORES, TURN_COLUMN
from streamrl.user_code.checks import format_returned


def derive_group_columns(
    row: Algorithm, settings: AlgorithmSettings, columns: Mapping[str, Tensor], group_ids: Tensor
) -> dict[str, Tensor]:
    """Compute advantages and the other columns that need whole groups, [B] or [B, T].

    `columns` are those of `list_derivation_columns` for all groups of the algorithm's scope, and
    perhaps `rejected` bool [B]; `group_ids` [B] identifies the group of each rollout. Returns
    loss_mask bool [B, T] without tokens that must not be trained, included bool [B], advantages,
    group_tokens [B] (trained tokens in the rollout's group), with turn-mean turn_tokens [B, T]
    (trained tokens in the token's turn), and the algorithm's derived columns.

    `included` is the one mask of the rollouts that count: the algorithm's functions see no others,
    so nothing that they compute over a group depends on those. Their derived columns are 0.
    """
    sampled, reasons = columns["loss_mask"], columns["finish_reason"]
    mask = sampled & ~torch.isin(reasons, torch.tensor(settings.masked_reasons))[:, None]
    included = ~torch.isin(reasons, torch.tensor(settings.excluded_reasons))
    if "rejected" in columns:
        included &= ~columns["rejected"]
    inputs = _shape_rewards(settings, columns) | {"loss_mask": mask, "num_tokens": sampled.sum(-1)}
    # A rollout without an environment is a turn.
    inputs.setdefault(TURN_COLUMN, sampled.long())
    # Where nothing counts, nothing is trained, and any result will do that has the right shape.
    rows = included if included.any() else torch.ones_like(included)
    derived = _derive_from_included(
        row, settings, {name: column[rows] for name, column in inputs.items()}, group_ids[rows]
    )
    _, index = torch.unique(group_ids, return_inverse=True)
    tokens = mask.sum(-1)
    totals = tokens.new_zeros(int(index.max()) + 1).index_add(0, index, tokens)
    result = {"loss_mask": mask, "included": included, "group_tokens": totals[index]}
    if settings.loss_aggregation == "turn-mean":
        turns = TurnSteps(inputs[TURN_COLUMN])
        result["turn_tokens"] = turns.spread(turns.sum_tokens(mask.long()))
    for name, values in derived.items():
        result[name] = values.new_zeros((len(rows), *values.shape[1:]))
        result[name][rows] = values
    return result


def _derive_from_included(
    row: Algorithm, settings: AlgorithmSettings, inputs: Mapping[str, Tensor], group_ids: Tensor
) -> dict[str, Tensor]:
    """Call the algorithm's functions; return advantages and derived columns of these rows."""
    mask = inputs["loss_mask"]
    shapes = [(len(mask),), tuple(mask.shape)]
    advantages = row.call_function(row.advantages, inputs, group_ids, settings)
    validate_tensor(row, row.advantages, advantages, shapes)
    if settings.whiten_advantages:
        per_token = advantages if advantages.ndim > 1 else advantages[:, None]
        advantages = masked_whiten(per_token.expand(mask.shape), mask)
    result = {"advantages": advantages}
    for name, function in row.derived.items():
        derived_inputs = {**inputs, **_expand_to_tokens(result, mask)}
        result[name] = row.call_function(function, derived_inputs, group_ids, settings)
        validate_tensor(row, function, result[name], shapes)
    return result


def _shape_rewards(settings: AlgorithmSettings, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `columns` with length and KL penalties in the scores, and with token_rewards [B, T].

    Adds token_costs [B, T] if `columns` contain costs.
    """
    sampled, scores = columns["loss_mask"], columns["scores"]
    token_scores = columns.get(TOKEN_SCORES, make_token_rewards(scores, sampled))
    rewards = apply_mask(token_scores, sampled)
    if settings.overlong_buffer:
        penalty = soft_overlong_penalty(
            sampled.sum(-1),
            max_length=settings.max_length,
            buffer=settings.overlong_buffer,
            factor=settings.overlong_factor,
        )
        scores, rewards = scores + penalty, rewards + make_token_rewards(penalty, sampled)
    own = {TOKEN_SCORES: token_scores, "scores": scores, "token_rewards": rewards}
    shaped = {**columns, **own}
    if "costs" in columns:
        shaped["token_costs"] = make_token_rewards(columns["costs"], sampled)
    if settings.kl_coef and settings.kl_in == "reward":
        sampling = apply_mask(columns["generator_logprobs"], sampled)
        reference = apply_mask(columns["ref_logprobs"], sampled)
        penalties = settings.kl_coef * kl_estimate(sampling, reference, settings.kl_kind)
        shaped["token_rewards"] = rewards - apply_mask(penalties, sampled)
        shaped["scores"] = scores - masked_row_sum(penalties, sampled)[:, 0]
        if "costs" in columns:
            # Costs are minimized, so the KL penalty is added to them.
            shaped["token_costs"] = make_token_rewards(columns["costs"], sampled, -penalties)
    return shaped


def _expand_to_tokens(derived: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Return columns of rollouts [B] and tokens [B, T] all as [B, T], 0 where `mask` is false."""
    expanded = {
        name: x if x.ndim > 1 else x[:, None].expand(mask.shape) for name, x in derived.items()
    }
    return {
        name: x & mask if x.dtype == torch.bool else apply_mask(x, mask)
        for name, x in expanded.items()
    }


def policy_loss(
    row: Algorithm,
    settings: AlgorithmSettings,
    batch: Mapping[str, Tensor],
    *,
    logprobs: Tensor,
    entropy: Tensor,
    version: int = 0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the summed loss of a micro-batch (scalar) and the sums for `summarize_policy`.

    The loss is token loss + KL - entropy. All three are aggregated alike, so a single denominator
    normalizes the total.

    `batch` contains the results of `derive_group_columns` for these rollouts and generator_logprobs
    [B, T]. It also contains ref_logprobs [B, T] if kl_coef is not 0 or the row has the column,
    proximal_logprobs [B, T] if the policy at the start of the step differs from the trained one,
    and the results of `correct_before_updates`, if there are any: near, bool [B, T], tokens to be
    trained, and policy_weights [B, T]; with top_entropy also high_entropy, bool [B, T], tokens with
    a policy loss. Rows with the column ref_top_ids also read ref_top_logprobs and word_logprobs, of
    the trained policy, [B, T, W]. `logprobs` and `entropy` [B, T] are of the trained policy;
    `version` is the version of the policy at the start of the step.
    """
    # Mask first: padding may hold NaN, which clamp() keeps and whose gradient spreads.
    mask = batch["loss_mask"]
    current = apply_mask(logprobs, mask)
    sampling = apply_mask(batch["generator_logprobs"], mask)
    if row.trains_on != ROLLOUTS:
        sampling = current.detach()  # nobody has sampled them
    proximal = apply_mask(
        _compute_proximal_logprobs(settings, batch, current.detach(), version), mask
    )
    is_decoupled = settings.correction.proximal != "generator"
    log_ratio = current - (proximal if is_decoupled else sampling)
    off_policy_log_ratio = proximal - sampling
    derived = _expand_to_tokens({name: batch[name] for name in ("advantages", *row.derived)}, mask)
    words = [
        torch.where(mask[..., None], batch[name], 0.0)
        for name in ("word_logprobs", REF_TOP_LOGPROBS)
        if name in batch
    ]
    tokens = TokenLossInput(log_ratio, current, derived["advantages"], mask, derived, *words)
    losses, clipped = compute_token_losses(row, tokens, settings)
    weights, kept = _correct_off_policy(settings, off_policy_log_ratio, sampling, mask)
    if "policy_weights" in batch:
        weights = apply_mask(batch["policy_weights"], mask)
    if settings.correction.off_policy_threshold is not None:
        kept = kept & off_policy_sequence_mask(
            current.detach() - sampling,
            derived["advantages"],
            mask,
            threshold=settings.correction.off_policy_threshold,
        )
    if "near" in batch:
        kept = kept & batch["near"]
    if "high_entropy" in batch:
        losses = apply_mask(losses, batch["high_entropy"])
    losses_by_part = {"policy": losses * weights, "entropy": -settings.entropy_coef * entropy}
    sums = divergence_sums(off_policy_log_ratio, mask) | {
        "num_tokens": mask.sum(),
        "num_rollouts": mask.any(-1).sum(),
        "num_groups": (mask.sum(-1).double() / batch["group_tokens"].clamp(min=1)).sum(),
        "num_kept": kept.sum(),
        "num_sampled": mask.sum(),
        "weight_sum": apply_mask(weights, kept).sum(),
        "clipped_sum": (clipped & kept).sum(),
        "entropy_sum": apply_mask(entropy, mask).sum(),
    }
    turn_tokens = batch.get("turn_tokens")
    if turn_tokens is not None:
        sums["num_turns"] = (mask / turn_tokens.clamp(min=1).double()).sum()
    if settings.kl_coef or "ref_logprobs" in row.columns:
        kind, weighted = settings.kl_kind.removesuffix("*"), settings.kl_kind.endswith("*")
        kl = kl_estimate(current, apply_mask(batch["ref_logprobs"], mask), kind)
        sums["kl_ref_sum"] = apply_mask(kl, mask).sum()
        if settings.kl_coef and settings.kl_in == "loss":
            if weighted:
                kl = kl * probability_ratio(current - sampling)
            losses_by_part["kl"] = settings.kl_coef * kl
    summed_losses = {
        name: aggregate_loss_sum(
            apply_mask(part_loss, kept),
            mask,
            mode=settings.loss_aggregation,
            group_tokens=batch["group_tokens"],
            turn_tokens=turn_tokens,
        )
        for name, part_loss in losses_by_part.items()
    }
    loss = sum(summed_losses.values(), start=logprobs.new_zeros(()))
    sums |= {f"loss_{name}_sum": part_loss for name, part_loss in summed_losses.items()}
    return loss, {name: value.detach() for name, value in sums.items()}


def correct_before_updates(
    settings: AlgorithmSettings, batch: Mapping[str, Tensor], logprobs: Tensor, *, version: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return importance weights, tokens kept and sums of the weights before a step's first update.

    Weights are [B, T], not yet divided by their mean over the step; the tokens that
    `correction.reject` keeps bool [B, T]; the sums those of `weight_sums`, [2]. `batch` contains
    loss_mask, generator_logprobs and policy_version [B, T]; `logprobs` [B, T] are of the policy
    `version`, from which the step starts.
    """
    mask = batch["loss_mask"]
    proximal = _compute_proximal_logprobs(settings, batch, logprobs, version)
    sampling = batch["generator_logprobs"]
    log_ratio = apply_mask(proximal - sampling, mask)
    weights, near = _correct_off_policy(settings, log_ratio, sampling, mask)
    return weights, near, weight_sums(weights, mask, level=settings.correction.weights)


def estimate_score_norms(
    logprobs: Tensor, collision: Tensor, weights: Tensor, mask: Tensor
) -> Tensor:
    """Return the squared norm of the gradient of each token's logprob by the logits: [B, T].

    It is 1 - 2 p + sum p^2, where p are the policy's probabilities; `collision` [B, T] is the sum.
    `weights` are those of `correct_before_updates`, which multiply the gradients inside the mask.
    """
    squares = torch.where(mask, weights.square(), 1.0)
    return (1 - 2 * logprobs.exp() + collision) * squares


def shared_value_loss(
    settings: AlgorithmSettings, batch: Mapping[str, Tensor], values: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the value loss of a model that is policy and critic at once, and the critic's sums.

    `values` [B, T] are the trained ones. Unlike `critic_loss`, aggregates as the policy's loss
    does, so a single denominator normalizes both, and leaves out rejected rollouts, which have no
    returns. The names of the sums have a prefix that separates them from the policy's.
    """
    mask = batch["loss_mask"] & batch["included"][:, None]
    losses, sums = critic_token_losses({**batch, "loss_mask": mask}, values, clip=clip)
    loss = aggregate_loss_sum(
        losses,
        mask,
        mode=settings.loss_aggregation,
        group_tokens=batch["group_tokens"],
        turn_tokens=batch.get("turn_tokens"),
    )
    return loss, {SHARED_CRITIC_PREFIX + name: value for name, value in sums.items()}


def _compute_proximal_logprobs(
    settings: AlgorithmSettings, batch: Mapping[str, Tensor], current: Tensor, version: int
) -> Tensor:
    """Return the logprobs of the proximal policy, against which the loss clips: [B, T]."""
    if settings.correction.proximal == "interpolated":
        return interpolated_proximal(
            current, batch["generator_logprobs"], batch["policy_version"], version=version
        )
    # Before the first update of a step, the current policy is the proximal policy.
    return batch.get("proximal_logprobs", current)


def _correct_off_policy(
    settings: AlgorithmSettings, log_ratio: Tensor, sampling: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return importance weights [B, T] and the mask of tokens that are not rejected, bool [B, T].

    `log_ratio`: proximal minus sampling policy, whose logprobs are `sampling`.
    """
    correction, weights, kept = settings.correction, torch.ones_like(log_ratio), mask
    if correction.weights != NO_CORRECTION:
        weights = importance_weights(
            log_ratio,
            mask,
            level=correction.weights,
            low=correction.weight_low,
            high=correction.weight_high,
            mode=correction.weight_mode,
        )
    if correction.reject != NO_CORRECTION:
        kept = kept & rejection_mask(
            log_ratio,
            mask,
            kind=correction.reject,
            level=correction.reject_level,
            low=correction.reject_low,
            high=correction.reject_high,
            sampling=sampling,
        )
    return weights, kept


def compute_token_losses(
    row: Algorithm, tokens: TokenLossInput, settings: AlgorithmSettings
) -> tuple[Tensor, Tensor]:
    """Call an algorithm's token loss; return loss and mask of clipped gradients, both [B, T].

    Raises AlgorithmError if the function returns anything else.
    """
    result = row.call_function(row.token_loss, tokens, settings)
    name = f"algorithm {row.name}: {row.token_loss.__name__}"
    try:
        losses, clipped = result
    except (TypeError, ValueError):
        raise AlgorithmError(
            f"{name} returned a {type(result).__name__}, expected (loss, clipped mask)"
        ) from None
    for tensor in (losses, clipped):
        validate_tensor(row, row.token_loss, tensor, [tuple(tokens.loss_mask.shape)])
    if clipped.dtype != torch.bool:
        raise AlgorithmError(f"{name}: the clipped mask is {clipped.dtype}, must be bool")
    return losses, clipped


def validate_tensor(
    row: Algorithm, function: Callable[..., Any], result: object, shapes: Sequence[tuple[int, ...]]
) -> None:
    """Raise AlgorithmError unless the `result` of `function` is a tensor of an allowed shape."""
    if not isinstance(result, Tensor) or tuple(result.shape) not in shapes:
        actual = format_returned(result)
        if isinstance(result, Tensor):
            actual = f"shape {list(result.shape)}"
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise AlgorithmError(
            f"algorithm {row.name}: {function.__name__} returned {actual}, expected {expected}"
        )
