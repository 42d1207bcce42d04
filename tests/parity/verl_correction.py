"""Compare our importance weights and rejection masks with those of verl."""

from torch import Tensor
from verl.trainer.ppo import rollout_corr_helper

from streamrl.algorithms.math import correction
from tests.parity.case import Batch, ParityCase


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
    *(
        weights(level, mode, low)
        for level in ("token", "sequence")
        for mode, low in (("truncate", None), ("mask", 0.5))
    ),
    weights("token", "truncate", None, far=True),
    rejection("k1", "token", 1.5, low=0.8),
    rejection("k1", "sum", 3.0, low=0.5),
    rejection("k1", "mean", 1.05, low=0.98),
    *(
        rejection(kind, level, high)
        for kind in ("k2", "k3")
        for level, high in (("token", 0.05), ("sum", 2.0), ("mean", 0.15), ("max", 1.5))
    ),
]
