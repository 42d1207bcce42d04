"""Fit of decode coefficients to the end times of groups, with and without slow cohorts."""

from dataclasses import replace

import numpy as np
import pytest

from streamrl.messages import Array
from streamrl.planner.calibration.fit_decode import (
    WINDOW_GROUPS,
    DecodeReplay,
    GroupWindow,
    fit_decode,
)
from streamrl.planner.calibration.sampled_groups import GeneratedGroup
from streamrl.planner.problem.stage_timings import GeneratorTiming

TRUE = GeneratorTiming(1, 512, 1e6, 2e-4, 1e-7, 1.5e-5, 4e-3, 5e-5, 3e-5, group_s=3e-4)
START = replace(TRUE, step_s=4e-3, rollout_s=1e-4, prefill_token_s=5e-5)


def make_cohorts(paces: list[float]) -> DecodeReplay:
    """Return a cohort of 32 groups for each pace."""
    rng, lengths = np.random.default_rng(0), []
    for _ in range(32 * len(paces)):
        lengths.append(rng.choice([2, 4, 6, 7, 8, 12], 8).tolist())
    turns = np.repeat(np.arange(len(paces)), 32)
    begins = 10.0 * turns
    none: Array = np.array([], np.float64)
    prompts, cached = [5] * len(lengths), [0] * len(lengths)
    replay = DecodeReplay(begins, begins, prompts, lengths, turns >= 0, none, turns, cached)
    lasts = replay.replay_groups(TRUE, pause_s=0.0) - begins
    return replace(replay, end_times=begins + lasts * np.array(paces)[turns])


@pytest.mark.parametrize("paces", [[1.0] * 4, [1.0, 1.4, 0.9, 1.0, 1.2, 0.8, 1.0]])
def test_coefficients_match_the_median_pace(paces: list[float]):
    fit = fit_decode([make_cohorts(paces)], START, pause_s=0.0)
    true = (TRUE.step_s, TRUE.rollout_s, TRUE.prefill_token_s, TRUE.group_s)
    assert [estimate.value for estimate in fit] == pytest.approx(true, rel=0.1)
    assert fit[0].residual < 0.01


def test_windows_cover_the_run_and_count_groups_with_known_neighbors():
    # A group begins every second and takes 5.5 s: six run at a time.
    count = 3 * WINDOW_GROUPS + 100
    episode = [
        GeneratedGroup("generator-0", "generate", str(i), ((i, i + 5.5),), 5, (3,), i, 0)
        for i in range(count)
    ]
    windows = list(GroupWindow.split_episode(episode))
    uids_by_window = [
        [group.uid for group in window.groups if window.contains_group(group)] for window in windows
    ]
    assert len(windows) == 3
    # The first five groups of a window began in the previous window and do not count; the last six
    # run concurrently with groups of the next window.
    assert uids_by_window[0][0] == "0"
    assert [len(uids) for uids in uids_by_window] == [
        len(w.groups) - 5 * (i > 0) - 5 * (i < 2) for i, w in enumerate(windows)
    ]
    assert uids_by_window[-1][-1] == str(count - 1)


def test_prefill_time_is_at_least_the_compute_time():
    # The measured end times include no prefill time.
    free = replace(TRUE, prefill_token_s=0.0)
    replay = make_cohorts([1.0] * 4)
    measured = replace(replay, end_times=replay.replay_groups(free, pause_s=0.0))
    fit = fit_decode([measured], START, pause_s=0.0)
    assert fit[2].value == pytest.approx(START.compute_rollout_s, rel=0.2)
    assert fit[2].value >= START.compute_rollout_s
