"""Settings of the off-policy correction, which weights, rejects or masks tokens in the loss."""

from dataclasses import dataclass
from typing import Annotated

from streamrl.files.typed_settings import Conflict, above, at_least, check_conflicts, one_of

NO_CORRECTION = "none"
PROXIMAL_POLICIES = ("generator", "trainer", "interpolated")
WEIGHT_LEVELS = ("token", "sequence", "geometric")
WEIGHT_MODES = ("truncate", "mask")
REJECTION_KINDS = ("k1", "k2", "k3", "binary_kl")
REJECTION_LEVELS = ("token", "sum", "mean", "max")


def _is_empty(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and low >= high


@dataclass
class CorrectionConfig:
    """Off-policy correction of tokens from an older policy or a different engine."""

    #: Policy that the loss clips against: generator, which sampled the token; trainer, the policy
    #: at the start of the step (decoupled PPO); interpolated, between generator and current policy.
    proximal: Annotated[str, one_of(*PROXIMAL_POLICIES)] = "generator"
    #: Importance weight of proximal over generator policy, if they differ: none, token, sequence or
    #: geometric.
    weights: Annotated[str, one_of(NO_CORRECTION, *WEIGHT_LEVELS)] = NO_CORRECTION
    #: Treatment of a weight out of bounds: truncate (TIS) or mask (IcePop).
    weight_mode: Annotated[str, one_of(*WEIGHT_MODES)] = "truncate"
    #: Smallest weight; null for no bound.
    weight_low: Annotated[float | None, at_least(0)] = None
    #: Largest weight; null for no bound.
    weight_high: Annotated[float | None, above(0)] = 2.0
    #: Divide weights by their mean over the step: over tokens (token), or rollouts (sequence,
    #: geometric), before rejection. One more forward pass.
    normalize_weights: bool = False
    #: Quantity by which tokens are rejected: none, k1 (the ratio), k2, k3 or binary_kl (KPop)
    #: (divergences).
    reject: Annotated[str, one_of(NO_CORRECTION, *REJECTION_KINDS)] = NO_CORRECTION
    #: Level of the rejection: token, or the rollout's sum, mean or max.
    reject_level: Annotated[str, one_of(*REJECTION_LEVELS)] = "token"
    #: Smallest ratio (k1).
    reject_low: Annotated[float | None, at_least(0)] = None
    #: Largest ratio (k1) or divergence.
    reject_high: Annotated[float | None, above(0)] = None
    #: Mask tokens of negative advantage in rollouts that became less likely than exp(-this) per
    #: token; null: none.
    off_policy_threshold: Annotated[float | None, at_least(0)] = None
    #: Mask the tokens of largest log-ratio until the mean squared log-ratio of the rest of the step
    #: is below this (M2PO); null: none.
    second_moment_threshold: Annotated[float | None, above(0)] = None

    @property
    def corrects_before_updates(self) -> bool:
        """Whether a pass before a step's first update rejects tokens or normalizes weights."""
        masks = self.reject != NO_CORRECTION or self.second_moment_threshold is not None
        return masks or self.normalize_weights

    def __post_init__(self) -> None:
        has_reject, low, high = self.reject != NO_CORRECTION, self.reject_low, self.reject_high
        is_open = low is None and high is None
        unused = "has no effect with reject=none. Remove it, or set reject."
        conflicts: list[Conflict] = [
            (
                self.weights != NO_CORRECTION and self.proximal == "generator",
                "weights",
                "with correction.proximal=generator the loss's ratio is this weight already."
                " Set correction.proximal=trainer.",
            ),
            (
                self.normalize_weights and self.weights == NO_CORRECTION,
                "normalize_weights",
                "has no effect with weights=none. Remove it, or set weights.",
            ),
            (
                _is_empty(self.weight_low, self.weight_high),
                "weight_low",
                f"must be below weight_high={self.weight_high}",
            ),
            (_is_empty(low, high), "reject_low", f"must be below reject_high={high}"),
            (not has_reject and low is not None, "reject_low", unused),
            (not has_reject and high is not None, "reject_high", unused),
            (
                has_reject and is_open,
                "reject",
                "needs reject_low or reject_high",
            ),
            (
                self.reject not in (NO_CORRECTION, "k1") and low is not None,
                "reject_low",
                f"{self.reject} is a divergence, which only has an upper bound. Use reject_high.",
            ),
        ]
        check_conflicts(self, conflicts, "algorithm.correction.")
