"""`streamrl calibrate`: how long things took in a run, as constants for the planner."""

import argparse
import json
from typing import Any

import yaml

from streamrl.calibration.fit_constants import Calibration, Determined, calibrate
from streamrl.calibration.fit_timings import Fitted, fit
from streamrl.calibration.prediction import Figures, PlannedRun, predict
from streamrl.calibration.run_trace import Measured, read_run
from streamrl.cli.arguments.arg_types import named, named_path
from streamrl.cli.output.output_files import check_file, write_file
from streamrl.placement import Cluster


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `streamrl calibrate`."""
    parser.add_argument("run_dir", type=named_path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--cluster",
        type=named,
        help="what the run was made on, as in 8xH100; not needed on one machine's CPU cores",
    )
    parser.add_argument(
        "-o",
        dest="output",
        type=named_path,
        metavar="FILE",
        help="write the constants there, as YAML",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code. Raises ConfigError for a run that says too little."""
    if arguments.output is not None:
        check_file("-o", arguments.output)
    cluster = None if arguments.cluster is None else Cluster.parse(arguments.cluster)
    measured = read_run(arguments.run_dir)
    planned = PlannedRun.of(measured, measured.config, cluster)
    fitted = fit(measured, planned.base)
    found = calibrate(fitted, planned.problem, planned.placement, planned.start)
    figures = predict(planned, fitted.timings)
    errors = figures.against(Figures.of(measured))
    if arguments.output is not None:
        write_file("-o", arguments.output, as_yaml(measured, found))
    if arguments.json:
        print(json.dumps(as_json(measured, fitted, found) | {"simulated": errors}))
    else:
        print("\n".join(describe(measured, found, errors)))
        if arguments.output is not None:
            print(f"written     {arguments.output}")
    return 0


def as_yaml(measured: Measured, found: Calibration) -> str:
    """All constants; those that the run says nothing of are as they were."""
    head = f"# Of {measured.run_dir}: {', '.join(found.determined)}.\n# The others are defaults.\n"
    return head + yaml.safe_dump(found.constants.to_dict(), sort_keys=False)


def as_json(measured: Measured, fitted: Fitted, found: Calibration) -> dict[str, Any]:
    """All there is for scripts."""
    return {
        "steps": len(measured.steps),
        "left_out": dict(measured.left_out),
        "cores": vars(measured.machine),
        "constants": found.constants.to_dict(),
        "determined": {
            name: {
                "value": one.value,
                "default": one.default,
                "coefficient": one.coefficient,
                "is_cut": one.is_cut,
                "is_known": one.found.is_known,
                **vars(one.found),
            }
            for name, one in found.determined.items()
        },
        "coefficients": {name: vars(one) for name, one in fitted.found.items()},
    }


def describe(
    measured: Measured, found: Calibration, errors: dict[str, dict[str, float]]
) -> list[str]:
    """The lines a person reads."""
    out = ", ".join(f"{count} {why}" for why, count in measured.left_out.items() if count)
    lines = [
        f"{measured.run_dir}: {len(measured.steps)} steps of {measured.mean_step_s:.3g} s"
        + (f"; left out: {out}" if out else ""),
        f"{'constant':<24}{'value':>12}{'default':>12}{'+-':>8}{'off':>8}  measured",
    ]
    lines += [_line(name, one) for name, one in found.determined.items()]
    step = errors["step_s"]
    lines.append(
        f"simulated with these, a step takes {step['predicted']:.3g} s:"
        f" {step['error']:+.0%} of what it took"
    )
    return lines


def _line(name: str, one: Determined) -> str:
    """+-: standard error; off: the median measurement's distance from the fit."""
    error = f"{one.found.error / one.found.value:.0%}" if one.found.value else "-"
    note = ""
    if one.is_cut:
        note = "; at its bound"
    elif one.found.value and not one.found.is_known:
        note = "; only with others"
    return (
        f"{name:<24}{one.value:>12.4g}{one.default:>12.4g}{error:>8}{one.found.residual:>8.0%}"
        f"  {one.found.count} times{note}"
    )
