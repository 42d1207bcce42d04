"""What verl's constants are fitted on: `python -m benchmarks.published.verl_fit` fits them anew.

Least squares of logarithms over the printed parts of synchronous steps, nothing else. Prints the
calibration found, and every part, printed and as it says.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.command import BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.published.batches import calls_s
from benchmarks.published.points import VERL, VerlRun
from benchmarks.published.verl import (
    CALIBRATED,
    Calibration,
    Costs,
    handed_s,
    is_fitted,
    placement,
    problem,
)
from streamrl.messages import Array
from streamrl.placement.steady_state.call_durations import GenerationModel

MOST_EVALUATIONS = 40
Parts = dict[str, tuple[float, float]]


def parts(run: VerlRun, calibrated: Calibration) -> Parts:
    """Of a synchronous run, those that are printed: seconds printed, and seconds predicted."""
    asked = problem(run, calibrated)
    model, placed = Costs(run, asked, calibrated), placement(run, asked)
    calls = calls_s(asked, model, placed)
    update_s = calls["train"] - model.constants.train_step_s + handed_s(run, calibrated)
    found = {
        "gen": (run.gen_s, calls["generate"]),
        "own": (run.forward_s, calls["reward"]),
        "update": (run.update_s, update_s),
    }
    if run.reference_s:
        found["reference"] = (run.reference_s, calls["reference"])
    if run.sampled_s:
        timing = model.predict_timings(placed).generator
        # A replica's part of the prompts, as one replica has them, is the mean of all replicas.
        alone = replace(
            asked.workload, groups_per_step=asked.workload.groups_per_step // timing.replicas
        )
        mean_s = GenerationModel(alone).find_completions_s(replace(timing, replicas=1), (1.0,))[-1]
        found["sampled"] = (run.sampled_s, mean_s)
    return found


def of_logarithms(logarithms: Array) -> Calibration:
    """A calibration of the logarithms of all it has."""
    values = iter(np.exp(logarithms).tolist())
    plain = {name: next(values) for name in asdict(CALIBRATED) if name != "medians"}
    return Calibration(**plain, medians={name: next(values) for name in CALIBRATED.medians})


def to_logarithms(calibrated: Calibration) -> Array:
    """The inverse."""
    told = asdict(calibrated)
    medians = told.pop("medians")
    return np.log([*told.values(), *medians.values()])


def errors(calibrated: Calibration) -> Iterator[float]:
    """Logarithms of what is predicted to what is printed."""
    for run in VERL:
        if is_fitted(run):
            for printed, predicted in parts(run, calibrated).values():
                yield math.log(predicted / printed)


def fit(start: Calibration = CALIBRATED, most: int = MOST_EVALUATIONS) -> Calibration:
    """Find the calibration with the least squares, from `start`, in at most so many evaluations."""

    def missed(logarithms: Array) -> Sequence[float]:
        return list(errors(of_logarithms(logarithms)))

    found = least_squares(missed, to_logarithms(start), diff_step=0.01, max_nfev=most)
    return of_logarithms(found.x)


def make_parser() -> BenchmarkParser:
    """Declare how long is fitted."""
    parser = BenchmarkParser("verl_fit", __doc__)
    parser.add_argument("--evaluations", type=at_least(1), default=MOST_EVALUATIONS, help="at most")
    parser.set_quick(evaluations=1)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Fit, and print what comes of it."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fit, and predict every part that is fitted."""
    report_progress(f"least squares, at most {arguments.evaluations} evaluations")
    found = fit(most=arguments.evaluations)
    predicted = {
        f"{run.name}, {run.train} H20": {
            name: [printed, round(predicted, 1)]
            for name, (printed, predicted) in parts(run, found).items()
        }
        for run in VERL
        if is_fitted(run)
    }
    squares = sum(error**2 for error in errors(found))
    return {"calibration": asdict(found), "parts": predicted, "squares": squares}


if __name__ == "__main__":
    main()
