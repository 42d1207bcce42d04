"""Slowest replica of a step, by hand and against engines simulated token by token."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.problem.workload import LognormalLengths, Workload
from streamrl.planner.simulator.simulated_engine import SimulatedEngine
from streamrl.planner.steady_state.call_durations import GenerationModel
from tests.planner.samplers import sampler

TIMING = sampler(0.01, rollout_s=0.001, replicas=2, max_running=8)


@given(
    sigma=st.floats(0.3, 1.2),
    replicas=st.integers(2, 8),
    kv_tokens=st.sampled_from([1e9, 8000.0, 4000.0]),
)
def test_completion_matches_simulated_engines(sigma: float, replicas: int, kv_tokens: float):
    lengths = LognormalLengths(150, sigma, 1500)
    workload = Workload(32, 2, 100, lengths)
    timing = replace(
        TIMING, replicas=replicas, max_running=64, kv_tokens=kv_tokens, kv_token_s=1e-7
    )
    rng, ends = np.random.default_rng(3), []
    for _ in range(12):
        drawn = lengths.sample(64, rng).reshape(32, 2).tolist()
        engines = [SimulatedEngine[int](timing) for _ in range(replicas)]
        for i, row in enumerate(drawn):
            engines[i % replicas].add_group(i, 100, row, 0.0)
        for engine in engines:
            while not engine.is_empty:
                engine.advance_to(engine.next_event_s)
        ends.append(max(engine.now for engine in engines))
    (end,) = GenerationModel(workload).find_completions_s(timing, (1.0,))
    assert end == pytest.approx(np.mean(ends), rel=0.1)
