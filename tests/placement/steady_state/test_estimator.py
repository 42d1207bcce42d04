"""Schedules that a person can work out: sums, maxima, and the closed form of being ahead."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.dataflow import Dataflow, build_dataflow
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import load_model_shape
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.problem import CallMemory, PlacementCosts, PlacementProblem
from streamrl.placement.run_options import RunOptions
from streamrl.placement.stage_timings import (
    ScoreTiming,
    StageTimings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.placement.steady_state.estimator import (
    PlacementEstimator,
    compute_d_cost,
    estimate_placement,
)
from streamrl.placement.steady_state.list_scheduler import JobDependency
from streamrl.placement.workload import FixedLength, LognormalLengths, Workload
from streamrl.resharding import RankGrid
from tests.placement.simple_costs import SimpleCosts, sampler

SMALL = load_model_shape("qwen2.5-0.5b")
GRPO = build_dataflow((*ROLLOUT_COLUMNS, "scores", "ref_logprobs"))
PPO = build_dataflow((*ROLLOUT_COLUMNS, "scores", "ref_logprobs", "values"))
WORKLOAD = Workload(8, 1, 100, FixedLength(100))
"""A step of 8 rollouts with 1600 tokens together."""


def problem(dataflow: Dataflow = GRPO, workload: Workload = WORKLOAD) -> PlacementProblem:
    roles = {call.followed_role or call.role for call in dataflow.calls} - {"generator", "reward"}
    return PlacementProblem(
        dataflow, dict.fromkeys(roles, SMALL), workload, Cluster.from_text("8xA100")
    )


GENERATOR = sampler(0.1)
"""10 s for a step's rollouts, whatever runs beside them."""
TIMINGS = StageTimings(
    GENERATOR,
    {
        "reference": ScoreTiming(1, 8, 3.0, 0.0, 0.0),
        "value": ScoreTiming(1, 8, 2.0, 0.0, 0.0),
    },
    {"policy": TrainTiming(1, 4.0, 0.0, 1.0), "critic": TrainTiming(1, 2.0, 0.0, 1.0)},
)
"""Reference 3 s, values 2 s, policy 4 + 1 s, critic 2 + 1 s."""


class Told:
    """Costs that are as they are told."""

    def __init__(self, timings: StageTimings = TIMINGS, why: str = "") -> None:
        self.told = timings
        self.why = why

    @property
    def approximate_costs(self) -> PlacementCosts:
        return self

    def predict_timings(self, placement: Placement) -> StageTimings:
        return self.told

    def predict_memory(self, placement: Placement) -> Mapping[str, CallMemory]:
        return {stage: CallMemory(1e9, 2e9) for stage in placement.assignments}

    def explain_infeasible(self, placement: Placement) -> str:
        return self.why

    def call_duration_s(self, stage: str, assignment: CallAssignment) -> float:
        seconds = {"generate": 10.0, "reference": 3.0, "value": 2.0, "train": 5.0}
        return seconds.get(stage, 3.0)

    def first_rollouts_s(self, assignment: CallAssignment) -> float:
        return self.call_duration_s("generate", assignment)


def on(**meshes: str) -> dict[str, CallAssignment]:

    found = {}
    for stage, text in meshes.items():
        mesh = Mesh.from_text(text)
        found[stage] = CallAssignment(mesh, RankGrid(1, 1, mesh.size))
    return found


def step_s(
    placement: Placement, timings: StageTimings = TIMINGS, dataflow: Dataflow = GRPO
) -> float:
    return estimate_placement(problem(dataflow), placement, Told(timings)).step_s


def test_colocated_calls_follow_one_another() -> None:
    placement = Placement(on(generate="0-7", reference="0-7", train="0-7"))
    assert step_s(placement) == pytest.approx(10 + 3 + 5)


def test_steps_between_two_versions_wait_for_the_same_one() -> None:
    placement = Placement(on(generate="0-3", reference="4-7", train="4-7"), 1, is_streamed=False)
    told = Told(replace(TIMINGS, score={}))
    # Two steps of 10 s beside each other, each next one once the step before the other is trained.
    each = estimate_placement(problem(), placement, told)
    assert (each.step_s, each.staleness_mean) == pytest.approx((7.5, 0.75))
    # Both wait for both to be trained, 5 s each: one is on policy, the other a version behind.
    seldom = replace(problem(), run_options=RunOptions(publish_every=2))
    both = estimate_placement(seldom, placement, told)
    assert (both.step_s, both.staleness_mean) == pytest.approx((10.0, 0.5))
    # A pull that stops generation for 2 s does so once in two steps, and takes 4 s to come.
    slow = replace(told.told, weights={"generate": WeightsTiming(1.0, 5.0, 2.0)})
    assert estimate_placement(seldom, placement, Told(slow)).step_s == pytest.approx(
        (20.0 + 4 + 2) / 2
    )


@pytest.mark.parametrize(("lag", "every"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3)])
def test_a_step_waits_for_the_first_version_that_is_published_and_new_enough(
    lag: int, every: int
) -> None:
    need = JobDependency(0, lag, step_interval=every)
    for step in range(20):
        version = step - need.find_lag(step) + 1
        assert version % every == 0
        assert step - lag < version <= step - lag + every


def test_on_policy_parts_wait_for_one_another_where_steps_are_whole() -> None:
    placement = Placement(on(generate="0-3", reference="4-7", train="4-7"), is_streamed=False)
    assert step_s(placement) == pytest.approx(10 + 3 + 5)


def test_a_step_ahead_the_slower_part_counts() -> None:
    placement = Placement(on(generate="0-3", reference="4-7", train="4-7"), 1, is_streamed=False)
    fast = replace(TIMINGS, generator=replace(GENERATOR, max_running=8))
    assert step_s(placement, fast) == pytest.approx(10)
    slow = replace(TIMINGS, train={"policy": TrainTiming(1, 12.0, 0.0, 1.0)})
    assert step_s(placement, slow) == pytest.approx(3 + 13)


def test_calls_on_devices_of_their_own_score_at_the_same_time() -> None:
    calls = on(generate="0-7", reference="0-3", value="4-7", train="0-3", train_critic="4-7")
    # Both score; the critic's devices are done first, and wait for what the reference says.
    assert step_s(Placement(calls, is_streamed=False), dataflow=PPO) == pytest.approx(10 + 3 + 5)


@pytest.mark.parametrize("ahead", range(5))
def test_whole_steps_ahead_follow_the_closed_form(ahead: int) -> None:
    weights = {"generate": WeightsTiming(0.0, 2.0, 0.0)}
    timings = replace(TIMINGS, weights=weights)
    placement = Placement(
        on(generate="0-3", reference="4-7", train="4-7"), ahead, is_streamed=False
    )
    train_s, latency_s, sync_s = 3 + 5, 10.0, 2.0
    throughput_s = 10.0 / (ahead + 1)
    expected = max(train_s, throughput_s, (latency_s + train_s + sync_s) / (ahead + 1))
    assert step_s(placement, timings) == pytest.approx(expected)


def test_streamed_calls_work_on_a_step_as_it_comes() -> None:
    # Rollouts that have no room for more than one come one by one, 1.25 s apart.
    timings = replace(TIMINGS, generator=replace(GENERATOR, max_running=1, weights_s=0.0125))
    calls = on(generate="0-3", reference="4-5", train="6-7")
    whole = step_s(Placement(calls, is_streamed=False), timings)
    assert whole == pytest.approx(10 + 3 + 5)
    # A micro-batch is all there is to train: it waits for the last eighth of the scores.
    assert step_s(Placement(calls), timings) == pytest.approx(10 + 3 / 8 + 5)
    fine = replace(TIMINGS.train["policy"], micro_batch_s=1.0)
    small = replace(WORKLOAD, micro_batch_tokens=400)
    told = Told(replace(timings, train={"policy": fine}))
    found = estimate_placement(problem(workload=small), Placement(calls), told).step_s
    # Seven groups are there after 8.75 s, the last two of them are scored after another 0.75 s and
    # trained in 1 s; by then the last one is scored. It is trained in 0.5 s.
    assert found == pytest.approx(8.75 + 0.75 + 1 + 0.5 + 1)


def test_a_version_stops_who_pulls_it_and_waits_for_who_publishes() -> None:
    timings = replace(TIMINGS, weights={"generate": WeightsTiming(1.0, 2.0, 0.5)})
    placement = Placement(on(generate="0-3", reference="4-7", train="4-7"), is_streamed=False)
    assert step_s(placement, timings) == pytest.approx(10 + 3 + 5 + 1 + 2)


def test_hops_and_books_come_on_top() -> None:
    placement = Placement(on(generate="0-7", reference="0-7", train="0-7"))
    timings = replace(TIMINGS, hop_s=0.1)
    assert step_s(placement, timings) == pytest.approx(18.2)


def test_cores_that_all_share_bound_a_step() -> None:
    placement = Placement(on(generate="0-3", reference="4-7", train="4-7"), 4, is_streamed=False)
    # 2 + 3 + 5 seconds of work, on one core.
    assert step_s(placement, replace(TIMINGS, cores=1)) == pytest.approx(10)


def test_what_does_not_fit_says_why() -> None:
    found = estimate_placement(problem(), Placement(on(generate="0")), Told(why="too large"))
    assert found.infeasible_reason == "too large"
    assert math.isinf(found.step_s)


def test_idle_times_memory_and_tokens_are_those_of_the_schedule() -> None:
    placement = Placement(on(generate="0-3", reference="4-7", train="4-7"), is_streamed=False)
    found = estimate_placement(problem(), placement, Told())
    assert found.idle["generate"] == pytest.approx(8 / 18)
    assert found.idle["reference"] == pytest.approx(15 / 18)
    assert found.device_idle == pytest.approx(1 - (4 * 10 + 4 * 8) / (8 * 18))
    assert found.tokens_per_s == pytest.approx(800 / 18)
    assert found.memory_bytes == pytest.approx(2 * 1e9 + 2e9)
    assert found.staleness_mean == 0
    assert [each.stage for each in found.timeline].count("generate") == 1


def test_ahead_tokens_are_as_stale_as_their_versions() -> None:
    placement = Placement(on(generate="0-3", reference="4-7", train="4-7"), 1, is_streamed=False)
    slow = replace(TIMINGS, train={"policy": TrainTiming(1, 16.0, 0.0, 1.0)})
    # 20 s of training: all rollouts of the next step are sampled in the first 10 s of it.
    assert estimate_placement(problem(), placement, Told(slow)).staleness_mean == pytest.approx(1)
    found = estimate_placement(problem(), placement, Told())
    assert 0 < found.staleness_mean < 1


def test_the_papers_cost_has_a_barrier_behind_every_stage() -> None:
    calls = on(generate="0-7", reference="0-3", value="4-7", train="0-3", train_critic="4-7")
    assert compute_d_cost(problem(PPO), Placement(calls), Told()) == 10 + max(3, 2) + max(5, 3)


def test_being_ahead_loses_where_devices_are_few() -> None:
    cluster = Cluster.from_text("2xA100")
    small = PlacementProblem(GRPO, {"policy": SMALL, "reference": SMALL}, WORKLOAD, cluster)
    heavy = replace(small, workload=Workload(1024, 1, 100, FixedLength(1000)))
    colocated = Placement(on(generate="0-1", reference="0-1", train="0-1"))
    ahead = Placement(on(generate="0", reference="1", train="1"), 1)
    found = [
        estimate_placement(heavy, each, SimpleCosts(heavy)).step_s for each in (colocated, ahead)
    ]
    assert found[0] < found[1]


MESHES = ("0-7", "0-3", "4-7", "0-1", "2-3", "4-5", "6", "7")


@given(
    meshes=st.tuples(*[st.sampled_from(MESHES)] * 5),
    ahead=st.integers(0, 3),
    streamed=st.booleans(),
    seconds=st.tuples(*[st.floats(0.1, 20.0)] * 5),
    pause=st.floats(0.0, 1.0),
)
def test_no_device_is_had_twice_and_no_token_is_staler_than_the_bound(
    meshes: tuple[str, ...],
    ahead: int,
    streamed: bool,
    seconds: tuple[float, ...],
    pause: float,
) -> None:
    stages = ("generate", "reference", "value", "train", "train_critic")
    placement = Placement(on(**dict(zip(stages, meshes, strict=True))), ahead, streamed)
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
    found = estimate_placement(problem(PPO, workload), placement, Told(timings))
    assert 0 <= found.staleness_mean <= ahead
    assert 0 <= found.device_idle <= 1
    for device in range(8):
        here = sorted(
            (each.start_s, each.end_s)
            for each in found.timeline
            if device in placement.assignments[each.stage].mesh.devices
        )
        for (_, end), (start, _) in itertools.pairwise(here):
            assert start >= end - 1e-6
        assert sum(end - start for start, end in here) <= found.step_s * (1 + 1e-6)


@given(ahead=st.integers(0, 4), train=st.floats(0.5, 30.0))
def test_a_step_takes_at_least_the_work_of_its_busiest_devices(ahead: int, train: float) -> None:
    timings = replace(TIMINGS, train={"policy": TrainTiming(1, train, 0.0, 1.0)})
    placement = Placement(on(generate="0-3", reference="4-7", train="4-7"), ahead)
    assert step_s(placement, timings) >= (3 + train + 1) * (1 - 1e-6)


def test_what_was_asked_is_remembered() -> None:
    placement = Placement(on(generate="0-7", reference="0-7", train="0-7"))
    estimator = PlacementEstimator(problem(), Told())
    assert estimator.step_s(placement) == estimator.step_s(placement)
    assert [seconds for _, seconds in estimator.iter_estimated()] == [pytest.approx(18)]
    assert math.isinf(estimator.step_s(placement.with_staleness(1), limit_s=1.0))


def test_ahead_what_is_filtered_is_sampled_beside_the_rest() -> None:
    # Two replicas' worth of 8 rollouts fill the one there is; 16 take it twice as long.
    one, placement = replace(GENERATOR, max_running=8), Placement({}, max_staleness=1)
    found = []
    for share in (0.0, 0.5):
        asked = problem(workload=replace(WORKLOAD, filtered_fraction=share))
        generation = PlacementEstimator(asked, SimpleCosts(asked)).select_generation(placement)
        found.append(generation.find_completions_s(one, (1.0,))[-1])
    assert found[1] == pytest.approx(2 * found[0])


def test_on_policy_what_is_filtered_is_sampled_after_it() -> None:
    asked = problem(workload=replace(WORKLOAD, groups_per_step=64, filtered_fraction=0.5))
    generation = PlacementEstimator(asked, SimpleCosts(asked)).select_generation(Placement({}))
    roomy = replace(GENERATOR, max_running=10**6)
    # Half are kept at once; of 64 chains the longest has 7.3 groups on average, however much room
    # there is. Half a second passes before each but the first.
    once = PlacementEstimator(asked, SimpleCosts(asked)).select_generation(
        Placement({}, max_staleness=1)
    )
    first = once.find_completions_s(roomy, (1.0,))[-1]
    half, last = generation.find_completions_s(roomy, (0.5, 1.0))
    assert half == pytest.approx(first, rel=0.05)
    assert last == pytest.approx(7.3 * first, rel=0.1)
    assert generation.find_completions_s(roomy, (0.5, 1.0), link_s=0.5)[-1] == pytest.approx(
        last + 6.3 * 0.5, rel=0.1
    )
