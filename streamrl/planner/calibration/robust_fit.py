"""Robust linear fits of measured durations, on which a few outliers have little effect."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamrl.messages import Array

OUTLIER_SCALE = 0.1
"""Residuals above this fraction of the median measurement count less (soft L1 loss)."""
INITIAL_NOISE = 0.1
"""Assumed relative error of a measurement before the first fit."""
MIN_NOISE = 1e-3


MAX_RELATIVE_ERROR = 0.3
"""A coefficient counts as known if its standard error is at most this fraction of its value."""


@dataclass(frozen=True)
class CoefficientEstimate:
    """A fitted coefficient, 0 or more, with its uncertainty.

    error: standard error.
    count: number of measurements.
    residual: median absolute residual of the fit over the median measurement.
    """

    value: float
    error: float = 0.0
    count: int = 0
    residual: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether the measurements determine this coefficient, not only its sum with others."""
        return self.count > 0 and self.error <= MAX_RELATIVE_ERROR * self.value


def fit_line(
    features: Sequence[Sequence[float]], seconds: Sequence[float]
) -> list[CoefficientEstimate]:
    """Fit measured seconds as a sum of features times coefficients.

    features: a row per measurement.
    """
    rows, measured = np.asarray(features, np.float64), np.asarray(seconds, np.float64)
    sizes = np.maximum(rows.mean(axis=0), 1e-300)
    return fit_parts(lambda parts: rows / sizes @ parts, measured, sizes)


def fit_parts(
    predict: Callable[[Array], Array], measured: Array, sizes: Array
) -> list[CoefficientEstimate]:
    """Fit how measured times divide into parts, where `predict(parts)` gives the times.

    Each part is in seconds; dividing a part by its entry of `sizes` gives a coefficient.

    Example: measured group times of 10 s with a typical size of 1000 decode steps; a part of 8 s
    gives a coefficient of 8 ms per step.

    The fit alternates between solving and estimating the noise: the median absolute deviation times
    1.4826, which is the standard deviation for normal errors. Standard errors come from the inverse
    of J^T J at the solution.
    """
    scale = max(float(np.median(measured)), 1e-12)
    equal_parts = np.full(len(sizes), 1 / len(sizes))

    def compute_residuals(x: Array) -> Array:
        """Return the residuals, relative to the median measurement."""
        residuals: Array = (predict(x * scale) - measured) / scale
        return residuals

    parts, noise = equal_parts, INITIAL_NOISE
    for _ in range(3):
        solution = _solve_parts(compute_residuals, parts, equal_parts, noise)
        parts = solution.x
        residuals = np.abs(predict(parts * scale) - measured)
        noise = min(INITIAL_NOISE, max(MIN_NOISE, 1.4826 * float(np.median(residuals)) / scale))
    parts, spread, jacobian = parts * scale, float(np.median(residuals)), solution.jac
    covariance = np.linalg.pinv(jacobian.T @ jacobian)
    errors = 1.4826 * spread * np.sqrt(np.maximum(np.diag(covariance), 0.0))
    pairs = zip((parts / sizes).tolist(), (errors / sizes).tolist(), strict=True)
    return [
        CoefficientEstimate(value, error, len(measured), spread / scale) for value, error in pairs
    ]


def _solve_parts(
    compute_residuals: Callable[[Array], Array], start: Array, equal_parts: Array, noise: float
) -> Any:
    """Minimize the residuals plus a ridge term toward equal parts, weighted by the noise.

    If all measurements have the same size, only the ridge term separates the parts.
    """
    # Imported late: scipy.optimize takes 0.4 s, and most commands fit nothing.
    from scipy.optimize import least_squares

    return least_squares(
        lambda parts: np.concatenate(
            [compute_residuals(parts), noise * len(equal_parts) * (parts - equal_parts)]
        ),
        np.maximum(start, 1e-6),
        bounds=(0.0, np.inf),
        loss="soft_l1",
        f_scale=OUTLIER_SCALE,
        diff_step=1e-3,
        xtol=1e-6,
        ftol=1e-9,
        max_nfev=12,
    )


def fit_median(seconds: Sequence[float]) -> CoefficientEstimate:
    """Fit a single coefficient: the median of measured seconds, with its standard error."""
    if not len(seconds):
        return CoefficientEstimate(0.0)
    median = float(np.median(seconds))
    deviation = float(np.median(np.abs(np.asarray(seconds) - median)))
    error = 1.4826 * deviation / np.sqrt(len(seconds))
    residual = deviation / median if median else 0.0
    return CoefficientEstimate(median, float(error), len(seconds), residual)
