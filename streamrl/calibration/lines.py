"""Straight lines through measured seconds that a few odd ones do not bend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from streamrl.messages import Array

ODD = 0.1
"""A measurement that is off by more than this part of the median counts less."""
PULL = 0.03
"""How strongly parts are drawn to be alike, in measurements. Where all of them are of one size
nothing else says which part is whose."""


@dataclass(frozen=True)
class Fit:
    """Coefficients that are 0 or more, the standard error of each, and how many measurements.

    residual: median of how far a measurement is from the line, as a part of the median.
    """

    values: tuple[float, ...]
    errors: tuple[float, ...]
    count: int
    residual: float


def fit_line(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """Seconds as a sum of each feature times its coefficient; a row for each measurement."""
    rows, measured = np.asarray(features, np.float64), np.asarray(seconds, np.float64)
    sizes = np.maximum(rows.mean(axis=0), 1e-300)
    return fit_parts(lambda parts: rows / sizes @ parts, measured, sizes)


def fit_parts(predict: Callable[[Array], Array], measured: Array, sizes: Array) -> Fit:
    """As `fit_line`, of any prediction of the parts, seconds each; a coefficient is a part over
    its size."""
    scale = max(float(np.median(measured)), 1e-12)
    start = np.full(len(sizes), scale / len(sizes))

    def off(parts: Array) -> Array:
        drawn = np.sqrt(PULL) * (parts - start / scale)
        return np.concatenate([(predict(parts * scale) - measured) / scale, drawn])

    found = least_squares(
        off,
        start / scale,
        bounds=(0.0, np.inf),
        loss="soft_l1",
        f_scale=ODD,
        diff_step=1e-3,
        max_nfev=60,
    )
    parts = found.x * scale
    away = predict(parts) - measured
    spread = max(float(np.median(np.abs(away))), 0.0)
    jacobian = found.jac
    covariance = np.linalg.pinv(jacobian.T @ jacobian)
    errors = 1.4826 * spread * np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return Fit(
        tuple(float(part) for part in parts / sizes),
        tuple(float(error) for error in errors / sizes),
        len(measured),
        spread / scale,
    )


def fit_median(seconds: Sequence[float]) -> Fit:
    """One number for all: their median."""
    if not len(seconds):
        return Fit((0.0,), (0.0,), 0, 0.0)
    middle = float(np.median(seconds))
    away = float(np.median(np.abs(np.asarray(seconds) - middle)))
    error = 1.4826 * away / np.sqrt(len(seconds))
    return Fit((middle,), (float(error),), len(seconds), away / middle if middle else 0.0)
