"""Rounds of micro-batches: equal to those of the packer, as slow as the fullest rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer.packing import pack_rollouts
from streamrl.planner.problem.stage_timings import TrainTiming
from streamrl.planner.problem.workload import EmpiricalLengths, FixedLength, Workload
from streamrl.planner.steady_state.call_durations import pack_rounds, train_duration


def test_round_waits_for_the_fullest_rank():
    # Up to 12 tokens: [10], [6, 6] and [3, 2, 1]. For two ranks [6, 6] is halved; the rounds are
    # ([10], [3, 2, 1]) and ([6], [6]).
    assert pack_rounds(np.array([1, 2, 3, 6, 6, 10]), 12, 2) == (2, 10 + 6)


def test_varied_lengths_need_more_micro_batches():
    timing = TrainTiming(dp_size=1, micro_batch_s=1.0, token_s=0.0, update_s=0.0)
    equal = Workload(64, 1, 5, FixedLength(20), micro_batch_tokens=100)
    mixed = EmpiricalLengths.from_samples([5] * 30 + [65] * 10)
    varied = Workload(64, 1, 5, mixed, micro_batch_tokens=100)
    assert equal.num_tokens == varied.num_tokens
    # Rollouts of 25 tokens go four to a micro-batch; of the others those of 70 are alone, and those
    # of 10 go ten to a micro-batch.
    assert train_duration(timing, equal).passes_s == pytest.approx(16)
    assert train_duration(timing, varied).passes_s > 20


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 200), st.integers(1, 9)
)
def test_rounds_equal_those_of_the_packer(lengths: list[int], budget: int, dp_size: int):
    packed = pack_rollouts(
        [("0", i, length) for i, length in enumerate(lengths)],
        world_size=dp_size,
        micro_batch_tokens=budget,
    )
    slowest_tokens = sum(
        max(sum(lengths[i] for _, i in rows) for rows in packed_round) for packed_round in packed
    )
    rounds, tokens = pack_rounds(np.array(lengths), budget, dp_size)
    assert rounds == len(packed)
    assert tokens == pytest.approx(slowest_tokens)
