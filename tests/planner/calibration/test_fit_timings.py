"""Fits recover the timings of simulated runs, of replayed groups and of lines."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.dataflow import POLICY
from streamrl.messages import Array
from streamrl.planner.calibration.fit_timings import (
    MAX_GROUPS,
    DecodeReplay,
    FittedTimings,
    fit_decode,
    fit_line,
    fit_timings,
)
from streamrl.planner.calibration.prediction import PlannedRun
from streamrl.planner.calibration.run_trace import GeneratedGroup, load_run_trace
from streamrl.planner.problem.stage_timings import GeneratorTiming, StageTimings
from tests.planner.calibration.runs import TRUE, play, recipe, write_run


def fit_simulated_run(
    folder: Path, timings: StageTimings, *overrides: str, seed: int = 0
) -> FittedTimings:
    config = recipe(folder, *overrides)
    simulated = play(config, timings, seed=seed)
    measured = load_run_trace(write_run(folder / "run", config, simulated))
    planned = PlannedRun.from_trace(measured, measured.config)
    base = planned.base_timings
    like = replace(
        base.generator,
        weights_s=timings.generator.weights_s,
        kv_token_s=timings.generator.kv_token_s,
        compute_rollout_s=timings.generator.compute_rollout_s,
    )
    return fit_timings(measured, replace(base, generator=like))


@pytest.mark.parametrize("staleness", [0, 1])
def test_fitting_recovers_the_coefficients_of_a_run(tmp_path: Path, staleness: int):
    overrides = f"pipeline.max_staleness={staleness}"
    fitted = fit_simulated_run(tmp_path, TRUE, overrides, seed=staleness).timings
    recovered, true = (
        [
            *(item.generator.step_s, item.generator.rollout_s, item.generator.prefill_token_s),
            *(item.train[POLICY].micro_batch_s, item.train[POLICY].token_s),
            *(item.train[POLICY].update_s, item.hop_s, item.step_s),
            *(item.weights["generate"].pull_s, item.weights["generate"].publish_s),
            # Most batches are one group, so time per batch and per group cannot be separated.
            item.score["reward"].batch_duration_s(4, 0),
        ]
        for item in (fitted, TRUE)
    )
    assert recovered == pytest.approx(true, rel=0.05)


def test_pull_time_excludes_the_wait_for_a_decode_step(tmp_path: Path):
    slow = replace(TRUE, generator=replace(TRUE.generator, step_s=0.06))
    timings = fit_simulated_run(tmp_path, slow, "pipeline.max_staleness=1").timings
    # A pull of 6 ms waits for half a decode step on average, 30 ms.
    assert timings.weights["generate"].pull_s < 0.006 + 0.02


DECODE = GeneratorTiming(1, 512, 1e6, 2e-4, 1e-7, 1.5e-5, 4e-3, 5e-5, 3e-5, group_s=3e-4)
START = replace(DECODE, step_s=4e-3, rollout_s=1e-4, prefill_token_s=5e-5)


def make_replay() -> DecodeReplay:
    """Return 128 groups, of which 32 begin together every 10 s."""
    rng = np.random.default_rng(0)
    lengths = [rng.choice([2, 4, 6, 7, 8, 12], 8).tolist() for _ in range(128)]
    begins = 10.0 * np.repeat(np.arange(4), 32)
    none: Array = np.array([], np.float64)
    replay = DecodeReplay(begins, begins, [5] * 128, lengths, begins >= 0, none)
    return replace(replay, end_times=replay.replay_groups(DECODE, pause_s=0.0))


def test_coefficients_are_found_from_the_ends_of_groups():
    fit = fit_decode([make_replay()], START, pause_s=0.0)
    true = (DECODE.step_s, DECODE.rollout_s, DECODE.prefill_token_s, DECODE.group_s)
    assert [estimate.value for estimate in fit] == pytest.approx(true, rel=0.1)
    assert fit[0].residual < 0.01


def test_groups_beside_groups_that_are_left_out_do_not_count():
    # A group begins every second and takes 5.5 s: six run at a time.
    groups = [
        GeneratedGroup("generator-0", "generate", ((i, i + 5.5),), 5, (3,), i)
        for i in range(MAX_GROUPS + 100)
    ]
    replay = DecodeReplay.from_process(groups, [])
    assert len(replay.lengths) == MAX_GROUPS
    assert replay.complete_mask.tolist() == [False] * 5 + [True] * (MAX_GROUPS - 5)
    assert DecodeReplay.from_process(groups[:100], []).complete_mask.all()


def test_prefill_time_is_at_least_the_compute_time():
    # The measured end times include no prefill time.
    free = replace(DECODE, prefill_token_s=0.0)
    replay = make_replay()
    measured = replace(replay, end_times=replay.replay_groups(free, pause_s=0.0))
    fit = fit_decode([measured], START, pause_s=0.0)
    assert fit[2].value == pytest.approx(START.compute_rollout_s, rel=0.2)
    assert fit[2].value >= START.compute_rollout_s


@given(st.floats(1e-3, 1.0), st.floats(1e-6, 1e-3), st.integers(0, 1000))
def test_an_exact_line_is_recovered(batch_s: float, token_s: float, seed: int):
    tokens = np.random.default_rng(seed).uniform(batch_s / token_s, 5 * batch_s / token_s, 30)
    fit = fit_line([(1.0, t) for t in tokens], [batch_s + token_s * t for t in tokens])
    assert [estimate.value for estimate in fit] == pytest.approx([batch_s, token_s], rel=0.02)
    assert fit[0].residual < 1e-3


def test_outliers_do_not_change_the_fit():
    tokens = [100.0 * (i + 1) for i in range(20)]
    seconds = [0.05 + 1e-4 * t for t in tokens]
    seconds[3] *= 6
    seconds[11] *= 4
    fit = fit_line([(1.0, t) for t in tokens], seconds)
    assert [estimate.value for estimate in fit] == pytest.approx([0.05, 1e-4], rel=0.1)


def test_inseparable_parts_are_equal_with_a_large_error():
    fit = fit_line([(1.0, 500.0)] * 8, [0.1, 0.11, 0.1, 0.09, 0.1, 0.1, 0.11, 0.09])
    batch_s, token_s = (estimate.value for estimate in fit)
    assert batch_s + 500 * token_s == pytest.approx(0.1, rel=0.02)
    assert batch_s == pytest.approx(0.05, rel=0.1)


def test_coefficients_are_nonnegative():
    fit = fit_line([(1.0, float(t)) for t in range(1, 9)], [1.0 - 0.1 * t for t in range(1, 9)])
    assert min(estimate.value for estimate in fit) >= 0
