"""Environment time in the estimate: Little's law, against exact answers and the simulator."""

from dataclasses import replace

import pytest

from streamrl.dataflow import build_dataflow
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.planner.problem.episode_turns import EnvironmentTime, TurnParameters
from streamrl.planner.problem.problem import RunOptions
from streamrl.planner.problem.stage_timings import (
    GeneratorTiming,
    ScoreTiming,
    StageTimings,
    TrainTiming,
)
from streamrl.planner.problem.workload import FixedLength, LognormalLengths, Workload
from streamrl.planner.simulator.simulation import run_simulation
from streamrl.planner.steady_state.call_durations import GenerationModel
from tests.planner.notations import placement_from_meshes
from tests.planner.simple_costs import sampler

TIMING = GeneratorTiming(1, 32, 1e6, 0.01, 1e-6, 1e-4, 0.002, 1e-4, 1e-5)


def make_workload(
    delay_s: float, *, turns: int = 3, groups: int = 8, observed_tokens: int = 0
) -> Workload:
    """Return groups of 4 episodes with turns of 20 tokens."""
    environment = EnvironmentTime(delay_s)
    parameters = TurnParameters(
        FixedLength(turns), FixedLength(20), observed_tokens, environment, 1000
    )
    episodes = parameters.draw_episodes()
    return Workload(groups, 4, 50, episodes.lengths, turns=episodes)


def test_without_an_environment_a_timing_stays_as_it_is():
    for lengths in (FixedLength(60), LognormalLengths(100, 0.7, 400)):
        generation = GenerationModel(Workload(8, 4, 50, lengths))
        assert generation.add_environment_time(TIMING, None, 1) == TIMING


@pytest.mark.parametrize("delay_s", [0.0, 0.2, 2.0])
def test_slots_are_full_with_as_many_open_episodes_as_littles_law_says(delay_s: float):
    # A decode step takes 0.01 s: 60 tokens take 0.6 s.
    timing, workload = sampler(0.01, max_running=32), make_workload(delay_s)
    episodes = GenerationModel(workload).describe_open_episodes(timing)
    assert episodes.needed == pytest.approx(32 * (1 + 3 * delay_s / 0.6))
    assert episodes.find_running(episodes.needed) == 32
    assert episodes.find_running(episodes.needed / 2) == pytest.approx(16)


@pytest.mark.parametrize("delay_s", [0.0, 0.2, 2.0])
@pytest.mark.parametrize("open_episodes", [8, 32])
def test_generation_takes_waves_of_open_episodes(delay_s: float, open_episodes: int):
    # All 32 open episodes have slots: each wave takes an episode's decode and environment time.
    timing, workload = sampler(0.01, max_running=32), make_workload(delay_s)
    generation = GenerationModel(workload)
    open_timing = generation.add_environment_time(timing, open_episodes, 0)
    waves = 32 / open_episodes
    (end,) = generation.find_completions_s(open_timing, (1.0,))
    assert end == pytest.approx(waves * (0.6 + 3 * delay_s))


def test_full_slots_bound_the_throughput():
    timing, workload = sampler(0.01, max_running=4), make_workload(0.2)
    generation = GenerationModel(workload)
    many = generation.add_environment_time(timing, 1000, 3)
    # 32 episodes of 60 tokens on 4 slots.
    assert generation.estimate_saturated_step_s(many, 3) == pytest.approx(32 * 60 * 0.01 / 4)
    few = generation.add_environment_time(timing, 4, 3)
    assert generation.estimate_saturated_step_s(few, 3) == pytest.approx(8 * (0.6 + 0.6))


def test_observations_cost_their_prefill_once():
    timing = replace(sampler(0.01, max_running=32), prefill_token_s=1e-3)
    workload = make_workload(0.0, observed_tokens=30)
    generation = GenerationModel(workload)
    open_timing = generation.add_environment_time(timing, 32, 0)
    (end,) = generation.find_completions_s(open_timing, (1.0,))
    assert end == pytest.approx(0.6 + 32 * (50 + 2 * 30) * 1e-3)


@pytest.mark.parametrize("delay_s", [0.0, 0.2, 2.0])
@pytest.mark.parametrize("open_episodes", [16, 64])
def test_estimate_and_simulator_agree_on_generation(delay_s: float, open_episodes: int):
    workload = make_workload(delay_s, groups=16, observed_tokens=10)
    timings = StageTimings(
        replace(TIMING, max_running=16),
        {"reward": ScoreTiming(1, 64, 0.0, 0.0, 0.0)},
        {"policy": TrainTiming(1, 1e-6, 0.0, 1e-6)},
    )
    placement = placement_from_meshes({"generate": ("0", "1-1-1"), "train": ("1", "1-1-1")})
    flow = build_dataflow((*ROLLOUT_COLUMNS, "scores"))
    options = RunOptions(open_episodes=open_episodes)
    result = run_simulation(
        flow, placement, timings, workload, steps=2, seed=0, run_options=options
    )
    generation = GenerationModel(workload)
    open_timing = generation.add_environment_time(timings.generator, open_episodes, 0)
    (end,) = generation.find_completions_s(open_timing, (1.0,))
    # The estimate counts whole waves of equal episodes; a full engine has no waves.
    assert end == pytest.approx(result.step_ends[0], rel=0.16)
