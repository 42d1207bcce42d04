"""A step's work by hand: continuous batching in decode steps, scoring in batches, training."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.placement.stage_timings import ScoreTiming, TrainTiming
from streamrl.placement.steady_state.call_durations import (
    GenerationModel,
    choose_cuts,
    score_duration_s,
    split_seconds,
    train_duration,
)
from streamrl.placement.workload import (
    EmpiricalLengths,
    FixedLength,
    LognormalLengths,
    Workload,
)
from tests.placement.simple_costs import sampler

ALL = (1.0,)
ROOMY = sampler(0.01)
"""A decode step takes 10 ms, whatever runs."""


def test_rollouts_of_one_length_take_as_many_decode_steps_as_tokens() -> None:
    generation = GenerationModel(Workload(16, 1, 100, FixedLength(50)))
    assert generation.find_completions_s(ROOMY, ALL) == pytest.approx([0.5])


def test_what_has_no_room_runs_in_waves() -> None:
    generation = GenerationModel(Workload(10, 1, 100, FixedLength(50)))
    assert generation.find_completions_s(replace(ROOMY, max_running=4), ALL) == pytest.approx([1.5])


def test_who_came_last_stands_back_where_keys_and_values_have_no_room() -> None:
    generation = GenerationModel(Workload(3, 1, 100, FixedLength(50)))
    timing = replace(ROOMY, kv_tokens=310, prefill_token_s=1e-3)
    # Three prompts fit, and three tokens of each. Then two go on to their end, and the third has
    # its 103 tokens computed again and samples the other 47. A few tokens of room more or less are
    # the same.
    assert generation.find_completions_s(timing, ALL) == pytest.approx([0.97 + 0.403], abs=0.025)


def test_rollouts_that_wait_for_room_come_in_as_others_end() -> None:
    lengths = LognormalLengths(200, 0.5, 1000)
    generation = GenerationModel(Workload(64, 1, 100, lengths))
    (whole,) = generation.find_completions_s(ROOMY, ALL)
    (tight,) = generation.find_completions_s(replace(ROOMY, kv_tokens=20 * 250.0), ALL)
    # All tokens, where 20 run at a time on average.
    assert 0.8 * 64 / 20 * lengths.mean * 0.01 < tight < 64 / 20 * lengths.mean * 0.01 + whole


def test_keys_and_values_are_read_as_they_grow() -> None:
    generation = GenerationModel(Workload(8, 1, 100, FixedLength(50)))
    timing = replace(ROOMY, weights_s=0.0, kv_token_s=1e-6)
    # 8 rollouts, each with 100 to 150 tokens, over 50 steps.
    assert generation.find_completions_s(timing, ALL) == pytest.approx([50 * 8 * 125 * 1e-6])


def test_a_batch_that_thins_out_is_paid_for_as_it_is() -> None:
    generation = GenerationModel(Workload(2, 1, 100, EmpiricalLengths.from_samples([10, 30])))
    timing = replace(ROOMY, weights_s=0.0, rollout_s=0.01)
    share = generation.find_replica_schedules(timing)[0]
    shorter, longer = sorted(share.group_ends)
    expected = shorter * 0.02 + (longer - shorter) * 0.01
    assert share.group_ends_s(timing).max() == pytest.approx(expected)


def test_every_rollout_has_its_prompt_taken_in() -> None:
    timing = replace(ROOMY, prefill_token_s=1e-3, begin_s=2.0)
    generation = GenerationModel(Workload(3, 4, 100, FixedLength(50)))
    assert generation.find_completions_s(timing, ALL) == pytest.approx([2.0 + 12 * 0.1 + 0.5])


def test_groups_that_are_handed_on_delay_those_that_are_not_done() -> None:
    timing = replace(ROOMY, group_s=0.05)
    alike = GenerationModel(Workload(12, 2, 100, FixedLength(50)))
    assert alike.find_completions_s(timing, ALL) == pytest.approx([0.5])
    unlike = GenerationModel(Workload(12, 1, 100, EmpiricalLengths.from_samples([10, 30])))
    (share,) = unlike.find_replica_schedules(timing)
    ends = np.sort(share.group_ends)
    earlier = np.searchsorted(ends, ends)
    assert np.sort(share.group_ends_s(timing)) == pytest.approx(ends * 0.01 + earlier * 0.05)


def test_replicas_share_groups_and_a_group_stays_on_one() -> None:
    generation = GenerationModel(Workload(5, 8, 100, FixedLength(50)))
    timing = replace(ROOMY, weights_s=0.0, rollout_s=1e-3)
    # Two replicas: the busier one has 3 groups of 8.
    assert generation.find_completions_s(replace(timing, replicas=2), ALL) == pytest.approx(
        [50 * 0.024]
    )
    assert generation.find_completions_s(replace(timing, replicas=9), ALL) == pytest.approx(
        [50 * 0.008]
    )


def test_greedy_rollouts_are_sampled_beside_the_others() -> None:
    generation = GenerationModel(Workload(4, 1, 100, FixedLength(50)), extra=1)
    timing = replace(ROOMY, weights_s=0.0, rollout_s=1e-3)
    assert generation.find_completions_s(timing, ALL) == pytest.approx([50 * 0.008])


def test_groups_are_complete_with_their_longest_rollout() -> None:
    lengths = LognormalLengths(200, 1.0, 4096)
    ends = [
        GenerationModel(Workload(64, size, 100, lengths)).find_completions_s(ROOMY, (0.5, 1.0))
        for size in (1, 8)
    ]
    assert ends[1][0] > 2 * ends[0][0]


def test_the_longest_of_a_whole_step_is_among_the_rollouts_of_some_replica() -> None:
    lengths = LognormalLengths(200, 0.5, 10**6)
    generation = GenerationModel(Workload(1024, 1, 100, lengths))
    longest = round(lengths.expected_longest(1024))
    (end,) = generation.find_completions_s(replace(ROOMY, replicas=64), ALL)
    assert end == pytest.approx(longest * 0.01, rel=1e-6)


def test_what_others_fill_in_for_takes_its_share_of_a_full_batch() -> None:
    generation = GenerationModel(Workload(16, 1, 100, FixedLength(50)))
    timing = replace(ROOMY, max_running=32)
    # 16 rollouts of 50 tokens, 32 at a time where generation is a step ahead, 16 where it is not.
    assert generation.saturated_step_s(timing, 1) == pytest.approx(16 * 50 * 0.01 / 32)
    assert generation.saturated_step_s(timing, 0) == pytest.approx(16 * 50 * 0.01 / 16)


@given(
    groups=st.integers(1, 300),
    size=st.integers(1, 16),
    replicas=st.integers(1, 40),
    room=st.floats(1e3, 1e6),
    sigma=st.floats(0.1, 1.5),
)
def test_completion_rises_and_more_room_or_replicas_never_take_longer(
    groups: int, size: int, replicas: int, room: float, sigma: float
) -> None:
    generation = GenerationModel(Workload(groups, size, 100, LognormalLengths(100, sigma, 4096)))
    timing = replace(ROOMY, replicas=replicas, kv_tokens=room)
    ends = generation.find_completions_s(timing, choose_cuts(8))
    assert ends == sorted(ends)
    assert (
        generation.find_completions_s(replace(timing, kv_tokens=1e9), ALL)[-1] <= ends[-1] * 1.001
    )


@given(st.integers(1, 300), st.integers(1, 8), st.floats(1.0, 500.0))
def test_every_token_is_decoded_once(groups: int, size: int, slots: float) -> None:
    generation = GenerationModel(Workload(groups, size, 100, FixedLength(50)))
    timing = replace(ROOMY, kv_tokens=slots * 150)
    for share in generation.find_replica_schedules(timing):
        decoded = float(np.sum(share.running_rollouts * np.diff(share.edges)))
        assert decoded == pytest.approx(groups * size * 50)


def test_scoring_counts_batches_of_groups() -> None:
    timing = ScoreTiming(replicas=2, batch=4, batch_s=1.0, rollout_s=0.1, token_s=0.001)
    workload = Workload(20, 2, 100, FixedLength(50))
    # 10 groups of a replica: 3 batches, 20 rollouts, 3000 tokens.
    assert score_duration_s(timing, workload, 2) == pytest.approx(3 + 2 + 3)
    assert score_duration_s(timing, workload, 1) == pytest.approx(3 + 1 + 1.5)
    # Where they come one by one each is a batch.
    assert score_duration_s(timing, workload, 2, singly=True) == pytest.approx(10 + 2 + 3)


def test_training_is_what_may_begin_early_and_what_cannot() -> None:
    timing = TrainTiming(dp_size=2, micro_batch_s=0.5, token_s=1e-3, update_s=4.0)
    workload = Workload(20, 2, 100, FixedLength(50), epochs=3, mini_batches=2)
    # 20 rollouts of 150 tokens in a mini-batch: each share makes one micro-batch of 10.
    work = train_duration(timing, workload)
    epoch = 2 * (0.5 + 1.5)
    assert work.passes_s == pytest.approx(epoch + 4.0)
    assert work.final_s == pytest.approx(2 * epoch + 5 * 4.0)
    assert work.micro_batches == 2
    assert work.total_s == pytest.approx(3 * epoch + 6 * 4.0)


def test_a_round_takes_as_long_as_the_share_that_has_most() -> None:
    timing = TrainTiming(dp_size=3, micro_batch_s=0.0, token_s=1.0, update_s=0.0)
    workload = Workload(4, 1, 5, FixedLength(5), micro_batch_tokens=20)
    # Four rollouts, two to a micro-batch; one of the two is halved, and 2, 1, 1 are one round.
    assert train_duration(timing, workload).total_s == pytest.approx(20)


@given(st.integers(1, 100), st.floats(0.0, 1e6))
def test_parts_are_all_of_the_work(pieces: int, total: float) -> None:
    cuts = choose_cuts(pieces)
    assert cuts[-1] == 1.0
    assert len(cuts) <= max(pieces + 1, 1)
    assert math.isclose(sum(split_seconds(total, cuts)), total, abs_tol=1e-9)
