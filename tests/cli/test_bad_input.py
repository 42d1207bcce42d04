"""Bad input is refused with one line, exit code 2, and no file written."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from streamrl.buffer import Ledger
from streamrl.config.preflight import prepare_run
from streamrl.config.run_config import dump_config, load_config
from streamrl.dataflow import POLICY
from streamrl.engines.trainer_config import REFERENCE_FILE
from streamrl.run_dir.checkpoint import CheckpointWriter, get_role_dirs
from streamrl.run_dir.run_config_file import CONFIG_FILE
from streamrl.run_dir.run_lock import LOCK_FILE, acquire_run_lock
from tests.descendants import descendants

Refuse = Callable[..., str]
Saved = Callable[..., tuple[Path, Path]]


@pytest.fixture
def refused(toy: Path, tmp_path: Path, refuse: Refuse) -> Refuse:
    """Run `streamrl train` with overrides; return the error."""

    def run(*overrides: str) -> str:
        runs, before = tmp_path / "runs", descendants()
        error = refuse("train", toy / "recipe.yaml", f"run.dir={runs}", *overrides)
        assert not runs.exists(), "a file was written"
        assert not descendants() - before, "a process was left"
        assert error.startswith("streamrl: ")
        return error

    return run


@pytest.fixture
def saved(toy: Path, tmp_path: Path) -> Saved:
    """Write a run directory with a checkpoint of any state; return both."""

    def make(
        *overrides: str, state: Mapping[str, object] = {}, prompts: object = {}
    ) -> tuple[Path, Path]:
        run_dir = tmp_path / "run"
        run_dir.mkdir()
        (run_dir / "config.yaml").write_text(
            dump_config(load_config(toy / "recipe.yaml", overrides))
        )
        (run_dir / "metrics.jsonl").write_text('{"step": 9}\n')
        writer = CheckpointWriter(run_dir, 1)
        for folder in (*get_role_dirs(writer.partial_dir, POLICY), writer.queue_dir):
            folder.mkdir()
            (folder / "file").write_text("state")
        full: Any = {"version": 1, "ledger": Ledger().state_dict(), "cuts": {}, "dials": {}}
        return run_dir, writer.commit(full | {"prompts": prompts, **state}, keep=1)

    return make


@pytest.fixture(scope="module")
def prompts(toy: Path) -> object:
    """The state of the recipe's prompt stream before its first prompt."""
    return prepare_run(load_config(toy / "recipe.yaml")).prompts.state_dict()


def read_files(folder: Path) -> dict[Path, bytes]:
    return {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != LOCK_FILE
    }


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["pipeline.micro_batch_tokens=5"], ["pipeline.micro_batch_tokens=5", "one rollout"]),
        (["filter={kind: function, path: no.py, function: f}"], ["filter.path", "no such file"]),
        (["model.path=nowhere"], ["model.path=", "nowhere: no such directory"]),
        ([f"algorithm.path={'x' * 300}"], ["xxx: File name too long"]),
        (["data.train=nowhere.jsonl"], ["nowhere.jsonl"]),
        (["generator.max_new_tokens=500"], ["generator.max_new_tokens=500", "128"]),
        (["model.max_length=4096"], ["model.max_length=4096", "at most 128"]),
        (
            ["trainer.backend=torch", "trainer.world_size=4", "trainer.tensor_parallel=4"],
            ["trainer.tensor_parallel=4: must divide the model's num_attention_heads=2"],
        ),
        (["placement.address=127.0.0.1:1"], ["placement.address=127.0.0.1:1", "refused"]),
        (
            ["placement.cpus=2", "placement.mode=disaggregated"],
            ["needs 3 CPU slots", "the cluster has 2"],
        ),
        (
            [*("placement.mode=colocated", "trainer.world_size=3"), "generator.tensor_parallel=3"],
            ["generator.tensor_parallel=3: must divide the model's num_attention_heads=2"],
        ),
        (
            ["placement.memory_mb=20", "placement.mode=colocated"],
            ["placement.memory_mb=20: to", "MB = ", " weights", " gradients", " KV cache"],
        ),
        (["generator.replicas=100000"], ["GiB of memory", "100000 generator (generator.replicas)"]),
    ],
)
def test_an_invalid_config_is_refused_before_any_file_is_written(
    refused: Refuse, overrides: list[str], parts: list[str]
):
    line = refused(*overrides)
    for part in parts:
        assert part in line


def test_a_row_that_the_reward_cannot_judge_is_named(refused: Refuse, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "ground_truth": "2"}\n{"prompt": "2+2="}\n')
    line = refused(f"data.train={path}")
    assert "ground_truth" in line and "line 2" in line


def test_a_config_that_transformers_refuses_is_named(refused: Refuse, toy: Path, tmp_path: Path):
    broken = tmp_path / "broken"
    shutil.copytree(toy / "model", broken)
    settings = json.loads((broken / "config.json").read_text())
    # A state space model has no maximum length; transformers type-checks Qwen2's.
    for invalid in (settings | {"max_position_embeddings": "many"}, {"model_type": "mamba"}):
        (broken / "config.json").write_text(json.dumps(invalid))
        assert "max_position_embeddings" in refused(f"model.path={broken}")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ([], "exists: --resume it, choose another"),
        (["run.overwrite=true"], "taken: not a run directory: holds no config.yaml; delete it"),
    ],
)
def test_an_existing_directory_is_left_unchanged(
    toy: Path, tmp_path: Path, refuse: Refuse, overrides: list[str], part: str
):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "precious").write_text("data")
    words = ["train", toy / "recipe.yaml", f"run.dir={tmp_path}", "run.name=taken"]
    assert part in refuse(*words, *overrides)
    assert (tmp_path / "taken" / "precious").read_text() == "data"


def test_overwrite_refuses_to_remove_inputs_of_the_new_run(
    toy: Path, tmp_path: Path, refuse: Refuse
):
    model = tmp_path / "old" / "checkpoints" / "step_000003" / "model"
    shutil.copytree(toy / "model", model)
    (tmp_path / "old" / "config.yaml").write_text("")
    words = ["train", toy / "recipe.yaml", f"run.dir={tmp_path}", "run.name=old"]
    required_overrides = {
        "model.path": [],
        "critic.path": ["algorithm.name=ppo"],
        "data.pretrain": ["algorithm.ptx_coef=0.1"],
    }
    for key, overrides_of_key in required_overrides.items():
        error = refuse(*words, "run.overwrite=true", f"{key}={model}", *overrides_of_key)
        assert f"{key}={model}: lies inside the run that" in error
    assert (model / "model.safetensors").is_file()


PPO = ["algorithm.name=ppo", "algorithm.kl_coef=0.1", "algorithm.kl_target=0.1"]
SAFE_RLHF = ["algorithm.name=safe_rlhf", "costs=[{kind: exact}]"]


@pytest.mark.parametrize(
    ("stored", "override", "part"),
    [
        ([], "pipeline.groups_per_step=8", "a resumed run must keep 4"),
        ([], "pipeline.max_staleness=0", "the bound may only grow"),
        ([], "queue.journal.enabled=false", "a resumed run must keep true"),
        ([], "environment.path=a.py", "must keep environment={}, as groups in its queue"),
        ([], "run.seed=5", "cannot resume the data stream"),
        (PPO, "critic.trainer.lora_rank=4", "lora_rank=4: a resumed run must keep 0"),
        (PPO, "algorithm.kl_coef=0.5", "kl_coef=0.5: kl_coef adapts during training"),
        (SAFE_RLHF, "algorithm.params.lagrange=2", "lagrange adapts during training"),
    ],
)
def test_a_resume_with_incompatible_settings_is_refused_and_changes_no_file(
    saved: Saved, prompts: object, refuse: Refuse, stored: list[str], override: str, part: str
):
    run_dir, _ = saved(*stored, prompts=prompts)
    before = read_files(run_dir)
    assert part in refuse("train", "--resume", run_dir, override)
    assert read_files(run_dir) == before


@pytest.mark.parametrize(("old_every", "kept"), [(2, "above"), (0, "at")])
def test_a_resume_keeps_a_fixed_or_an_ema_reference(
    saved: Saved, refuse: Refuse, old_every: int, kept: str
):
    run_dir, path = saved("algorithm.kl_coef=0.1", f"reference.every={old_every}")
    if old_every:
        (path / "trainer" / REFERENCE_FILE).write_text("tensors")
    before = read_files(run_dir)
    error = refuse("train", "--resume", run_dir, f"reference.every={2 - old_every}")
    assert f"={2 - old_every}: a resumed run must keep it {kept} 0, as {path}" in error
    assert read_files(run_dir) == before


@pytest.mark.parametrize("command", ["resume", "checkpoint", "fork", "new", "overwrite"])
def test_a_live_run_directory_is_refused_and_left_unchanged(
    toy: Path, tmp_path: Path, saved: Saved, refuse: Refuse, command: str
):
    run_dir, path = saved(f"run.dir={tmp_path}", "run.name=run")
    lock = acquire_run_lock(run_dir)
    before = sorted(tmp_path.rglob("*"))
    new = [toy / "recipe.yaml", f"run.dir={tmp_path}", "run.name=run"]
    words = {
        "resume": ["--resume", run_dir],
        "checkpoint": ["--resume", path],
        "fork": ["--resume", path, "run.name=other"],
        "new": new,
        "overwrite": [*new, "run.overwrite=true"],
    }
    line = refuse("train", *words[command])
    assert f"{run_dir} is in use: its run is alive, since " in line
    assert f"pid {os.getpid()};" in line
    # Forking a live run is refused too.
    assert ("choose another run.name" in line) == (command in ("new", "overwrite"))
    assert sorted(tmp_path.rglob("*")) == before
    lock.release()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["run.dir={run}"], "must not contain each other"),
        (["run.name=taken"], "taken exists: --resume it"),
        (
            ["run.name=new", "algorithm.group_size=3"],
            "algorithm.group_size=3: a resumed run must keep",
        ),
    ],
)
def test_an_impossible_fork_is_refused(
    tmp_path: Path, saved: Saved, refuse: Refuse, words: list[str], part: str
):
    (tmp_path / "taken").mkdir()
    run_dir, path = saved()
    assert part in refuse("train", "--resume", path, *(w.format(run=run_dir) for w in words))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "taken"]


@pytest.mark.parametrize(
    ("state", "part"),
    [
        ({"version": "x"}, "at `$.version`"),
        ({"prompts": {}}, "state.json: KeyError"),
        ({"ledger": {"in_flight": 3}}, "state.json: "),
        ({}, "trainer/ is missing or empty"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_changes_no_file(
    saved: Saved, prompts: object, refuse: Refuse, state: dict[str, object], part: str
):
    run_dir, path = saved(prompts=prompts, state=state)
    if not state:
        (path / "trainer" / "file").unlink()
    before = read_files(run_dir)
    assert part in refuse("train", "--resume", run_dir, "run.steps=5")
    assert read_files(run_dir) == before


GRPO = "configs/grpo_arithmetic.yaml"
PLAN_ARGS = [GRPO, "--cluster", "8xH100"]
LONG = "x" * 400
NO_RUN = "not a run directory: no such directory"


@pytest.fixture(scope="module")
def empty_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / CONFIG_FILE).touch()
    return run_dir


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["train", "run.steps=3"], "name a config file first"),
        (["train", "nowhere.yaml"], "config nowhere.yaml: no such file"),
        (["train", "--resume", "nowhere"], NO_RUN),
        (["train", "--resume", "{tmp}"], "not a run directory: holds no config.yaml"),
        (["train", "{tmp}"], "not a run directory: holds no config.yaml"),
        (["evaluate", "nowhere", "--data", "x.jsonl"], "neither a model directory"),
        (["evaluate", "{run}", "--data", "x.jsonl"], "the run has no checkpoint yet"),
        (["scale", "{run}"], "name a role to scale"),
        (["scale", "nowhere", "--generators", "2"], NO_RUN),
        (
            ["scale", "{run}", "--generators", "0"],
            "--generators: 0: must be a whole number, at least 1",
        ),
        (["scale", "{run}", "--trainers", "2"], "--trainers"),
        (["dance"], "invalid choice"),
        (["data"], "the following arguments are required: action (see"),
        (["plan", *PLAN_ARGS, "--prompt-tokens", "x"], "--prompt-tokens: x: must be a number"),
        (["plan", *PLAN_ARGS, "--seed", "1.5"], "--seed: 1.5: must be a whole number, at least 0"),
        (["graph", "x.yaml"], "graph: no longer a command; use streamrl config --graph"),
        (["config", "--rewards", "tags"], "no such kind of reward; use kind regex with pattern: "),
        (
            ["config", "costs[].wight"],
            "costs[].wight: no such config key; the nearest key is costs[].w",
        ),
        (["config", "--json"], "unrecognized arguments: --json (see streamrl config --help)"),
        ([], "COMMAND"),
        # An empty word never means the working directory.
        (["plan", GRPO, "--cluster", ""], "--cluster: must not be empty"),
        (["plan", "", "--cluster", "8xH100"], "CONFIG: must not be empty"),
        (["plan", *PLAN_ARGS, "-o", ""], "-o/--output: must not be empty"),
        (["report", ""], "RUN: must not be empty"),
        (["train", "--resume", ""], "--resume: must not be empty"),
        (["evaluate", "model", "--data", ""], "--data: must not be empty"),
        (["data", "check", ""], "FILE: must not be empty"),
        (["score", "", "--completions", "rows"], "ROWS: must not be empty"),
        (["calibrate", LONG], NO_RUN),
        (["report", LONG], NO_RUN),
        (["report", "--ledger", LONG], NO_RUN),
        (["view", LONG], NO_RUN),
        (["episodes", LONG], NO_RUN),
        (["report", GRPO], f"{GRPO}: not a run directory: not a directory"),
        (["plan", *PLAN_ARGS, "--prompt-tokens", "9", "--model", LONG], "a known model name"),
        (["report"], "name a RUN to find its bottleneck, or --ledger RUN"),
        (["report", "{run}", "--uid", "0:1:0"], "--uid needs --ledger RUN"),
        (["config", "trainer.lrr"], "no such config key; the nearest key is trainer.lr"),
        (["config", "--rewards", "rgex"], "no such kind of reward; the nearest kind is regex"),
        (["config", "--algorithms", "gspi"], "no such algorithm; the nearest algorithm is gspo"),
        (["config", "critic.run.steps"], "critic.run.steps: no such config key"),
        (["config", "--rewards", "--path", "x.py"], "config --path: has no effect here"),
        (["config", "--algorithms", "--path", "no.py"], "algorithm.path=no.py: no such file"),
        (["config", "run", "trainer"], "config: one name at a time, not run trainer"),
        (["config", "--graph", ""], "config --graph: name a config file or a run directory"),
        (["config", "--graph", LONG], f"config {LONG}: File name too long"),
    ],
)
def test_a_bad_command_line_is_a_one_line_error(
    words: list[str], part: str, refuse: Refuse, tmp_path: Path, empty_run: Path
):
    assert part in refuse(*(word.format(tmp=tmp_path, run=empty_run) for word in words))
    assert list(tmp_path.iterdir()) == []
