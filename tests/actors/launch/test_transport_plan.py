"""Transport plan: published models, memory, nodes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from streamrl.actors.launch import transport_plan
from streamrl.actors.launch.transport_plan import (
    PublishedModel,
    TransportFacts,
    choose_transport,
    divide_shared_memory,
    plan_transport,
)
from streamrl.config.preflight import list_resource_demands
from streamrl.config.run_config import RunConfig, load_config
from streamrl.errors import ConfigError
from streamrl.placement.resource_demand import ResourceDemand
from streamrl.weights import WeightsConfig
from tests.actors.fakes import RECIPE, make_prepared
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


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a node with 100 MB free in /dev/shm, and a Ray object store of 60 MB."""
    node_facts = {"Alive": True, "NodeID": "abc", "Resources": {"object_store_memory": 60.0 * MB}}
    monkeypatch.setattr(ray, "nodes", lambda: [node_facts, {**node_facts, "Alive": False}])
    monkeypatch.setattr(transport_plan, "measure_shared_memory", lambda: (200 * MB, 100 * MB))


def config_of(model_path: str, *overrides: str) -> RunConfig:
    return load_config(RECIPE, [f"model.path={model_path}", *overrides])


def demands_of(config: RunConfig) -> list[ResourceDemand]:
    return list_resource_demands(config, make_prepared(config), on_gpu=False)


def count_published(config: RunConfig) -> dict[str, tuple[int, int]]:
    """Return the bytes of a version and the readers of each published model."""
    models = transport_plan._list_published_models(config, demands_of(config))
    return {model.role: (model.num_bytes, model.num_followers) for model in models}


MOVING = ["algorithm.kl_coef=0.1", "reference.every=1"]
PPO = ["algorithm.name=ppo", "critic.replicas=3"]


@pytest.mark.parametrize(
    ("overrides", "published"),
    [
        ([], {"policy": (4 * WHOLE, 1)}),
        (["generator.replicas=4"], {"policy": (4 * WHOLE, 4)}),
        (["trainer.dtype=auto", "trainer.backend=torch"], {"policy": (4 * WHOLE, 1)}),
        (MOVING, {"policy": (4 * WHOLE, 1), "reference": (4 * WHOLE, 1)}),
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
        (
            [*PPO, "critic.shadow.world_size=2"],
            {"policy": (4 * WHOLE, 1), "critic": (4 * (WHOLE + VALUE_HEAD), 3)},
        ),
        ([*PPO, "critic.shared_coef=0.5"], {"policy": (4 * (WHOLE + VALUE_HEAD), 1 + 3)}),
    ],
)
def test_published_models_are_counted_with_their_followers(
    model_path: str, overrides: list[str], published: dict[str, tuple[int, int]]
):
    assert count_published(config_of(model_path, *overrides)) == published


def test_an_untied_embedding_counts_twice(tmp_path: Path):
    untied_path = save(tiny_model(tied=False, seed=0), tmp_path / "untied")
    expected = {"policy": (4 * (WHOLE + EMBEDDING), 1)}
    assert count_published(config_of(untied_path)) == expected


@pytest.mark.parametrize(
    ("transport", "bound_to", "max_bytes"),
    [("shared_memory", "abc", {"policy": 40 * MB}), ("store", "", {}), ("collective", "", {})],
)
def test_only_shared_memory_binds_all_actors_to_a_node_and_divides_its_memory(
    model_path: str, transport: str, bound_to: str, max_bytes: dict[str, int]
):
    config = config_of(model_path, f"weights.transport={transport}")
    travel = plan_transport(config, demands_of(config), token="t")
    assert (travel.name, travel.node, travel.max_bytes) == (transport, bound_to, max_bytes)


def test_a_ray_store_that_fills_dev_shm_rules_out_shared_memory(
    model_path: str, monkeypatch: pytest.MonkeyPatch
):
    config = config_of(model_path, "weights.transport=shared_memory")
    monkeypatch.setattr(transport_plan, "get_object_store_bytes", lambda: [99.0 * MB])
    with pytest.raises(ConfigError, match=r"/dev/shm has 1\.0 MB for it"):
        plan_transport(config, demands_of(config), token="t")
    # A store larger than /dev/shm is outside it.
    monkeypatch.setattr(transport_plan, "get_object_store_bytes", lambda: [201.0 * MB])
    plan = plan_transport(config, demands_of(config), token="t")
    assert plan.max_bytes == {"policy": 100 * MB}
    assert (
        "Ray's object store of 201.0 MB does not fit /dev/shm and is on disk: docker" in plan.reason
    )


def test_a_model_at_rest_leaves_less_of_dev_shm(model_path: str):
    settings = ("weights.transport=shared_memory", "scorer.offload=true", "algorithm.kl_coef=0.1")
    config = config_of(model_path, *settings)
    prepared = make_prepared(config)
    prepared = replace(prepared, model_bytes={**prepared.model_bytes, "reference": 30 * MB})
    demands = list_resource_demands(config, prepared, on_gpu=True)
    assert plan_transport(config, demands, token="t").max_bytes == {"policy": 10 * MB}


MODEL_32B = PublishedModel("policy", num_bytes=61 * 10**9, num_followers=4)
CRITIC = PublishedModel("critic", num_bytes=10**9, num_followers=1)
ONE_NODE = TransportFacts(1, (MODEL_32B, CRITIC), 0, shm_bytes=10**12, node_store_bytes=10**12)
TWO_NODES = replace(ONE_NODE, num_nodes=2)
ON_GPUS = replace(TWO_NODES, has_gpus=True)
NEEDED = "needs 248.0 GB = 4 x 61.0 GB of policy + 4 x 1.0 GB of critic; /dev/shm has"


@pytest.mark.parametrize(
    ("facts", "transport", "reason"),
    [
        (
            ONE_NODE,
            "shared_memory",
            f"shared memory (publisher and readers are on one node; {NEEDED} 1000.0 GB for it,",
        ),
        (replace(ONE_NODE, has_gpus=True), "shared_memory", "shared memory (publisher and"),
        (
            replace(ONE_NODE, shm_bytes=248 * 10**9 - 1),
            "store",
            f"object store (shared memory {NEEDED} 248.0 GB for it, beside Ray's object store and"
            " models at rest; docker run --shm-size",
        ),
        (
            TWO_NODES,
            "store",
            "object store (shared memory needs one node; publisher and readers are on 2)",
        ),
        (ON_GPUS, "collective", "collective (publisher and readers have a GPU each, on 2 nodes)"),
        (replace(ON_GPUS, shares_gpus=True), "store", "object store (shared memory needs one"),
    ],
)
def test_auto_chooses_the_fastest_possible_transport(
    facts: TransportFacts, transport: str, reason: str
):
    chosen, line = choose_transport(WeightsConfig(), facts)
    assert chosen == transport and line.startswith(f"weights: {reason}")


@pytest.mark.parametrize(
    ("transport", "facts", "error"),
    [
        ("shared_memory", TWO_NODES, "needs one node; publisher and readers are on 2"),
        ("shared_memory", replace(ONE_NODE, shm_bytes=64), f"{NEEDED} 64 bytes for it"),
        ("collective", replace(ON_GPUS, shares_gpus=True), "NCCL needs a GPU for each process"),
    ],
)
def test_an_impossible_transport_is_refused_with_the_reason(
    transport: str, facts: TransportFacts, error: str
):
    with pytest.raises(ConfigError, match=re.escape(f"weights.transport={transport}: {error}")):
        choose_transport(WeightsConfig(transport=transport), facts)


@pytest.mark.parametrize(
    ("transport", "copied_roles", "needed_gb"),
    [
        ("collective", {"policy", "critic"}, 3 * 61 + 3 + 95),
        ("collective", {"policy"}, 3 * 61 + 1 + 95),
        ("collective", {"reference"}, 61 + 1 + 95),
        ("store", {"policy"}, 3 * 61 + 3 + 95),
        ("shared_memory", {"policy"}, 0),
    ],
)
def test_versions_and_a_queue_that_exceed_rays_object_store_are_named(
    transport: str, copied_roles: set[str], needed_gb: int
):
    def find_note(store_bytes: int) -> str:
        facts = replace(
            ONE_NODE,
            queue_bytes=95 * 10**9,
            copied_roles=frozenset(copied_roles),
            node_store_bytes=store_bytes,
        )
        line = choose_transport(WeightsConfig(transport=transport), facts)[1]
        return line.partition("; Ray may spill to disk: ")[2]

    assert not find_note(needed_gb * 10**9)
    note = find_note(needed_gb * 10**9 - 1)
    assert (f"needs {needed_gb - 95}.0 GB = " in note) is bool(needed_gb)


@pytest.mark.parametrize(
    ("readers", "max_staleness", "read"), [(1, 5, 1), (4, 0, 1), (4, 1, 2), (4, 9, 4), (0, 3, 0)]
)
def test_lagging_versions_are_bounded_by_readers_and_max_staleness(
    readers: int, max_staleness: int, read: int
):
    model = PublishedModel("policy", 100, readers)
    assert replace(ONE_NODE, max_staleness=max_staleness).count_versions(
        model, WeightsConfig()
    ) == (3 + read)


def test_published_models_share_the_memory_by_need():
    models = (PublishedModel("policy", 100, num_followers=2), PublishedModel("critic", 50, 1))
    facts = replace(ONE_NODE, models=models, max_staleness=1, shm_bytes=1400)
    assert divide_shared_memory(WeightsConfig(), facts) == {"policy": 1000, "critic": 400}
