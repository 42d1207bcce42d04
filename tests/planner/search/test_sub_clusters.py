"""Plans of a cluster against plans of its parts."""

from dataclasses import replace

import pytest

from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import load_model_shape
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.clusters import Cluster
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.workload import LognormalLengths, Workload
from streamrl.planner.search.planner import PlanResult, iter_sub_problems, plan_placement

MODEL = load_model_shape("llama-7b")
WORKLOAD = Workload(64, 4, 100, LognormalLengths(300, 0.7, 1000))


def make_problem(cluster: str, workload: Workload = WORKLOAD) -> PlacementProblem:
    dataflow = build_dataflow((*ROLLOUT_COLUMNS, "scores"))
    return PlacementProblem(dataflow, {"policy": MODEL}, workload, Cluster.from_text(cluster))


def make_plan(problem: PlacementProblem, *bounds: int) -> PlanResult:
    return plan_placement(problem, CostModel, max_staleness=bounds or (0,), proposals=300)


@pytest.mark.parametrize("cluster", ["8xA100,1xV100", "8xV100,8xA100"])
def test_additional_slower_nodes_never_slow_the_plan(cluster: str):
    small_plan, large_plan = (make_plan(make_problem(text), 0, 1) for text in ("8xA100", cluster))
    assert small_plan.best is not None and large_plan.best is not None
    # Exact bytes may differ with device numbers.
    assert large_plan.best.step_s <= small_plan.best.step_s * 1.001


def test_plan_exists_with_more_devices_than_rollouts():
    workload = replace(WORKLOAD, groups_per_step=8, group_size=1)
    assert make_plan(make_problem("64xA100", workload)).best is not None


def test_sub_problems_are_node_groups_limited_by_rollouts():
    workload = replace(WORKLOAD, groups_per_step=4, group_size=4)
    parts = [
        (first, str(sub_problem.cluster))
        for first, sub_problem in iter_sub_problems(make_problem("4xA100,8x8xV100", workload))
    ]
    assert parts == [(0, "4xA100"), (4, "2x8xV100")]
    assert list(iter_sub_problems(make_problem("8x8xA100"))) == []
