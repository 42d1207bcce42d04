"""`streamrl calibrate`: how long things took in a run, as constants for the planner."""

import argparse
import json
from typing import Any

import yaml

from streamrl.calibration.fit_constants import CalibrationResult, FittedConstant, fit_constants
from streamrl.calibration.fit_timings import FittedTimings, fit_timings
from streamrl.calibration.prediction import PlannedRun, SteadyMetrics, predict_metrics
from streamrl.calibration.run_trace import RunTrace, load_run_trace
from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.cli.output.output_files import check_output_file, write_output_file
from streamrl.placement import Cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl calibrate`."""
    parser.add_argument("run_dir", type=parse_path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--cluster",
        type=parse_nonempty,
        help="what the run was made on, as in 8xH100; not needed on one machine's CPU cores",
    )
    parser.add_argument(
        "-o",
        dest="output",
        type=parse_path,
        metavar="FILE",
        help="write the constants there, as YAML",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code. Raises ConfigError for a run that says too little."""
    if arguments.output is not None:
        check_output_file("-o", arguments.output)
    cluster = None if arguments.cluster is None else Cluster.from_text(arguments.cluster)
    measured = load_run_trace(arguments.run_dir)
    planned = PlannedRun.from_trace(measured, measured.config, cluster)
    fitted = fit_timings(measured, planned.base_timings)
    found = fit_constants(fitted, planned.problem, planned.placement, planned.initial_constants)
    figures = predict_metrics(planned, fitted.timings)
    errors = figures.compare_with(SteadyMetrics.from_trace(measured))
    if arguments.output is not None:
        write_output_file("-o", arguments.output, to_yaml(measured, found))
    if arguments.json:
        print(json.dumps(to_json(measured, fitted, found) | {"simulated": errors}))
    else:
        print("\n".join(describe_calibration(measured, found, errors)))
        if arguments.output is not None:
            print(f"written     {arguments.output}")
    return 0


def to_yaml(measured: RunTrace, found: CalibrationResult) -> str:
    """All constants; those that the run says nothing of are as they were."""
    head = (
        f"# Of {measured.run_dir}: {', '.join(found.fitted_constants)}.\n# The others are"
        f" defaults.\n"
    )
    return head + yaml.safe_dump(found.constants.to_dict(), sort_keys=False)


def to_json(measured: RunTrace, fitted: FittedTimings, found: CalibrationResult) -> dict[str, Any]:
    """All there is for scripts."""
    return {
        "steps": len(measured.steps),
        "left_out": dict(measured.excluded_steps),
        "cores": vars(measured.machine),
        "constants": found.constants.to_dict(),
        "determined": {
            name: {
                "value": one.value,
                "default": one.default,
                "coefficient": one.coefficient,
                "is_cut": one.is_clamped,
                "is_known": one.estimate.is_known,
                **vars(one.estimate),
            }
            for name, one in found.fitted_constants.items()
        },
        "coefficients": {name: vars(one) for name, one in fitted.estimates.items()},
    }


def describe_calibration(
    measured: RunTrace, found: CalibrationResult, errors: dict[str, dict[str, float]]
) -> list[str]:
    """The lines a person reads."""
    out = ", ".join(f"{count} {why}" for why, count in measured.excluded_steps.items() if count)
    lines = [
        f"{measured.run_dir}: {len(measured.steps)} steps of {measured.mean_step_s:.3g} s"
        + (f"; left out: {out}" if out else ""),
        f"{'constant':<24}{'value':>12}{'default':>12}{'+-':>8}{'off':>8}  measured",
    ]
    lines += [_format_constant(name, one) for name, one in found.fitted_constants.items()]
    step = errors["step_s"]
    lines.append(
        f"simulated with these, a step takes {step['predicted']:.3g} s:"
        f" {step['error']:+.0%} of what it took"
    )
    return lines


def _format_constant(name: str, one: FittedConstant) -> str:
    """+-: standard error; off: the median measurement's distance from the fit."""
    error = f"{one.estimate.error / one.estimate.value:.0%}" if one.estimate.value else "-"
    note = ""
    if one.is_clamped:
        note = "; at its bound"
    elif one.estimate.value and not one.estimate.is_known:
        note = "; only with others"
    return (
        f"{name:<24}{one.value:>12.4g}{one.default:>12.4g}{error:>8}{one.estimate.residual:>8.0%}"
        f"  {one.estimate.count} times{note}"
    )
