"""Quick simulations: a representative part predicts the whole run."""

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
    LengthDistribution,
    LognormalLengths,
    Workload,
    make_fixed_lengths,
)
from streamrl.planner.simulator.quick_run import (
    choose_num_parts,
    choose_num_steps,
    run_quick_simulation,
    split_timings,
)
from streamrl.planner.simulator.simulation import run_simulation
from tests.planner.notations import placement_from_meshes

GRPO = build_dataflow((*ROLLOUT_COLUMNS, "scores", "ref_logprobs"))
LENGTHS = LognormalLengths(200, 0.6, 400)
TIMINGS = StageTimings(
    GeneratorTiming(8, 64, 1e6, 0.01, 1e-7, 1e-5, 0.005, 1e-5, 1e-6),
    {
        "reference": ScoreTiming(4, batch=4, batch_s=0.01, rollout_s=0.0, token_s=1e-5),
        "reward": ScoreTiming(1, batch=1, batch_s=1e-4, rollout_s=0.0, token_s=0.0),
    },
    {"policy": TrainTiming(8, micro_batch_s=0.02, token_s=1e-4, update_s=0.2)},
)
PLACEMENT = placement_from_meshes(
    {"generate": ("0-7", "1-1-8"), "train": ("8-15", "1-1-8"), "reference": ("16-19", "1-1-4")},
    max_staleness=1,
)


def workload(groups: int, lengths: LengthDistribution = LENGTHS) -> Workload:
    return Workload(groups, 1, 100, lengths, micro_batch_tokens=4096)


@pytest.mark.parametrize(
    ("groups", "lead", "steps"),
    [
        # Small steps: two cycles of the steps in flight, and at least six steps.
        (64, 0, 2 + 6),
        (64, 4, 6 + 2 * 5 + 4),
        # 10240 rollouts in five steps, after two warm-up steps; one step ahead adds a step
        # before and a step after.
        (2048, 0, 2 + 5),
        (2048, 1, 3 + 5 + 1),
        # At least four counted steps.
        (50_000, 0, 2 + 4),
        # Many steps ahead: two cycles, or one if steps are large.
        (64, 16, 18 + 2 * 17 + 16),
        (2048, 16, 18 + 17 + 16),
    ],
)
def test_fewer_steps_are_simulated_if_steps_are_large(groups: int, lead: int, steps: int):
    assert choose_num_steps(workload(groups), lead) == steps
    # Rollouts count, in groups of any size.
    assert choose_num_steps(replace(workload(groups // 2), group_size=2), lead) == steps


@pytest.mark.parametrize(
    ("work", "lead", "parts"),
    [
        (workload(2048), 0, 8),
        # 1000 groups: eight parts of 125 are too small.
        (workload(1000), 0, 4),
        (workload(200), 0, 1),
        # Eight updates: of eight parts each would have 16 groups.
        (replace(workload(1024), mini_batches=8), 0, 4),
        (replace(workload(1024), mini_batches=8, group_size=2), 0, 8),
        # On policy each filtered group is replaced in turn: no part has as long a chain.
        (replace(workload(2048), filtered_fraction=0.5), 0, 1),
        (replace(workload(2048), filtered_fraction=0.5), 1, 8),
        # Without a limit, the longest rollout of a part is shorter.
        (workload(2048, LognormalLengths(200, 0.6, 1_000_000)), 0, 1),
        (workload(2048, make_fixed_lengths(300)), 0, 8),
    ],
)
def test_parts_represent_the_whole(work: Workload, lead: int, parts: int):
    assert choose_num_parts(TIMINGS, work, lead) == parts
    odd = replace(TIMINGS, generator=replace(TIMINGS.generator, replicas=7))
    assert choose_num_parts(odd, work, lead) == 1


def test_indivisible_replicas_become_slower():
    split = split_timings(TIMINGS, 4)
    assert split.generator.replicas == 2
    assert split.train["policy"].dp_size == 2
    assert (split.score["reference"].replicas, split.score["reference"].batch_s) == (1, 0.01)
    # A single replica for four parts gives each part a quarter of it: four times slower.
    assert (split.score["reward"].replicas, split.score["reward"].batch_s) == (1, 4e-4)


def test_a_part_predicts_the_rate_of_the_whole():
    quick = run_quick_simulation(
        GRPO, PLACEMENT, TIMINGS, workload(1024), seed=0, run_options=RunOptions()
    )
    assert quick.num_parts == 8
    full = run_simulation(GRPO, PLACEMENT, TIMINGS, workload(1024), steps=8, seed=0)
    assert quick.mean_step_s == pytest.approx(full.mean_step_s, rel=0.04)
    assert quick.tokens_per_s == pytest.approx(full.tokens_per_s, rel=0.04)
    assert quick.staleness_mean == pytest.approx(full.staleness_mean, abs=0.1)
