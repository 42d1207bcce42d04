"""Between a run's config and the planner: what is planned is what runs."""

from pathlib import Path

import pytest

from streamrl.config import RunConfig, load_config
from streamrl.config.to_placement import placed_run, pools_of, rules_of, run_placement, sited_run
from streamrl.config.to_planner_problem import Asked, problem_of, run_constants
from streamrl.dataflow import Kind
from streamrl.errors import ConfigError
from streamrl.placement import Cluster, FixedLength, Manner, Placement, of_meshes, of_ratios
from streamrl.placement.costs import Constants
from streamrl.resharding import Grid

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = {"policy": "llama-7b", "critic": "llama-7b", "reference": "llama-7b"}


def recipe(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}_arithmetic.yaml", overrides)


def test_a_problem_has_the_work_of_a_step_and_the_models_that_are_named() -> None:
    cluster = Cluster.parse("8xA100")
    problem = problem_of(recipe("ppo"), cluster, Asked(20, SIZES))
    assert problem.workload.rollouts == 256
    assert problem.workload.updates == 4
    assert problem.workload.whole_steps
    assert problem.workload.lengths == FixedLength(12)
    # The reward is a rule: it has no model and needs no devices.
    assert problem.stages == ["generate", "reference", "value", "train", "train_critic"]
    assert problem.models["critic"].scalar_head
    judged = problem_of(recipe("ppo"), cluster, Asked(20, {**SIZES, "reward": "qwen2.5-0.5b"}))
    assert "reward" in judged.stages
    # And it is done as the run is.
    seldom = recipe("ppo", "placement.slice_s=0.2", "weights.publish_every=2")
    manner = problem_of(seldom, cluster, Asked(20, SIZES)).manner
    assert manner == Manner(slice_s=0.2, publish_every=2)
    moved = recipe("grpo", "algorithm.kl_coef=0.1", "reference.every=3")
    named = {role: SIZES[role] for role in ("policy", "reference")}
    assert problem_of(moved, cluster, Asked(20, named)).manner.reference_every == 3


def test_what_lora_trains_is_planned_as_adapters_on_whole_layers() -> None:
    config = recipe("ppo", "trainer.lora_rank=16", "critic.trainer={lora_rank: 0}")
    problem = problem_of(config, Cluster.parse("8xA100"), Asked(20, SIZES))
    models = problem.models
    assert 0 < models["policy"].trained < 0.01 * models["policy"].params
    assert not models["critic"].trained
    rules = rules_of(config, problem)
    calls = {call.role: call for call in config.dataflow.calls if call.kind is Kind.TRAIN}
    assert rules(calls["policy"], Grid(1, 2, 2)) == ()
    assert rules(calls["policy"], Grid(1, 1, 4)) and rules(calls["critic"], Grid(1, 2, 2))


def test_more_rollouts_at_once_than_a_constant_may_be_are_told_by_the_setting() -> None:
    many = recipe("grpo", "generator.max_concurrent_rollouts=2000000")
    with pytest.raises(ConfigError, match=r"^generator\.max_concurrent_rollouts=2000000: must"):
        run_constants(many, Constants(), on_gpu=True)
    assert run_constants(recipe("grpo"), Constants(), on_gpu=True).max_running == 512


def test_micro_batches_caches_and_the_longest_rollout_are_the_runs_own() -> None:
    own = ["pipeline.micro_batch_tokens=8192", "generator.kv_cache_mb=3"]
    judged = "rewards=[{kind: model, path: some/judge, batch_tokens: 100}]"
    named = {**SIZES, "reward": "qwen2.5-0.5b"}
    asked = Asked(20, named, FixedLength(5), longest_prompt=30)
    problem = problem_of(recipe("ppo", *own, judged), Cluster.parse("8xA100"), asked)
    assert problem.score_tokens == {"reward": 100, "reference": 8192, "value": 8192}
    assert problem.kv_cache_bytes == 3 << 20
    # Completions of 5 tokens were measured, but an engine has room for the 12 they may have.
    assert problem.workload.most_tokens == 30 + 12


def test_what_train_cannot_split_is_not_planned_so() -> None:
    config, cluster = recipe("grpo"), Cluster.parse("8xH100")
    calls = {call.kind: call for call in config.dataflow.calls}
    for model, ranks, trains, serves in (
        ("llama-7b", 8, True, True),
        ("qwen2.5-7b", 2, True, True),
        ("qwen2.5-72b", 8, True, True),
        ("qwen3-8b", 2, False, True),
        ("qwen2.5-7b", 7, False, False),
        # Two key and value heads: pairs of ranks serve with the same ones, and cannot train so.
        ("qwen2.5-3b", 4, False, True),
    ):
        rules = rules_of(config, problem_of(config, cluster, Asked(20, {"policy": model})))
        assert bool(rules(calls[Kind.TRAIN], Grid(1, ranks, 1))) == trains, model
        assert bool(rules(calls[Kind.GENERATE], Grid(1, ranks, 1))) == serves, model


def test_a_run_of_several_nodes_joins_their_ray_and_one_of_its_own_has_room_for_a_step() -> None:
    config = recipe("grpo", "pipeline.groups_per_step=4096")
    near = sited_run(config, Cluster.parse("8xH100"), longest_tokens=30_000)
    assert near.placement.address == "" and near.placement.object_store_mb > 20_000
    far = sited_run(config, Cluster.parse("2x8xH100"), longest_tokens=30_000)
    assert far.placement.address == "auto"
    told = recipe("grpo", "placement.address=10.0.0.1:6379")
    assert sited_run(told, Cluster.parse("2x8xH100"), longest_tokens=30_000) == told


def test_a_model_that_nobody_can_size_is_refused() -> None:
    cluster = Cluster.parse("8xA100")
    with pytest.raises(ConfigError, match="--model critic=llama-7b: the run has models of"):
        problem_of(recipe("grpo"), cluster, Asked(20, SIZES))
    nowhere = recipe("grpo", "model.path=no/where")
    with pytest.raises(ConfigError, match="--model policy=NAME takes another"):
        problem_of(nowhere, cluster, Asked(20))


ROLES = ("policy", "critic", "reference")


def test_a_device_of_thousands_is_no_part_of_a_pool() -> None:
    dataflow = recipe("grpo").dataflow
    meshes = {"generate": ("0-0", "1-1-1"), "train": ("0-1023", "1-1-1024")}
    assert pools_of(dataflow, of_meshes(meshes)) is not None
    meshes["train"] = ("0-2047", "1-1-2048")
    assert pools_of(dataflow, of_meshes(meshes)) is None


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("grpo", ()),
        ("grpo", ("generator.replicas=3", "trainer.world_size=2", "trainer.zero_stage=2")),
        ("grpo", ("generator.tensor_parallel=2", "generator.replicas=2")),
        ("grpo", ("placement.mode=colocated", "trainer.world_size=2")),
        (
            "grpo",
            (
                *("placement.mode=colocated", "trainer.world_size=4", "trainer.backend=torch"),
                *("trainer.tensor_parallel=4", "generator.tensor_parallel=2"),
                "trainer.zero_stage=3",
            ),
        ),
        ("ppo", ()),
        ("ppo", ("placement.mode=split", "trainer.world_size=2", "critic.trainer.world_size=2")),
        ("ppo", ("placement.mode=shadow", "reference.replicas=2", "critic.replicas=2")),
        ("ppo", ("placement.mode=colocated", "trainer.world_size=2", "pipeline.max_staleness=3")),
        ("ppo", ("placement.mode=interleaving", "trainer.world_size=2")),
        (
            "ppo",
            (
                "placement.mode=mixed",
                "placement.pools=[{policy: 1, generator: 1}, {reference: 0.5, value: 0.5}]",
                "trainer.world_size=2",
            ),
        ),
    ],
)
def test_a_run_is_placed_as_its_own_placement_says(name: str, overrides: tuple[str, ...]) -> None:
    config = recipe(name, *overrides)
    placement = run_placement(config, ROLES)
    again = placed_run(recipe(name), placement)
    assert again.trainer.world_size == config.trainer.world_size
    assert again.generator.tensor_parallel == config.generator.tensor_parallel
    assert again.placement.is_hybrid == config.placement.is_hybrid
    assert run_placement(again, ROLES) == placement


def test_ratios_become_pools_of_roles() -> None:
    pools = [{"policy": 1.0, "generator": 1.0}, {"critic": 1.0, "reference": 0.5, "value": 0.5}]
    placement = of_ratios(recipe("ppo").dataflow, pools, [4, 2])
    config = placed_run(recipe("ppo"), placement)
    assert config.placement.mode == "mixed"
    assert config.placement.pools == pools
    assert config.critic.trainer["world_size"] == 2
    # What a name says needs no pools: reference replicas are on the first of the actor's devices.
    named = of_ratios(
        recipe("ppo").dataflow,
        [{**pools[0], "reference": 0.5}, {"critic": 1.0, "value": 1.0}],
        [4, 2],
    )
    assert placed_run(recipe("ppo"), named).placement.mode == "split"


def _grpo(generate: tuple[str, str], train: tuple[str, str]) -> Placement:
    return of_meshes({"generate": generate, "train": train})


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (_grpo(("0-3", "1-1-4"), ("4-7", "2-1-2")), "without pipeline stages"),
        (_grpo(("0-3", "1-1-4"), ("4-7", "1-2-2")), "ZeRO 1 does not go with tensor parallelism"),
        # A generator that shares devices is split over ranks of the trainer, or not at all.
        (_grpo(("0-3", "1-2-2"), ("0-1", "1-1-2")), "no pools of roles have these devices"),
    ],
)
def test_what_streamrl_does_not_run_is_refused_by_name(placement: Placement, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        placed_run(recipe("grpo"), placement)
    assert said in str(refused.value)
