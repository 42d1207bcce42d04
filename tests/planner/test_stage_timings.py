"""Time of a decode step, and sums over many."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.problem.stage_timings import GeneratorTiming

TIMING = GeneratorTiming(1, 8, 1e6, 1.0, 0.5, 2.2, 0.25, 0.125, 0.0)
COEFFICIENTS = st.floats(0.0, 1.0)


def test_decode_step_is_memory_or_compute_bound():
    # Two rollouts with 4 tokens: memory takes 1 + 0.5 * 4 = 3 s, compute 2.2 * 2 = 4.4 s.
    assert TIMING.decode_step_s(2, 4) == pytest.approx(4.4 + 0.25 + 2 * 0.125)
    # With 9 tokens memory takes 5.5 s.
    assert TIMING.decode_step_s(2, 9) == pytest.approx(5.5 + 0.25 + 2 * 0.125)


@given(
    COEFFICIENTS,
    COEFFICIENTS,
    COEFFICIENTS,
    st.integers(1, 9),
    st.integers(0, 99),
    st.integers(0, 40),
)
def test_sums_over_decode_steps_equal_single_steps(
    weights_s: float, kv_token_s: float, compute_s: float, running: int, tokens: int, steps: int
):
    timing = replace(
        TIMING, weights_s=weights_s, kv_token_s=kv_token_s, compute_rollout_s=compute_s
    )
    resident = tokens + running * np.arange(steps)
    step_times = [timing.decode_step_s(running, num_tokens) for num_tokens in resident.tolist()]
    assert timing.estimate_decode_steps_s(np.full(steps, running), resident) == pytest.approx(
        step_times
    )
    assert timing.decode_run_s(running, tokens, steps) == pytest.approx(sum(step_times))
    read = replace(timing, compute_rollout_s=0.0)
    memory_bound = read.compute_memory_bound_s(
        np.array(steps), np.array(steps * running), resident.sum()
    )
    assert memory_bound == pytest.approx(
        sum(read.decode_step_s(running, num_tokens) for num_tokens in resident.tolist())
    )
