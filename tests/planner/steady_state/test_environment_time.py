"""Environment time in the estimate: Little's law, against exact answers and the simulator."""

from dataclasses import replace

import pytest

from streamrl.dataflow import build_dataflow
from streamrl.messages import ROLLOUT_COLUMNS
from streamrl.planner.problem.problem import RunOptions
from streamrl.planner.problem.stage_timings import (
    GeneratorTiming,
    ScoreTiming,
    StageTimings,
    TrainTiming,
)
from streamrl.planner.problem.workload import (
    EnvironmentTime,
    FixedLength,
    TurnParameters,
    Workload,
)
from streamrl.planner.simulator.simulation import run_simulation
from streamrl.planner.steady_state.call_durations import GenerationModel
from tests.planner.notations import placement_from_meshes
from tests.planner.samplers import sampler

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
