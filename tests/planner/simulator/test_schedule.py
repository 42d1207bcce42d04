"""Steady-state estimate of the planner, compared with simulations of the same placement."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from statistics import median

import pytest

from streamrl.dataflow import build_dataflow
from streamrl.engines.models.model_shapes import load_model_shape
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.clusters import Cluster
from streamrl.placement.placements import Placement
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.problem import PlacementProblem, RunOptions
from streamrl.planner.problem.workload import (
    LengthDistribution,
    LognormalLengths,
    Workload,
    make_fixed_lengths,
)
from streamrl.planner.simulator.simulation import run_simulation
from streamrl.planner.steady_state.estimator import PlacementEstimator
from tests.planner.notations import make_assignment

MODEL = load_model_shape("qwen2.5-1.5b")
FIXED = make_fixed_lengths(512)
LONG_TAILED = LognormalLengths(300, 0.9, 4096)
PLACES = {
    "colocated": {"generate": (0, 8), "reference": (0, 8), "train": (0, 8)},
    "apart": {"generate": (0, 4), "reference": (4, 4), "train": (4, 4)},
    "scored in between": {"generate": (0, 4), "reference": (0, 8), "train": (4, 4)},
}
STEPS = 24
WORST = 0.15
MEDIAN = 0.05


@cache
def errors(
    lengths: LengthDistribution,
    mini_batches: int,
    publish_every: int = 1,
    aheads: tuple[int, ...] = (0, 1, 2),
    group_s: float = 0.0,
    filtered: float = 0.0,
) -> dict[str, float]:
    """Return the relative excess of the estimated step time, per placement and bound."""
    workload = Workload(
        *(32, 4, 256, lengths),
        mini_batches=mini_batches,
        requires_whole_step=mini_batches > 1,
        filtered_fraction=filtered,
    )
    flow = build_dataflow((*ROLLOUT_COLUMNS, "scores", "ref_logprobs"))
    models = {"policy": MODEL, "reference": MODEL}
    run_options = RunOptions(publish_every=publish_every)
    problem = PlacementProblem(flow, models, workload, Cluster.from_text("8xA100"), run_options)
    constants = replace(CostConstants(), max_running=32, decode_group_s=group_s)
    costs = CostModel(problem, constants)
    estimator = PlacementEstimator(problem, costs)
    errors_by_placement = {}
    for name, meshes in PLACES.items():
        calls = {
            stage: make_assignment(f"1-1-{size}", first) for stage, (first, size) in meshes.items()
        }
        for ahead in aheads:
            placement = Placement(calls, ahead)
            timings = costs.predict_timings(placement)
            played = run_simulation(
                flow, placement, timings, workload, steps=STEPS, seed=0, run_options=run_options
            )
            errors_by_placement[f"{name}, {ahead} ahead"] = (
                estimator.estimate_step_s(placement) / played.mean_step_s - 1
            )
    return errors_by_placement


@pytest.mark.parametrize(
    "measure",
    [
        partial(errors, FIXED, 1),
        partial(errors, LONG_TAILED, 1),
        pytest.param(partial(errors, FIXED, 4), marks=pytest.mark.slow),
        pytest.param(partial(errors, LONG_TAILED, 4), marks=pytest.mark.slow),
        partial(errors, LONG_TAILED, 1, filtered=0.5),
        pytest.param(partial(errors, LONG_TAILED, 1, filtered=0.8), marks=pytest.mark.slow),
        # Steps that share a version.
        partial(errors, FIXED, 1, publish_every=2, aheads=(1, 2)),
        partial(errors, FIXED, 1, publish_every=3, aheads=(2,)),
    ],
)
def test_estimates_are_close_to_simulated_steps(measure: Callable[[], dict[str, float]]):
    assert {name: error for name, error in measure().items() if abs(error) > WORST} == {}


@pytest.mark.parametrize("ahead", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))])
def test_estimates_include_group_delivery(ahead: int):
    plain, slow = errors(LONG_TAILED, 1), errors(LONG_TAILED, 1, aheads=(ahead,), group_s=0.1)
    worse = {name: slow[name] - plain[name] for name in slow}
    assert {name: error for name, error in worse.items() if abs(error) > 0.03} == {}


@pytest.mark.parametrize("updates", [(1,), pytest.param((1, 4), marks=pytest.mark.slow)])
def test_the_median_error_is_small(updates: tuple[int, ...]):
    every = [
        abs(error)
        for lengths in (FIXED, LONG_TAILED)
        for mini_batches in updates
        for error in errors(lengths, mini_batches).values()
    ]
    assert median(every) <= MEDIAN
