"""Fit cost constants, which hold for any placement, to the timings of one run.

Each coefficient of `StageTimings` depends on its constant c in one of two forms: a + b * c, or a +
b / c where c is the achieved fraction of a device's peak. The cost model's coefficient at two
values of c determines a and b; solving for the measured coefficient gives c.

Example: the cost model gives token_s = 2 ms at c = 0.5 and 1 ms at c = 1.0. Then a = 0, b = 1 ms,
and a measured token_s of 2.5 ms gives c = 0.4.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from streamrl.calibration.fit_timings import CoefficientEstimate, FittedTimings
from streamrl.dataflow import GENERATE_CALL, POLICY, CallKind
from streamrl.placement.costs.constants import UPPER_BOUNDS, CostConstants
from streamrl.placement.costs.cost_model import CostModel
from streamrl.placement.placements import Placement
from streamrl.placement.problem import PlacementProblem
from streamrl.placement.stage_timings import ScoreTiming, StageTimings

MIN_FRACTION = 1e-6
SOLVER_ROUNDS = 3
"""Rounds of solving for all constants: some coefficients depend on two constants."""


@dataclass(frozen=True)
class ConstantLink:
    """A cost constant and the coefficient of `FittedTimings` that determines the constant.

    coefficient: dotted name, such as train.policy.token_s.
    is_fraction: whether the constant is a fraction of a device's peak (a + b / c).
    """

    constant: str
    coefficient: str
    read_coefficient: Callable[[StageTimings], float]
    is_fraction: bool = False


@dataclass(frozen=True)
class FittedConstant:
    """A cost constant determined by a run: value, default, and the coefficient behind it.

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
    links = [
        link for link in _list_links(problem, placement) if link.coefficient in fitted.estimates
    ]
    target_timings = _normalize_rule_batches(fitted.timings, problem)
    constants, clamped = start, set[str]()
    for _ in range(SOLVER_ROUNDS):
        clamped.clear()
        for link in links:
            value, is_clamped = _solve_constant(
                link, link.read_coefficient(target_timings), constants, problem, placement
            )
            constants = _replace_constant(constants, link.constant, value)
            if is_clamped:
                clamped.add(link.constant)
    determined = {
        link.constant: FittedConstant(
            float(vars(constants)[link.constant]),
            float(vars(CostConstants.from_cluster(problem.cluster))[link.constant]),
            link.coefficient,
            fitted.estimates[link.coefficient],
            link.constant in clamped,
        )
        for link in links
    }
    return CalibrationResult(constants, determined)


def _solve_constant(
    link: ConstantLink,
    target: float,
    constants: CostConstants,
    problem: PlacementProblem,
    placement: Placement,
) -> tuple[float, bool]:
    """Return the value of a constant with which the cost model gives the coefficient `target`.

    Also return whether the value was clamped to its bounds, or does not affect the coefficient.
    """
    low, high = (0.5, 1.0) if link.is_fraction else (0.25, 0.5)

    def coefficient(value: float) -> float:
        """Return the cost model's coefficient at a value of the constant."""
        model = CostModel(problem, _replace_constant(constants, link.constant, value))
        return link.read_coefficient(model.predict_timings(placement))

    ends = coefficient(low), coefficient(high)
    inputs = (1 / low, 1 / high) if link.is_fraction else (low, high)
    slope = (ends[1] - ends[0]) / (inputs[1] - inputs[0])
    intercept = ends[0] - slope * inputs[0]
    if not slope:
        return float(vars(constants)[link.constant]), True
    solved = (target - intercept) / slope
    if link.is_fraction:
        solved = 1 / solved if solved > 0 else 1.0
    value = min(max(solved, MIN_FRACTION if link.is_fraction else 0.0), UPPER_BOUNDS[link.constant])
    return value, abs(value - solved) > 1e-9 * max(1.0, abs(solved))


def _replace_constant(constants: CostConstants, name: str, value: float) -> CostConstants:
    return CostConstants(**{**vars(constants), name: value})


def _list_links(problem: PlacementProblem, placement: Placement) -> Iterator[ConstantLink]:
    """Yield all links; of several stages, the first with a model determines a constant."""
    yield ConstantLink(
        "train_flops_fraction", f"train.{POLICY}.token_s", lambda t: t.train[POLICY].token_s, True
    )
    yield ConstantLink(
        "micro_batch_s", f"train.{POLICY}.micro_batch_s", lambda t: t.train[POLICY].micro_batch_s
    )
    yield ConstantLink("round_s", f"train.{POLICY}.round_s", lambda t: t.train[POLICY].round_s)
    yield ConstantLink("update_s", f"train.{POLICY}.update_s", lambda t: t.train[POLICY].update_s)
    yield ConstantLink("train_step_s", f"train.{POLICY}.step_s", lambda t: t.train[POLICY].step_s)
    yield ConstantLink(
        "forward_flops_fraction",
        "generator.prefill_token_s",
        lambda t: t.generator.prefill_token_s,
        True,
    )
    yield ConstantLink("decode_step_s", "generator.step_s", lambda t: t.generator.step_s)
    yield ConstantLink("decode_rollout_s", "generator.rollout_s", lambda t: t.generator.rollout_s)
    yield ConstantLink("decode_group_s", "generator.group_s", lambda t: t.generator.group_s)
    yield ConstantLink("begin_s", "generator.begin_s", lambda t: t.generator.begin_s)
    yield from _list_score_links(problem, placement)
    yield from _list_weights_links(problem, placement)
    yield ConstantLink("hop_s", "hop_s", lambda t: t.hop_s)
    yield ConstantLink("between_steps_s", "step_s", lambda t: t.step_s)


def _list_score_links(problem: PlacementProblem, placement: Placement) -> Iterator[ConstantLink]:
    stages = [call.stage for call in problem.dataflow.select_calls(CallKind.SCORE)]
    rule = next((stage for stage in stages if stage not in placement.assignments), "")
    if rule:
        yield ConstantLink("rule_group_s", f"score.{rule}.batch_s", lambda t: t.score[rule].batch_s)
        yield ConstantLink(
            "rule_rollout_s", f"score.{rule}.rollout_s", lambda t: t.score[rule].rollout_s
        )
    modeled = next((stage for stage in stages if stage in placement.assignments), "")
    if modeled:
        prefix = f"score.{modeled}"
        yield ConstantLink("score_batch_s", f"{prefix}.batch_s", lambda t: t.score[modeled].batch_s)
        yield ConstantLink(
            "score_rollout_s", f"{prefix}.rollout_s", lambda t: t.score[modeled].rollout_s
        )


def _list_weights_links(problem: PlacementProblem, placement: Placement) -> Iterator[ConstantLink]:
    """Yield links for generators, which pull weights or switch phases on shared devices."""
    stage, source = GENERATE_CALL.stage, problem.dataflow.select_calls(CallKind.TRAIN)[0].stage
    prefix = f"weights.{stage}"
    if placement.overlaps(source, stage):
        yield ConstantLink("switch_s", f"{prefix}.pause_s", lambda t: t.weights[stage].pause_s)
        return
    yield ConstantLink("publish_s", f"{prefix}.publish_s", lambda t: t.weights[stage].publish_s)
    yield ConstantLink("pull_s", f"{prefix}.pull_s", lambda t: t.weights[stage].pull_s)

    def paused(timings: StageTimings) -> float:
        """Return the fraction of a pull in which the generator pauses."""
        weights = timings.weights[stage]
        return weights.pause_s / weights.pull_s if weights.pull_s else 0.0

    yield ConstantLink("pause_fraction", f"{prefix}.pause_s", paused)


def _normalize_rule_batches(timings: StageTimings, problem: PlacementProblem) -> StageTimings:
    """Convert rule-based score stages to batches of one group, as in the cost model."""
    size = problem.workload.group_size
    score = {}
    for stage, timing in timings.score.items():
        normalized = timing
        if problem.find_model(stage) is None and timing.batch > 1:
            group_s = timing.batch_duration_s(timing.batch * size, 0.0) / timing.batch
            normalized = ScoreTiming(
                timing.replicas,
                1,
                max(0.0, group_s - timing.rollout_s * size),
                timing.rollout_s,
                0.0,
            )
        score[stage] = normalized
    return replace(timings, score=score)
