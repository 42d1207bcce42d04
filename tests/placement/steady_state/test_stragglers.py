"""The slowest replica of a step, by hand and against replicas that are sampled token by token."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.placement.steady_state.call_durations import GenerationModel
from streamrl.placement.steady_state.stragglers import (
    ReplicaLoads,
    sample_loads,
    slowest_replica_factor,
)
from streamrl.placement.workload import EmpiricalLengths, LognormalLengths, Workload
from streamrl.simulator.replicas.engine import SimulatedEngine
from tests.placement.simple_costs import sampler

TIMING = sampler(0.01, rollout_s=0.001, replicas=2, max_running=8)


def one(longest: float, tokens: float) -> ReplicaLoads:
    return ReplicaLoads(np.array([[longest]]), np.array([[tokens]]), np.zeros((1, 1)))


def test_a_replica_takes_longer_for_more_tokens_beside_the_longest() -> None:
    # 100 decode steps of 10 ms, and a millisecond for each token: 1.2 s of 200, 1.5 s of 500.
    found = slowest_replica_factor(
        TIMING, one(100, 500), one(100, 200), steps=100, slots=8, rollouts=8
    )
    assert found == pytest.approx(1.5 / 1.2)


def test_where_rollouts_wait_more_tokens_are_more_decode_steps() -> None:
    # 4 at a time: 400 tokens take 100 steps, and the longest 50 more. 600 take 150 and 50.
    found = slowest_replica_factor(
        TIMING, one(100, 600), one(100, 400), steps=150, slots=4, rollouts=8
    )
    assert found == pytest.approx((200 * 0.01 + 0.6) / (150 * 0.01 + 0.4))


def test_all_rollouts_of_a_step_are_some_replicas() -> None:
    loads = sample_loads(Workload(5, 3, 10, EmpiricalLengths.from_samples([7])), 3, 2)
    assert loads.longest_tokens.tolist()[0] == [7, 7]
    assert sorted(loads.total_tokens.tolist()[0]) == [2 * 3 * 7, 3 * 3 * 7]
    assert loads.read_tokens.tolist()[0][0] == pytest.approx(9 * (7 * 10 + 24.5))


@given(
    sigma=st.floats(0.3, 1.2),
    replicas=st.integers(2, 8),
    room=st.sampled_from([1e9, 8000.0, 4000.0]),
)
def test_steps_end_when_engines_that_sample_them_do(
    sigma: float, replicas: int, room: float
) -> None:
    lengths = LognormalLengths(150, sigma, 1500)
    workload = Workload(32, 2, 100, lengths)
    timing = replace(TIMING, replicas=replicas, max_running=64, kv_tokens=room, kv_token_s=1e-7)
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
    (found,) = GenerationModel(workload).find_completions_s(timing, (1.0,))
    assert found == pytest.approx(np.mean(ends), rel=0.1)
