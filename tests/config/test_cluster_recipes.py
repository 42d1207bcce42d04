"""Recipes for clusters with GPUs: memory, idle GPUs, and what to download."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from huggingface_hub.cli.hf import app

from benchmarks.recipes import ROOT, find_recipes, list_commands, read_simulation, simulate_recipe
from streamrl.cli.arguments.planner_args import read_planner_inputs
from streamrl.config.run_config import RunConfig, load_config, with_settings
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.to_placement import build_run_placement

RECIPES = find_recipes()
MIN_ROLLOUTS = 16
"""Rollouts of full length that the KV cache of a generator must hold."""
MAX_IDLE = 0.25

each_recipe = pytest.mark.parametrize("path", RECIPES.values(), ids=list(RECIPES))


def plan_memory(path: Path, **settings: Any) -> tuple[str, float]:
    """Return why a recipe does not fit, or "", and the full rollouts in a generator's KV cache."""
    arguments, config = read_simulation(path)
    config = with_settings(config, settings)
    problem, constants = read_planner_inputs(arguments, config).build_problem(config)
    costs = CostModel(problem, constants)
    placement = build_run_placement(config, problem.models)
    placement.check_on_cluster(problem.cluster)
    if problem_found := costs.explain_infeasible(placement):
        return problem_found, 0.0
    generator = costs.predict_timings(placement).generator
    longest = problem.workload.prompt_tokens + config.generator.max_new_tokens
    return "", generator.kv_tokens / longest


@each_recipe
def test_a_recipe_fits_its_cluster(path: Path):
    problem, rollouts = plan_memory(path)
    assert problem == ""
    assert rollouts >= MIN_ROLLOUTS


@pytest.mark.slow
@each_recipe
def test_a_recipe_keeps_the_gpus_of_its_cluster_busy(path: Path):
    assert simulate_recipe(path)["gpus_idle"] <= MAX_IDLE


def list_paths(config: RunConfig) -> Iterator[str]:
    """Yield the models and files that a run reads."""
    yield config.model.path
    yield from (file.path for file in (*config.data.train_files, *config.data.eval_files))
    yield from (reward.options["path"] for reward in config.rewards if reward.kind == "model")


@each_recipe
def test_a_recipe_has_an_evaluation_set_and_downloads_all_that_it_reads(path: Path):
    config = load_config(path)
    assert config.data.eval_files and config.evaluation.every
    written = []
    for words in list_commands(path, "hf download"):
        _, command, rest = app.resolve_command(click.Context(app), words[1:])
        assert command is not None
        given = command.make_context("hf download", rest).params
        assert re.fullmatch(r"[0-9a-f]{40}", given["revision"])
        # A single file of a data set, or all of a model.
        assert ("dataset" in words) == bool(given["filenames"])
        written += [Path(given["local_dir"]) / name for name in given["filenames"] or ("",)]
    assert sorted(Path(name) for name in list_paths(config)) == sorted(
        ROOT / name for name in written
    )


def test_the_docs_list_every_recipe_for_a_cluster():
    page = (ROOT / "docs" / "recipes.md").read_text()
    on_hub = {
        path.stem for path in ROOT.glob("configs/*.yaml") if "path: models/" in path.read_text()
    }
    assert on_hub == RECIPES.keys()
    for name, path in RECIPES.items():
        assert f"| `{name}` | {read_simulation(path)[0].cluster} |" in page


def test_a_whole_32b_model_on_each_gpu_is_refused_for_its_kv_cache():
    problem, _ = plan_memory(RECIPES["dapo_qwen2.5_32b_math"], **{"generator.tensor_parallel": 1})
    assert re.search(r"generate 6\d\.\d; active generate for keys and values 5\.4", problem)
