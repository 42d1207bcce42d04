"""Advice on simulated runs with known bottlenecks."""

from dataclasses import replace
from pathlib import Path

import pytest

from streamrl.errors import ConfigError
from streamrl.planner.calibration.advice import (
    describe_run,
    measure_stage_loads,
    report_to_json,
)
from streamrl.planner.calibration.prediction import PlannedRun
from streamrl.planner.calibration.run_trace import RunTrace, load_run_trace
from streamrl.planner.problem.stage_timings import TrainTiming
from tests.planner.calibration.runs import TRUE, play, recipe, write_run

SLOW_TRAINING = replace(TRUE, train={"policy": TrainTiming(1, 0.2, 3e-3, 0.02)})


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory: pytest.TempPathFactory) -> RunTrace:
    folder = tmp_path_factory.mktemp("run")
    config = recipe(folder, "generator.replicas=2")
    simulated = play(config, SLOW_TRAINING, steps=20)
    return load_run_trace(write_run(folder / "run", config, simulated))


def test_a_training_bound_run_is_recognized(slow_run: RunTrace):
    loads = measure_stage_loads(slow_run)
    assert next(iter(loads)) == "train"
    assert (loads["train"]["busy"] or 0.0) > 0.9


def test_a_run_of_episodes_has_too_few_open_and_is_not_simulated(tmp_path: Path):
    environment = f"environment={{path: {tmp_path}/game.py, max_turns: 3, open_episodes: 4}}"
    words = ("rewards=[{kind: environment}]", "pipeline.max_staleness=0")
    sizes = ("pipeline.groups_per_step=4", "generator.max_concurrent_rollouts=4")
    config = recipe(tmp_path, environment, *words, *sizes)
    shares = {"decode_frac": 0.2, "wait_frac": 0.1, "environment_frac": 0.7, "turns": 2.0}
    metrics = {f"episode/{name}": value for name, value in shares.items()}
    run_dir = write_run(tmp_path / "run", config, play(config, steps=10), metrics)
    # Spans of turns have other facts than those of groups.
    trace = replace(load_run_trace(run_dir), generated_groups=[])
    all_lines = describe_run(trace)
    first = next(n for n, line in enumerate(all_lines) if line.startswith("episodes"))
    lines = all_lines[first : first + 2]
    assert lines[0].startswith("episodes    2 turns, 0 calls")
    assert "20% sampling, 10% waiting for a slot or the devices, 70% waiting for" in lines[0]
    # 4 * (1 + 0.7 / 0.2) = 18, but a step has 16 episodes.
    assert "environment.open_episodes=16 keep more of its 4 decode slots" in lines[1]
    # Episodes that sampled nothing have no decode time.
    rows = [{**step.row, "episode/decode_frac": 0.0} for step in trace.steps]
    steps = [replace(step, row=row) for step, row in zip(trace.steps, rows, strict=True)]
    assert report_to_json(replace(trace, steps=steps))["episodes"] is None
    with pytest.raises(ConfigError, match="no sampled groups with lengths: the run has an envi"):
        PlannedRun.from_trace(trace, trace.config)


def test_groups_dropped_as_stale_are_compared_with_the_trained_ones(slow_run: RunTrace):
    assert not any(line.startswith("stale") for line in describe_run(slow_run))
    dropped = {"stale/share": 0.5, "stale/length_ratio": 2.5, "stale/lost_prompts": 3}
    first, second, *others = slow_run.steps
    steps = [*(replace(step, row={**step.row, **dropped}) for step in (first, second)), *others]
    (line,) = [n for n in describe_run(replace(slow_run, steps=steps)) if n.startswith("stale")]
    share = f"{1 / len(steps):.0%}"
    assert line == (
        f"stale       {share} of the groups are dropped, 2.5 times as long as the trained ones;"
        " 6 prompts for good"
    )


def test_filter_cost_is_reported_with_the_advice_to_oversample(slow_run: RunTrace):
    assert not any(line.startswith("filter") for line in describe_run(slow_run))
    rows = [
        {
            **step.row,
            **{"ledger/trained": 8 * n, "ledger/filtered": 72 * n, "filter/oversample": 1.0},
            **{"filter/generate_s": 3.0, "filter/score_s": 0.5},
        }
        for n, step in enumerate(slow_run.steps)
    ]
    steps = [replace(step, row=row) for step, row in zip(slow_run.steps, rows, strict=True)]
    run = replace(slow_run, steps=steps)
    shares = {"share": 0.9, "generate_s": 3.0, "score_s": 0.5, "oversample": 1.0}
    assert report_to_json(run)["filter"] == shares
    cost_line, advice_line = [line for line in describe_run(run) if "filter" in line]
    assert cost_line.startswith(
        "filter      rejects 90% of the groups: 3 s of generation and 0.5 s of sc"
    )
    assert "1 prompts are admitted per trained group, and one in 10 is kept" in advice_line
    enough = [replace(step, row={**step.row, "filter/oversample": 9.5}) for step in steps]
    assert len([n for n in describe_run(replace(run, steps=enough)) if "filter" in n]) == 1
