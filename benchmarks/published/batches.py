"""Engines that have one step's prompts at a time, though a step ahead of training.

The next step's are sampled while this one's are scored and trained, and weights pass in between.
streamrl's engines have both, so its own schedule is none of such a run.
"""

from streamrl.dataflow import Kind
from streamrl.placement.costs import CostModel
from streamrl.placement.placements import Placement
from streamrl.placement.problem import Problem
from streamrl.placement.steady_state.call_durations import Generation, score_s, training


def calls_s(asked: Problem, model: CostModel, placed: Placement) -> dict[str, float]:
    """Of each call that has devices, alone on them: a whole step's work."""
    timings, workload = model.timings(placed), asked.workload
    found = {}
    for call in asked.dataflow.ordered:
        if call.stage not in placed.calls:
            continue
        if call.kind is Kind.GENERATE:
            seconds = Generation(workload).completion(timings.generator, (1.0,))[-1]
        elif call.kind is Kind.SCORE:
            seconds = score_s(timings.score[call.stage], workload, workload.group_size)
        else:
            trained = timings.train[call.role]
            seconds = training(trained, workload).total_s + trained.step_s
        found[call.stage] = seconds
    return found


def one_ahead_s(asked: Problem, model: CostModel, placed: Placement) -> float:
    """A step: the longer of sampling and of what follows it, and weights on their way."""
    apart = calls_s(asked, model, placed)
    sampling_s = apart.pop("generate")
    weights = model.timings(placed).weights["generate"]
    return weights.publish_s + weights.pull_s + max(sampling_s, sum(apart.values()))
