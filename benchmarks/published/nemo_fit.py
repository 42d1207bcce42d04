"""Fit NeMo-RL's constants: `python -m benchmarks.published.nemo_fit`.

Least squares of log errors over the synchronous steps. Prints the constants, and every step as
published and as predicted.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.published.nemo import CONSTANTS, is_fitted, predict_step_s
from benchmarks.published.points import NEMO
from streamrl.messages import Array
from streamrl.planner.costs.constants import CostConstants

MAX_EVALUATIONS = 100
NAMES = ("expert_layer_s", "train_step_s", "network_hop_s")


def from_logarithms(logarithms: Array) -> CostConstants:
    """Build constants from the logarithms of the fitted ones."""
    return replace(CONSTANTS, **dict(zip(NAMES, np.exp(logarithms).tolist(), strict=True)))


def iter_log_errors(constants: CostConstants) -> Iterator[float]:
    """Yield log(predicted / printed) of each fitted step."""
    for run in NEMO:
        if is_fitted(run):
            yield math.log(predict_step_s(run, constants) / run.step_s)


def fit_constants(most: int = MAX_EVALUATIONS) -> CostConstants:
    """Fit the constants by least squares. most: maximum number of evaluations."""
    start = np.log([vars(CONSTANTS)[name] for name in NAMES])
    result = least_squares(
        lambda logarithms: list(iter_log_errors(from_logarithms(logarithms))),
        start,
        diff_step=0.01,
        max_nfev=most,
    )
    return from_logarithms(result.x)


def make_parser() -> BenchmarkParser:
    """Declare the number of evaluations."""
    parser = BenchmarkParser("nemo_fit", __doc__)
    parser.add_argument("--evaluations", type=at_least(1), default=MAX_EVALUATIONS, help="at most")
    parser.set_quick(evaluations=1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Fit and print the result."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fit, and predict every fitted step."""
    report_progress(f"least squares, at most {arguments.evaluations} evaluations")
    constants = fit_constants(arguments.evaluations)
    return {
        "constants": {name: vars(constants)[name] for name in NAMES},
        "steps": {
            f"{run.model}, {run.gpus} {run.device}": [
                run.step_s,
                round(predict_step_s(run, constants), 1),
            ]
            for run in NEMO
            if is_fitted(run)
        },
        "squares": sum(error**2 for error in iter_log_errors(constants)),
    }


if __name__ == "__main__":
    main()
