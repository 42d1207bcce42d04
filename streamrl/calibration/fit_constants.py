"""From the timings of one run to the constants of the cost model, which are of any placement.

A coefficient of `Timings` depends on the constant it is tied to in one of two ways: as a + b * c,
or, where the constant is a part of what a device can do, as a + b / c. Two values of the constant
say what a and b are.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from streamrl.calibration.fit_timings import Fitted, Found
from streamrl.dataflow import GENERATE, POLICY, Kind
from streamrl.placement import Placement, Problem, ScoreTiming, Timings
from streamrl.placement.costs import Constants, CostModel
from streamrl.placement.costs.constants import MOST

LEAST_PART = 1e-6
"""A device that reaches less of what it can do does nothing."""
ROUNDS = 3
"""Some coefficients depend on two constants: so often all are gone through."""


@dataclass(frozen=True)
class Tie:
    """A constant, the coefficient that says what it is, and that one's name in a `Fitted`."""

    constant: str
    coefficient: str
    read: Callable[[Timings], float]
    is_part: bool = False


@dataclass(frozen=True)
class Determined:
    """A constant that a run says: its value and default, and the coefficient it follows from.

    is_cut: the coefficient is out of the constant's bounds, and it is at the nearest one.
    """

    value: float
    default: float
    coefficient: str
    found: Found
    is_cut: bool = False


@dataclass(frozen=True)
class Calibration:
    """Constants of a run, and those that it says: the others are what they were before."""

    constants: Constants
    determined: Mapping[str, Determined]


def calibrate(
    fitted: Fitted, problem: Problem, placement: Placement, start: Constants
) -> Calibration:
    """The constants with which a cost model gives these timings for this placement."""
    ties = [tie for tie in _ties(problem, placement) if tie.coefficient in fitted.found]
    wanted = _comparable(fitted.timings, problem)
    constants, cut = start, set[str]()
    for _ in range(ROUNDS):
        cut.clear()
        for tie in ties:
            value, is_cut = _solve(tie, tie.read(wanted), constants, problem, placement)
            constants = _set(constants, tie.constant, value)
            if is_cut:
                cut.add(tie.constant)
    determined = {
        tie.constant: Determined(
            float(vars(constants)[tie.constant]),
            float(vars(Constants.of(problem.cluster))[tie.constant]),
            tie.coefficient,
            fitted.found[tie.coefficient],
            tie.constant in cut,
        )
        for tie in ties
    }
    return Calibration(constants, determined)


def _solve(
    tie: Tie, wanted: float, constants: Constants, problem: Problem, placement: Placement
) -> tuple[float, bool]:
    """The value of a constant that gives a coefficient, and whether it had to be cut to bounds."""
    low, high = (0.5, 1.0) if tie.is_part else (0.25, 0.5)

    def coefficient(value: float) -> float:
        model = CostModel(problem, _set(constants, tie.constant, value))
        return tie.read(model.timings(placement))

    ends = coefficient(low), coefficient(high)
    seen = (1 / low, 1 / high) if tie.is_part else (low, high)
    slope = (ends[1] - ends[0]) / (seen[1] - seen[0])
    level = ends[0] - slope * seen[0]
    if not slope:
        return float(vars(constants)[tie.constant]), True
    solved = (wanted - level) / slope
    if tie.is_part:
        solved = 1 / solved if solved > 0 else 1.0
    value = min(max(solved, LEAST_PART if tie.is_part else 0.0), MOST[tie.constant])
    return value, abs(value - solved) > 1e-9 * max(1.0, abs(solved))


def _set(constants: Constants, name: str, value: float) -> Constants:
    return Constants(**{**vars(constants), name: value})


def _ties(problem: Problem, placement: Placement) -> Iterator[Tie]:
    """What a run of this dataflow can say. Where several stages depend on one constant the first
    that has a model says what it is."""
    yield Tie(
        "train_flops_fraction", f"train.{POLICY}.token_s", lambda t: t.train[POLICY].token_s, True
    )
    yield Tie(
        "micro_batch_s", f"train.{POLICY}.micro_batch_s", lambda t: t.train[POLICY].micro_batch_s
    )
    yield Tie("round_s", f"train.{POLICY}.round_s", lambda t: t.train[POLICY].round_s)
    yield Tie("update_s", f"train.{POLICY}.update_s", lambda t: t.train[POLICY].update_s)
    yield Tie("train_step_s", f"train.{POLICY}.step_s", lambda t: t.train[POLICY].step_s)
    yield Tie(
        "forward_flops_fraction",
        "generator.prefill_token_s",
        lambda t: t.generator.prefill_token_s,
        True,
    )
    yield Tie("decode_step_s", "generator.step_s", lambda t: t.generator.step_s)
    yield Tie("decode_rollout_s", "generator.rollout_s", lambda t: t.generator.rollout_s)
    yield Tie("decode_group_s", "generator.group_s", lambda t: t.generator.group_s)
    yield Tie("begin_s", "generator.begin_s", lambda t: t.generator.begin_s)
    yield from _score_ties(problem, placement)
    yield from _weights_ties(problem, placement)
    yield Tie("hop_s", "hop_s", lambda t: t.hop_s)
    yield Tie("between_steps_s", "step_s", lambda t: t.step_s)


def _score_ties(problem: Problem, placement: Placement) -> Iterator[Tie]:
    """Of the first stage that is a rule, and of the first that has a model."""
    stages = [call.stage for call in problem.dataflow.of_kind(Kind.SCORE)]
    rule = next((stage for stage in stages if stage not in placement.calls), "")
    if rule:
        yield Tie("rule_group_s", f"score.{rule}.batch_s", lambda t: t.score[rule].batch_s)
        yield Tie("rule_rollout_s", f"score.{rule}.rollout_s", lambda t: t.score[rule].rollout_s)
    modelled = next((stage for stage in stages if stage in placement.calls), "")
    if modelled:
        place = f"score.{modelled}"
        yield Tie("score_batch_s", f"{place}.batch_s", lambda t: t.score[modelled].batch_s)
        yield Tie("score_rollout_s", f"{place}.rollout_s", lambda t: t.score[modelled].rollout_s)


def _weights_ties(problem: Problem, placement: Placement) -> Iterator[Tie]:
    """Of the generators: as one of those who follow from elsewhere, or share the devices."""
    stage, source = GENERATE.stage, problem.dataflow.of_kind(Kind.TRAIN)[0].stage
    place = f"weights.{stage}"
    if placement.overlaps(source, stage):
        yield Tie("switch_s", f"{place}.pause_s", lambda t: t.weights[stage].pause_s)
        return
    yield Tie("publish_s", f"{place}.publish_s", lambda t: t.weights[stage].publish_s)
    yield Tie("pull_s", f"{place}.pull_s", lambda t: t.weights[stage].pull_s)

    def paused(timings: Timings) -> float:
        one = timings.weights[stage]
        return one.pause_s / one.pull_s if one.pull_s else 0.0

    yield Tie("pause_fraction", f"{place}.pause_s", paused)


def _comparable(timings: Timings, problem: Problem) -> Timings:
    """With rules that judge one group at a time, as the cost model has them."""
    size = problem.workload.group_size
    score = {}
    for stage, one in timings.score.items():
        own = one
        if problem.model_of(stage) is None and one.batch > 1:
            full = one.batch_of(one.batch * size, 0.0) / one.batch
            own = ScoreTiming(
                one.replicas, 1, max(0.0, full - one.rollout_s * size), one.rollout_s, 0.0
            )
        score[stage] = own
    return replace(timings, score=score)
