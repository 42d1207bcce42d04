"""Transport plan: published models, memory, nodes."""

from pathlib import Path
from typing import Any

import pytest
import ray

from streamrl.actors.launch import transport_plan
from streamrl.actors.launch.transport_plan import plan_transport
from streamrl.config.preflight import PreparedRun, list_resource_demands
from streamrl.config.run_config import RunConfig, load_config
from streamrl.errors import ConfigError
from streamrl.placement.resource_demand import ResourceDemand
from tests.engines.tiny_qwen import save, tiny_model

WHOLE = 78_400
"""Parameters of the tiny model, its tied embedding of 64 x 64 once."""
EMBEDDING = 64 * 64
VALUE_HEAD = 64 + 1
# Outputs and inputs of the linear modules in one of the two layers.
ENDS = 2 * (128 + 96 + 96 + 128 + 192 + 192 + 192)
MB = 10**6


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tiny_model(tied=True, seed=0), tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tiny_model(tied=False, seed=0), tmp_path_factory.mktemp("untied"))


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a node with 100 MB free in /dev/shm, and a Ray object store of 60 MB."""
    node_facts = {"Alive": True, "NodeID": "abc", "Resources": {"object_store_memory": 60.0 * MB}}
    monkeypatch.setattr(ray, "nodes", lambda: [node_facts, {**node_facts, "Alive": False}])
    monkeypatch.setattr(transport_plan, "get_free_bytes", lambda: 100 * MB)
    monkeypatch.setattr(transport_plan, "get_total_bytes", lambda: 200 * MB)


def config_of(model_path: str, tmp_path: Path, *overrides: str) -> RunConfig:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{path: {model_path}}}\ndata: {{train: rows.jsonl}}\nrewards: [{{kind: exact}}]\n"
    )
    return load_config(recipe, overrides)


def demands_of(config: RunConfig) -> list[ResourceDemand]:
    nothing: Any = None
    return list_resource_demands(
        config, PreparedRun(config.dataflow, nothing, {}, (), 8, 0, ()), on_gpu=False
    )


def count_published(config: RunConfig) -> dict[str, tuple[int, int]]:
    """Return the bytes of a version and the readers of each published model."""
    models = transport_plan._list_published_models(config, demands_of(config))
    return {model.role: (model.num_bytes, model.num_readers) for model in models}


MOVING = ["algorithm.kl_coef=0.1", "reference.every=1"]
PPO = ["algorithm.name=ppo", "critic.replicas=3"]


@pytest.mark.parametrize(
    ("overrides", "published"),
    [
        ([], {"policy": (4 * WHOLE, 1)}),
        (["generator.replicas=4"], {"policy": (4 * WHOLE, 4)}),
        (["trainer.dtype=bfloat16"], {"policy": (2 * WHOLE, 1)}),
        (["trainer.dtype=auto", "trainer.backend=torch"], {"policy": (4 * WHOLE, 1)}),
        (["trainer.lora_rank=4"], {"policy": (4 * 4 * ENDS, 1)}),
        (MOVING, {"policy": (4 * WHOLE, 1), "reference": (4 * WHOLE, 1)}),
        (
            [*MOVING, "trainer.dtype=bfloat16"],
            {"policy": (2 * WHOLE, 1), "reference": (2 * WHOLE, 1)},
        ),
        (
            [*MOVING, "trainer.dtype=bfloat16", "reference.decay=0.9"],
            {"policy": (2 * WHOLE, 1), "reference": (4 * WHOLE, 1)},
        ),
        # The critic has the body with the embedding, and a value head.
        (PPO, {"policy": (4 * WHOLE, 1), "critic": (4 * (WHOLE + VALUE_HEAD), 3)}),
        (
            [*PPO, "trainer.lora_rank=4", "critic.trainer.lora_rank=2"],
            {"policy": (4 * 4 * ENDS, 1), "critic": (4 * (2 * ENDS + VALUE_HEAD), 3)},
        ),
        ([*PPO, "critic.shared_coef=0.5"], {"policy": (4 * (WHOLE + VALUE_HEAD), 1 + 3)}),
    ],
)
def test_published_models_are_counted_with_their_followers(
    model_path: str, tmp_path: Path, overrides: list[str], published: dict[str, tuple[int, int]]
):
    assert count_published(config_of(model_path, tmp_path, *overrides)) == published


def test_an_untied_embedding_counts_twice(untied_path: str, tmp_path: Path):
    expected = {"policy": (4 * (WHOLE + EMBEDDING), 1)}
    assert count_published(config_of(untied_path, tmp_path)) == expected


def test_shared_memory_binds_all_actors_to_a_node_and_divides_its_memory(
    model_path: str, tmp_path: Path
):
    config = config_of(model_path, tmp_path, "weights.transport=shared_memory")
    travel = plan_transport(config, demands_of(config), token="t")
    assert travel.node == "abc" and not travel.on_device
    assert travel.max_bytes == {"policy": 40 * MB}
    assert not travel.copies_per_node


@pytest.mark.parametrize(
    ("transport", "passes_on"),
    [("store", True), ("collective", False), ("disk", False)],
)
def test_other_transports_bind_no_node_and_some_pass_versions_on_between_nodes(
    model_path: str, tmp_path: Path, transport: str, passes_on: bool
):
    config = config_of(model_path, tmp_path, f"weights.transport={transport}")
    travel = plan_transport(config, demands_of(config), token="t")
    assert (travel.node, travel.max_bytes) == ("", {})
    assert travel.copies_per_node is passes_on


def test_a_ray_store_that_fills_dev_shm_rules_out_shared_memory(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = config_of(model_path, tmp_path, "weights.transport=shared_memory")
    monkeypatch.setattr(transport_plan, "get_object_store_bytes", lambda: [99.0 * MB])
    with pytest.raises(ConfigError, match=r"/dev/shm has 1.0 MB = 100.0 MB free - 99.0 MB for Ray"):
        plan_transport(config, demands_of(config), token="t")
    # A store larger than /dev/shm is outside it.
    monkeypatch.setattr(transport_plan, "get_object_store_bytes", lambda: [201.0 * MB])
    assert plan_transport(config, demands_of(config), token="t").max_bytes == {"policy": 100 * MB}


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (["weights.transport=store"], "940"),
        (["weights.transport=collective", "weights.publish_every=2"], "940"),
        (["weights.transport=collective"], "313"),
    ],
)
def test_the_reason_names_copies_that_exceed_rays_object_store(
    model_path: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    needed: str,
):
    """A version is 313.6 kB. The queue has half of the smallest store."""
    config = config_of(model_path, tmp_path, *overrides)
    monkeypatch.setattr(transport_plan, "get_object_store_bytes", lambda: [200.0, 100.0])
    reason = plan_transport(config, demands_of(config), token="t").reason
    assert f"Ray may spill to disk: needs {needed}." in reason
    assert "313.6 kB of policy + 50 bytes of the queue; a node's object store has" in reason
    monkeypatch.setattr(transport_plan, "get_object_store_bytes", lambda: [200.0 * MB, 2.0 * MB])
    assert "spill" not in plan_transport(config, demands_of(config), token="t").reason
