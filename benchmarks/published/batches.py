"""Engines that have one step's prompts at a time, though a step ahead of training.

The next step's are sampled while this one's are scored and trained, and weights pass in between.
streamrl's engines have both, so its own schedule is none of such a run.
"""

from streamrl.dataflow import CallKind
from streamrl.placement.costs.cost_model import CostModel
from streamrl.placement.placements import Placement
from streamrl.placement.problem import PlacementProblem
from streamrl.placement.steady_state.call_durations import (
    GenerationModel,
    score_duration_s,
    train_duration,
)


def calls_s(asked: PlacementProblem, model: CostModel, placed: Placement) -> dict[str, float]:
    """Of each call that has devices, alone on them: a whole step's work."""
    timings, workload = model.predict_timings(placed), asked.workload
    found = {}
    for call in asked.dataflow.ordered_calls:
        if call.stage not in placed.assignments:
            continue
        if call.kind is CallKind.GENERATE:
            seconds = GenerationModel(workload).find_completions_s(timings.generator, (1.0,))[-1]
        elif call.kind is CallKind.SCORE:
            seconds = score_duration_s(timings.score[call.stage], workload, workload.group_size)
        else:
            trained = timings.train[call.role]
            seconds = train_duration(trained, workload).total_s + trained.step_s
        found[call.stage] = seconds
    return found


def one_ahead_s(asked: PlacementProblem, model: CostModel, placed: Placement) -> float:
    """A step: the longer of sampling and of what follows it, and weights on their way."""
    apart = calls_s(asked, model, placed)
    sampling_s = apart.pop("generate")
    weights = model.predict_timings(placed).weights["generate"]
    return weights.publish_s + weights.pull_s + max(sampling_s, sum(apart.values()))
