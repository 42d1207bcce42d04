"""The loss a micro-batch contributes to a step, and the sums its metrics are made of.

Everything here is a plain sum, so that micro-batches and ranks may be added up; `summarise` does
the divisions, once, at the end of the step.
"""

from collections.abc import Mapping

from torch import Tensor

from streamrl.algorithms.kl import kl_estimate
from streamrl.algorithms.losses import aggregate_sum, keep, ratio
from streamrl.algorithms.table import Algorithm, Settings


def policy_loss(
    row: Algorithm,
    settings: Settings,
    batch: Mapping[str, Tensor],
    *,
    logprobs: Tensor,
    entropy: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Summed loss of a micro-batch (scalar) and sums for `summarise`: token loss + KL - entropy.

    `batch` holds loss_mask bool [B, T], generator_logprobs [B, T], advantages [B], and ref_logprobs
    [B, T] where kl_coef is not 0. `logprobs` and `entropy` [B, T] are of the trained policy. The
    ratio is trained policy to the policy that sampled, token by token. The parts are aggregated
    alike, so that the whole is normalised by one number.
    """
    mask = batch["loss_mask"]
    log_ratio = keep(logprobs - batch["generator_logprobs"], mask)
    losses, clipped = row.token_loss(log_ratio, batch["advantages"][:, None], mask, settings)
    parts = {
        "policy": aggregate_sum(losses, mask, mode=settings.loss_aggregation),
        "entropy": -settings.entropy_coef
        * aggregate_sum(entropy, mask, mode=settings.loss_aggregation),
    }
    sums = _token_sums(log_ratio, mask) | {
        "clipped_sum": (clipped & mask).sum(),
        "entropy_sum": keep(entropy, mask).sum(),
    }
    if settings.kl_coef:
        # The mask goes on first: clamping a NaN of the padding would not make it a number.
        reference = keep(batch["ref_logprobs"], mask)
        kl = kl_estimate(keep(logprobs, mask), reference, settings.kl_kind)
        parts["kl"] = settings.kl_coef * aggregate_sum(kl, mask, mode=settings.loss_aggregation)
        sums["kl_ref_sum"] = kl.sum()
    loss = sum(parts.values(), start=logprobs.new_zeros(()))
    sums |= {f"loss_{name}_sum": part for name, part in parts.items()}
    return loss, {name: value.detach() for name, value in sums.items()}


def _token_sums(log_ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    weights = keep(ratio(log_ratio), mask)
    return {
        "num_tokens": mask.sum(),
        "num_rollouts": mask.any(-1).sum(),
        "ratio_sum": weights.sum(),
        "ratio_squared_sum": weights.square().sum(),
    }


def summarise(sums: Mapping[str, float], normaliser: float) -> dict[str, float]:
    """Metrics of a step from its sums over all micro-batches and ranks; none if it had no token.

    `loss/*` are the parts of the loss as it was minimised, weights included; `policy/*` are means
    over tokens; `policy/ess` is the effective share of the sample, (sum r)^2 / (n sum r^2). What
    needs a reference is there only if there was one.
    """
    num_tokens = sums.get("num_tokens", 0.0)
    if not num_tokens or not normaliser:
        return {}
    metrics = {
        "policy/clip_frac": sums["clipped_sum"] / num_tokens,
        "policy/ratio_mean": sums["ratio_sum"] / num_tokens,
        "policy/entropy": sums["entropy_sum"] / num_tokens,
        "policy/ess": sums["ratio_sum"] ** 2 / (num_tokens * sums["ratio_squared_sum"]),
        "loss/policy": sums["loss_policy_sum"] / normaliser,
        "loss/entropy": sums["loss_entropy_sum"] / normaliser,
    }
    if "kl_ref_sum" in sums:
        metrics["policy/kl_ref"] = sums["kl_ref_sum"] / num_tokens
        metrics["loss/kl"] = sums["loss_kl_sum"] / normaliser
    return metrics
