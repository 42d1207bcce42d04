"""Configs written by `streamrl plan` pass the checks of `streamrl train` on that cluster."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.cli.main import main
from streamrl.config.preflight import (
    PreparedRun,
    check_worker_memory,
    compute_shard_bytes,
    list_placement_options,
    prepare_run,
)
from streamrl.config.role_counts import with_placement_mode
from streamrl.config.run_config import RunConfig, load_config
from streamrl.engines.models.tensor_parallel_support import (
    check_generator_split,
    check_trainer_split,
)
from streamrl.errors import ConfigError
from streamrl.files.hf_config import read_model_config
from streamrl.placement.clusters import Cluster
from streamrl.placement.meshes import Mesh
from streamrl.placement.placements import CallAssignment, Placement
from streamrl.placement.resource_demand import ClusterCapacity, choose_mode
from streamrl.planner.costs.constants import CostConstants
from streamrl.planner.costs.cost_model import CostModel
from streamrl.planner.problem.workload import LengthDistribution, make_fixed_lengths
from streamrl.planner.search.hybridflow import (
    ParallelismChoices,
    iter_allocations,
    iter_set_partitions,
)
from streamrl.planner.steady_state.estimator import PlacementEstimator
from streamrl.planner.to_placement import (
    apply_placement,
    build_run_placement,
    has_shared_generator_devices,
    list_zero_stages,
    make_run_refusal,
    make_split_rules,
)
from streamrl.planner.to_planner_problem import (
    PlannerRequest,
    build_planner_problem,
    build_run_constants,
)
from streamrl.resharding.grids import RankGrid
from tests.rewards.tiny_classifier import write_classifier
from tests.toy import write_toy

MIB = 1 << 20
CONFIGS = Path(__file__).parent.parent / "configs"
PRESETS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
QUICK = [("grpo_arithmetic", "2xH100"), ("grpo_arithmetic_colocated", "4xCPU")]
CLUSTERS = ("1xH100", "2xH100", "4xA100", "2x8xA100", "4xCPU")
IN_TURN = [
    (name, CLUSTERS[(i + shift) % len(CLUSTERS)])
    for i, name in enumerate(PRESETS)
    for shift in (0, 2)
]
"""Each recipe on two clusters, each cluster with recipes of every kind."""
SHORT = (
    "generator.max_new_tokens=12",
    "data.max_prompt_tokens=null",
    "pipeline.groups_per_step=16",
)
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    # vLLM serves this family with the model classes of transformers.
    "gpt_neox": {},
    "qwen3_moe": {
        **{"num_key_value_heads": 1, "head_dim": 32, "moe_intermediate_size": 33},
        **{"num_experts": 4, "num_experts_per_tok": 2},
    },
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2},
}
REFUSED = {
    ("gpt_neox", "2xH100"): {"placement.mode"},
    ("qwen3_moe", "2xH100"): {"generator.tensor_parallel", "trainer.tensor_parallel"},
    ("mixtral", "2xCPU"): {"trainer.tensor_parallel"},
}
"""Settings named when train refuses placements, by family and cluster."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the toy's model and rows, a reward model, and pretraining texts."""
    folder = write_toy(tmp_path_factory.mktemp("inputs"))
    write_classifier(folder / "judge")
    (folder / "texts.jsonl").write_text('{"text": "1+1=2"}\n')
    return folder


def preset(name: str, inputs: Path) -> list[str]:
    """Return the path of a recipe of configs/ and overrides that make it use the toy's files."""
    path = CONFIGS / f"{name}.yaml"
    recipe: dict[str, Any] = yaml.safe_load(path.read_text())
    words = [str(path), f"model.path={inputs}/model", f"data.train={inputs}/rows.jsonl", *SHORT]
    words += [f"data.eval={inputs}/rows.jsonl"] if "eval" in recipe["data"] else []
    words += [f"data.pretrain={inputs}/texts.jsonl"] if "pretrain" in recipe["data"] else []
    if "overlong_buffer" in recipe["algorithm"]:
        words.append("algorithm.overlong_buffer=3")
    if "kv_cache_mb" in recipe["generator"]:  # for a GPU; a core of the CPU cluster has 4 GB
        words.append("generator.kv_cache_mb=64")
    for i, reward in enumerate(recipe["rewards"]):
        if reward["kind"] == "model":
            words.append(f"rewards[{i}].path={inputs}/judge")
    # The answers in the toy's rows are numbers, not code.
    return words + (["rewards=[{kind: exact}]"] if recipe["rewards"][0]["kind"] == "code" else [])


def choose_placement(config: RunConfig, prepared: PreparedRun, cluster: Cluster) -> str:
    """Return the mode that a run takes on a cluster."""
    num_gpus = 0 if cluster.is_cpu else cluster.num_devices
    capacity = ClusterCapacity(config.placement.cpus or cluster.num_devices + 8, num_gpus)
    return choose_mode(list_placement_options(config, prepared, num_gpus > 0), capacity).mode


def check_as_train_does(config: RunConfig, cluster: Cluster) -> None:
    """Run all checks of `streamrl train` before it starts an engine, on as many devices."""
    prepared, on_gpu = prepare_run(config), not cluster.is_cpu
    mode = choose_placement(config, prepared, cluster)
    assert mode == config.placement.mode
    placed_config = with_placement_mode(config, mode)
    check_worker_memory(placed_config, on_gpu=on_gpu)
    compute_shard_bytes(
        placed_config, prepared, node_stores=[placed_config.placement.object_store_mb * MIB]
    )
    if kv_cache_mb := config.generator.kv_cache_mb:
        # vLLM refuses to start without room for the longest rollout.
        model = read_model_config(config.model.path).get_text_config()
        heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
        width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
        token_bytes = 2 * model.num_hidden_layers * heads * width * (2 if on_gpu else 4)
        assert (
            kv_cache_mb * MIB
            >= prepared.max_length * token_bytes / config.generator.tensor_parallel
        )


def make_choices(
    config: RunConfig, cluster: Cluster, lengths: LengthDistribution | None = None
) -> tuple[CostModel, ParallelismChoices]:
    """Return the costs of a run's placements as `streamrl plan` makes them, and its choices."""
    problem = build_planner_problem(config, cluster, PlannerRequest(5, lengths=lengths))
    constants, refuse = (
        build_run_constants(config, CostConstants()),
        make_run_refusal(config, problem),
    )
    costs = CostModel(problem, constants, explain_refusal=refuse)
    rules = make_split_rules(config, problem)
    return costs, ParallelismChoices(PlacementEstimator(problem, costs), rules=rules)


def sizes(placement: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """Return the grid and ZeRO stage of each call."""
    return {stage: (call["grid"], call["zero_stage"]) for stage, call in placement["calls"].items()}


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        *QUICK,
        *(
            pytest.param(name, cluster, marks=pytest.mark.slow)
            for name, cluster in IN_TURN
            if (name, cluster) not in QUICK
        ),
    ],
)
def test_train_accepts_the_plan_of_each_recipe(
    name: str, cluster: str, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, words = tmp_path / "plan.yaml", preset(name, inputs)
    options = ["--cluster", cluster, "--proposals", "10", "-o", str(out), "--json"]
    assert main(["plan", *words, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    config = load_config(out)
    check_as_train_does(config, Cluster.from_text(cluster))
    # The report lists the settings that differ; max_staleness stays that of the recipe.
    before = load_config(Path(words[0]), words[1:])
    assert config.pipeline.max_staleness == before.pipeline.max_staleness
    assert all(key.split(".")[0] in vars(config) for key in report["settings"])
    best = report["best"]["placement"]
    models = {call.model_role for call in config.dataflow.calls if call.stage in best["calls"]}
    assert sizes(build_run_placement(config, models).to_dict()) == sizes(best)
    assert (config.placement.address == "auto") == (Cluster.from_text(cluster).num_nodes > 1)


@pytest.mark.parametrize(
    "name",
    ["grpo_arithmetic", "ppo_arithmetic", pytest.param("safe_rlhf_toy", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("bound", [0, 1])
def test_train_accepts_every_placement_that_a_plan_may_choose(name: str, bound: int, inputs: Path):
    path, *overrides = preset(name, inputs)
    config = load_config(Path(path), [*overrides, f"pipeline.max_staleness={bound}"])
    cluster = Cluster.from_text("4xH100")
    costs, choices = make_choices(config, cluster, lengths=make_fixed_lengths(12))
    prepared: dict[int, PreparedRun] = {}
    checked = 0
    in_two = [sets for sets in iter_set_partitions(choices.roles) if len(sets) <= 2]
    for sets in in_two:
        for meshes in iter_allocations(cluster, len(sets)):
            roles = {
                role: mesh for role_set, mesh in zip(sets, meshes, strict=True) for role in role_set
            }
            assignments = choices.fit_on_meshes(roles)
            if assignments is None:
                continue
            placement = choices.make_placement(assignments, bound)
            kv_cache_bytes = (
                costs.compute_kv_cache_bytes(placement)
                if has_shared_generator_devices(placement)
                else None
            )
            run = apply_placement(config, placement, kv_cache_bytes=kv_cache_bytes)
            # Shadow critics load a model of their own.
            shadows = run.critic.replicas
            prepared[shadows] = prepared.get(shadows) or prepare_run(run)
            assert choose_placement(run, prepared[shadows], cluster) == run.placement.mode
            check_worker_memory(run, on_gpu=True)
            checked += 1
    assert checked >= len(in_two)


def write_family(family: str, like: Path, folder: Path) -> str:
    """Write a tiny model of a family, with sizes and tokenizer of the model in `like`."""
    shutil.copytree(like, folder)
    sizes = {key: json.loads((like / "config.json").read_text())[key] for key in SIZES}
    settings = AutoConfig.for_model(family, **sizes, **FAMILIES[family])
    AutoModelForCausalLM.from_config(settings).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def families(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Model directories by family."""
    folder = tmp_path_factory.mktemp("families")
    return {name: write_family(name, inputs / "model", folder / name) for name in FAMILIES}


def refusal(
    config: RunConfig,
    prepared: PreparedRun,
    cluster: Cluster,
    placement: Placement,
    kv_cache_bytes: float,
) -> str:
    """Return the error of `streamrl train` for a run with this placement; empty if accepted."""
    try:
        run = apply_placement(config, placement, kv_cache_bytes=kv_cache_bytes)
        check_generator_split(run.model.path, run.generator.tensor_parallel)
        check_trainer_split(run.model.path, run.trainer)
        choose_placement(run, prepared, cluster)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=[pytest.mark.slow] * ((family, name) not in REFUSED))
        for family, name in itertools.product(FAMILIES, ("2xH100", "2xCPU"))
    ],
)
def test_planner_refuses_every_placement_that_train_refuses(
    family: str, name: str, inputs: Path, families: dict[str, str]
):
    path, *overrides = preset("grpo_arithmetic", inputs)
    settings = ["pipeline.max_staleness=0", "trainer.backend=torch", "algorithm.kl_coef=0"]
    settings.append(f"model.path={families[family]}")
    config, cluster = load_config(Path(path), [*overrides, *settings]), Cluster.from_text(name)
    prepared, (costs, every) = prepare_run(config), make_choices(config, cluster)
    rules = make_split_rules(config, costs.problem)
    calls = {role: config.dataflow.calls_by_role[role][0] for role in every.roles}
    # All combinations: a search would skip uneven splits.
    options = [
        [
            CallAssignment(mesh, grid, zero)
            for mesh in (Mesh(0, 1), Mesh(1, 1), Mesh(0, 2))
            for grid in (RankGrid(1, 1, mesh.size), RankGrid(1, mesh.size, 1))[: mesh.size]
            for zero in list_zero_stages(calls[role], grid)
        ]
        for role in every.roles
    ]
    reasons = {True: set[str](), False: set[str]()}
    for assignments in itertools.product(*options):
        roles = dict(zip(every.roles, assignments, strict=True))
        placement = every.make_placement(roles)
        by_rules = any(r.zero_stage not in rules(calls[role], r.grid) for role, r in roles.items())
        planner_error = costs.explain_infeasible(placement)
        train_error = refusal(config, prepared, cluster, placement, MIB)
        # The planner may be stricter than train, never laxer; errors about devices are the same.
        assert planner_error or by_rules or not train_error, f"{placement}: {train_error}"
        if train_error.startswith("placement.mode="):
            assert planner_error == train_error
        reasons[bool(train_error)].add(train_error.split("=")[0])
    assert reasons[False]
    assert reasons[True] >= REFUSED.get((family, name), set())


@pytest.mark.parametrize(("family", "cluster"), [("gpt_neox", "2xH100"), ("gpt_neox", "2xCPU")])
def test_train_accepts_the_plan_of_each_family(
    family: str,
    cluster: str,
    inputs: Path,
    families: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    out, words = tmp_path / "plan.yaml", preset("grpo_arithmetic", inputs)
    # Few CPU slots, and a long prompt only in the evaluation data.
    rows = [json.loads(line) for line in (inputs / "rows.jsonl").read_text().splitlines()[:2]]
    rows[0]["prompt"][0]["content"] = "1+1" * 10
    (tmp_path / "long.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words += [f"model.path={families[family]}", "placement.cpus=1"]
    words += [f"data.eval={tmp_path}/long.jsonl"]
    options = ["--cluster", cluster, "--proposals", "10", "-o", str(out), "--json"]
    assert main(["plan", *words, *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["best"]["kind"] != "colocated" or cluster.endswith("CPU")
    check_as_train_does(load_config(out), Cluster.from_text(cluster))


def test_an_infeasible_plan_reports_the_reason(inputs: Path, capsys: pytest.CaptureFixture[str]):
    words = [*preset("grpo_arithmetic", inputs), "--proposals", "10"]
    assert main(["plan", *words, "weights.transport=shared_memory", "--cluster", "2x1xH100"]) == 1
    assert "weights.transport=shared_memory: needs one node; the cluster has 2" in (
        capsys.readouterr().out
    )


def test_kv_cache_size_is_set_only_for_a_generator_on_shared_devices(inputs: Path):
    path, *overrides = preset("grpo_arithmetic", inputs)
    config = load_config(Path(path), overrides)
    _, choices = make_choices(config, Cluster.from_text("2xH100"))
    separate = choices.fit_on_meshes({"generator": Mesh(0, 1), "policy": Mesh(1, 1)})
    together = choices.fit_on_meshes({"generator": Mesh(0, 2), "policy": Mesh(0, 2)})
    assert separate is not None and together is not None
    assert [
        has_shared_generator_devices(choices.make_placement(assignments))
        for assignments in (separate, together)
    ] == [False, True]
    sized = apply_placement(config, choices.make_placement(together), kv_cache_bytes=5.5 * MIB)
    assert sized.generator.kv_cache_mb == 5
    # An explicit setting of the run is kept.
    explicit = load_config(Path(path), [*overrides, "generator.kv_cache_mb=7"])
    unchanged = apply_placement(
        explicit, choices.make_placement(together), kv_cache_bytes=5.5 * MIB
    )
    assert unchanged.generator.kv_cache_mb == 7


def test_roles_sized_by_one_setting_have_equal_device_splits(inputs: Path):
    path, *overrides = preset("safe_rlhf_toy", inputs)
    config = load_config(Path(path), overrides)
    costs, choices = make_choices(config, Cluster.from_text("8xH100"))
    assignments = choices.fit_on_meshes(dict.fromkeys(choices.roles, Mesh(0, 8)))
    assert assignments is not None
    (small,) = (assignment for assignment in choices.list_options("critic", Mesh(0, 4))[:1])
    unlike = choices.make_placement({**assignments, "critic": small, "value": small})
    assert "one setting sizes both critic and cost_critic" in costs.explain_infeasible(unlike)
    with pytest.raises(ConfigError, match="one setting sizes both critic and cost_critic"):
        apply_placement(config, unlike)
