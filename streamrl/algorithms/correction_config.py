"""Settings of the off-policy correction."""

from dataclasses import dataclass

from streamrl.algorithms.math.options import (
    REJECTION_KINDS,
    REJECTION_LEVELS,
    WEIGHT_LEVELS,
    WEIGHT_MODES,
)
from streamrl.errors import ConfigError

NO_CORRECTION = "none"
PROXIMAL_POLICIES = ("generator", "trainer", "interpolated")


@dataclass
class CorrectionConfig:
    """Off-policy correction of tokens from an older policy or a different engine."""

    #: Policy that the loss clips against: generator, which sampled the token; trainer, the policy
    #: at the start of the step (decoupled PPO); interpolated, between generator and current policy.
    proximal: str = "generator"
    #: Importance weight of proximal over generator policy, if they differ: none, token, sequence or
    #: geometric.
    weights: str = NO_CORRECTION
    #: Treatment of a weight out of bounds: truncate (TIS) or mask (IcePop).
    weight_mode: str = "truncate"
    #: Smallest weight; null for no bound.
    weight_low: float | None = None
    #: Largest weight; null for no bound.
    weight_high: float | None = 2.0
    #: Quantity by which tokens are rejected: none, k1 (the ratio), k2 or k3 (divergences).
    reject: str = NO_CORRECTION
    #: Level of the rejection: token, or the rollout's sum, mean or max.
    reject_level: str = "token"
    #: Smallest ratio (k1).
    reject_low: float | None = None
    #: Largest ratio (k1) or divergence.
    reject_high: float | None = None
    #: Mask tokens of negative advantage in rollouts that became less likely than exp(-this) per
    #: token; null: none.
    off_policy_threshold: float | None = None
    #: Mask the tokens of largest log-ratio until the mean squared log-ratio of the rest of the step
    #: is below this (M2PO); null: none.
    second_moment_threshold: float | None = None
    #: Whether rejected tokens count in the loss denominator.
    count_rejected: bool = True

    @property
    def masks_before_updates(self) -> bool:
        """Whether tokens are rejected by the policy before a step's first update."""
        return self.reject != NO_CORRECTION or self.second_moment_threshold is not None

    def __post_init__(self) -> None:
        choices = {
            "proximal": PROXIMAL_POLICIES,
            "weights": (NO_CORRECTION, *WEIGHT_LEVELS),
            "weight_mode": WEIGHT_MODES,
            "reject": (NO_CORRECTION, *REJECTION_KINDS),
            "reject_level": REJECTION_LEVELS,
        }
        for key, allowed in choices.items():
            if vars(self)[key] not in allowed:
                raise ConfigError(
                    f"{_format_setting(self, key)}: must be one of {', '.join(allowed)}"
                )
        if self.weights != NO_CORRECTION and self.proximal == "generator":
            raise ConfigError(
                f"{_format_setting(self, 'weights')}: with correction.proximal=generator the"
                " loss's ratio is this weight already. Set correction.proximal=trainer."
            )
        self._check_bounds()

    def _check_bounds(self) -> None:
        for key in ("weight_low", "reject_low", "off_policy_threshold"):
            value = vars(self)[key]
            if value is not None and value < 0:
                raise ConfigError(f"{_format_setting(self, key)}: must be 0 or more")
        for key in ("weight_high", "reject_high", "second_moment_threshold"):
            value = vars(self)[key]
            if value is not None and value <= 0:
                raise ConfigError(f"{_format_setting(self, key)}: must be above 0")
        for kind in ("weight", "reject"):
            low, high = vars(self)[f"{kind}_low"], vars(self)[f"{kind}_high"]
            if low is not None and high is not None and low >= high:
                raise ConfigError(
                    f"{_format_setting(self, f'{kind}_low')}: must be below {kind}_high={high}"
                )
        self._check_rejection()

    def _check_rejection(self) -> None:
        for key in ("reject_low", "reject_high"):
            if self.reject == NO_CORRECTION and vars(self)[key] is not None:
                raise ConfigError(
                    f"{_format_setting(self, key)} has no effect with reject=none. Remove it, or"
                    " set reject."
                )
        if self.reject != NO_CORRECTION and self.reject_low is None and self.reject_high is None:
            raise ConfigError(f"{_format_setting(self, 'reject')}: needs reject_low or reject_high")
        if self.reject not in (NO_CORRECTION, "k1") and self.reject_low is not None:
            raise ConfigError(
                f"{_format_setting(self, 'reject_low')}: {self.reject} is a divergence, which only"
                " has an upper bound. Use reject_high."
            )


def _format_setting(config: CorrectionConfig, key: str) -> str:
    return f"algorithm.correction.{key}={vars(config)[key]}"
