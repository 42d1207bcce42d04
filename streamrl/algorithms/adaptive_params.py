"""Numbers that are set anew after every step, from what the step showed.

A dial is named after the field of `Settings`, or the number of the row's own, that it takes the
place of. Who trains is told the dials before a step; they are part of a checkpoint, and steps that
are made again turn them again.
"""

from collections.abc import Mapping

from streamrl.algorithms.algorithm import Algorithm, AlgorithmSettings
from streamrl.algorithms.math.kl import adapt_kl_coef


class AdaptiveParams:
    """The dials of a run, by name: those of the row, and kl_coef if it is to follow a target."""

    def __init__(self, row: Algorithm, settings: AlgorithmSettings) -> None:
        self._spec = row
        self._settings = settings
        self.values = {name: float(settings.params[name]) for name in row.dials}
        if settings.kl_target is not None:
            self.values["kl_coef"] = settings.kl_coef

    def update_after_step(self, sums: Mapping[str, float], *, num_rollouts: int) -> None:
        """Turn them by the policy's sums of a step and its rollouts; not if it trained nothing.

        Raises AlgorithmError if a dial of the row gives no number.
        """
        if not sums.get("num_sampled"):
            return
        settings = self._settings.with_adaptive_params(self.values)
        shown = {name: sums[f"{name}_sum"] / num_rollouts for name in _list_reported(sums)}
        for name in self._spec.dials:
            self.values[name] = self._spec.adapt_param(name, self.values[name], shown, settings)
        if settings.kl_target is not None:
            self.values["kl_coef"] = adapt_kl_coef(
                settings.kl_coef,
                sums["kl_ref_sum"] / sums["num_sampled"],
                target=settings.kl_target,
                horizon=settings.kl_horizon,
                num_rollouts=num_rollouts,
            )

    def state_dict(self) -> dict[str, float]:
        """Where they stand."""
        return dict(self.values)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from where they stood; those the run no longer has are forgotten."""
        self.values.update({name: state[name] for name in self.values if name in state})


def _list_reported(sums: Mapping[str, float]) -> list[str]:
    return [name for name in ("score", "cost") if f"{name}_sum" in sums]
