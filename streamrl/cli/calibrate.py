"""`streamrl calibrate`: fit the planner's cost constants to a run."""

import argparse
import json
from typing import Any

import yaml

from streamrl.calibration.fit_constants import CalibrationResult, FittedConstant, fit_constants
from streamrl.calibration.fit_timings import FittedTimings, fit_timings
from streamrl.calibration.prediction import PlannedRun, SteadyMetrics, predict_metrics
from streamrl.calibration.run_trace import RunTrace, load_run_trace
from streamrl.cli.arguments.arg_types import parse_path
from streamrl.cli.arguments.config_args import add_run_cluster_argument, read_run_cluster
from streamrl.cli.output.advice_report import describe_excluded_steps
from streamrl.cli.output.output_files import check_output_file, write_output_file
from streamrl.telemetry.progress_line import show_progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=parse_path, metavar="RUN", help="run directory")
    add_run_cluster_argument(parser)
    parser.add_argument(
        "-o",
        dest="output",
        type=parse_path,
        metavar="FILE",
        help="write the constants to FILE as YAML",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run `streamrl calibrate`. Raises ConfigError if the run has too few measurements."""
    if arguments.output is not None:
        check_output_file("-o", arguments.output)
    with show_progress(f"reading {arguments.run_dir}") as progress:
        cluster = read_run_cluster(arguments)
        trace = load_run_trace(arguments.run_dir)
        planned = PlannedRun.from_trace(trace, trace.config, cluster)
        progress.describe("fitting")
        fitted = fit_timings(trace, planned.base_timings)
        calibration = fit_constants(
            fitted, planned.problem, planned.placement, planned.initial_constants
        )
        progress.describe("simulating with the fitted constants")
        predicted = predict_metrics(planned, fitted.timings)
        errors = predicted.compare_with(SteadyMetrics.from_run(trace))
    if arguments.output is not None:
        write_output_file("-o", arguments.output, to_yaml(trace, calibration))
    if arguments.json:
        print(json.dumps(to_json(trace, fitted, calibration) | {"simulated": errors}))
    else:
        print("\n".join(describe_calibration(trace, calibration, errors)))
        if arguments.output is not None:
            print(f"written     {arguments.output}")
    return 0


def to_yaml(trace: RunTrace, calibration: CalibrationResult) -> str:
    """Format all cost constants as YAML; those that the run did not measure keep their defaults."""
    head = (
        f"# Fitted to {trace.run_dir}: {', '.join(calibration.fitted_constants)}.\n"
        "# All other constants are defaults.\n"
    )
    return head + yaml.safe_dump(calibration.constants.to_dict(), sort_keys=False)


def to_json(
    trace: RunTrace, fitted: FittedTimings, calibration: CalibrationResult
) -> dict[str, Any]:
    return {
        "steps": len(trace.steps),
        "left_out": dict(trace.excluded_steps),
        "cores": vars(trace.machine),
        "constants": calibration.constants.to_dict(),
        "determined": {
            name: {
                "value": constant.value,
                "default": constant.default,
                "coefficient": constant.coefficient,
                "is_cut": constant.is_clamped,
                "is_known": constant.estimate.is_known,
                **vars(constant.estimate),
            }
            for name, constant in calibration.fitted_constants.items()
        },
        "coefficients": {name: vars(estimate) for name, estimate in fitted.estimates.items()},
    }


def describe_calibration(
    trace: RunTrace, calibration: CalibrationResult, errors: dict[str, dict[str, float]]
) -> list[str]:
    """Format a table of the fitted cost constants, and the error of a simulation that uses them.

    errors: prediction and relative error by metric of the simulated run.
    """
    lines = [
        f"{trace.run_dir}: {len(trace.steps)} steps of {trace.mean_step_s:.3g} s"
        f"{describe_excluded_steps(trace)}",
        f"{'constant':<24}{'value':>12}{'default':>12}{'+-':>8}{'off':>8}  measured",
    ]
    lines += [
        _format_constant(name, constant) for name, constant in calibration.fitted_constants.items()
    ]
    step = errors["step_s"]
    lines.append(
        f"simulated with these constants, a step takes {step['predicted']:.3g} s:"
        f" {step['error']:+.0%} of the measured time"
    )
    return lines


def _format_constant(name: str, constant: FittedConstant) -> str:
    """Format a row; "+-" is the relative standard error, "off" the median residual."""
    error = (
        f"{constant.estimate.error / constant.estimate.value:.0%}"
        if constant.estimate.value
        else "-"
    )
    note = ""
    if constant.is_clamped:
        note = "; clamped to its bound"
    elif constant.estimate.value and not constant.estimate.is_known:
        note = "; only jointly determined"
    return (
        f"{name:<24}{constant.value:>12.4g}{constant.default:>12.4g}{error:>8}{constant.estimate.residual:>8.0%}"
        f"  {constant.estimate.count} times{note}"
    )
