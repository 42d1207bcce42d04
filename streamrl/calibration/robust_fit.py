"""Straight lines through measured seconds that a few odd ones do not bend."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamrl.messages import Array

OUTLIER_SCALE = 0.1
"""A measurement that is off by more than this part of the median counts less."""
INITIAL_NOISE = 0.1
"""How far measurements are taken to be off before anything is known, as a part of the median."""
MIN_NOISE = 1e-3


@dataclass(frozen=True)
class RobustFit:
    """Coefficients that are 0 or more, the standard error of each, and how many measurements.

    residual: median of how far a measurement is from the line, as a part of the median.
    """

    coefficients: tuple[float, ...]
    standard_errors: tuple[float, ...]
    num_measurements: int
    residual: float


def fit_line(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> RobustFit:
    """Seconds as a sum of each feature times its coefficient; a row for each measurement."""
    rows, measured = np.asarray(features, np.float64), np.asarray(seconds, np.float64)
    sizes = np.maximum(rows.mean(axis=0), 1e-300)
    return fit_parts(lambda parts: rows / sizes @ parts, measured, sizes)


def fit_parts(
    predict: Callable[[Array], Array],
    measured: Array,
    sizes: Array,
    *,
    starts: Sequence[Sequence[float]] = (),
) -> RobustFit:
    """As `fit_line`, of any prediction of the parts, seconds each; a coefficient is a part over
    its size.

    starts: where it may begin, as parts of the median; the best of them is taken. By default all
    parts are alike.
    """
    scale = max(float(np.median(measured)), 1e-12)
    alike = np.full(len(sizes), 1 / len(sizes))

    def off(x: Array) -> Array:
        away: Array = (predict(x * scale) - measured) / scale
        return away

    parts = min(
        (np.array(one) for one in starts), key=lambda x: _compute_cost(off(x)), default=alike
    )
    noise = INITIAL_NOISE
    for _ in range(3):
        found = _solve_parts(off, parts, alike, noise)
        parts = found.x
        away = np.abs(predict(parts * scale) - measured)
        noise = min(INITIAL_NOISE, max(MIN_NOISE, 1.4826 * float(np.median(away)) / scale))
    parts, spread, jacobian = parts * scale, float(np.median(away)), found.jac
    covariance = np.linalg.pinv(jacobian.T @ jacobian)
    errors = 1.4826 * spread * np.sqrt(np.maximum(np.diag(covariance), 0.0))
    return RobustFit(
        tuple(float(part) for part in parts / sizes),
        tuple(float(error) for error in errors / sizes),
        len(measured),
        spread / scale,
    )


def _compute_cost(off: Array) -> float:
    """What the solver makes least."""
    return float(np.sum(np.sqrt(1 + (off / OUTLIER_SCALE) ** 2) - 1))


def _solve_parts(off: Callable[[Array], Array], start: Array, alike: Array, noise: float) -> Any:
    """The parts that are least off, drawn to be alike as strongly as there is noise.

    Where all measurements are of one size nothing else says which part is whose.
    """
    # It takes 0.4 s to import, which a command that fits nothing need not wait for.
    from scipy.optimize import least_squares

    return least_squares(
        lambda parts: np.concatenate([off(parts), noise * len(alike) * (parts - alike)]),
        np.maximum(start, 1e-6),
        bounds=(0.0, np.inf),
        loss="soft_l1",
        f_scale=OUTLIER_SCALE,
        diff_step=1e-3,
        xtol=1e-6,
        ftol=1e-9,
        max_nfev=12,
    )


def fit_median(seconds: Sequence[float]) -> RobustFit:
    """One number for all: their median."""
    if not len(seconds):
        return RobustFit((0.0,), (0.0,), 0, 0.0)
    middle = float(np.median(seconds))
    away = float(np.median(np.abs(np.asarray(seconds) - middle)))
    error = 1.4826 * away / np.sqrt(len(seconds))
    return RobustFit((middle,), (float(error),), len(seconds), away / middle if middle else 0.0)
