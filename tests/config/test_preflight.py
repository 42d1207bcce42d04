"""Preflight: resource demands and limits of a run, computed before it starts."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from streamrl.buffer.encoding import encode_columns
from streamrl.config import preflight
from streamrl.config.device_memory import estimate_role_memory, find_gpu_shortage
from streamrl.config.preflight import (
    PROCESS_GIB,
    PreparedRun,
    compute_shard_bytes,
    list_placement_options,
    list_resource_demands,
    prepare_run,
)
from streamrl.config.role_counts import with_placement_mode
from streamrl.config.run_config import RunConfig, load_config
from streamrl.engines.memory import memory_model
from streamrl.engines.memory.memory_model import measure_training_sizes
from streamrl.engines.models.forward import load_skeleton
from streamrl.engines.trainer_config import ReferenceConfig, TrainerConfig
from streamrl.errors import ConfigError
from streamrl.messages import rollouts_to_columns
from streamrl.placement.resource_demand import ClusterCapacity, choose_mode
from tests.rollouts import make_rollout
from tests.toy import write_toy

MB = 1 << 20
ToyRun = tuple[RunConfig, PreparedRun]
PrepareNamed = Callable[..., tuple[str, ...]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ToyRun:
    overrides = [
        "algorithm.kl_coef=0.1",
        "rewards=[{kind: exact}, {kind: numeric, name: a_name_that_is_long}]",
    ]
    config = load_config(write_toy(tmp_path_factory.mktemp("toy")) / "recipe.yaml", overrides)
    return config, prepare_run(config)


def choose(config: RunConfig, prepared: PreparedRun, cpus: int, gpus: int = 0) -> str:
    """Return the mode that a run takes on a cluster of this size."""
    options = list_placement_options(config, prepared, gpus > 0)
    return choose_mode(options, ClusterCapacity(cpus, gpus)).mode


def test_max_group_bytes_bounds_every_group(run: ToyRun):
    config, prepared = run
    new, size = config.generator.max_new_tokens, config.algorithm.group_size
    rollout = make_rollout([1] * (prepared.max_length - new), [1] * new, version=10**6)
    names = ["scores", *(f"reward/{name}" for name in config.component_columns)]
    scores = {name: np.ones(size, np.float32) for name in names}
    reference = {"ref_logprobs": np.zeros(size * prepared.max_length, np.float32)}
    blobs = [
        encode_columns(columns)
        for columns in (rollouts_to_columns([rollout] * size), scores, reference)
    ]
    assert {call.stage for call in config.dataflow.calls} >= {"generate", "reward", "reference"}
    assert sum(map(len, blobs)) <= config.bound_group_bytes(prepared.max_length)


def test_a_shard_may_use_its_share_of_the_smallest_object_store(run: ToyRun):
    config, prepared = run
    # Two shards share one node's store; on two nodes each has half of its own.
    assert compute_shard_bytes(config, prepared, node_stores=[100 * MB]) == 25 * MB
    assert compute_shard_bytes(config, prepared, node_stores=[100 * MB, 300 * MB]) == 50 * MB


def test_an_object_store_too_small_for_a_step_is_refused_with_the_arithmetic(run: ToyRun):
    config, prepared = run
    needed = config.pipeline.groups_per_step * config.bound_group_bytes(prepared.max_length)
    compute_shard_bytes(config, prepared, node_stores=[4 * needed + 4])
    message = r"50% of an object store .* over 2 of queue.shards=2: .* at least"
    with pytest.raises(ConfigError, match=message):
        compute_shard_bytes(config, prepared, node_stores=[4 * needed - 4])


@pytest.mark.parametrize(
    ("settings", "on_gpu", "copies"),
    [
        (["weights.transport=auto"], False, {"generator": 1, "reference": 1, "trainer": 1}),
        (["weights.transport=auto"], True, {"generator": 0, "reference": 0, "trainer": 0}),
        (["scorer.offload=true"], True, {"generator": 0, "reference": 1, "trainer": 0}),
        (["scorer.offload=true", "reference.replicas=3"], True, {"reference": 1 / 3}),
        (["weights.transport=collective"], True, {"generator": 1, "reference": 0, "trainer": 0}),
        (
            ["weights.transport=collective", "reference.every=1", "scorer.offload=true"],
            True,
            {"generator": 1, "reference": 2, "trainer": 0},
        ),
        (["weights.transport=collective", "trainer.lora_rank=4"], True, {"generator": 0}),
    ],
)
def test_demanded_memory_includes_models_that_an_actor_keeps_on_the_host(
    run: ToyRun,
    tmp_path: Path,
    settings: list[str],
    on_gpu: bool,
    copies: dict[str, int],
):
    config = load_config(write_toy(tmp_path) / "recipe.yaml", ["algorithm.kl_coef=0.1", *settings])
    model_bytes = dict.fromkeys(config.dataflow.calls_by_role, 3 << 30) | {"reward": 0}
    prepared = replace(run[1], model_bytes=model_bytes)
    demands = list_resource_demands(config, prepared, on_gpu)
    memory_gib = {d.role: d.memory_gib for d in demands if d.role in copies}
    # On a CPU a trainer also has the state of its optimizer, here a few MB.
    expected = {role: PROCESS_GIB + 3 * count for role, count in copies.items()}
    assert memory_gib == pytest.approx(expected, abs=0.01)


def test_demanded_memory_of_a_critic_is_that_of_its_own_model(tmp_path: Path):
    recipe = write_toy(tmp_path) / "recipe.yaml"
    overrides = ["algorithm.name=ppo", f"critic.path={tmp_path}/critic", "critic.replicas=1"]
    shutil.copytree(tmp_path / "model", tmp_path / "critic")
    shape = AutoConfig.from_pretrained(tmp_path / "critic", intermediate_size=64)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "critic")
    config = load_config(recipe, overrides)
    demands = list_resource_demands(config, prepare_run(config), on_gpu=False)
    memory_gib = {demand.role: demand.memory_gib for demand in demands}
    assert memory_gib["value"] < memory_gib["critic"] < memory_gib["trainer"]


SMALLER = {"intermediate_size": 64, "vocab_size": 40}
"""Changes to the toy's model; a vocabulary may be padded further."""


@pytest.fixture
def write_teacher(tmp_path: Path) -> Callable[..., RunConfig]:
    """Return a function that writes a reference with a changed model; returns the run's config."""

    def write(*overrides: str, **changes: int) -> RunConfig:
        recipe, teacher = write_toy(tmp_path) / "recipe.yaml", tmp_path / "teacher"
        shutil.copytree(tmp_path / "model", teacher)
        shape = AutoConfig.from_pretrained(teacher, **changes)
        AutoModelForCausalLM.from_config(shape).save_pretrained(teacher)
        return load_config(
            recipe, ["algorithm.name=distill", f"reference.path={teacher}", *overrides]
        )

    return write


def test_memory_of_a_reference_is_that_of_its_own_model(write_teacher: Callable[..., RunConfig]):
    config = write_teacher("trainer.dtype=float32", **SMALLER)
    prepared = prepare_run(config)
    weights = {  # float32
        role: sum(p.numel() for p in load_skeleton(path).parameters()) * 4
        for role, path in (("policy", config.model.path), ("reference", config.reference.path))
    }
    assert weights["reference"] < weights["policy"]
    headers = 10_000
    assert prepared.model_bytes["reference"] == pytest.approx(weights["reference"], abs=headers)
    demands = list_resource_demands(config, prepared, on_gpu=False)
    (demand,) = (demand for demand in demands if demand.role == "reference")
    demanded = (demand.memory_gib - PROCESS_GIB) * (1 << 30)
    assert demanded == pytest.approx(weights["reference"], abs=headers)
    (ranks,) = (call for call in config.dataflow.calls if call.role == "reference")
    layout = config.get_ranks_config(ranks)
    memory = estimate_role_memory(config, "reference", on_gpu=True, trainer=layout)
    assert memory.weights == weights["reference"]


def test_a_reference_that_cannot_score_the_policys_tokens_is_refused(
    write_teacher: Callable[..., RunConfig],
):
    config = write_teacher(max_position_embeddings=8, vocab_size=31)
    folder = Path(config.reference.path)
    with pytest.raises(ConfigError, match=r"reference\.path=.*: takes 8 tokens, fewer than"):
        prepare_run(config)
    AutoConfig.from_pretrained(config.model.path, vocab_size=31).save_pretrained(folder)
    with pytest.raises(ConfigError, match="has 31 token ids, and the policy samples from 32"):
        prepare_run(config)
    tokenizer = (folder / "tokenizer.json").read_text()
    swapped = tokenizer.replace('"7": 10', '"7": 11').replace('"8": 11', '"8": 10')
    (folder / "tokenizer.json").write_text(swapped)
    rule = r"must have the tokenizer of model\.path=.*: the id of '7' is 11, not 10$"
    with pytest.raises(ConfigError, match=rule):
        prepare_run(config)
    config.reference.path = ""
    with pytest.raises(ConfigError, match=r"reference\.path=: must be set: distill learns"):
        prepare_run(config)


def test_a_reference_whose_texts_end_otherwise_is_noted(write_teacher: Callable[..., RunConfig]):
    config = write_teacher()
    settings_file = Path(config.reference.path) / "tokenizer_config.json"
    settings = json.loads(settings_file.read_text()) | {"eos_token": "7"}
    settings_file.write_text(json.dumps(settings))
    (note,) = (note for note in prepare_run(config).notes if "reference.path" in note)
    assert "its texts end with '7', and the policy's with '" in note


def test_ranks_that_share_a_model_demand_memory_for_a_part_each(tmp_path: Path):
    recipe = write_toy(tmp_path) / "recipe.yaml"

    def demand(*settings: str) -> tuple[int, float]:
        config = load_config(recipe, ["algorithm.kl_coef=0.1", *settings])
        demands = list_resource_demands(config, prepare_run(config), on_gpu=False)
        (found,) = (demand for demand in demands if demand.role == "reference")
        return found.count, found.memory_gib - PROCESS_GIB

    count, whole_gib = demand()
    assert (count, demand("reference.world_size=2")) == (1, (2, pytest.approx(whole_gib / 2)))
    assert demand("reference={world_size: 2, replicas: 2}")[0] == 4


@pytest.mark.parametrize("mode", ["auto", "shadow"])
def test_a_generator_on_a_shared_gpu_needs_a_kv_cache_limit(run: ToyRun, mode: str):
    config = replace(run[0], placement=replace(run[0].placement, mode=mode))
    message = (
        r"generator\.kv_cache_mb=null: must be set where a generator shares a GPU, here with .*ref"
    )
    with pytest.raises(ConfigError, match=message):
        choose(config, run[1], 8, 1)
    bounded = replace(config, generator=replace(config.generator, kv_cache_mb=500))
    assert choose(bounded, run[1], 8, 1 if mode == "auto" else 2) in ("colocated", mode)
    # With a dedicated GPU, or on a CPU, no limit is needed.
    choose(run[0], run[1], 8, 3)
    choose(config, run[1], 8)


def test_a_tensor_parallel_generator_demands_a_device_per_process(run: ToyRun):
    config = replace(run[0], generator=replace(run[0].generator, tensor_parallel=2))
    for on_gpu, key in ((False, "requested_cpus"), (True, "requested_gpus")):
        modes = list_placement_options(config, run[1], on_gpu)
        reason = "in a colocated run it must divide trainer.world_size=1"
        assert modes["colocated"] == f"generator.tensor_parallel=2: {reason}"
        demands = modes["disaggregated"]
        assert not isinstance(demands, str), demands
        values_by_role = {demand.role: getattr(demand, key) for demand in demands}
        assert (values_by_role["generator"], values_by_role["trainer"]) == (2, 1)


def test_ranks_that_cannot_split_a_scoring_model_are_refused(run: ToyRun):
    # The toy has two heads.
    layouts = {
        "tensor_parallel": "reference.tensor_parallel=4: ",
        "sequence_parallel": "reference.sequence_parallel=4: ",
    }
    for key, message in layouts.items():
        layout = replace(ReferenceConfig(world_size=4), **dict[str, Any]({key: 4}))
        with pytest.raises(ConfigError, match=f"^{message}"):
            prepare_run(replace(run[0], reference=layout))


def test_experts_of_a_dense_model_cannot_be_replayed(run: ToyRun):
    algorithm = replace(run[0].algorithm, router_replay="r3")
    with pytest.raises(ConfigError, match=r"^algorithm.router_replay=r3: .* is no mixture of exp"):
        prepare_run(replace(run[0], algorithm=algorithm))


def test_a_generator_inside_trainer_ranks_demands_no_devices(run: ToyRun):
    config = replace(
        run[0],
        generator=replace(run[0].generator, tensor_parallel=2),
        trainer=replace(run[0].trainer, world_size=2),
    )
    for slots, mode in ((6, "disaggregated"), (2, "colocated")):
        assert choose(config, run[1], slots) == mode


def test_memory_budget_applies_only_if_auto_colocates(run: ToyRun):
    placement = replace(run[0].placement, mode="auto", memory_mb=500)
    config = replace(run[0], placement=placement)
    for cpus, mode, budget_mb in ((8, "disaggregated", None), (1, "colocated", 500)):
        assert choose(config, run[1], cpus) == mode
        assert with_placement_mode(config, mode).placement.memory_mb == budget_mb


def test_auto_excludes_colocation_beyond_the_memory_budget(run: ToyRun):
    config = replace(run[0], placement=replace(run[0].placement, mode="auto", memory_mb=1))
    assert choose(config, run[1], 8) == "disaggregated"
    message = (
        r"^the run needs 4 CPU slots = .*; the cluster has 1; colocated is impossible:"
        r" placement\.memory_mb=1: to train, a worker holds"
    )
    with pytest.raises(ConfigError, match=message):
        choose(config, run[1], 1)


def test_a_policy_that_is_never_trained_gets_a_note(run: ToyRun, tmp_path):
    overrides = ["algorithm.name=ppo", "critic.warmup_alone=3"]
    config = load_config(write_toy(tmp_path) / "recipe.yaml", overrides)
    assert "critic.warmup_alone=3: the policy is frozen in all" in prepare_run(config).notes[0]
    assert not any("warmup_alone" in note for note in run[1].notes)


ENVIRONMENTS = """
from pathlib import Path

from streamrl.environments import Turn

class Turns:
    def __init__(self, word="+"): self.word = word
    def reset(self, row): return row.extra_info.get("first", self.word)
    def step(self, reply): return Turn(done=True)

class Tools:
    def reset(self, row):
        if "fails" in row.extra_info: raise OSError("no server")
        if "fails_once" in row.extra_info:
            try: Path(row.extra_info["fails_once"]).touch(exist_ok=False)
            except FileExistsError: return
            raise OSError("server restarts")
    def add(self, a: int) -> int:
        \"\"\"Add.\"\"\"
"""


@pytest.fixture(scope="module")
def prepare_named(tmp_path_factory: pytest.TempPathFactory) -> PrepareNamed:
    """Prepare a run with environments and rows; return its notes."""
    toy = write_toy(tmp_path_factory.mktemp("toy"))
    (toy / "named.py").write_text(ENVIRONMENTS)

    def prepare(environment: str, *rows: dict[str, object]) -> tuple[str, ...]:
        full = [{"prompt": "1+1", "ground_truth": "2", **row} for row in rows]
        path = toy / "named.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in full))
        overrides = [f"data={{train: {path}}}", environment.replace("FILE", f"{toy}/named.py")]
        return prepare_run(load_config(toy / "recipe.yaml", overrides)).notes

    return prepare


TURNS, TOOLS = {"environment": "turns"}, {"environment": "tools"}
NAMED = (
    "environment={max_tokens: 48, call_format: hermes,"
    " named: {turns: {path: FILE:Turns, options: {word: '-'}}, tools: {path: FILE:Tools}}}"
)


def test_preflight_resets_a_row_of_each_environment(prepare_named: PrepareNamed):
    notes = prepare_named(NAMED, TURNS, TURNS, TOOLS)
    assert any("Tools in" in note and "has no score" in note for note in notes)
    assert not any("names it" in note for note in notes)
    notes = prepare_named(NAMED, TURNS)
    assert "environment.named.tools: no row that was checked names it" in notes
    with pytest.raises(ConfigError, match=r"^environment.named.tools.path=.*OSError: no server"):
        prepare_named(NAMED, TURNS, {**TOOLS, "fails": True})
    with pytest.raises(ConfigError, match=r"max_tokens=48: leaves no room for a turn: .*line 2"):
        prepare_named(NAMED, TOOLS, {**TURNS, "first": "1" * 48})
    with pytest.raises(ConfigError, match="line 2: column environment=: must be one of turns, to"):
        prepare_named(NAMED, TURNS, {})


def test_preflight_resets_an_episode_as_often_as_a_run_does(
    prepare_named: PrepareNamed, tmp_path: Path
):
    environment = "environment={path: FILE:Tools, max_tokens: 48, call_format: hermes}"
    row = {"fails_once": str(tmp_path / "failed")}
    assert any("has no score" in note for note in prepare_named(environment, row))
    assert (tmp_path / "failed").exists()


SMALL_GPU = 2 << 30
"""Memory of a GPU, bytes: CUDA's context and 1.5 GiB."""


def find_shortage(run: ToyRun, model_bytes: dict[str, int], **sections: Mapping[str, Any]) -> str:
    config = run[0]
    for section, changes in sections.items():
        config = replace(config, **{section: replace(getattr(config, section), **changes)})
    return find_gpu_shortage(config, model_bytes, SMALL_GPU)


def test_a_trainer_that_does_not_fit_its_gpu_is_refused_with_what_helps(
    run: ToyRun, monkeypatch: pytest.MonkeyPatch
):
    roles = {"policy": 0}
    assert not find_shortage(run, roles)
    sizes = measure_training_sizes(load_skeleton(run[0].model.path), TrainerConfig(), on_gpu=True)
    # 20 bytes a parameter of 0.1 G: weights, two gradients, and the optimizer with master weights.
    large = replace(sizes, params=10**8, base_params=10**8, trained=10**8, largest_param=10**6)
    monkeypatch.setattr(memory_model, "measure_training_sizes", lambda *_, **__: large)
    shortage = find_shortage(run, roles, trainer={"dtype": "bfloat16"})
    assert shortage.startswith("the models of a GPU need about 2.7 GiB, and it has 2.0: policy 2.7")
    assert shortage.endswith("; it fits by trainer.offload_optimizer=true")
    assert not find_shortage(run, roles, trainer={"dtype": "bfloat16", "offload_optimizer": True})


def test_a_scorer_that_does_not_fit_its_gpu_is_refused_unless_it_is_offloaded(run: ToyRun):
    # Of a reward model's files half counts: they may be float32.
    assert not find_shortage(run, {"reward": 3 << 30})
    shortage = find_shortage(run, {"reward": 4 << 30})
    rule = "scorer.offload=true or a larger world_size of the reward model"
    assert shortage.endswith(f"it has 2.0: reward 2.5; {rule}")
    assert not find_shortage(run, {"reward": 4 << 30}, scorer={"offload": True})


def test_processes_that_share_a_gpu_are_added_up(run: ToyRun):
    """Each has its own CUDA context, and the generator its KV cache."""
    cache: dict[str, Any] = {
        "generator": {"kv_cache_mb": 1536},
        "placement": {"mode": "disaggregated"},
    }
    roles = {"generator": 1, "reference": 1, "policy": 0}
    assert not find_shortage(run, roles, **cache)
    shortage = find_shortage(run, roles, **(cache | {"placement": {"mode": "colocated"}}))
    assert shortage.startswith("the models of a GPU need about 2.5 GiB")
    assert "reference 0.5" in shortage and "policy 2.0" in shortage


def test_a_mode_whose_models_do_not_fit_is_impossible(run: ToyRun, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preflight, "find_smallest_gpu_bytes", lambda: 1 << 20)
    config = replace(run[0], generator=replace(run[0].generator, kv_cache_mb=64))
    options = list_placement_options(config, run[1], on_gpu=True)
    assert len(options) == 2 and all(
        "the models of a GPU need about" in str(option) for option in options.values()
    )
    assert not isinstance(list_placement_options(run[0], run[1], False)["disaggregated"], str)


def test_an_offloaded_optimizer_demands_host_memory(run: ToyRun):
    config, prepared = run
    config = replace(config, trainer=replace(config.trainer, offload_optimizer=True))

    def demand_gib(*, on_gpu: bool) -> float:
        demands = list_resource_demands(config, prepared, on_gpu)
        return next(demand.memory_gib for demand in demands if demand.role == "trainer")

    state = estimate_role_memory(config, "policy", on_gpu=False)
    assert demand_gib(on_gpu=True) == pytest.approx(PROCESS_GIB + state.optimizer / 2**30)
    assert demand_gib(on_gpu=False) > demand_gib(on_gpu=True)
