"""Simulations small enough to check by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from streamrl.dataflow import Dataflow, build_dataflow
from streamrl.errors import ConfigError
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.planner.problem.problem import RunOptions
from streamrl.planner.problem.stage_timings import (
    ScoreTiming,
    StageTimings,
    TrainTiming,
    WeightsTiming,
)
from streamrl.planner.problem.workload import Workload, make_fixed_lengths
from streamrl.planner.simulator.results import SimulationResult
from streamrl.planner.simulator.simulation import run_simulation
from tests.planner.notations import make_assignment, sampler

FLOW = build_dataflow((*ROLLOUT_COLUMNS, "scores"))
GENERATOR = sampler(1.0, max_running=8, kv_tokens=1000)
TIMINGS = StageTimings(
    generator=GENERATOR,
    score={"reward": ScoreTiming(1, 2, batch_s=0.5, rollout_s=0.0, token_s=0.0)},
    train={"policy": TrainTiming(1, micro_batch_s=2.0, token_s=0.0, update_s=1.0)},
    weights={"generate": WeightsTiming(publish_s=3.0, pull_s=4.0)},
)
"""A token takes a second, a score half of one, a micro-batch two, an update one."""
WORKLOAD = Workload(2, 1, 1, make_fixed_lengths(10), micro_batch_tokens=100)


def on(first_device: int) -> CallAssignment:
    return make_assignment("1-1-1", first_device)


APART = Placement({"generate": on(0), "train": on(1)})
TOGETHER = Placement({"generate": on(0), "reward": on(0), "train": on(0)})


def run(
    timings: StageTimings = TIMINGS,
    placement: Placement = APART,
    *,
    workload: Workload = WORKLOAD,
    flow: Dataflow = FLOW,
    run_options: RunOptions | None = None,
    steps: int = 3,
) -> SimulationResult:
    result = run_simulation(
        flow, placement, timings, workload, steps=steps, seed=1, run_options=run_options
    )
    return result.exclude_steps(0)


def test_on_policy_steps_wait_for_the_previous_version():
    # Pull 4, sample 10, score 0.5, train 2 and 1, publish 3; then again.
    result = run()
    assert result.step_ends == [17.5, 38.0, 58.5]
    assert result.tokens_by_staleness == {0: 60}
    assert result.exclude_steps(1).mean_step_s == 20.5
    assert result.exclude_steps(1).tokens_per_s == 20 / 20.5


def test_one_step_ahead_samples_while_it_trains():
    # Four groups are sampled by 14. The second step has its gradients at 19.5, and updates once
    # version 1 is published, at 20.5. Version 1 is loaded at 24.5 and version 2 at 28.5, while the
    # groups of the third step are sampled, until 34.5.
    result = run(placement=replace(APART, max_staleness=1))
    assert result.step_ends == [17.5, 21.5, 38.0]
    expected = [((0, 10),), ((0, 10),), ((1, 4), (2, 6))]
    assert [o.groups[0].info.version_tokens for o in result.outcomes] == expected
    assert result.tokens_by_staleness == {0: 20 + 12, 1: 20 + 8}


def test_unpublished_versions_are_skipped_by_generators():
    ahead, timings = replace(APART, max_staleness=1), replace(TIMINGS, weights={})
    # Four groups are sampled by 10 and scored by 11. Version 1 is not published: the next groups
    # begin with version 2, at 16.5.
    result = run(timings, ahead, steps=4, run_options=RunOptions(publish_every=2))
    assert result.step_ends == [10.5 + 3, 10.5 + 6, 10.5 + 6 + 13.5, 10.5 + 6 + 16.5]
    assert run(timings, ahead, steps=4).step_ends[2] == 13.5 + 13.5
    assert result.exclude_steps(0).tokens_by_staleness == {0: 40, 1: 40}
    with pytest.raises(ConfigError, match="publish_every=2: must be at most 1: generation"):
        run(timings, APART, run_options=RunOptions(publish_every=2))


def test_a_shadow_critic_that_waits_for_its_pool_does_not_keep_it_busy():
    flow = build_dataflow((*ROLLOUT_COLUMNS, "scores", "values"))
    stages = ("generate", "value", "train", "train_critic")
    placement = Placement(dict.fromkeys(stages, on(0)))
    timings = replace(
        TIMINGS,
        score={**TIMINGS.score, "value": ScoreTiming(1, 2, 0.5, 0.0, 0.0)},
        train={**TIMINGS.train, "critic": TIMINGS.train["policy"]},
        weights={"value": WeightsTiming(publish_s=0.0, pull_s=8.0, pause_s=1.0)},
    )
    result = run(timings, placement, flow=flow, steps=5).exclude_steps(1)
    busy = {stage: 1 - idle for stage, idle in result.idle_fractions.items()}
    assert sum(busy[stage] for stage in stages) <= 1
    # A second of loading and half a second of scoring.
    assert busy["value"] == pytest.approx(1.5 / result.mean_step_s)


def test_an_ema_reference_delays_only_the_steps_at_which_it_moves():
    flow = build_dataflow((*ROLLOUT_COLUMNS, "scores", "ref_logprobs"), moves_reference=True)
    placement = Placement({"generate": on(0), "reference": on(1), "train": on(2)})
    score = {**TIMINGS.score, "reference": ScoreTiming(1, 2, 0.5, 0.0, 0.0)}
    weights = {"reference": WeightsTiming(publish_s=0.0, pull_s=100.0)}
    timings = replace(TIMINGS, score=score, weights=weights)

    def played(every: int) -> tuple[Sequence[float], list[object]]:
        run_options = RunOptions(reference_every=every)
        result = run(timings, placement, flow=flow, steps=5, run_options=run_options)
        spans = [
            span for span in result.recorders["reference-0"].list_spans() if span.name == "pull"
        ]
        return result.step_ends, [span.args["version"] for span in spans]

    # If the reference moves, pull 100, otherwise sample 10; then score 0.5, train 2 and 1.
    assert played(1) == ([103.5 * step for step in range(1, 6)], [0, 1, 2, 3, 4])
    assert played(2) == ([103.5, 117.0, 220.5, 234.0, 337.5], [0, 2, 4])
    assert played(4) == ([103.5, 117.0, 130.5, 144.0, 247.5], [0, 4])


def test_hops_and_bookkeeping_take_time():
    # Begin 0.25; a hop after each stage; recording a step takes 0.5.
    generator = replace(GENERATOR, begin_s=0.25)
    timings = replace(TIMINGS, generator=generator, weights={}, hop_s=0.125, step_s=0.5)
    end = 0.25 + 10 + 0.125 + 0.5 + 0.125 + 3 + 0.5
    assert run(timings, steps=2).step_ends == [end, 2 * end]


def test_trained_models_run_concurrently_unless_they_share_devices():
    flow = build_dataflow((*ROLLOUT_COLUMNS, "scores", "values"))
    score = {**TIMINGS.score, "value": ScoreTiming(1, 2, 0.5, 0.0, 0.0)}
    train = {**TIMINGS.train, "critic": TrainTiming(1, 4.0, 0.0, 1.0)}
    timings = replace(TIMINGS, score=score, train=train, weights={})
    assignments = {"generate": on(0), "value": on(1), "train": on(2), "train_critic": on(3)}
    result = run(timings, Placement(assignments), flow=flow, steps=1)
    assert result.step_ends == [10.5 + 4 + 1]
    result = run(timings, Placement(assignments | {"train_critic": on(2)}), flow=flow, steps=1)
    assert result.step_ends == [10.5 + 4 + 1 + 2 + 1]


def test_queue_depths_are_means_over_time():
    result = run(replace(TIMINGS, generator=replace(GENERATOR, max_running=1), weights={}), steps=1)
    # Of two groups one waits while the other is sampled, for 10 s.
    assert result.queue_depths["generate"] == pytest.approx(10 / result.step_ends[0])


def test_invalid_scenarios_are_errors_with_a_reason():
    with pytest.raises(ConfigError, match="kv_tokens=10: must be at least 11"):
        run(replace(TIMINGS, generator=replace(GENERATOR, kv_tokens=10)))


def test_weights_are_published_before_the_devices_are_released():
    # The first step is sampled until 14, scored, and trained until 41. From 24 on the second step
    # waits for its scoring on the same device (6 s); publishing does not wait for that scoring.
    placement = Placement({"generate": on(0), "reward": on(1), "train": on(1)}, max_staleness=1)
    timings = replace(
        TIMINGS,
        generator=replace(GENERATOR, max_running=2),
        score={"reward": ScoreTiming(1, 1, 3.0, 0.0, 0.0)},
        train={"policy": TrainTiming(1, micro_batch_s=20.0, token_s=0.0, update_s=1.0)},
    )
    workload = replace(WORKLOAD, requires_whole_step=True)
    result = run(timings, placement, workload=workload, steps=6)
    spans = result.recorders["policy"].list_spans()
    updates = [span.end_s for span in spans if span.name == "update"]
    published = [span for span in spans if span.name == "publish"]
    assert len(published) == len(updates) == 6
    assert [span.start_s for span in published] == pytest.approx(updates)


def test_cool_down_steps_do_not_count():
    result = run_simulation(
        FLOW, replace(APART, max_staleness=4), TIMINGS, WORKLOAD, steps=30, seed=1
    )
    assert (result.warm_up_steps, result.cool_down_steps) == (8, 4)
    assert result.mean_step_s == pytest.approx((result.step_ends[25] - result.step_ends[7]) / 18)
    assert result.exclude_steps(0).cool_down_steps == 0
    assert result.exclude_steps(99, 99).mean_step_s == result.step_ends[-1] - result.step_ends[-2]
