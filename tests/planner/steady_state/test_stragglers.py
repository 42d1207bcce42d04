"""Slowest replica of a step, by hand and against engines simulated token by token."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.problem.workload import EmpiricalLengths, LognormalLengths, Workload
from streamrl.planner.simulator.simulated_engine import SimulatedEngine
from streamrl.planner.steady_state.call_durations import GenerationModel
from streamrl.planner.steady_state.stragglers import (
    ReplicaLoads,
    estimate_slowest_replica_factor,
    sample_loads,
)
from tests.planner.samplers import sampler

TIMING = sampler(0.01, rollout_s=0.001, replicas=2, max_running=8)


def make_loads(longest: float, tokens: float) -> ReplicaLoads:
    return ReplicaLoads(np.array([[longest]]), np.array([[tokens]]), np.zeros((1, 1)))


def test_slowest_replica_has_more_tokens():
    # 100 decode steps of 10 ms, and 1 ms per token: 1.2 s for 200 tokens, 1.5 s for 500.
    factor = estimate_slowest_replica_factor(
        TIMING, make_loads(100, 500), make_loads(100, 200), steps=100, slots=8, rollouts=8
    )
    assert factor == pytest.approx(1.5 / 1.2)


def test_waiting_rollouts_add_decode_steps():
    # 4 at a time: 400 tokens take 100 steps, and the longest 50 more; 600 take 150 and 50.
    factor = estimate_slowest_replica_factor(
        TIMING, make_loads(100, 600), make_loads(100, 400), steps=150, slots=4, rollouts=8
    )
    assert factor == pytest.approx((200 * 0.01 + 0.6) / (150 * 0.01 + 0.4))


def test_sampled_loads_cover_all_rollouts():
    loads = sample_loads(Workload(5, 3, 10, EmpiricalLengths.from_samples([7])), 3, 2)
    assert loads.longest_tokens.tolist()[0] == [7, 7]
    assert sorted(loads.total_tokens.tolist()[0]) == [2 * 3 * 7, 3 * 3 * 7]
    assert loads.read_tokens.tolist()[0][0] == pytest.approx(9 * (7 * 10 + 24.5))


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
