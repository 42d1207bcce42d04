"""Compare our losses, their aggregation and our corrections with those of verl."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import torch_functional
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

from streamrl.algorithms.math import correction, losses
from tests.algorithms.aggregate import aggregate_loss
from tests.parity.case import Batch, ParityCase

COUNTS = "verl adds 1e-8 to a row's number of tokens"
PER_ROW = "seq-mean-token-mean"
NEAR = 1e-7
NO_CLIP = 1e9
MAX_LENGTH = 64
actor = partial(ActorConfig, strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
CLIP_ACTOR = partial(actor, clip_ratio_low=0.2, clip_ratio_high=0.28)
SEQUENCE_CLIP = {"clip_low": 0.05, "clip_high": 0.08}
CLIP_COV = PolicyLossConfig(clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=2.0)
KL_COV = PolicyLossConfig(kl_cov_ratio=0.1, ppo_kl_coef=0.7)


def policy_loss(
    name: str,
    config: ActorConfig,
    *,
    mode: str = "token-mean",
    advantages: str = "advantages",
    old: str = "old_logprobs",
) -> Callable[[Batch], Tensor]:
    """Return a policy loss of verl, reduced by `mode`; `advantages`, `old` are batch fields."""

    def theirs(batch: Batch) -> Tensor:
        loss, _ = core_algos.get_policy_loss_fn(name)(
            old_log_prob=getattr(batch, old),
            log_prob=batch.logprobs,
            advantages=getattr(batch, advantages).expand_as(batch.mask),
            response_mask=batch.mask,
            loss_agg_mode=mode,
            config=config,
        )
        return loss

    return theirs


def loss_case(
    function: str,
    peer: str,
    token_loss: Callable[[Batch], Tensor],
    theirs: Callable[[Batch], Tensor],
    *,
    mode: str = "token-mean",
    note: str = "",
) -> ParityCase:
    """Make a case of a policy loss."""
    per_row = mode == PER_ROW
    return ParityCase(
        f"losses.{function}",
        peer,
        lambda b: aggregate_loss(token_loss(b), b.loss_mask, mode=mode),
        theirs,
        wrt="logprobs",
        wider_bound=NEAR if per_row else None,
        note=COUNTS if per_row else note,
    )


def in_band(batch: Batch) -> Tensor:
    """Choose all tokens with a covariance in the band, so that nothing is random: bool [B, T]."""
    chosen = losses.covariance_band_mask(
        batch.logprobs, batch.advantages, batch.loss_mask, low=0.1, high=2.0, fraction=1.0
    )
    clipped = losses.outside_clip_mask(batch.log_ratio, batch.advantages, **CLIP)
    return chosen & ~clipped


def agg_loss(
    mode: str,
    *,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    max_length: int = 0,
) -> ParityCase:
    """Make a case of an aggregation, with counts of the batch or of a larger step."""
    return ParityCase(
        f"losses.aggregate, {mode}{', of a larger step' if num_tokens else ''}",
        "agg_loss",
        lambda b: aggregate_loss(
            b.logprobs,
            b.loss_mask,
            mode=mode,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            max_length=max_length,
        ),
        lambda b: core_algos.agg_loss(
            b.logprobs,
            b.mask,
            mode,
            batch_num_tokens=num_tokens,
            global_batch_size=num_sequences,
            loss_scale_factor=max_length,
        ),
        wrt="logprobs",
        wider_bound=NEAR if mode == "seq-mean-token-mean" else None,
        note=COUNTS if mode == "seq-mean-token-mean" else "",
    )


def value_loss(clip: float | None) -> ParityCase:
    """Make a case of the critic's loss, clipped or not."""
    return ParityCase(
        f"losses.value_loss, {'clip' if clip else 'no clip'}",
        "compute_value_loss",
        lambda b: aggregate_loss(
            losses.value_loss(b.values, b.returns, b.old_values, clip=clip),
            b.loss_mask,
            mode="token-mean",
        ),
        lambda b: core_algos.compute_value_loss(
            b.values, b.returns, b.old_values, b.mask, clip or NO_CLIP
        )[0],
        wrt="values",
    )


def weights(level: str, mode: str, low: float | None, *, far: bool = False) -> ParityCase:
    """Make a case of importance weights; verl truncates from above and masks from both sides."""
    threshold = 2.0 if low is None else f"{low}_2.0"
    name = f"{', low' if low else ''}{', far' if far else ''}"

    def log_ratio(batch: Batch) -> Tensor:
        return batch.logprobs - (batch.far_logprobs if far else batch.old_logprobs)

    return ParityCase(
        f"correction.importance_weights, {level}, {mode}{name}",
        "compute_rollout_correction_weights",
        lambda b: correction.importance_weights(
            log_ratio(b), b.loss_mask, level=level, low=low, high=2.0, mode=mode
        ),
        lambda b: rollout_corr_helper.compute_rollout_correction_weights(
            log_ratio(b), b.mask, level, threshold
        )[0],
        wider_bound=1e-8 if far else None,
        note="verl's are at least exp(-20)" if far else "",
    )


def normalized_weights(level: str) -> ParityCase:
    """Make a case of importance weights divided by their mean over the step."""

    def ours(batch: Batch) -> Tensor:
        weights = correction.importance_weights(
            batch.log_ratio, batch.loss_mask, level=level, high=2.0
        )
        total, count = correction.weight_sums(weights, batch.loss_mask, level=level)
        return weights / (total / count)

    return ParityCase(
        f"correction.weight_sums, {level}",
        "compute_rollout_correction_weights, batch_normalize",
        ours,
        lambda b: rollout_corr_helper.compute_rollout_correction_weights(
            b.log_ratio, b.mask, level, 2.0, rollout_is_batch_normalize=True
        )[0],
        wider_bound=NEAR,
        note=COUNTS,
    )


def rejection(kind: str, level: str, high: float, low: float | None = None) -> ParityCase:
    """Make a case of a rejection mask; verl bounds the inverse ratio."""
    threshold = high if low is None else f"{1 / high}_{1 / low}"
    option = f"token_{kind}" if level == "token" else f"seq_{level}_{kind}"
    return ParityCase(
        f"correction.rejection_mask, {kind}, {level}",
        f"compute_rollout_rejection_mask, {option}",
        lambda b: correction.rejection_mask(
            b.log_ratio, b.loss_mask, kind=kind, level=level, low=low, high=high
        ).double(),
        lambda b: rollout_corr_helper.compute_rollout_rejection_mask(
            b.log_ratio, b.mask, option, threshold
        )[0],
        note="verl's bounds are those of the inverse ratio" if low else "",
    )


CASES = [
    loss_case(
        "clipped_surrogate, dual_clip",
        "vanilla, clip_ratio_c",
        lambda b: losses.clipped_surrogate_loss(b.log_ratio, b.advantages, **CLIP, dual_clip=2.0),
        policy_loss("vanilla", CLIP_ACTOR(clip_ratio_c=2.0)),
    ),
    loss_case(
        "clipped_surrogate, dual_clip, far",
        "vanilla, clip_ratio_c",
        lambda b: losses.clipped_surrogate_loss(
            b.logprobs - b.far_logprobs, b.advantages, **CLIP, dual_clip=2.0
        ),
        policy_loss("vanilla", CLIP_ACTOR(clip_ratio_c=2.0), old="far_logprobs"),
    ),
    loss_case(
        "sequence_clipped_surrogate",
        "gspo",
        lambda b: losses.sequence_clipped_surrogate_loss(
            b.log_ratio, b.advantages, b.loss_mask, **SEQUENCE_CLIP
        ),
        policy_loss("gspo", actor(clip_ratio_low=0.05, clip_ratio_high=0.08), mode=PER_ROW),
        mode=PER_ROW,
    ),
    loss_case(
        "clipped_importance",
        "cispo",
        lambda b: losses.clipped_importance_loss(
            b.log_ratio, b.advantages, logprobs=b.logprobs, **CLIP
        ),
        policy_loss("cispo", CLIP_ACTOR()),
    ),
    ParityCase(
        "losses.geometric_mean",
        "geo_mean",
        lambda b: aggregate_loss(
            losses.geometric_mean_loss(b.log_ratio, b.row_advantages, b.loss_mask, **CLIP),
            b.loss_mask,
            mode="seq-mean-token-mean",
            num_sequences=len(b.mask),
        ),
        policy_loss("geo_mean", CLIP_ACTOR(), advantages="row_advantages"),
        wrt="logprobs",
        wider_bound=NEAR,
        note=COUNTS + "; rows without one count",
    ),
    loss_case(
        "soft_adaptive",
        "sapo",
        lambda b: losses.soft_adaptive_loss(
            b.log_ratio, b.advantages, temperature_positive=0.8, temperature_negative=1.3
        ),
        policy_loss("sapo", actor(tau_pos=0.8, tau_neg=1.3)),
        mode=PER_ROW,
    ),
    loss_case(
        "covariance_clip",
        "clip_cov",
        lambda b: losses.covariance_clip_loss(b.log_ratio, b.advantages, chosen=in_band(b), **CLIP),
        policy_loss("clip_cov", CLIP_ACTOR(policy_loss=CLIP_COV)),
        note="all of the band; of tokens that PPO clips verl chooses none",
    ),
    loss_case(
        "covariance_kl",
        "kl_cov",
        lambda b: losses.covariance_kl_loss(
            b.log_ratio,
            b.advantages,
            chosen=losses.covariance_top_mask(b.logprobs, b.advantages, b.loss_mask, fraction=0.1),
            coef=0.7,
        ),
        policy_loss("kl_cov", actor(policy_loss=KL_COV)),
    ),
    loss_case(
        "divergence_masked, tv",
        "dppo_tv",
        lambda b: losses.divergence_masked_loss(
            b.log_ratio, b.advantages, logprobs=b.logprobs, kind="tv", low=0.1, high=0.15, cap=1.5
        ),
        policy_loss("dppo_tv", actor(clip_ratio_low=0.1, clip_ratio_high=0.15, clip_ratio_c=1.5)),
    ),
    loss_case(
        "divergence_masked, kl",
        "dppo_kl",
        lambda b: losses.divergence_masked_loss(
            b.log_ratio, b.advantages, logprobs=b.logprobs, kind="kl", low=0.02, high=0.03, cap=1.5
        ),
        policy_loss("dppo_kl", actor(clip_ratio_low=0.02, clip_ratio_high=0.03, clip_ratio_c=1.5)),
    ),
    loss_case(
        "quadratic_penalty",
        "dro",
        lambda b: losses.quadratic_penalty_loss(
            b.log_ratio, b.advantages, logprobs=b.logprobs, coef=0.6
        ),
        policy_loss("dro", actor(policy_loss=PolicyLossConfig(dro_beta=0.6))),
    ),
    loss_case(
        "score_function",
        "gpg",
        lambda b: losses.score_function_loss(b.logprobs, b.advantages),
        policy_loss("gpg", actor()),
    ),
    value_loss(0.2),
    value_loss(None),
    ParityCase(
        "losses.entropy",
        "entropy_from_logits",
        lambda b: losses.entropy_from_logits(b.logits),
        lambda b: torch_functional.entropy_from_logits(b.logits),
        wrt="logits",
    ),
    agg_loss("token-mean"),
    agg_loss("token-sum"),
    agg_loss("token-mean", num_tokens=1234, num_sequences=77),
    agg_loss("seq-mean-token-sum"),
    agg_loss("seq-mean-token-sum", num_tokens=1234, num_sequences=77),
    agg_loss("seq-mean-token-sum-norm", max_length=MAX_LENGTH),
    agg_loss("seq-mean-token-mean"),
    agg_loss("seq-mean-token-mean", num_tokens=1234, num_sequences=77),
    *(
        weights(level, mode, low)
        for level in ("token", "sequence")
        for mode, low in (("truncate", None), ("mask", 0.5))
    ),
    weights("token", "truncate", None, far=True),
    normalized_weights("token"),
    normalized_weights("sequence"),
    rejection("k1", "token", 1.5, low=0.8),
    rejection("k1", "sum", 3.0, low=0.5),
    rejection("k1", "mean", 1.05, low=0.98),
    *(
        rejection(kind, level, high)
        for kind in ("k2", "k3")
        for level, high in (("token", 0.05), ("sum", 2.0), ("mean", 0.15), ("max", 1.5))
    ),
]
