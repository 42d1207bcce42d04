"""Rounds of micro-batches: those of the packer, and who has most in each."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.buffer.assembly.packing import pack_rollouts
from streamrl.placement.stage_timings import TrainTiming
from streamrl.placement.steady_state.call_durations import train_duration
from streamrl.placement.steady_state.micro_batch_rounds import pack_rounds
from streamrl.placement.workload import EmpiricalLengths, FixedLength, Workload


def test_each_round_waits_for_the_share_with_most_tokens() -> None:
    # Up to 12 tokens: 10, then 6 beside 6, then 3 beside 2 and 1. A round for two shares has the
    # first two, and 12 tokens; the last is halved: 3 and 1 beside 2.
    assert pack_rounds(np.array([1, 2, 3, 6, 6, 10]), 12, 2) == (2, 12 + 4)


def test_rollouts_of_unlike_lengths_make_more_micro_batches_than_their_tokens_fill() -> None:
    timing = TrainTiming(dp_size=1, micro_batch_s=1.0, token_s=0.0, update_s=0.0)
    alike = Workload(64, 1, 5, FixedLength(20), micro_batch_tokens=100)
    mixed = EmpiricalLengths.from_samples([5] * 30 + [65] * 10)
    unlike = Workload(64, 1, 5, mixed, micro_batch_tokens=100)
    assert alike.num_tokens == unlike.num_tokens
    # Four of 25 go together; of the others those of 70 are alone, and ten of 10 go together.
    assert train_duration(timing, alike).passes_s == pytest.approx(16)
    assert train_duration(timing, unlike).passes_s > 20


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(40, 200), st.integers(1, 9)
)
def test_rounds_are_those_of_the_packer(lengths: list[int], budget: int, shares: int) -> None:
    packed = pack_rollouts(
        [("0", i, length) for i, length in enumerate(lengths)],
        world_size=shares,
        micro_batch_tokens=budget,
    )
    most = sum(max(sum(lengths[i] for _, i in rows) for rows in each) for each in packed)
    rounds, found = pack_rounds(np.array(lengths), budget, shares)
    assert rounds == len(packed)
    assert found == pytest.approx(most)
