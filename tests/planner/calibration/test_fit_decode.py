"""Fit of decode coefficients to the end times of groups, with and without slow cohorts."""

from dataclasses import replace

import numpy as np
import pytest

from streamrl.messages import Array
from streamrl.planner.calibration.fit_timings import MAX_GROUPS, DecodeReplay, fit_decode
from streamrl.planner.calibration.run_trace import GeneratedGroup
from streamrl.planner.problem.stage_timings import GeneratorTiming

TRUE = GeneratorTiming(1, 512, 1e6, 2e-4, 1e-7, 1.5e-5, 4e-3, 5e-5, 3e-5, group_s=3e-4)
START = replace(TRUE, step_s=4e-3, rollout_s=1e-4, prefill_token_s=5e-5)


def make_replay() -> DecodeReplay:
    """Return 128 groups, of which 32 begin together every 10 s."""
    rng = np.random.default_rng(0)
    lengths = [rng.choice([2, 4, 6, 7, 8, 12], 8).tolist() for _ in range(128)]
    begins = 10.0 * np.repeat(np.arange(4), 32)
    none: Array = np.array([], np.float64)
    replay = DecodeReplay(begins, begins, [5] * 128, lengths, begins >= 0, none)
    return replace(replay, end_times=replay.replay_groups(TRUE, pause_s=0.0))


def test_coefficients_are_found_from_the_ends_of_groups():
    fit = fit_decode([make_replay()], START, pause_s=0.0)
    true = (TRUE.step_s, TRUE.rollout_s, TRUE.prefill_token_s, TRUE.group_s)
    assert [estimate.value for estimate in fit] == pytest.approx(true, rel=0.1)
    assert fit[0].residual < 0.01


def test_groups_beside_groups_that_are_left_out_do_not_count():
    # A group begins every second and takes 5.5 s: six run at a time.
    groups = [
        GeneratedGroup("generator-0", "generate", str(i), ((i, i + 5.5),), 5, (3,), i, 0)
        for i in range(MAX_GROUPS + 100)
    ]
    replay = DecodeReplay.from_process(groups, [])
    assert len(replay.lengths) == MAX_GROUPS
    assert replay.complete_mask.tolist() == [False] * 5 + [True] * (MAX_GROUPS - 5)
    assert DecodeReplay.from_process(groups[:100], []).complete_mask.all()


def test_prefill_time_is_at_least_the_compute_time():
    # The measured end times include no prefill time.
    free = replace(TRUE, prefill_token_s=0.0)
    replay = make_replay()
    measured = replace(replay, end_times=replay.replay_groups(free, pause_s=0.0))
    fit = fit_decode([measured], START, pause_s=0.0)
    assert fit[2].value == pytest.approx(START.compute_rollout_s, rel=0.2)
    assert fit[2].value >= START.compute_rollout_s
