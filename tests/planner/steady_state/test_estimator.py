"""Steady-state estimates by hand: sums, maxima, and the closed form of generation ahead."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.dataflow import Dataflow, build_dataflow
from streamrl.engines.models.model_shapes import load_model_shape
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.clusters import Cluster
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.costs.generation_model import GenerationModel
from streamrl.planner.problem.problem import (
    CallMemory,
    PlacementEstimate,
    PlacementProblem,
    RunOptions,
)
from streamrl.planner.problem.stage_timings import (
    ScoreTiming,
    StageTimings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.planner.problem.workload import LognormalLengths, Workload, make_fixed_lengths
from streamrl.planner.steady_state.estimator import PlacementEstimator
from streamrl.planner.steady_state.jobs import CallGraph, JobGraph, make_ahead_job
from streamrl.planner.steady_state.list_scheduler import JobDependency
from tests.planner.notations import make_assignment, parse_mesh, sampler

SMALL = load_model_shape("qwen2.5-0.5b")
GRPO = build_dataflow((*ROLLOUT_COLUMNS, "scores", "ref_logprobs"))
PPO = build_dataflow((*ROLLOUT_COLUMNS, "scores", "ref_logprobs", "values"))
WORKLOAD = Workload(8, 1, 100, make_fixed_lengths(100))
"""8 rollouts with 1600 tokens in total."""


def make_problem(dataflow: Dataflow = GRPO, workload: Workload = WORKLOAD) -> PlacementProblem:
    roles = {call.followed_role or call.role for call in dataflow.calls} - {"generator", "reward"}
    return PlacementProblem(
        dataflow, dict.fromkeys(roles, SMALL), workload, Cluster.from_text("8xA100")
    )


GENERATOR = sampler(0.1)
"""10 s for a step's rollouts, whatever runs beside them."""
TIMINGS = StageTimings(
    GENERATOR,
    {"reference": ScoreTiming(1, 8, 3.0, 0.0, 0.0), "value": ScoreTiming(1, 8, 2.0, 0.0, 0.0)},
    {"policy": TrainTiming(1, 4.0, 0.0, 1.0), "critic": TrainTiming(1, 2.0, 0.0, 1.0)},
)
"""Reference 3 s, values 2 s, policy 4 + 1 s, critic 2 + 1 s."""


class FixedCosts(CostModel):
    """Costs with fixed timings."""

    def __init__(self, timings: StageTimings = TIMINGS) -> None:
        self.timings = timings

    def predict_timings(self, placement: Placement) -> StageTimings:
        return self.timings

    def predict_memory(self, placement: Placement) -> Mapping[str, CallMemory]:
        return {stage: CallMemory(1e9, 2e9) for stage in placement.assignments}

    def explain_misfit(self, placement: Placement) -> str:
        return ""

    def explain_refusal(self, placement: Placement) -> str:
        return ""


def assign_meshes(**meshes: str) -> dict[str, CallAssignment]:
    devices = {stage: parse_mesh(text) for stage, text in meshes.items()}
    return {s: make_assignment(f"1-1-{mesh.size}", mesh.first) for s, mesh in devices.items()}


def separate(ahead: int = 0, *, streamed: bool = False) -> Placement:
    """Generate on devices 0 to 3; score and train on 4 to 7."""
    calls = assign_meshes(generate="0-3", reference="4-7", train="4-7")
    return Placement(calls, ahead, is_streamed=streamed)


COLOCATED = Placement(assign_meshes(generate="0-7", reference="0-7", train="0-7"))


def estimate_placement(
    problem: PlacementProblem, placement: Placement, costs: CostModel
) -> PlacementEstimate:
    return PlacementEstimator(problem, costs).estimate(placement)


def estimate_step_s(
    placement: Placement, timings: StageTimings = TIMINGS, dataflow: Dataflow = GRPO
) -> float:
    return estimate_placement(make_problem(dataflow), placement, FixedCosts(timings)).step_s


IN_SETS = Placement(
    assign_meshes(generate="0-7", reference="0-3", value="4-7", train="0-3", train_critic="4-7"),
    is_streamed=False,
)


@pytest.mark.parametrize(
    ("placement", "changes", "dataflow", "step_s"),
    [
        (COLOCATED, {}, GRPO, 10 + 3 + 5),
        (separate(), {}, GRPO, 10 + 3 + 5),
        # One step ahead takes the slower part: generation, or scoring and training.
        (separate(1), {"generator": replace(GENERATOR, max_running=8)}, GRPO, 10),
        (separate(1), {"train": {"policy": TrainTiming(1, 12.0, 0.0, 1.0)}}, GRPO, 3 + 13),
        # Critic and reference score; the critic's devices are free first, and wait for the
        # reference.
        (IN_SETS, {}, PPO, 10 + 3 + 5),
        # A version pauses its follower, which waits for the publication.
        (
            separate(),
            {"weights": {"generate": WeightsTiming(1.0, 2.0, 0.5)}},
            GRPO,
            10 + 3 + 5 + 1 + 2,
        ),
    ],
)
def test_a_step_by_hand(
    placement: Placement, changes: dict[str, Any], dataflow: Dataflow, step_s: float
):
    timings = replace(TIMINGS, **changes)
    assert estimate_step_s(placement, timings, dataflow) == pytest.approx(step_s)


def test_steps_between_two_published_versions_wait_for_the_same_version():
    placement = separate(1)
    costs = FixedCosts(replace(TIMINGS, score={}))
    # Two steps of 10 s overlap; each starts when the step before the other is trained.
    single = estimate_placement(make_problem(), placement, costs)
    assert single.step_s == pytest.approx(7.5)
    # The next steps wait until both are trained, 5 s each: one is on policy, one a version behind.
    alternate = replace(make_problem(), run_options=RunOptions(publish_every=2))
    paired = estimate_placement(alternate, placement, costs)
    assert paired.step_s == pytest.approx(10.0)
    # A pull that pauses generation for 2 s happens once in two steps, and takes 4 s to arrive.
    slow = replace(costs.timings, weights={"generate": WeightsTiming(1.0, 5.0, 2.0)})
    expected = pytest.approx((20.0 + 4 + 2) / 2)
    assert estimate_placement(alternate, placement, FixedCosts(slow)).step_s == expected


@pytest.mark.parametrize(("lag", "interval"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_dependency_finds_the_first_published_version_within_the_bound(lag: int, interval: int):
    dependency = JobDependency(0, lag, step_interval=interval)
    for step in range(20):
        version = step - dependency.find_lag(step) + 1
        assert version % interval == 0
        assert step - lag < version <= step - lag + interval


def test_streamed_calls_process_groups_as_they_arrive():
    # With a KV cache for one rollout they arrive one by one, 1.25 s apart.
    timings = replace(TIMINGS, generator=replace(GENERATOR, max_running=1, weights_s=0.0125))
    calls = assign_meshes(generate="0-3", reference="4-5", train="6-7")
    unstreamed_s = estimate_step_s(Placement(calls, is_streamed=False), timings)
    assert unstreamed_s == pytest.approx(10 + 3 + 5)
    # All rollouts form one micro-batch, which waits for the last eighth of the scores.
    assert estimate_step_s(Placement(calls), timings) == pytest.approx(10 + 3 / 8 + 5)
    fine = replace(TIMINGS.train["policy"], micro_batch_s=1.0)
    small = replace(WORKLOAD, micro_batch_tokens=400)
    costs = FixedCosts(replace(timings, train={"policy": fine}))
    streamed_s = estimate_placement(make_problem(workload=small), Placement(calls), costs).step_s
    # Seven groups arrive by 8.75 s; the last two of them are scored after another 0.75 s and
    # trained in 1 s, when the last group is scored. Training the last takes 0.5 s.
    assert streamed_s == pytest.approx(8.75 + 0.75 + 1 + 0.5 + 1)


def test_estimate_reports_idle_time_memory_and_throughput():
    estimate = estimate_placement(make_problem(), separate(), FixedCosts())
    assert estimate.idle["generate"] == pytest.approx(8 / 18)
    assert estimate.idle["reference"] == pytest.approx(15 / 18)
    assert estimate.device_idle == pytest.approx(1 - (4 * 10 + 4 * 8) / (8 * 18))
    assert estimate.tokens_per_s == pytest.approx(800 / 18)
    assert estimate.memory_bytes == pytest.approx(2 * 1e9 + 2e9)


MESHES = ("0-7", "0-3", "4-7", "0-1", "2-3", "4-5", "6", "7")


@given(
    meshes=st.tuples(*[st.sampled_from(MESHES)] * 5),
    ahead=st.integers(0, 3),
    streamed=st.booleans(),
    seconds=st.tuples(*[st.floats(0.1, 20.0)] * 5),
    pause=st.floats(0.0, 1.0),
)
def test_devices_are_exclusive(
    meshes: tuple[str, ...], ahead: int, streamed: bool, seconds: tuple[float, ...], pause: float
):
    stages = ("generate", "reference", "value", "train", "train_critic")
    placement = Placement(assign_meshes(**dict(zip(stages, meshes, strict=True))), ahead, streamed)
    timings = StageTimings(
        replace(GENERATOR, weights_s=seconds[0] / 100, max_running=4),
        {
            "reference": ScoreTiming(1, 8, seconds[1], 0.0, 0.0),
            "value": ScoreTiming(1, 8, seconds[2], 0.0, 0.0),
        },
        {
            "policy": TrainTiming(1, seconds[3] / 4, 0.0, 0.5),
            "critic": TrainTiming(1, seconds[4] / 4, 0.0, 0.5),
        },
        {"generate": WeightsTiming(0.1, 1.0, pause), "value": WeightsTiming(0.1, 0.5, 0.0)},
    )
    lengths = LognormalLengths(80, 0.5, 400)
    workload = Workload(16, 1, 100, lengths, micro_batch_tokens=700)
    estimate = estimate_placement(make_problem(PPO, workload), placement, FixedCosts(timings))
    assert 0 <= estimate.device_idle <= 1
    for device in range(8):
        busy = [
            1 - estimate.idle[stage]
            for stage, call in placement.assignments.items()
            if device in call.mesh.devices
        ]
        assert sum(busy) <= 1 + 1e-6


LONG_TAILED = Workload(8, 1, 100, LognormalLengths(80, 0.5, 400))


@pytest.mark.parametrize(("slice_s", "scored_s"), [(0.5, 8.0), (1.0, 6.0), (2.0, 4.0), (5.0, 2.0)])
def test_generation_ahead_pauses_for_a_group_after_every_slice(slice_s: float, scored_s: float):
    # Groups take 1 s each. 12 s of generation hold as many turns of slice and group as fit; with
    # the shortest slice all 8 groups are scored before the end.
    placement = Placement(assign_meshes(generate="0-7", reference="0-7", train="8"), 1)
    timings = StageTimings(
        sampler(0.1, replicas=8),
        {"reference": ScoreTiming(8, 1, 1.0, 0.0, 0.0)},
        {"policy": TrainTiming(1, 1.0, 0.0, 1.0)},
    )
    jobs = JobGraph(
        CallGraph.from_dataflow(GRPO), LONG_TAILED, placement, timings, RunOptions(slice_s=slice_s)
    )
    jobs.completion_spans = [(1.0, 12.0)]
    all_jobs = jobs.build_jobs(make_ahead_job(jobs, GenerationModel(LONG_TAILED)))
    (reference,) = (job for job in all_jobs if job.stage == "reference" and job.is_queued)
    assert sum(reference.parts) == pytest.approx(scored_s)
