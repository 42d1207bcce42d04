"""Numbers that are set anew after every step, from what the step showed.

A dial is named after the field of `Settings` it takes the place of. Who trains is told the dials
before a step; they are part of a checkpoint, and steps that are made again turn them again.
"""

from collections.abc import Mapping

from streamrl.algorithms.algorithm import Settings
from streamrl.algorithms.kl import adapt_coefficient


class Dials:
    """The dials of a run, by name: kl_coef, if it is to follow a target."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.values: dict[str, float] = {}
        if settings.kl_target is not None:
            self.values["kl_coef"] = settings.kl_coef

    def after(self, sums: Mapping[str, float], *, num_rollouts: int) -> None:
        """Turn them by the policy's sums of a step and its rollouts; not if it trained nothing."""
        target, sampled = self._settings.kl_target, sums.get("num_sampled", 0.0)
        if target is None or not sampled:
            return
        self.values["kl_coef"] = adapt_coefficient(
            self.values["kl_coef"],
            sums["kl_ref_sum"] / sampled,
            target=target,
            horizon=self._settings.kl_horizon,
            num_rollouts=num_rollouts,
        )

    def state_dict(self) -> dict[str, float]:
        """Where they stand."""
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from where they stood; those the run no longer has are forgotten."""
        self.values.update({name: state[name] for name in self.values if name in state})
