"""Adaptive parameters: coefficients that a run updates after every step from the step's statistics.

An adaptive parameter overrides the field of AlgorithmSettings, or the entry of `params`, of the
same name. Trainers receive the values before each step. Checkpoints contain the values; repeated
steps update them again.
"""

import math
from collections.abc import Mapping

from streamrl.algorithms.algorithm import Algorithm, AlgorithmSettings
from streamrl.algorithms.math.tokens import adapt_kl_coef


class AdaptiveParams:
    """Adaptive parameters of a run: those in the algorithm's `dials`, and kl_coef with a kl_target.

    values: current value by name.
    """

    def __init__(self, row: Algorithm, settings: AlgorithmSettings) -> None:
        self._spec = row
        self._settings = settings
        self.values = {name: float(settings.params[name]) for name in row.dials}
        if settings.kl_target is not None:
            self.values["kl_coef"] = settings.kl_coef

    def update_after_step(self, sums: Mapping[str, float]) -> None:
        """Update all values from the policy's metric sums over a training step.

        Means are over included rollouts. Does nothing if the step trained no token. Raises
        AlgorithmError if an update function of the algorithm returns no finite number.
        """
        if not (sums.get("num_sampled") and (num_rollouts := sums["included"])):
            return
        settings = self._settings.with_adaptive_params(self.values)
        totals = {name: sums[f"{name}_sum"] for name in ("score", "cost") if f"{name}_sum" in sums}
        means = {name: total / num_rollouts for name, total in totals.items()}
        for name in self._spec.dials:
            self.values[name] = self._spec.adapt_param(name, self.values[name], means, settings)
        if settings.kl_target is not None:
            self.values["kl_coef"] = adapt_kl_coef(
                settings.kl_coef,
                sums["kl_ref_sum"] / sums["num_sampled"],
                target=settings.kl_target,
                num_rollouts=num_rollouts,
            )

    def state_dict(self) -> dict[str, float]:
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the values from a checkpoint; ignore parameters that the run no longer has."""
        self.values.update({name: state[name] for name in self.values if name in state})


def adapt_multiplier(
    multiplier: float, cost: float, *, limit: float, lr: float, largest: float
) -> float:
    """Return the Lagrange multiplier after a step with mean cost `cost`: larger above `limit`.

    Gradient ascent on lambda (cost - limit) in log lambda, so lambda stays positive: lambda' =
    lambda exp(lr lambda (cost - limit)), at most `largest`. Source: Dai et al. 2024 (Safe RLHF).
    """
    # Keep exp() from overflowing (at 709) for costs far off the limit.
    ascent = max(min(lr * (cost - limit) * multiplier, 350.0), -350.0)
    return min(multiplier * math.exp(ascent), largest)
