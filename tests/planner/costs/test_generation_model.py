"""Generation of a step: by hand, and against engines simulated token by token."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.planner.costs.call_durations import choose_cuts
from streamrl.planner.costs.generation_model import GenerationModel, compute_mean_time_in_flight
from streamrl.planner.problem.workload import LognormalLengths, Workload, make_fixed_lengths
from streamrl.planner.simulator.simulated_engine import SimulatedEngine
from tests.planner.notations import sampler

ALL = (1.0,)
UNBOUNDED = sampler(0.01)
"""A decode step takes 10 ms, whatever runs."""


def test_waiting_rollouts_start_as_others_end():
    lengths = LognormalLengths(200, 0.5, 1000)
    generation = GenerationModel(Workload(64, 1, 100, lengths))
    (unlimited,) = generation.find_completions_s(UNBOUNDED, ALL)
    (limited,) = generation.find_completions_s(replace(UNBOUNDED, kv_tokens=10 * 250.0), ALL)
    # All tokens, with 10 running rollouts on average.
    least = 0.8 * 64 / 10 * lengths.mean * 0.01
    assert unlimited < least < limited < least / 0.8 + unlimited


@pytest.mark.parametrize(
    ("replicas", "step_s"),
    # The busiest replica has all 5 groups of 8, 3 groups, or one.
    [(1, 0.040), (2, 0.024), (9, 0.008)],
)
def test_replicas_divide_whole_groups(replicas: int, step_s: float):
    generation = GenerationModel(Workload(5, 8, 100, make_fixed_lengths(50)))
    timing = sampler(0.0, rollout_s=1e-3, replicas=replicas)
    assert generation.find_completions_s(timing, ALL) == pytest.approx([50 * step_s])


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


@given(
    sigma=st.floats(0.3, 1.2),
    replicas=st.integers(2, 8),
    kv_tokens=st.sampled_from([1e9, 8000.0, 4000.0]),
)
def test_the_slowest_replica_is_that_of_simulated_engines(
    sigma: float, replicas: int, kv_tokens: float
):
    lengths = LognormalLengths(150, sigma, 1500)
    timing = replace(
        sampler(0.01, rollout_s=0.001, replicas=replicas, max_running=64, kv_tokens=kv_tokens),
        kv_token_s=1e-7,
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
    generation = GenerationModel(Workload(32, 2, 100, lengths))
    (end,) = generation.find_completions_s(timing, ALL)
    assert end == pytest.approx(np.mean(ends), rel=0.1)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_steps_in_flight_delay_each_other(window: int):
    # Steps that take 1 or 9: a step starts when a step ends, and ends in order.
    durations = np.random.default_rng(3).choice([1.0, 9.0], 20_000)
    ends = [0.0] * window
    for duration in durations.tolist():
        ends.append(max(ends[-1], ends[-window] + duration))
    expected = window * ends[-1] / len(durations)
    times = np.array([1.0, 9.0])
    assert compute_mean_time_in_flight(times, window=window) == pytest.approx(expected, rel=0.08)
