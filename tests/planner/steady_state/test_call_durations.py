"""Durations of calls by hand: continuous batching in decode steps, scoring in batches, training."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.problem.stage_timings import ScoreTiming, TrainTiming
from streamrl.planner.problem.workload import (
    LognormalLengths,
    Workload,
    make_fixed_lengths,
)
from streamrl.planner.steady_state.call_durations import (
    GenerationModel,
    choose_cuts,
    score_duration_s,
    train_duration,
)
from tests.planner.samplers import sampler

ALL = (1.0,)
UNBOUNDED = sampler(0.01)
"""A decode step takes 10 ms, whatever runs."""


def test_rollouts_of_equal_length_take_one_decode_step_per_token():
    generation = GenerationModel(Workload(16, 1, 100, make_fixed_lengths(50)))
    assert generation.find_completions_s(UNBOUNDED, ALL) == pytest.approx([0.5])


def test_waiting_rollouts_start_as_others_end():
    lengths = LognormalLengths(200, 0.5, 1000)
    generation = GenerationModel(Workload(64, 1, 100, lengths))
    (unlimited,) = generation.find_completions_s(UNBOUNDED, ALL)
    (limited,) = generation.find_completions_s(replace(UNBOUNDED, kv_tokens=20 * 250.0), ALL)
    # All tokens, with 20 running rollouts on average.
    assert 0.8 * 64 / 20 * lengths.mean * 0.01 < limited < 64 / 20 * lengths.mean * 0.01 + unlimited


def test_replicas_divide_whole_groups():
    generation = GenerationModel(Workload(5, 8, 100, make_fixed_lengths(50)))
    timing = replace(UNBOUNDED, weights_s=0.0, rollout_s=1e-3)
    # Two replicas: the busier one has 3 groups of 8.
    expected = pytest.approx([50 * 0.024])
    assert generation.find_completions_s(replace(timing, replicas=2), ALL) == expected
    assert generation.find_completions_s(replace(timing, replicas=9), ALL) == pytest.approx(
        [50 * 0.008]
    )


@given(
    groups=st.integers(1, 300),
    size=st.integers(1, 16),
    replicas=st.integers(1, 40),
    kv_tokens=st.floats(1e3, 1e6),
    sigma=st.floats(0.1, 1.5),
)
def test_completion_is_monotonic_and_more_kv_cache_is_never_slower(
    groups: int, size: int, replicas: int, kv_tokens: float, sigma: float
):
    generation = GenerationModel(Workload(groups, size, 100, LognormalLengths(100, sigma, 4096)))
    timing = replace(UNBOUNDED, replicas=replicas, kv_tokens=kv_tokens)
    ends = generation.find_completions_s(timing, choose_cuts(8))
    assert ends == sorted(ends)
    assert (
        generation.find_completions_s(replace(timing, kv_tokens=1e9), ALL)[-1] <= ends[-1] * 1.001
    )


def test_scoring_time_counts_batches_of_groups():
    timing = ScoreTiming(replicas=2, batch=4, batch_s=1.0, rollout_s=0.1, token_s=0.001)
    workload = Workload(20, 2, 100, make_fixed_lengths(50))
    # 10 groups per replica: 3 batches, 20 rollouts, 3000 tokens.
    assert score_duration_s(timing, workload, 2) == pytest.approx(3 + 2 + 3)
    assert score_duration_s(timing, workload, 1) == pytest.approx(3 + 1 + 1.5)
    # Groups that arrive one by one are a batch each.
    assert score_duration_s(timing, workload, 2, singly=True) == pytest.approx(10 + 2 + 3)


def test_training_has_an_early_and_a_final_part():
    timing = TrainTiming(dp_size=2, micro_batch_s=0.5, token_s=1e-3, update_s=4.0)
    workload = Workload(20, 2, 100, make_fixed_lengths(50), epochs=3, mini_batches=2)
    # 20 rollouts of 150 tokens per mini-batch: each rank has one micro-batch of 10.
    duration = train_duration(timing, workload)
    epoch = 2 * (0.5 + 1.5)
    assert duration.passes_s == pytest.approx(epoch + 4.0)
    assert duration.final_s == pytest.approx(2 * epoch + 5 * 4.0)
    assert duration.micro_batches == 2
    assert duration.total_s == pytest.approx(3 * epoch + 6 * 4.0)


def test_round_takes_as_long_as_the_fullest_rank():
    timing = TrainTiming(dp_size=3, micro_batch_s=0.0, token_s=1.0, update_s=0.0)
    workload = Workload(4, 1, 5, make_fixed_lengths(5), micro_batch_tokens=20)
    # Four rollouts, two per micro-batch; one of the two is halved, and 2, 1, 1 are one round.
    assert train_duration(timing, workload).total_s == pytest.approx(20)
