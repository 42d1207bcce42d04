"""Durations of calls by hand: scoring in batches, training in rounds of micro-batches."""

import pytest

from streamrl.planner.costs.call_durations import pack_mini_batch, score_duration_s, train_duration
from streamrl.planner.problem.stage_timings import ScoreTiming, TrainTiming
from streamrl.planner.problem.workload import Workload, make_fixed_lengths


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


def test_round_waits_for_the_fullest_rank():
    # Three rollouts of 10 tokens with at most 20 in a micro-batch: [10, 10] and [10].
    workload = Workload(3, 1, 1, make_fixed_lengths(9), micro_batch_tokens=20)
    assert pack_mini_batch(workload, 1) == (2, 20 + 10)
    assert pack_mini_batch(workload, 2) == (1, 20)
