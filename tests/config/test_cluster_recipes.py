"""Recipes for clusters with GPUs fit their cluster by the planner's memory model."""

from pathlib import Path

import pytest

from streamrl.config.run_config import load_config
from streamrl.placement.clusters import Cluster
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.to_placement import build_run_placement
from streamrl.planner.to_planner_problem import (
    PlannerRequest,
    build_planner_problem,
    build_run_constants,
)

ROOT = Path(__file__).parents[2]
CLUSTERS = {
    "grpo_lora_qwen2.5_1.5b_math": "1xRTX4090",
    "grpo_qwen2.5_3b_math": "1xH100",
    "grpo_lora_qwen2.5_7b_math": "1xH100",
    "grpo_qwen2.5_7b_math_colocated": "8xH100",
    "grpo_qwen2.5_7b_math_split": "8xH100",
    "grpo_qwen3_30b_a3b_math": "4x8xH100",
    "dapo_qwen2.5_32b_math_4x8": "4x8xH100",
    "dapo_qwen2.5_32b_math": "16x8xH100",
}
MIN_ROLLOUTS = 16
"""Rollouts of full length that the KV cache of a generator must hold."""


def plan_memory(name: str, cluster: str, *overrides: str) -> tuple[str, float]:
    """Return why a recipe does not fit, or "", and the full rollouts in a generator's KV cache."""
    config = load_config(ROOT / "configs" / f"{name}.yaml", overrides)
    model = Path(config.model.path).name.lower()
    request = PlannerRequest(200, models={"policy": model})
    problem = build_planner_problem(config, Cluster.from_text(cluster), request)
    costs = CostModel(problem, build_run_constants(config, CostConstants()))
    placement = build_run_placement(config, problem.models)
    if problem_found := costs.explain_infeasible(placement):
        return problem_found, 0.0
    generator = costs.predict_timings(placement).generator
    return "", generator.kv_tokens / (200 + config.generator.max_new_tokens)


@pytest.mark.parametrize(("name", "cluster"), CLUSTERS.items(), ids=list(CLUSTERS))
def test_a_recipe_fits_its_cluster(name: str, cluster: str):
    problem, rollouts = plan_memory(name, cluster)
    assert problem == ""
    assert rollouts >= MIN_ROLLOUTS


def test_the_docs_list_every_recipe_for_a_cluster():
    page = (ROOT / "docs" / "recipes.md").read_text()
    on_hub = {
        path.stem for path in ROOT.glob("configs/*.yaml") if "path: models/" in path.read_text()
    }
    assert on_hub == CLUSTERS.keys()
    for name, cluster in CLUSTERS.items():
        assert f"| `{name}` | {cluster} |" in page


def test_a_whole_32b_model_on_each_gpu_is_refused_for_its_kv_cache():
    problem, _ = plan_memory("dapo_qwen2.5_32b_math", "10x8xH100", "generator.tensor_parallel=1")
    assert "resident generate 65.5; active generate for keys and values 5.4" in problem
