"""A plan of a cluster is no worse than one of a part of it."""

from dataclasses import replace

import pytest

from streamrl.dataflow import build_dataflow
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.clusters import Cluster
from streamrl.placement.costs import CostModel
from streamrl.placement.model_shapes import load_model_shape
from streamrl.placement.problem import PlacementProblem
from streamrl.placement.search import PlanResult, plan_placement
from streamrl.placement.search.sub_clusters import iter_sub_problems
from streamrl.placement.workload import LognormalLengths, Workload

MODEL = load_model_shape("llama-7b")
WORKLOAD = Workload(64, 4, 100, LognormalLengths(300, 0.7, 1000))


def problem(cluster: str, workload: Workload = WORKLOAD) -> PlacementProblem:
    flow = build_dataflow((*ROLLOUT_COLUMNS, "scores"))
    return PlacementProblem(flow, {"policy": MODEL}, workload, Cluster.from_text(cluster))


def planned(
    asked: PlacementProblem, *bounds: int, proposals: int = 300, runners_up: int = 0
) -> PlanResult:
    return plan_placement(
        asked,
        CostModel,
        max_staleness=bounds or (0,),
        proposals=proposals,
        runners_up=runners_up,
    )


@pytest.mark.parametrize("cluster", ["8xA100,1xV100", "8xV100,8xA100"])
def test_unlike_nodes_are_no_reason_to_be_slower(cluster: str) -> None:
    alone, both = (planned(problem(text), 0, 1) for text in ("8xA100", cluster))
    assert alone.best is not None and both.best is not None
    # Exact bytes may differ where devices have other numbers.
    assert both.best.step_s <= alone.best.step_s * 1.001


def test_more_devices_than_rollouts_are_no_reason_to_fit_nowhere() -> None:
    few = replace(WORKLOAD, groups_per_step=8, group_size=1)
    assert planned(problem("64xA100", few)).best is not None


def test_parts_are_groups_of_nodes_and_as_many_as_there_is_work_for() -> None:
    few = replace(WORKLOAD, groups_per_step=4, group_size=4)
    found = [
        (first, str(part.cluster))
        for first, part in iter_sub_problems(problem("4xA100,8x8xV100", few))
    ]
    assert found == [(0, "4xA100"), (4, "2x8xV100")]
    assert list(iter_sub_problems(problem("8x8xA100"))) == []


def test_what_is_best_on_a_part_is_told_of_all_of_it() -> None:
    few = replace(WORKLOAD, groups_per_step=8, group_size=2)
    alone, more = (
        planned(problem(cluster, few), 0, 1, proposals=60, runners_up=2)
        for cluster in ("16xA100", "64xA100")
    )
    for point, other in zip(alone.front, more.front, strict=True):
        told = [each.placement for each in (other.candidate, *other.runners_up)]
        assert all(each.placement in told for each in (point.candidate, *point.runners_up))
        assert all(told.count(placement) == 1 for placement in told)
