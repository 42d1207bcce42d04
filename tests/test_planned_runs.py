"""What `streamrl plan` writes is a run that `streamrl train` takes on that cluster."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.cli.main import main
from streamrl.config import RunConfig, load_config
from streamrl.errors import ConfigError
from streamrl.model_config import read_model_config
from streamrl.placement import Capacity, Cluster, FixedLength, Mesh, Placement, owner, settle
from streamrl.placement.costs import Constants, CostModel
from streamrl.placement.schedule import Estimator
from streamrl.placement.search import Choices
from streamrl.placement.search.partitions import allocations, set_partitions
from streamrl.placing import (
    RunCosts,
    placed_run,
    rules_of,
    run_costs,
    run_placement,
    shares_devices,
)
from streamrl.planning import Asked, problem_of, run_constants
from streamrl.preflight import hybrid_memory, prepare, shard_bytes, ways
from streamrl.resharding import Grid
from streamrl.slots import placed
from tests.rewards.tiny_classifier import write_classifier
from tests.toy import write_toy

MIB = 1 << 20
CONFIGS = Path(__file__).parent.parent / "configs"
PRESETS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
QUICK = {
    ("grpo_arithmetic", "2xH100"),
    ("grpo_arithmetic_colocated", "4xCPU"),
}
CLUSTERS = ("1xH100", "2xH100", "4xA100", "2x8xA100", "4xCPU")
SHORT = ("generator.max_new_tokens=12", "pipeline.groups_per_step=16", "algorithm.kl_horizon=4096")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy's model and data, a reward model, and texts."""
    folder = write_toy(tmp_path_factory.mktemp("inputs"))
    write_classifier(folder / "judge")
    (folder / "texts.jsonl").write_text('{"text": "1+1=2"}\n')
    return folder


def preset(name: str, inputs: Path) -> list[str]:
    """A recipe of configs/, with the toy's files in place of its own."""
    path = CONFIGS / f"{name}.yaml"
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    words = [str(path), f"model.path={inputs}/model", f"data.train={inputs}/rows.jsonl", *SHORT]
    words += [f"data.eval={inputs}/rows.jsonl"] if "eval" in found["data"] else []
    words += [f"data.pretrain={inputs}/texts.jsonl"] if "pretrain" in found["data"] else []
    if "overlong_buffer" in found["algorithm"]:
        words.append("algorithm.overlong_buffer=3")
    for i, reward in enumerate(found["rewards"]):
        if reward["kind"] == "model":
            words.append(f"rewards[{i}].path={inputs}/judge")
    # The toy's rows have numbers for answers.
    return words + (["rewards=[{kind: exact}]"] if found["rewards"][0]["kind"] == "code" else [])


def check_as_train_does(config: RunConfig, cluster: Cluster) -> None:
    """All that `streamrl train` checks before it starts an engine, on as many devices."""
    prepared, on_gpu = prepare(config), not cluster.is_cpu
    cpus = config.placement.cpus or cluster.size + 8
    have = Capacity(cpus=cpus, gpus=cluster.size if on_gpu else 0)
    mode = settle(ways(config, prepared, on_gpu), have).mode
    assert mode == config.placement.mode
    there = placed(config, mode)
    hybrid_memory(there, on_gpu=on_gpu)
    shard_bytes(there, prepared, node_stores=[there.placement.object_store_mb * MIB])
    if given := config.generator.kv_cache_mb:
        # vLLM refuses to start without room for the longest rollout.
        model = read_model_config(config.model.path).get_text_config()
        heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
        width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
        token_bytes = 2 * model.num_hidden_layers * heads * width * (2 if on_gpu else 4)
        assert given * MIB >= prepared.max_length * token_bytes / config.generator.tensor_parallel


def sizes(placement: Placement) -> dict[str, tuple[Grid, int, int]]:
    calls = placement.calls.items()
    return {stage: (each.grid, each.mesh.size, each.zero_stage) for stage, each in calls}


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        pytest.param(name, each, marks=[pytest.mark.slow] * ((name, each) not in QUICK))
        for name in PRESETS
        for each in CLUSTERS
    ],
)
def test_what_is_planned_of_a_recipe_is_taken_by_train(
    name: str, cluster: str, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, words = tmp_path / "plan.yaml", preset(name, inputs)
    options = ["--cluster", cluster, "--proposals", "10", "-o", str(out), "--json"]
    assert main(["plan", *words, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    config = load_config(out)
    check_as_train_does(config, Cluster.parse(cluster))
    # What is said to be written is what differs; the bound is the config's own.
    before = load_config(Path(words[0]), words[1:])
    assert config.pipeline.max_staleness == before.pipeline.max_staleness
    assert all(key.split(".")[0] in vars(config) for key in found["settings"])
    best = Placement.of_dict(found["best"]["placement"], place="best")
    models = {owner(call) for call in config.dataflow.calls if call.stage in best.calls}
    assert sizes(run_placement(config, models)) == sizes(best)
    assert (config.placement.address == "auto") == (Cluster.parse(cluster).num_nodes > 1)


@pytest.mark.parametrize(
    "name",
    [
        "grpo_arithmetic",
        "ppo_arithmetic",
        pytest.param("safe_rlhf_toy", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("bound", [0, 1])
def test_every_placement_that_a_plan_may_choose_is_taken_by_train(
    name: str, bound: int, inputs: Path
) -> None:
    path, *overrides = preset(name, inputs)
    config = load_config(Path(path), [*overrides, f"pipeline.max_staleness={bound}"])
    cluster = Cluster.parse("4xH100")
    problem = problem_of(config, cluster, Asked(5, lengths=FixedLength(12)))
    costs = CostModel(problem, run_constants(config, Constants(), on_gpu=True))
    choices = Choices(
        Estimator(problem, run_costs(config, problem, costs)), rules=rules_of(config, problem)
    )
    prepared, checked = prepare(config), 0
    in_two = [sets for sets in set_partitions(choices.roles) if len(sets) <= 2]
    for sets in in_two:
        for meshes in allocations(cluster, len(sets)):
            roles = {role: mesh for some, mesh in zip(sets, meshes, strict=True) for role in some}
            found = choices.fitted(roles)
            if found is None:
                continue
            placement = choices.placement(found, bound)
            room = costs.kv_cache(placement) if shares_devices(placement) else None
            run = placed_run(config, placement, kv_cache_bytes=room)
            have = Capacity(cpus=cluster.size + 8, gpus=cluster.size)
            assert settle(ways(run, prepared, True), have).mode == run.placement.mode
            hybrid_memory(run, on_gpu=True)
            checked += 1
    assert checked >= len(in_two)


def test_a_generator_alone_takes_what_it_finds_and_one_that_shares_is_told(inputs: Path) -> None:
    path, *overrides = preset("grpo_arithmetic", inputs)
    config = load_config(Path(path), overrides)
    problem = problem_of(config, Cluster.parse("2xH100"), Asked(5))
    choices = Choices(Estimator(problem, CostModel(problem)), rules=rules_of(config, problem))
    apart = choices.fitted({"generator": Mesh(0, 1), "policy": Mesh(1, 1)})
    together = choices.fitted({"generator": Mesh(0, 2), "policy": Mesh(0, 2)})
    assert apart is not None and together is not None
    assert [shares_devices(choices.placement(each)) for each in (apart, together)] == [False, True]
    given = placed_run(config, choices.placement(together), kv_cache_bytes=5.5 * MIB)
    assert given.generator.kv_cache_mb == 5
    # What the run itself says stays.
    own = load_config(Path(path), [*overrides, "generator.kv_cache_mb=7"])
    kept = placed_run(own, choices.placement(together), kv_cache_bytes=5.5 * MIB)
    assert kept.generator.kv_cache_mb == 7


def test_roles_of_one_setting_have_devices_alike(inputs: Path) -> None:
    path, *overrides = preset("safe_rlhf_toy", inputs)
    config = load_config(Path(path), overrides)
    problem = problem_of(config, Cluster.parse("8xH100"), Asked(5))
    choices = Choices(Estimator(problem, CostModel(problem)), rules=rules_of(config, problem))
    whole = choices.fitted(dict.fromkeys(choices.roles, Mesh(0, 8)))
    assert whole is not None
    (small,) = (each for each in choices.of("critic", Mesh(0, 4))[:1])
    unlike = choices.placement({**whole, "critic": small})
    costs = RunCosts(CostModel(problem), config.dataflow)
    assert "critic and cost_critic have one setting" in costs.unfit(unlike)
    with pytest.raises(ConfigError, match="critic and cost_critic have one setting"):
        placed_run(config, unlike)
