"""Step time of a one-step-off pipeline: engines hold one step's prompts, a step ahead of training.

The next step is sampled while this one is scored and trained; weights are updated in between.
streamrl's engines hold prompts of both steps, so its estimator does not describe such a run.
"""

from streamrl.dataflow import CallKind
from streamrl.placement.placements import Placement
from streamrl.planner.costs.call_durations import score_duration_s, train_duration
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.costs.generation_model import GenerationModel
from streamrl.planner.problem.problem import PlacementProblem


def predict_calls_s(
    problem: PlacementProblem, costs: CostModel, placement: Placement
) -> dict[str, float]:
    """Predict seconds of each placed call for a whole step, alone on its devices."""
    timings, workload = costs.predict_timings(placement), problem.workload
    call_seconds = {}
    for call in problem.dataflow.ordered_calls:
        if call.stage not in placement.assignments:
            continue
        if call.kind is CallKind.GENERATE:
            seconds = GenerationModel(workload).find_completions_s(timings.generator, (1.0,))[-1]
        elif call.kind is CallKind.SCORE:
            seconds = score_duration_s(timings.score[call.stage], workload, workload.group_size)
        else:
            trained = timings.train[call.role]
            seconds = train_duration(trained, workload).total_s + trained.step_s
        call_seconds[call.stage] = seconds
    return call_seconds


def predict_one_ahead_s(problem: PlacementProblem, costs: CostModel, placement: Placement) -> float:
    """Predict seconds of a step: weight update, then the longer of sampling and all other calls."""
    call_seconds = predict_calls_s(problem, costs, placement)
    sampling_s = call_seconds.pop("generate")
    weights = costs.predict_timings(placement).weights["generate"]
    return weights.publish_s + weights.pull_s + max(sampling_s, sum(call_seconds.values()))
