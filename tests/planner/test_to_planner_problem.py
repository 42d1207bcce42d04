"""Conversion between a config, a planner problem and a placement."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, PreTrainedConfig, Qwen3MoeConfig

from benchmarks.memory import make_config
from streamrl.config.preflight import check_worker_memory
from streamrl.config.run_config import RunConfig, load_config
from streamrl.dataflow import CallKind
from streamrl.engines.memory.memory_model import measure_training_sizes
from streamrl.engines.memory.worker_memory import CUDA_CONTEXT_BYTES, NCCL_GROUP_BYTES
from streamrl.engines.models.forward import load_skeleton
from streamrl.engines.models.model_shapes import add_adapter_params, load_model_shape
from streamrl.engines.trainer_config import TrainerConfig
from streamrl.errors import ConfigError
from streamrl.placement.clusters import Cluster
from streamrl.placement.placements import Placement
from streamrl.planner.costs.call_cost import CallCost
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.costs.memory import build_training_sizes
from streamrl.planner.problem.problem import RunOptions
from streamrl.planner.problem.workload import Workload, make_fixed_lengths
from streamrl.planner.to_placement import (
    apply_placement,
    build_run_placement,
    configure_for_cluster,
    make_split_rules,
)
from streamrl.planner.to_planner_problem import (
    PlannerRequest,
    build_planner_problem,
    build_run_constants,
)
from streamrl.resharding.grids import RankGrid
from tests.planner.notations import make_assignment, placement_from_meshes
from tests.toy import write_toy

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = {"policy": "llama-7b", "critic": "llama-7b", "reference": "llama-7b"}


def recipe(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}_arithmetic.yaml", overrides)


def test_a_problem_has_the_workload_and_the_named_models():
    cluster = Cluster.from_text("8xA100")
    problem = build_planner_problem(recipe("ppo"), cluster, PlannerRequest(20, SIZES))
    assert problem.workload.num_rollouts == 256
    assert problem.workload.num_updates == 4
    assert problem.workload.requires_whole_step
    assert problem.workload.lengths == make_fixed_lengths(12)
    # The reward is rule-based: no model, no devices.
    assert problem.placed_stages == ["generate", "reference", "value", "train", "train_critic"]
    assert problem.models["critic"].has_scalar_head
    judged = build_planner_problem(
        recipe("ppo"), cluster, PlannerRequest(20, {**SIZES, "reward": "qwen2.5-0.5b"})
    )
    assert "reward" in judged.placed_stages
    # The plan's options equal the run's.
    publishing_every_2 = recipe("ppo", "placement.slice_s=0.2", "weights.publish_every=2")
    problem = build_planner_problem(publishing_every_2, cluster, PlannerRequest(20, SIZES))
    assert problem.run_options == RunOptions(slice_s=0.2, publish_every=2)
    ema_reference = recipe("grpo", "algorithm.kl_coef=0.1", "reference.every=3")
    models = {role: SIZES[role] for role in ("policy", "reference")}
    problem = build_planner_problem(ema_reference, cluster, PlannerRequest(20, models))
    assert problem.run_options.reference_every == 3


def test_a_reference_of_its_own_is_planned_with_its_own_shape(tmp_path: Path):
    folder = write_toy(tmp_path)
    shutil.copytree(folder / "model", folder / "teacher")
    shape = AutoConfig.from_pretrained(folder / "model", intermediate_size=96)
    shape.save_pretrained(folder / "teacher")
    overrides = ["algorithm.kl_coef=0.1", f"reference.path={folder}/teacher"]
    config = load_config(folder / "recipe.yaml", overrides)
    models = build_planner_problem(config, Cluster.from_text("8xA100"), PlannerRequest(20)).models
    widths = {role: model.intermediate for role, model in models.items()}
    assert widths == {"policy": 128, "reference": 96}


def test_lora_is_planned_as_adapters_on_frozen_layers():
    config = recipe("ppo", "trainer.lora_rank=16", "critic.trainer={lora_rank: 0}")
    problem = build_planner_problem(config, Cluster.from_text("8xA100"), PlannerRequest(20, SIZES))
    models = problem.models
    assert 0 < models["policy"].adapter_params < 0.01 * models["policy"].num_params
    assert not models["critic"].adapter_params
    rules = make_split_rules(config, problem)
    calls = {call.role: call for call in config.dataflow.calls if call.kind is CallKind.TRAIN}
    assert rules(calls["policy"], RankGrid(1, 2, 2)) == ()
    assert rules(calls["policy"], RankGrid(1, 1, 4)) and rules(calls["critic"], RankGrid(1, 2, 2))


GIB = 1 << 30
MEASURED_GIB = {
    # Micro-batch tokens, gradient checkpointing, offload of the optimizer: peak on a GPU.
    ("qwen2.5-1.5b", 4096, False, False): 41.0,
    ("qwen2.5-1.5b", 16384, False, False): 74.3,
    # Here the update has the peak.
    ("qwen2.5-1.5b", 4096, True, False): 34.6,
    ("qwen2.5-1.5b", 16384, True, True): 16.8,
    ("qwen2.5-3b", 4096, True, False): 69.0,
}
"""Of ZeRO 1 in bfloat16: docs/gpus.md."""


@pytest.mark.parametrize("case", MEASURED_GIB, ids=str)
def test_planned_memory_of_training_is_as_measured_on_a_gpu(case: tuple[str, int, bool, bool]):
    model, tokens, checkpointing, offload = case
    settings = {
        "pipeline.micro_batch_tokens": tokens,
        "trainer.gradient_checkpointing": checkpointing,
        "trainer.offload_optimizer": offload,
    }
    config = recipe("grpo", *(f"{name}={value}".lower() for name, value in settings.items()))
    models = dict.fromkeys(config.dataflow.calls_by_role, model)
    models = {role: name for role, name in models.items() if role in SIZES}
    problem = build_planner_problem(
        config,
        Cluster.from_text("8x8xH100"),
        PlannerRequest(20, models, make_fixed_lengths(tokens)),
    )
    costs = CostModel(problem, build_run_constants(config, CostConstants()))
    planned = costs.predict_memory(Placement({"train": make_assignment("1-1-1")}))["train"]
    # torch measured its own allocations, without CUDA's context.
    assert 0.97 < (planned.peak_bytes - CUDA_CONTEXT_BYTES) / GIB / MEASURED_GIB[case] < 1.09


QWEN3_MOE = Qwen3MoeConfig(
    hidden_size=256,
    num_hidden_layers=2,
    vocab_size=1024,
    intermediate_size=1024,
    moe_intermediate_size=1024,
    num_experts=8,
    num_experts_per_tok=4,
    architectures=["Qwen3MoeForCausalLM"],
)


@pytest.mark.parametrize(
    ("model", "tp_size", "lora_rank"),
    [
        (make_config("qwen2.5-0.5b", 24), 1, 0),
        (make_config("qwen2.5-0.5b", 24), 2, 0),
        (make_config("qwen2.5-0.5b", 24), 1, 16),
        (QWEN3_MOE, 1, 0),
        (QWEN3_MOE, 2, 0),
    ],
    ids=["dense", "split", "LoRA", "experts", "split experts"],
)
def test_a_shape_has_the_sizes_of_its_model(
    model: PreTrainedConfig, tp_size: int, lora_rank: int, tmp_path: Path
):
    model.save_pretrained(tmp_path)
    backend = "torch" if tp_size > 1 else "deepspeed"
    trainer = TrainerConfig(
        backend,
        dtype="float32",
        world_size=tp_size,
        tensor_parallel=tp_size,
        zero_stage=3,
        lora_rank=lora_rank,
    )
    measured = measure_training_sizes(load_skeleton(str(tmp_path)), trainer, on_gpu=True)
    train = make_assignment(f"1-{tp_size}-1", zero_stage=3)
    cost = CallCost(
        add_adapter_params(load_model_shape(str(tmp_path)), lora_rank),
        train,
        Workload(1, 1, 1, make_fixed_lengths(1)),
        Cluster.from_text("8xH100"),
        CostConstants(),
    )
    planned = vars(build_training_sizes(cost, trainer))
    for name, size in vars(measured).items():
        assert planned[name] == pytest.approx(size, rel=1e-3), name


SPLIT = ("trainer.backend=torch", "trainer.world_size=2", "trainer.tensor_parallel=2")
BFLOAT16_GENERATOR = ("generator.dtype=bfloat16",)
GPU_CACHE = ("generator.kv_cache_mb=3",)


@pytest.mark.parametrize(
    ("cluster", "settings"),
    [
        ("1xCPU", ()),
        ("1xCPU", BFLOAT16_GENERATOR),
        ("1xCPU", ("trainer.dtype=bfloat16", *BFLOAT16_GENERATOR)),
        ("1xCPU", ("trainer.lora_rank=4",)),
        ("2xCPU", ("trainer.world_size=2", "trainer.zero_stage=3", *GPU_CACHE)),
        ("2xCPU", ("trainer.world_size=2", "generator.tensor_parallel=2")),
        ("2xCPU", SPLIT),
        ("2xCPU", (*SPLIT, "generator.tensor_parallel=2")),
        ("2xCPU", (*SPLIT, *BFLOAT16_GENERATOR)),
        ("1xH100", GPU_CACHE),
        ("2xH100", (*SPLIT, *GPU_CACHE, "generator.dtype=float32")),
        ("2xH100", ("model.path=moe", "trainer.world_size=2", "trainer.zero_stage=3", *GPU_CACHE)),
    ],
    ids=str,
)
def test_plan_and_preflight_count_the_same_bytes(
    cluster: str, settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    recipe_path = write_toy(tmp_path) / "recipe.yaml"
    monkeypatch.chdir(tmp_path)
    QWEN3_MOE.save_pretrained("moe")
    config = load_config(recipe_path, ["placement.mode=colocated", *settings])
    worker = check_worker_memory(config, on_gpu="CPU" not in cluster)
    assert worker is not None
    problem = build_planner_problem(config, Cluster.from_text(cluster), PlannerRequest(20))
    costs = CostModel(
        problem, build_run_constants(config, CostConstants.from_cluster(problem.cluster))
    )
    planned = costs.predict_memory(build_run_placement(config, problem.models))
    held = worker.weights + worker.optimizer + worker.gradients + worker.libraries
    used = max(worker.activations, worker.update_buffers)
    served = planned["generate"].resident_bytes - worker.kv_cache
    assert served == pytest.approx(worker.serving_weights, rel=1e-3)
    assert planned["train"].resident_bytes == pytest.approx(held, rel=1e-3)
    assert planned["train"].active_bytes == pytest.approx(used, rel=1e-3)


def test_micro_batches_kv_cache_and_longest_rollout_come_from_the_run():
    overrides = ["pipeline.micro_batch_tokens=8192", "generator.kv_cache_mb=3"]
    judged = "rewards=[{kind: model, path: some/judge, batch_tokens: 100}]"
    models = {**SIZES, "reward": "qwen2.5-0.5b"}
    request = PlannerRequest(20, models, make_fixed_lengths(5), max_prompt_tokens=30)
    problem = build_planner_problem(
        recipe("ppo", *overrides, judged), Cluster.from_text("8xA100"), request
    )
    assert problem.score_tokens == {"reward": 100, "reference": 8192, "value": 8192}
    assert problem.kv_cache_bytes == 3 << 20
    # The lengths have 5 tokens, but an engine reserves the 12 that the config allows.
    assert problem.workload.max_rollout_tokens == 30 + 12


SHARED = "world_size: 4, sequence_parallel: 4"


@pytest.mark.parametrize(
    ("stage", "setting"),
    [
        ("reference", f"reference={{{SHARED}}}"),
        ("value", f"critic={{replicas: 1, shadow: {{{SHARED}}}}}"),
        ("value", f"critic={{trainer: {{{SHARED}}}}}"),
    ],
)
def test_ranks_that_share_tokens_score_a_part_of_a_micro_batch(stage: str, setting: str):
    active = []
    for shared in (setting, setting.replace("parallel: 4", "parallel: 1")):
        config, cluster = recipe("ppo", shared), Cluster.from_text("2x8xA100")
        problem = build_planner_problem(config, cluster, PlannerRequest(20, SIZES))
        memory = CostModel(problem).predict_memory(build_run_placement(config, problem.models))
        active.append(memory[stage].active_bytes)
    saved_tokens, hidden = 4096 * 3 // 4, 4096
    assert active[1] - active[0] == saved_tokens * hidden * CostConstants().activation_bytes


def test_a_reward_model_does_not_follow_the_layout_of_shadow_critics():
    shadow = f"critic={{replicas: 1, shadow: {{{SHARED}}}}}"
    judged = recipe("ppo", shadow, "rewards=[{kind: model, path: judge}]")
    models = {**SIZES, "reward": "llama-7b"}
    problem = build_planner_problem(judged, Cluster.from_text("8xA100"), PlannerRequest(20, models))
    calls, rules = judged.dataflow.calls_by_role, make_split_rules(judged, problem)
    assert rules(calls["reward"][0], RankGrid(1, 1, 3)) == (1, 3)
    assert [rules(calls["value"][0], RankGrid(1, 1, ranks)) for ranks in (3, 4)] == [(), (3,)]


def test_split_rules_exclude_layouts_that_training_cannot_run():
    config, cluster = recipe("grpo"), Cluster.from_text("8xH100")
    calls = {call.kind: call for call in config.dataflow.calls}
    for model, ranks, trains, serves in (
        ("llama-7b", 8, True, True),
        ("qwen2.5-7b", 2, True, True),
        ("qwen2.5-72b", 8, True, True),
        ("qwen3-8b", 2, True, True),
        ("qwen2.5-7b", 7, False, False),
        # Two key/value heads: two ranks can replicate them for serving, but not for training.
        ("qwen2.5-3b", 4, False, True),
    ):
        rules = make_split_rules(
            config, build_planner_problem(config, cluster, PlannerRequest(20, {"policy": model}))
        )
        assert bool(rules(calls[CallKind.TRAIN], RankGrid(1, ranks, 1))) == trains, model
        assert bool(rules(calls[CallKind.GENERATE], RankGrid(1, ranks, 1))) == serves, model


BFLOAT16 = "trainer.dtype=bfloat16"
FSDP2 = ("trainer.backend=torch", "trainer.world_size=2", "trainer.zero_stage=3")


@pytest.mark.parametrize(
    ("model", "settings", "tp_size", "dp_size", "stages"),
    [
        # The experts of a rank, 128 over 2, are sharded by numbers that divide them.
        ("qwen3-30b-a3b", (), 2, 4, (0, 3)),
        ("qwen3-30b-a3b", (), 2, 3, (0,)),
        # bfloat16 needs master weights.
        ("qwen2.5-7b", (BFLOAT16,), 2, 1, (0,)),
        ("qwen2.5-7b", (BFLOAT16,), 2, 2, (0, 3)),
        ("qwen2.5-7b", (BFLOAT16,), 1, 4, (1, 3)),
        ("qwen2.5-7b", (BFLOAT16, *FSDP2), 1, 4, (3,)),
        ("qwen2.5-7b", (BFLOAT16, *FSDP2), 1, 1, ()),
        ("qwen2.5-7b", FSDP2, 1, 4, (0, 3)),
        ("qwen2.5-7b", ("trainer.offload_optimizer=true",), 1, 4, (1, 3)),
    ],
)
def test_zero_stages_are_those_that_a_trainer_can_run(
    model: str, settings: tuple[str, ...], tp_size: int, dp_size: int, stages: tuple[int, ...]
):
    config = recipe("grpo", *settings)
    request = PlannerRequest(20, {"policy": model})
    problem = build_planner_problem(config, Cluster.from_text("8xH100"), request)
    (call,) = (call for call in config.dataflow.calls if call.kind is CallKind.TRAIN)
    grid = RankGrid(1, tp_size, dp_size)
    assert make_split_rules(config, problem)(call, grid) == stages
    for stage in stages:
        train = make_assignment(str(grid), zero_stage=stage)
        placement = Placement({"generate": make_assignment("1-1-4", 8), "train": train}, 1)
        trainer = apply_placement(config, placement).trainer
        assert (trainer.dtype, trainer.zero_stage) == (config.trainer.dtype, stage)


def test_configure_for_cluster_joins_ray_or_sizes_the_object_store():
    config = recipe("grpo", "pipeline.groups_per_step=4096")
    one_node = configure_for_cluster(config, Cluster.from_text("8xH100"), longest_tokens=30_000)
    assert one_node.placement.address == "" and one_node.placement.object_store_mb > 20_000
    two_nodes = configure_for_cluster(config, Cluster.from_text("2x8xH100"), longest_tokens=30_000)
    assert two_nodes.placement.address == "auto"
    addressed = recipe("grpo", "placement.address=10.0.0.1:6379")
    assert (
        configure_for_cluster(addressed, Cluster.from_text("2x8xH100"), longest_tokens=30_000)
        == addressed
    )


def test_a_model_of_unknown_size_is_refused():
    cluster = Cluster.from_text("8xA100")
    with pytest.raises(ConfigError, match="--model critic=llama-7b: the run has policy, reward"):
        build_planner_problem(recipe("grpo"), cluster, PlannerRequest(20, SIZES))
    nowhere = recipe("grpo", "model.path=no/where")
    with pytest.raises(ConfigError, match="choose another with --model policy=NAME"):
        build_planner_problem(nowhere, cluster, PlannerRequest(20))


ROLES = ("policy", "critic", "reference")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
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
        ("ppo", ("reference.world_size=2", "reference.replicas=2", "critic.replicas=2")),
        ("ppo", ("placement.mode=colocated", "trainer.world_size=2", "pipeline.max_staleness=3")),
        ("ppo", ("placement.mode=interleaving", "trainer.world_size=2")),
        (
            "ppo",
            (
                "placement.mode=mixed",
                "placement.pools=[{policy: 1, generator: 1}, {reference: 0.5, value: 0.5}]",
                "critic.replicas=1",
                "trainer.world_size=2",
            ),
        ),
    ],
)
def test_apply_placement_inverts_build_run_placement(name: str, overrides: tuple[str, ...]):
    config = recipe(name, *overrides)
    placement = build_run_placement(config, ROLES)
    applied = apply_placement(recipe(name), placement)
    assert applied.trainer.world_size == config.trainer.world_size
    assert applied.reference.world_size == config.reference.world_size
    assert applied.generator.tensor_parallel == config.generator.tensor_parallel
    assert applied.placement.is_hybrid == config.placement.is_hybrid
    assert build_run_placement(applied, ROLES) == placement


@pytest.mark.parametrize(("world_size", "tp_size"), [(2, 1), (2, 2), (4, 2)])
def test_a_reward_model_has_the_devices_and_the_memory_of_its_ranks(world_size: int, tp_size: int):
    sizes = f"world_size: {world_size}, tensor_parallel: {tp_size}"
    whole, split = (
        recipe("grpo", f"rewards=[{{kind: model, path: judge{ranks}}}]", "scorer.replicas=2")
        for ranks in ("", f", {sizes}")
    )
    named = PlannerRequest(20, {"policy": "qwen2.5-1.5b", "reward": "llama-7b"})
    held, placements = [], []
    for config in (whole, split):
        problem = build_planner_problem(config, Cluster.from_text("2x8xH100"), named)
        placements.append(build_run_placement(config, problem.models))
        held.append(CostModel(problem).predict_memory(placements[-1])["reward"].resident_bytes)
    reward = placements[1].assignments["reward"]
    assert (reward.mesh.size, str(reward.grid)) == (
        2 * world_size,
        f"1-{tp_size}-{reward.grid.dp_size}",
    )
    libraries = CUDA_CONTEXT_BYTES + ((tp_size > 1) + (world_size > tp_size)) * NCCL_GROUP_BYTES
    share = (held[0] - CUDA_CONTEXT_BYTES) / world_size
    assert held[1] - libraries == pytest.approx(share, rel=0.01)
    assert (
        build_run_placement(apply_placement(whole, placements[1]), problem.models) == placements[1]
    )


def test_overlapping_roles_become_mixed_pools():
    pools = [{"policy": 1.0, "generator": 1.0}, {"critic": 1.0, "reference": 0.5, "value": 0.5}]
    actor = {"generate": ("0-3", "1-1-4"), "train": ("0-3", "1-1-4")}
    critic = {"train_critic": ("4-5", "1-1-2")}
    halves = {"reference": ("4-4", "1-1-1"), "value": ("5-5", "1-1-1")}
    placement = placement_from_meshes({**actor, **critic, **halves})
    config = apply_placement(recipe("ppo"), placement)
    assert config.placement.mode == "mixed"
    assert config.placement.pools == pools
    assert config.critic.trainer["world_size"] == 2
    # Named modes need no pools: reference replicas occupy the first devices of the actor.
    split = {"reference": ("0-1", "1-1-2"), "value": ("4-5", "1-1-2")}
    named = placement_from_meshes({**actor, **critic, **split})
    assert apply_placement(recipe("ppo"), named).placement.mode == "split"


def test_devices_that_no_pools_of_roles_give_are_refused():
    # A generator on shared devices is either split over trainer ranks or unsplit.
    meshes = {"generate": ("0-3", "1-2-2"), "train": ("0-1", "1-1-2")}
    with pytest.raises(ConfigError, match="no placement mode or pools of roles give these devices"):
        apply_placement(recipe("grpo"), placement_from_meshes(meshes))
