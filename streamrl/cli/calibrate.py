"""`streamrl calibrate`: fit the planner's cost constants to a run.

Fit cost constants, which hold for any placement, to the timings of one run.

Each coefficient of `StageTimings` depends on its constant c in one of two forms: a + b * c, or a +
b / c where c is the achieved fraction of a device's peak. The cost model's coefficient at two
values of c determines a and b; solving for the measured coefficient gives c.

Example: the cost model gives token_s = 2 ms at c = 0.5 and 1 ms at c = 1.0. Then a = 0, b = 1 ms,
and a measured token_s of 2.5 ms gives c = 0.4.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from streamrl.cli.arguments.arg_types import parse_nonempty, parse_path
from streamrl.cli.output.output_files import check_output_file, write_output_file
from streamrl.dataflow import GENERATE_CALL, POLICY, CallKind
from streamrl.placement.clusters import Cluster
from streamrl.placement.placements import Placement
from streamrl.planner.calibration.advice import describe_excluded_steps
from streamrl.planner.calibration.fit_timings import CoefficientEstimate, FittedTimings, fit_timings
from streamrl.planner.calibration.prediction import PlannedRun, SteadyMetrics, predict_metrics
from streamrl.planner.calibration.run_trace import RunTrace, load_run_trace
from streamrl.planner.costs.constants import CostConstants, get_bounds
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.stage_timings import StageTimings
from streamrl.telemetry.progress import show_progress

SOLVER_ROUNDS = 3
"""Rounds of solving for all constants: some coefficients depend on two constants."""


@dataclass(frozen=True)
class FittedConstant:
    """A cost constant determined by a run: value, default, and the coefficient behind it.

    coefficient: dotted name, such as train.policy.token_s.
    is_clamped: whether the solution was out of bounds and `value` is the nearest bound.
    """

    value: float
    default: float
    coefficient: str
    estimate: CoefficientEstimate
    is_clamped: bool = False


@dataclass(frozen=True)
class CalibrationResult:
    """All cost constants, and those that the run determined; the rest keep their values."""

    constants: CostConstants
    fitted_constants: Mapping[str, FittedConstant]


def fit_constants(
    fitted: FittedTimings, problem: PlacementProblem, placement: Placement, start: CostConstants
) -> CalibrationResult:
    """Find cost constants with which the cost model predicts fitted timings for a placement.

    start: constants from which the fit starts, and values of those that the run does not determine.
    """
    coefficients = {
        constant: coefficient
        for constant, coefficient in _link_coefficients(problem, placement).items()
        if coefficient in fitted.estimates
    }
    target_timings = _normalize_rule_batches(fitted.timings, problem)
    constants, clamped = start, set[str]()
    for _ in range(SOLVER_ROUNDS):
        clamped.clear()
        for name, coefficient in coefficients.items():
            target = _read_coefficient(target_timings, coefficient)
            value, is_clamped = _solve_constant(
                name, coefficient, target, constants, problem, placement
            )
            constants = _replace_constant(constants, name, value)
            if is_clamped:
                clamped.add(name)
    defaults = vars(CostConstants.from_cluster(problem.cluster))
    determined = {
        name: FittedConstant(
            float(vars(constants)[name]),
            float(defaults[name]),
            coefficient,
            fitted.estimates[coefficient],
            name in clamped,
        )
        for name, coefficient in coefficients.items()
    }
    return CalibrationResult(constants, determined)


def _solve_constant(
    name: str,
    coefficient: str,
    target: float,
    constants: CostConstants,
    problem: PlacementProblem,
    placement: Placement,
) -> tuple[float, bool]:
    """Return the value of a constant with which the cost model gives the coefficient `target`.

    Also return whether the value was clamped to its bounds, or does not affect the coefficient.
    """
    is_fraction = name.endswith("flops_fraction")
    low, high = (0.5, 1.0) if is_fraction else (0.25, 0.5)

    def predict(value: float) -> float:
        """Return the cost model's coefficient at a value of the constant."""
        model = CostModel(problem, _replace_constant(constants, name, value))
        return _read_coefficient(model.predict_timings(placement), coefficient)

    ends = predict(low), predict(high)
    inputs = (1 / low, 1 / high) if is_fraction else (low, high)
    slope = (ends[1] - ends[0]) / (inputs[1] - inputs[0])
    intercept = ends[0] - slope * inputs[0]
    if not slope:
        return float(vars(constants)[name]), True
    solved = (target - intercept) / slope
    if is_fraction:
        solved = 1 / solved if solved > 0 else 1.0
    lowest, highest = get_bounds(name)
    value = min(max(solved, lowest), highest)
    return value, abs(value - solved) > 1e-9 * max(1.0, abs(solved))


def _read_coefficient(timings: StageTimings, name: str) -> float:
    """Return a coefficient by its dotted name."""
    value: Any = timings
    for part in name.split("."):
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return float(value)


def _replace_constant(constants: CostConstants, name: str, value: float) -> CostConstants:
    return CostConstants(**{**vars(constants), name: value})


def _link_coefficients(problem: PlacementProblem, placement: Placement) -> dict[str, str]:
    """Return, by cost constant, the dotted name of the coefficient that determines it.

    Of several stages, the first with a model determines a constant.
    """
    links = {
        "train_flops_fraction": f"train.{POLICY}.token_s",
        "micro_batch_s": f"train.{POLICY}.micro_batch_s",
        "round_s": f"train.{POLICY}.round_s",
        "update_s": f"train.{POLICY}.update_s",
        "train_step_s": f"train.{POLICY}.step_s",
        "forward_flops_fraction": "generator.prefill_token_s",
        "decode_step_s": "generator.step_s",
        "decode_rollout_s": "generator.rollout_s",
        "decode_group_s": "generator.group_s",
        "begin_s": "generator.begin_s",
    }
    stages = [call.stage for call in problem.dataflow.select_calls(CallKind.SCORE)]
    if rule := next((stage for stage in stages if stage not in placement.assignments), ""):
        links |= {"rule_group_s": f"score.{rule}.batch_s"}
        links |= {"rule_rollout_s": f"score.{rule}.rollout_s"}
    if modeled := next((stage for stage in stages if stage in placement.assignments), ""):
        links |= {"score_batch_s": f"score.{modeled}.batch_s"}
        links |= {"score_rollout_s": f"score.{modeled}.rollout_s"}
    # Generators pull weights, or switch phases on shared devices.
    stage, source = GENERATE_CALL.stage, problem.dataflow.select_calls(CallKind.TRAIN)[0].stage
    if placement.overlaps(source, stage):
        links |= {"switch_s": f"weights.{stage}.pause_s"}
    else:
        links |= {"publish_s": f"weights.{stage}.publish_s", "pull_s": f"weights.{stage}.pull_s"}
        # After pull_s, of which the pause is a fraction.
        links |= {"pause_fraction": f"weights.{stage}.pause_s"}
    return links | {"hop_s": "hop_s", "between_steps_s": "step_s"}


def _normalize_rule_batches(timings: StageTimings, problem: PlacementProblem) -> StageTimings:
    """Convert rule-based score stages to batches of one group, as in the cost model."""
    size = problem.workload.group_size
    score = dict(timings.score)
    for stage, timing in timings.score.items():
        if problem.find_model(stage) is None and timing.batch > 1:
            group_s = timing.batch_duration_s(timing.batch * size, 0.0) / timing.batch
            batch_s = max(0.0, group_s - timing.rollout_s * size)
            score[stage] = replace(timing, batch=1, batch_s=batch_s, token_s=0.0)
    return replace(timings, score=score)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", type=parse_path, metavar="RUN", help="run directory")
    parser.add_argument(
        "--cluster",
        type=parse_nonempty,
        metavar="8xH100",
        help="cluster that the run used; not needed for the CPU cores of one machine",
    )
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
        check_output_file("-o", arguments.output, inputs=[arguments.run_dir])
    with show_progress(f"reading {arguments.run_dir}") as progress:
        cluster = arguments.cluster and Cluster.from_text(arguments.cluster)
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
