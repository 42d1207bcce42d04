"""An algorithm applied: from columns to advantages, and from a micro-batch to a summed loss.

The loss is in plain sums, so that micro-batches and ranks may be added up; `summarise_policy` does
the divisions, once, at the end of the step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from streamrl.algorithms.algorithm import Algorithm, AlgorithmSettings, TokenLossInput
from streamrl.algorithms.checks import compute_token_losses, validate_tensor
from streamrl.algorithms.correction_config import NO_CORRECTION
from streamrl.algorithms.math.advantages import masked_whiten
from streamrl.algorithms.math.correction import (
    importance_weights,
    interpolated_proximal,
    off_policy_sequence_mask,
    rejection_mask,
)
from streamrl.algorithms.math.critic import critic_token_losses
from streamrl.algorithms.math.diagnostics import divergence_sums
from streamrl.algorithms.math.kl import kl_estimate
from streamrl.algorithms.math.losses import aggregate_loss_sum
from streamrl.algorithms.math.masks import apply_mask, masked_row_sum
from streamrl.algorithms.math.shaping import make_token_rewards, soft_overlong_penalty
from streamrl.algorithms.math.step_metrics import SHARED_CRITIC_PREFIX
from streamrl.messages import FinishReason


def derive_group_columns(
    row: Algorithm, settings: AlgorithmSettings, columns: Mapping[str, Tensor], group_ids: Tensor
) -> dict[str, Tensor]:
    """What is known of whole groups before they are trained: per rollout [B] or per token [B, T].

    `columns` are those of `list_derivation_columns` for all groups of the row's scope, `group_ids`
    [B] tells them apart. Gives loss_mask bool [B, T] without what is not to be trained, advantages,
    group_tokens [B] (tokens that count in the rollout's group) and the row's own.
    """
    sampled = columns["loss_mask"]
    counts = sampled
    if settings.mask_truncated:
        cut_off = columns["finish_reason"] == FinishReason.LENGTH.value
        counts = sampled & ~cut_off[:, None]
    known = _shape_rewards(settings, columns) | {"loss_mask": counts, "num_tokens": sampled.sum(-1)}
    shapes = [(len(counts),), tuple(counts.shape)]
    advantages = row.call_function(row.advantages, known, group_ids, settings)
    validate_tensor(row, row.advantages, advantages, shapes)
    if settings.whiten_advantages:
        per_token = advantages if advantages.ndim > 1 else advantages[:, None]
        advantages = masked_whiten(per_token.expand(counts.shape), counts)
    result = {"loss_mask": counts, "advantages": advantages}
    for name, function in row.derived.items():
        seen = known | _expand_to_tokens(result, counts)
        result[name] = row.call_function(function, seen, group_ids, settings)
        validate_tensor(row, function, result[name], shapes)
    _, index = torch.unique(group_ids, return_inverse=True)
    tokens = counts.sum(-1)
    totals = tokens.new_zeros(int(index.max()) + 1).index_add(0, index, tokens)
    return result | {"group_tokens": totals[index]}


def _shape_rewards(settings: AlgorithmSettings, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The columns with scores as the algorithm is to see them, and token_rewards [B, T].

    Where there are costs, token_costs [B, T] too.
    """
    sampled, scores = columns["loss_mask"], columns["scores"]
    if settings.overlong_buffer:
        scores = scores + soft_overlong_penalty(
            sampled.sum(-1),
            max_length=settings.max_length,
            buffer=settings.overlong_buffer,
            factor=settings.overlong_factor,
        )
    shaped = {**columns, "scores": scores, "token_rewards": make_token_rewards(scores, sampled)}
    if "costs" in columns:
        shaped["token_costs"] = make_token_rewards(columns["costs"], sampled)
    if settings.kl_coef and settings.kl_in == "reward":
        behaviour = apply_mask(columns["generator_logprobs"], sampled)
        reference = apply_mask(columns["ref_logprobs"], sampled)
        penalties = settings.kl_coef * kl_estimate(behaviour, reference, settings.kl_kind)
        shaped["token_rewards"] = make_token_rewards(scores, sampled, penalties)
        shaped["scores"] = scores - masked_row_sum(penalties, sampled)[:, 0]
        if "costs" in columns:
            # To lower a cost is no reason to leave the reference either.
            shaped["token_costs"] = make_token_rewards(columns["costs"], sampled, -penalties)
    return shaped


def _expand_to_tokens(derived: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """All of it as [B, T], 0 where the mask is false."""
    wide = {name: x if x.ndim > 1 else x[:, None].expand(mask.shape) for name, x in derived.items()}
    return {
        name: x & mask if x.dtype == torch.bool else apply_mask(x, mask) for name, x in wide.items()
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
    """Summed loss of a micro-batch (scalar) and sums for `summarise_policy`: token loss + KL -
    entropy.

    `batch` holds what `derive_group_columns` gave for these rollouts, generator_logprobs [B, T],
    and ref_logprobs [B, T] where kl_coef is not 0; proximal_logprobs [B, T] of the policy at the
    start of the step if that is another, and near, bool [B, T], if only those are to be trained.
    `logprobs` and `entropy` [B, T] are of the trained policy, `version` is that of the step. The
    parts are aggregated alike, so that the whole is normalised by one number.
    """
    # The mask goes on first: clamping a NaN of the padding would not make it a number.
    mask = batch["loss_mask"]
    current = apply_mask(logprobs, mask)
    behaviour = apply_mask(batch["generator_logprobs"], mask)
    proximal = apply_mask(_proximal_logprobs(settings, batch, current.detach(), version), mask)
    decoupled = settings.correction.proximal != "generator"
    log_ratio = current - (proximal if decoupled else behaviour)
    behind = proximal - behaviour
    derived = _expand_to_tokens({name: batch[name] for name in ("advantages", *row.derived)}, mask)
    tokens = TokenLossInput(log_ratio, current, derived["advantages"], mask, derived)
    losses, clipped = compute_token_losses(row, tokens, settings)
    weights, kept = _correct_off_policy(settings, behind, mask)
    if settings.correction.off_policy_threshold is not None:
        kept = kept & off_policy_sequence_mask(
            current.detach() - behaviour,
            derived["advantages"],
            mask,
            threshold=settings.correction.off_policy_threshold,
        )
    if "near" in batch:
        kept = kept & batch["near"]
    counted = mask if settings.correction.count_rejected else kept
    parts = {"policy": losses * weights, "entropy": -settings.entropy_coef * entropy}
    sums = divergence_sums(behind, mask) | {
        "num_tokens": counted.sum(),
        "num_rollouts": counted.any(-1).sum(),
        "num_groups": (counted.sum(-1).double() / batch["group_tokens"].clamp(min=1)).sum(),
        "num_kept": kept.sum(),
        "num_sampled": mask.sum(),
        "weight_sum": apply_mask(weights, kept).sum(),
        "clipped_sum": (clipped & kept).sum(),
        "entropy_sum": apply_mask(entropy, mask).sum(),
    }
    if settings.kl_coef:
        kl = kl_estimate(current, apply_mask(batch["ref_logprobs"], mask), settings.kl_kind)
        sums["kl_ref_sum"] = apply_mask(kl, mask).sum()
        if settings.kl_in == "loss":
            parts["kl"] = settings.kl_coef * kl
    summed = {
        name: aggregate_loss_sum(
            apply_mask(part, kept),
            counted,
            mode=settings.loss_aggregation,
            group_tokens=batch["group_tokens"],
        )
        for name, part in parts.items()
    }
    loss = sum(summed.values(), start=logprobs.new_zeros(()))
    sums |= {f"loss_{name}_sum": part for name, part in summed.items()}
    return loss, {name: value.detach() for name, value in sums.items()}


def shared_value_loss(
    settings: AlgorithmSettings, batch: Mapping[str, Tensor], values: Tensor, *, clip: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Summed value loss of a model that is policy and critic at once, and the critic's sums.

    As `critic_loss`, but aggregated as the policy's loss is, so that their sum is normalised by one
    number. The sums have names of their own beside those of the policy.
    """
    losses, sums = critic_token_losses(batch, values, clip=clip)
    loss = aggregate_loss_sum(
        losses,
        batch["loss_mask"],
        mode=settings.loss_aggregation,
        group_tokens=batch["group_tokens"],
    )
    return loss, {SHARED_CRITIC_PREFIX + name: value for name, value in sums.items()}


def _proximal_logprobs(
    settings: AlgorithmSettings, batch: Mapping[str, Tensor], current: Tensor, version: int
) -> Tensor:
    """Logprobs of the policy at the start of the step, or in its place, [B, T]."""
    if settings.correction.proximal == "interpolated":
        return interpolated_proximal(
            current, batch["generator_logprobs"], batch["policy_version"], version=version
        )
    # Before the first update it is the policy that is trained.
    return batch.get("proximal_logprobs", current)


def _correct_off_policy(
    settings: AlgorithmSettings, behind: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights [B, T] and the tokens that are kept, bool [B, T], by how far behind sampling was."""
    chosen, weights, kept = settings.correction, torch.ones_like(behind), mask
    if chosen.weights != NO_CORRECTION:
        weights = importance_weights(
            behind,
            mask,
            level=chosen.weights,
            low=chosen.weight_low,
            high=chosen.weight_high,
            mode=chosen.weight_mode,
        )
    if chosen.reject != NO_CORRECTION:
        kept = kept & rejection_mask(
            behind,
            mask,
            kind=chosen.reject,
            level=chosen.reject_level,
            low=chosen.reject_low,
            high=chosen.reject_high,
        )
    return weights, kept
