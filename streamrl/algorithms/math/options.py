"""Allowed values of the algorithm's settings that are chosen by name."""

ADVANTAGE_SCALES = ("std", "batch", "mean", "none")
SINGLE_ROLLOUT_MODES = ("zero", "keep")
LOSS_AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
)
WEIGHT_LEVELS = ("token", "sequence", "geometric")
WEIGHT_MODES = ("truncate", "mask")
REJECTION_KINDS = ("k1", "k2", "k3")
REJECTION_LEVELS = ("token", "sum", "mean", "max")


def validate_aggregation(mode: str) -> None:
    """Raise ValueError unless `mode` is one of LOSS_AGGREGATIONS."""
    if mode not in LOSS_AGGREGATIONS:
        raise ValueError(
            f"loss aggregation {mode!r}: must be one of {', '.join(LOSS_AGGREGATIONS)}"
        )
