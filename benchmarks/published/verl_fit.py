"""Fit verl's constants: `python -m benchmarks.published.verl_fit`.

Least squares of log errors over the published parts of synchronous steps. Prints the calibration,
and every part as published and as predicted.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.published.batches import predict_calls_s
from benchmarks.published.points import VERL, VerlRun
from benchmarks.published.verl import (
    DEFAULT_CALIBRATION,
    VerlCalibration,
    VerlCosts,
    build_placement,
    build_problem,
    compute_handoff_s,
    is_fitted,
)
from streamrl.messages import Array
from streamrl.planner.costs.generation_model import GenerationModel

MAX_EVALUATIONS = 40
Parts = dict[str, tuple[float, float]]


def predict_parts(run: VerlRun, calibration: VerlCalibration) -> Parts:
    """Predict the published parts of a synchronous run: (seconds printed, seconds predicted)."""
    problem = build_problem(run, calibration)
    costs, placement = VerlCosts(run, problem, calibration), build_placement(run, problem)
    calls = predict_calls_s(problem, costs, placement)
    update_s = calls["train"] - costs.constants.train_step_s + compute_handoff_s(run, calibration)
    result = {
        "gen": (run.gen_s, calls["generate"]),
        "own": (run.forward_s, calls["reward"]),
        "update": (run.update_s, update_s),
    }
    if run.reference_s:
        result["reference"] = (run.reference_s, calls["reference"])
    if run.sampled_s:
        timing = costs.predict_timings(placement).generator
        # One replica with its part of the prompts is the mean over all replicas.
        replica_workload = replace(
            problem.workload, groups_per_step=problem.workload.groups_per_step // timing.replicas
        )
        mean_s = GenerationModel(replica_workload).find_completions_s(
            replace(timing, replicas=1), (1.0,)
        )[-1]
        result["sampled"] = (run.sampled_s, mean_s)
    return result


def from_logarithms(logarithms: Array) -> VerlCalibration:
    """Build a calibration from the logarithms of its values."""
    values = iter(np.exp(logarithms).tolist())
    plain = {name: next(values) for name in asdict(DEFAULT_CALIBRATION) if name != "medians"}
    return VerlCalibration(
        **plain, medians={name: next(values) for name in DEFAULT_CALIBRATION.medians}
    )


def to_logarithms(calibration: VerlCalibration) -> Array:
    """Return the logarithms of all values."""
    values = asdict(calibration)
    medians = values.pop("medians")
    return np.log([*values.values(), *medians.values()])


def iter_log_errors(calibration: VerlCalibration) -> Iterator[float]:
    """Yield log(predicted / printed) of each fitted part."""
    for run in VERL:
        if is_fitted(run):
            for printed, predicted in predict_parts(run, calibration).values():
                yield math.log(predicted / printed)


def fit_constants(
    start: VerlCalibration = DEFAULT_CALIBRATION, most: int = MAX_EVALUATIONS
) -> VerlCalibration:
    """Fit by least squares from `start`. most: maximum number of evaluations."""

    def compute_residuals(logarithms: Array) -> Sequence[float]:
        return list(iter_log_errors(from_logarithms(logarithms)))

    result = least_squares(compute_residuals, to_logarithms(start), diff_step=0.01, max_nfev=most)
    return from_logarithms(result.x)


def make_parser() -> BenchmarkParser:
    """Declare the number of evaluations."""
    parser = BenchmarkParser("verl_fit", __doc__)
    parser.add_argument("--evaluations", type=at_least(1), default=MAX_EVALUATIONS, help="at most")
    parser.set_quick(evaluations=1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Fit and print the result."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fit, and predict every fitted part."""
    report_progress(f"least squares, at most {arguments.evaluations} evaluations")
    result = fit_constants(most=arguments.evaluations)
    predicted = {
        f"{run.name}, {run.train} H20": {
            name: [printed, round(predicted, 1)]
            for name, (printed, predicted) in predict_parts(run, result).items()
        }
        for run in VERL
        if is_fitted(run)
    }
    squares = sum(error**2 for error in iter_log_errors(result))
    return {"calibration": asdict(result), "parts": predicted, "squares": squares}


if __name__ == "__main__":
    main()
