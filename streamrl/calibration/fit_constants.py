"""From the timings of one run to the constants of the cost model, which are of any placement.

A coefficient of `StageTimings` depends on the constant it is tied to in one of two ways: as a + b *
c, or, where the constant is a part of what a device can do, as a + b / c. Two values of the
constant say what a and b are.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from streamrl.calibration.fit_timings import CoefficientEstimate, FittedTimings
from streamrl.dataflow import GENERATE_CALL, POLICY, CallKind
from streamrl.placement import Placement, PlacementProblem, ScoreTiming, StageTimings
from streamrl.placement.costs import CostConstants, CostModel
from streamrl.placement.costs.constants import UPPER_BOUNDS

MIN_FRACTION = 1e-6
"""A device that reaches less of what it can do does nothing."""
SOLVER_ROUNDS = 3
"""Some coefficients depend on two constants: so often all are gone through."""


@dataclass(frozen=True)
class ConstantLink:
    """A constant, and the name of its coefficient in `FittedTimings`."""

    constant: str
    coefficient: str
    read_coefficient: Callable[[StageTimings], float]
    is_fraction: bool = False


@dataclass(frozen=True)
class FittedConstant:
    """A constant that a run says: its value and default, and the coefficient it follows from.

    is_cut: the coefficient is out of the constant's bounds, and it is at the nearest one.
    """

    value: float
    default: float
    coefficient: str
    estimate: CoefficientEstimate
    is_clamped: bool = False


@dataclass(frozen=True)
class CalibrationResult:
    """Constants of a run, and those that it says: the others are what they were before."""

    constants: CostConstants
    fitted_constants: Mapping[str, FittedConstant]


def fit_constants(
    fitted: FittedTimings, problem: PlacementProblem, placement: Placement, start: CostConstants
) -> CalibrationResult:
    """The constants with which a cost model gives these timings for this placement."""
    ties = [tie for tie in _list_links(problem, placement) if tie.coefficient in fitted.estimates]
    wanted = _normalize_rule_batches(fitted.timings, problem)
    constants, cut = start, set[str]()
    for _ in range(SOLVER_ROUNDS):
        cut.clear()
        for tie in ties:
            value, is_cut = _solve_constant(
                tie, tie.read_coefficient(wanted), constants, problem, placement
            )
            constants = _replace_constant(constants, tie.constant, value)
            if is_cut:
                cut.add(tie.constant)
    determined = {
        tie.constant: FittedConstant(
            float(vars(constants)[tie.constant]),
            float(vars(CostConstants.from_cluster(problem.cluster))[tie.constant]),
            tie.coefficient,
            fitted.estimates[tie.coefficient],
            tie.constant in cut,
        )
        for tie in ties
    }
    return CalibrationResult(constants, determined)


def _solve_constant(
    tie: ConstantLink,
    wanted: float,
    constants: CostConstants,
    problem: PlacementProblem,
    placement: Placement,
) -> tuple[float, bool]:
    """The value of a constant that gives a coefficient, and whether it had to be cut to bounds."""
    low, high = (0.5, 1.0) if tie.is_fraction else (0.25, 0.5)

    def coefficient(value: float) -> float:
        model = CostModel(problem, _replace_constant(constants, tie.constant, value))
        return tie.read_coefficient(model.predict_timings(placement))

    ends = coefficient(low), coefficient(high)
    seen = (1 / low, 1 / high) if tie.is_fraction else (low, high)
    slope = (ends[1] - ends[0]) / (seen[1] - seen[0])
    level = ends[0] - slope * seen[0]
    if not slope:
        return float(vars(constants)[tie.constant]), True
    solved = (wanted - level) / slope
    if tie.is_fraction:
        solved = 1 / solved if solved > 0 else 1.0
    value = min(max(solved, MIN_FRACTION if tie.is_fraction else 0.0), UPPER_BOUNDS[tie.constant])
    return value, abs(value - solved) > 1e-9 * max(1.0, abs(solved))


def _replace_constant(constants: CostConstants, name: str, value: float) -> CostConstants:
    return CostConstants(**{**vars(constants), name: value})


def _list_links(problem: PlacementProblem, placement: Placement) -> Iterator[ConstantLink]:
    """What a run of this dataflow can say. Where several stages depend on one constant the first
    that has a model says what it is."""
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
    """Of the first stage that is a rule, and of the first that has a model."""
    stages = [call.stage for call in problem.dataflow.select_calls(CallKind.SCORE)]
    rule = next((stage for stage in stages if stage not in placement.assignments), "")
    if rule:
        yield ConstantLink("rule_group_s", f"score.{rule}.batch_s", lambda t: t.score[rule].batch_s)
        yield ConstantLink(
            "rule_rollout_s", f"score.{rule}.rollout_s", lambda t: t.score[rule].rollout_s
        )
    modelled = next((stage for stage in stages if stage in placement.assignments), "")
    if modelled:
        place = f"score.{modelled}"
        yield ConstantLink("score_batch_s", f"{place}.batch_s", lambda t: t.score[modelled].batch_s)
        yield ConstantLink(
            "score_rollout_s", f"{place}.rollout_s", lambda t: t.score[modelled].rollout_s
        )


def _list_weights_links(problem: PlacementProblem, placement: Placement) -> Iterator[ConstantLink]:
    """Of the generators: as one of those who follow from elsewhere, or share the devices."""
    stage, source = GENERATE_CALL.stage, problem.dataflow.select_calls(CallKind.TRAIN)[0].stage
    place = f"weights.{stage}"
    if placement.overlaps(source, stage):
        yield ConstantLink("switch_s", f"{place}.pause_s", lambda t: t.weights[stage].pause_s)
        return
    yield ConstantLink("publish_s", f"{place}.publish_s", lambda t: t.weights[stage].publish_s)
    yield ConstantLink("pull_s", f"{place}.pull_s", lambda t: t.weights[stage].pull_s)

    def paused(timings: StageTimings) -> float:
        one = timings.weights[stage]
        return one.pause_s / one.pull_s if one.pull_s else 0.0

    yield ConstantLink("pause_fraction", f"{place}.pause_s", paused)


def _normalize_rule_batches(timings: StageTimings, problem: PlacementProblem) -> StageTimings:
    """With rules that judge one group at a time, as the cost model has them."""
    size = problem.workload.group_size
    score = {}
    for stage, one in timings.score.items():
        own = one
        if problem.find_model(stage) is None and one.batch > 1:
            full = one.batch_duration_s(one.batch * size, 0.0) / one.batch
            own = ScoreTiming(
                one.replicas, 1, max(0.0, full - one.rollout_s * size), one.rollout_s, 0.0
            )
        score[stage] = own
    return replace(timings, score=score)
