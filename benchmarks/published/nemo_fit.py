"""What NeMo-RL's constants are fitted on: `python -m benchmarks.published.nemo_fit` fits them anew.

Least squares of logarithms over synchronous steps, nothing else. Prints the constants found, and
every step, printed and as they say.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.published.nemo import CONSTANTS, is_fitted, step_s
from benchmarks.published.points import NEMO
from streamrl.messages import Array
from streamrl.placement.costs.constants import CostConstants

MOST_EVALUATIONS = 100
NAMES = ("expert_layer_s", "train_step_s", "network_hop_s")


def of_logarithms(logarithms: Array) -> CostConstants:
    """Constants, of the logarithms of what is fitted."""
    return replace(CONSTANTS, **dict(zip(NAMES, np.exp(logarithms).tolist(), strict=True)))


def errors(constants: CostConstants) -> Iterator[float]:
    """Logarithms of what is predicted to what is printed."""
    for run in NEMO:
        if is_fitted(run):
            yield math.log(step_s(run, constants) / run.step_s)


def fit(most: int = MOST_EVALUATIONS) -> CostConstants:
    """Find the constants with the least squares, in at most so many evaluations."""
    start = np.log([vars(CONSTANTS)[name] for name in NAMES])
    found = least_squares(
        lambda logarithms: list(errors(of_logarithms(logarithms))),
        start,
        diff_step=0.01,
        max_nfev=most,
    )
    return of_logarithms(found.x)


def make_parser() -> BenchmarkParser:
    """Declare how long is fitted."""
    parser = BenchmarkParser("nemo_fit", __doc__)
    parser.add_argument("--evaluations", type=at_least(1), default=MOST_EVALUATIONS, help="at most")
    parser.set_quick(evaluations=1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, and print what comes of it."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fit, and predict every step that is fitted."""
    report_progress(f"least squares, at most {arguments.evaluations} evaluations")
    constants = fit(arguments.evaluations)
    return {
        "constants": {name: vars(constants)[name] for name in NAMES},
        "steps": {
            f"{run.model}, {run.gpus} {run.device}": [
                run.step_s,
                round(step_s(run, constants), 1),
            ]
            for run in NEMO
            if is_fitted(run)
        },
        "squares": sum(error**2 for error in errors(constants)),
    }


if __name__ == "__main__":
    main()
