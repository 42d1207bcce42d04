"""Plans: close to the optimum, deterministic, with reasons for every loser; parts of a cluster."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.exhaustive import ExhaustiveSearch
from streamrl.dataflow import ModelCall
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem, RunOptions
from streamrl.planner.search.planner import (
    ExcludedBound,
    PlacementPlanner,
    PlanResult,
    iter_sub_problems,
    plan_placement,
)
from streamrl.planner.steady_state.estimator import make_placement_key
from streamrl.resharding.grids import RankGrid
from tests.planner.search.problems import FIXED, LONG_TAILED, choices, grpo, ppo

MAX_GAP = 0.01


@pytest.mark.parametrize(
    ("problem", "ahead"),
    [
        *(
            (grpo(cluster, size, lengths), 0)
            for cluster in ("2xA100", "4xA100", "8xA100")
            for size in ("qwen2.5-0.5b", "qwen2.5-3b")
            for lengths in (FIXED, LONG_TAILED)
        ),
        (grpo("2xA100", "qwen2.5-0.5b", LONG_TAILED), 1),
        (grpo("4xA100", "qwen2.5-0.5b"), 1),
        (ppo("2xA100", "qwen2.5-0.5b", LONG_TAILED), 0),
        (ppo("4xA100", "qwen2.5-1.5b"), 0),
    ],
)
def test_a_plan_is_near_the_exhaustive_optimum(problem: PlacementProblem, ahead: int):
    planned = plan_placement(problem, CostModel, max_staleness=[ahead], proposals=600)
    assert planned.points
    oracle = ExhaustiveSearch(choices(problem), sorted({0, ahead}))
    _, seconds = oracle.find_best(planned.candidates[0].placement)
    assert planned.candidates[0].step_s <= (1 + MAX_GAP) * seconds


@pytest.fixture(scope="module")
def planned() -> PlanResult:
    problem = ppo("2x8xA100", lengths=LONG_TAILED)
    return plan_placement(problem, CostModel, max_staleness=[0, 1, 2], proposals=60)


def test_more_staleness_is_never_slower(planned: PlanResult):
    times = [point.candidate.step_s for point in planned.points]
    assert times == sorted(times, reverse=True)
    assert planned.candidates[0].step_s == min(times)
    for point in planned.points:
        assert point.candidate.placement.max_staleness <= point.max_staleness


def test_the_best_of_every_kind_is_listed_after_the_winner(planned: PlanResult):
    winner, *losers = planned.candidates
    points = [point.candidate for point in planned.points]
    assert winner == min(points, key=lambda candidate: candidate.step_s)
    labels = [candidate.label for candidate in planned.candidates]
    assert len(set(labels)) == len(labels)
    assert {"colocated", "split", "disaggregated", "asynchronous, 1 ahead"} <= set(labels)
    assert all(candidate.step_s >= winner.step_s for candidate in losers)


def test_runner_ups_have_other_devices_and_hardly_longer_steps(planned: PlanResult):
    assert any(point.runner_ups for point in planned.points)
    for point in planned.points:
        placed = [point.candidate, *point.runner_ups]
        devices = [[c.mesh for c in item.placement.assignments.values()] for item in placed]
        assert all(devices.count(item) == 1 for item in devices)
        assert all(item.step_s <= 1.1 * point.candidate.step_s for item in point.runner_ups)


def test_placements_found_for_any_bound_are_tried_at_the_runs_own():
    problem = ppo("2x8xA100", lengths=LONG_TAILED)
    planner = PlacementPlanner(problem, CostModel(problem))
    plan = planner.plan([0, 1, 2], seed=0, proposals=60, run_bound=1)
    tried = {
        make_placement_key(item): step_s for item, step_s in planner.estimator.iter_estimated()
    }
    (own_s,) = (point.candidate.step_s for point in plan.points if point.max_staleness == 1)
    for point in plan.points:
        at_own = replace(point.candidate.placement, max_staleness=1)
        assert own_s <= tried[make_placement_key(at_own)]


def test_publishing_every_other_step_needs_a_staleness_of_one():
    problem = replace(
        grpo("4xA100", "qwen2.5-0.5b", FIXED), run_options=RunOptions(publish_every=2)
    )
    planned = plan_placement(problem, CostModel, max_staleness=[0, 1], proposals=60)
    (point,) = planned.points
    assert point.candidate.placement.max_staleness == 1
    assert all(candidate.placement.max_staleness == 1 for candidate in planned.candidates)
    (excluded,) = planned.excluded_bounds
    assert excluded.max_staleness == 0
    assert excluded.why.startswith("publish_every=2: ")


def test_infeasible_plan_reports_the_shortage():
    problem = ppo("2xV100", "llama-70b")
    planned = plan_placement(problem, CostModel, proposals=10)
    assert not planned.points
    assert planned.excluded_bounds == [ExcludedBound(0, "no evaluated placement fits")]
    assert all(
        "GB short" in candidate.estimate.infeasible_reason for candidate in planned.candidates
    )
    assert {candidate.label for candidate in planned.candidates} == {"colocated", "disaggregated"}


def test_split_rules_restrict_the_plan():
    problem = ppo("4x8xA100", "llama-34b")

    def allow_unpipelined(call: ModelCall, grid: RankGrid) -> Sequence[int]:
        return (3,) if grid.pp_size == 1 and grid.tp_size != 2 else ()

    planned = plan_placement(problem, CostModel, rules=allow_unpipelined, proposals=50)
    assert planned.points
    for assignment in planned.candidates[0].placement.assignments.values():
        assert (assignment.grid.pp_size, assignment.zero_stage) == (1, 3)
        assert assignment.grid.tp_size != 2


@pytest.mark.parametrize(
    "cluster", [pytest.param("8xA100,1xV100", marks=pytest.mark.slow), "8xV100,8xA100"]
)
def test_additional_slower_nodes_never_slow_the_plan(cluster: str):
    small_plan, large_plan = (
        plan_placement(
            grpo(text, "llama-7b", LONG_TAILED), CostModel, max_staleness=(0, 1), proposals=100
        )
        for text in ("8xA100", cluster)
    )
    assert small_plan.points and large_plan.points
    assert large_plan.candidates[0].step_s <= small_plan.candidates[0].step_s * 1.001


def shrink_step(problem: PlacementProblem, groups: int, group_size: int) -> PlacementProblem:
    workload = replace(problem.workload, groups_per_step=groups, group_size=group_size)
    return replace(problem, workload=workload)


def test_plan_exists_with_more_devices_than_rollouts():
    problem = shrink_step(grpo("64xA100", "llama-7b"), 8, 1)
    assert plan_placement(problem, CostModel, proposals=60).points


def test_sub_problems_are_node_groups_limited_by_rollouts():
    problem = shrink_step(grpo("4xA100,8x8xV100", "llama-7b"), 4, 4)
    parts = [(first, str(part.cluster)) for first, part in iter_sub_problems(problem)]
    assert parts == [(0, "4xA100"), (4, "2x8xV100")]
    assert list(iter_sub_problems(grpo("8x8xA100", "llama-7b"))) == []
