"""`streamrl plan` and `streamrl simulate`: console output, written files."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.cli.main import main
from streamrl.config.run_config import RunConfig, load_config
from streamrl.placement.placements import Placement
from streamrl.planner.problem.problem import PlacementProblem
from streamrl.planner.problem.workload import Workload, make_fixed_lengths
from streamrl.planner.simulator.quick_run import choose_num_steps
from streamrl.planner.to_placement import build_run_placement, make_run_refusal
from tests.planner.notations import parse_mesh

Refuse = Callable[..., str]
CONFIGS = Path(__file__).parent.parent.parent / "configs"
GRPO = str(CONFIGS / "grpo_arithmetic.yaml")
GUESS = str(CONFIGS / "grpo_guess.yaml")
SIZES = ["--model", "qwen2.5-1.5b", "--prompt-tokens", "200", "--lengths", "lognormal:300:0.7"]
STEP = ["generator.max_new_tokens=2048", "pipeline.groups_per_step=16"]
SMALL = [GRPO, *STEP, "--cluster", "8xH100", *SIZES, "--proposals", "50"]
FEW = ["--cluster", "2xH100", "--proposals", "0", "pipeline.groups_per_step=8"]
TINY = [GRPO, *STEP, "--cluster", "4xH100", *SIZES, "--proposals", "20"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(list(words))
    return code, capsys.readouterr().out


def test_a_plan_lists_every_gaining_bound_and_details_the_best(capsys: pytest.CaptureFixture[str]):
    code, out = run(capsys, "plan", *SMALL, "--max-staleness", "0,1")
    assert code == 0
    assert "grpo on 8xH100 (8 devices): policy qwen2.5-1.5b" in out
    lines = out.splitlines()
    assert lines[3].split() == [
        *("max_staleness:", "placement", "step,", "s", "idle", "GB", "on", "a", "device"),
        *("simulated,", "s", "tokens/s", "staleness"),
    ]
    assert lines[4].startswith("0: ")
    best = lines.index(next(line for line in lines if line.startswith("best: ")))
    assert [line.split()[0] for line in lines[best + 1 :]] == ["generate", "train", "run.steps=80:"]


def test_a_bound_without_a_row_is_reported_with_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def make_refusal(config: RunConfig, problem: PlacementProblem) -> Callable[[Placement], str]:
        refuse = make_run_refusal(config, problem)
        return lambda placement: "refused" if placement.max_staleness else refuse(placement)

    monkeypatch.setattr("streamrl.cli.plan.make_run_refusal", make_refusal)
    words = ["plan", *TINY, "--max-staleness", "0,2"]
    code, out = run(capsys, *words, "--json")
    assert code == 0
    plan = json.loads(out)
    assert [point["max_staleness"] for point in plan["front"]] == [0]
    (absent,) = plan["absent"]
    assert absent["max_staleness"] == 2 and absent["why"].startswith("simulated, it has")
    lines = run(capsys, *words)[1].splitlines()
    assert lines[-2:] == ["", f"no row for 2: {absent['why']}"]


@pytest.mark.slow
def test_the_default_plan_uses_the_configs_bound_and_compares_other_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, config_bound = tmp_path / "plan.yaml", 3
    words = [*TINY, *FEW, f"pipeline.max_staleness={config_bound}", "-o", str(out)]
    plan = json.loads(run(capsys, "plan", *words, "--json")[1])
    assert (
        plan["best"]["max_staleness"] == plan["best"]["placement"]["max_staleness"] == config_bound
    )
    assert load_config(out).pipeline.max_staleness == config_bound
    lines = run(capsys, "plan", *words)[1].splitlines()
    (best,) = (line for line in lines if line.startswith("best: "))
    assert best.endswith("(pipeline.max_staleness=3, the config's own)")
    assert [point["max_staleness"] for point in plan["front"]] == [0, 1, 2, 3, 4]
    speeds = [point["simulated"]["tokens_per_s"] for point in plan["front"]]
    assert speeds == sorted(speeds)


def test_the_plan_is_written_as_a_config_with_its_placement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = tmp_path / "plan.yaml"
    words = ["-o", str(config), "--json", "--max-staleness", "0,2"]
    code, out = run(capsys, "plan", *TINY, *words)
    assert code == 0
    planned = json.loads(out)["best"]
    reloaded = build_run_placement(load_config(config), {"policy"})
    assert {s: str(c.grid) for s, c in reloaded.assignments.items()} == {
        s: c["grid"] for s, c in planned["placement"]["calls"].items()
    }
    assert reloaded.max_staleness == planned["placement"]["max_staleness"]
    # The simulator simulates the written config's placement exactly as the plan's.
    workload = Workload(16, 8, 200, make_fixed_lengths(300))
    steps = str(choose_num_steps(workload, reloaded.max_staleness))
    written = [str(config), "--cluster", "4xH100", *SIZES, "--steps", steps, "--json"]
    code, out = run(capsys, "simulate", *written)
    assert code == 0
    assert json.loads(out)["step_s"] == pytest.approx(planned["simulated"]["step_s"], rel=0.02)


def test_a_plan_ignores_the_runs_own_depth(capsys: pytest.CaptureFixture[str]):
    words = ["plan", *TINY, *FEW, "--max-staleness", "1", "--json", "pipeline.max_staleness=2"]
    plain, deep = (run(capsys, *words, f"pipeline.depth={depth}") for depth in ("null", "2"))
    assert plain == deep


def test_unused_devices_and_run_cost_are_reported(capsys: pytest.CaptureFixture[str]):
    few = ["pipeline.groups_per_step=1", "algorithm.group_size=2", "run.steps=3600"]
    few += ["--proposals", "0", "--max-staleness", "0"]
    code, out = run(capsys, "plan", *TINY, "--cluster", "8xH100", *few, "--json")
    assert code == 0
    plan = json.loads(out)
    used = {
        device
        for call in plan["best"]["placement"]["calls"].values()
        for device in parse_mesh(call["devices"]).devices
    }
    assert plan["unused"] == 8 - len(used) > 0
    hours = plan["best"]["simulated"]["step_s"]
    assert plan["best"]["run_hours"] == pytest.approx(hours)
    assert plan["best"]["run_device_hours"] == pytest.approx(8 * hours)
    text = run(capsys, "plan", *TINY, "--cluster", "8xH100", *few)[1]
    assert f"{plan['unused']} of 8 devices are unused\n" in text
    assert f"run.steps=3600: {hours:.3g} h, {8 * hours:.3g} GPU-hours\n" in text


@pytest.mark.parametrize(
    ("words", "placed"),
    [([], "2, by the ranks of critic"), (["critic.replicas=1"], "2")],
)
def test_a_placement_names_the_ranks_that_compute_values(
    words: list[str], placed: str, capsys: pytest.CaptureFixture[str]
):
    sizes = ["--cluster", "8xH100", *SIZES[:4], "--steps", "1", "pipeline.groups_per_step=2"]
    code, out = run(capsys, "simulate", str(CONFIGS / "ppo_arithmetic.yaml"), *sizes, *words)
    assert code == 0
    assert f"; value 1-1-1 on {placed}; train 1-1-1 on 3, ZeRO 1; train_critic " in out


def test_a_plan_turns_on_what_saves_the_memory_that_is_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["plan", GRPO, "--cluster", "1xH100", "--model", "qwen2.5-1.5b", "--proposals", "0"]
    words += ["--prompt-tokens", "200", "generator.max_new_tokens=2000", "--max-staleness", "0"]
    words += ["pipeline.micro_batch_tokens=16384", "pipeline.groups_per_step=8", "--json"]
    code, out = run(capsys, *words, "-o", str(tmp_path / "plan.yaml"))
    assert code == 0
    settings = json.loads(out)["settings"]
    saved = [
        settings.get(f"trainer.{key}") for key in ("gradient_checkpointing", "offload_optimizer")
    ]
    assert any(saved)
    trainer = load_config(tmp_path / "plan.yaml").trainer
    assert [trainer.gradient_checkpointing or None, trainer.offload_optimizer or None] == saved
    # The torch backend cannot offload the optimizer.
    code, out = run(capsys, *words, "trainer.backend=torch")
    assert code == 0
    train = json.loads(out)["best"]["placement"]["calls"]["train"]
    assert train["checkpointing"] and not train["offloaded"]


def test_a_reward_model_too_large_for_a_gpu_is_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = tmp_path / "plan.yaml"
    words = [GRPO, "--cluster", "2xH100", "--model", "qwen2.5-0.5b", "--model", "reward=llama-34b"]
    words += ["--prompt-tokens", "20", "--proposals", "0", "--max-staleness", "0"]
    words += ["rewards=[{kind: exact},{kind: model, path: judge}]"]
    code, out = run(capsys, "plan", *words, "pipeline.groups_per_step=2", "-o", str(plan), "--json")
    assert code == 0
    settings = json.loads(out)["settings"]
    assert settings["rewards[1].options.world_size"] == 2
    planned = json.loads(out)["best"]["placement"]["calls"]["reward"]
    reward = build_run_placement(load_config(plan), {"policy", "reward"}).assignments["reward"]
    assert (str(reward.mesh), str(reward.grid)) == (planned["devices"], planned["grid"])
    assert not planned["offloaded"]
    # The printed setting is one that a command takes.
    words.append(f"rewards[1].options.world_size={settings['rewards[1].options.world_size']}")
    assert load_config(Path(GRPO), words[-2:]).find_split_reward("reward") is not None


@pytest.mark.parametrize(
    ("cluster", "setting", "suggested"),
    [
        ("2xH100", "generator.kv_cache_mb=70000", "generator.kv_cache_mb=null"),
        pytest.param(
            *("2xH100+14GB", "algorithm.kl_coef=0.1 scorer.offload=true", "scorer.offload=false"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_suggested_fixes_let_the_run_fit(
    cluster: str, setting: str, suggested: str, capsys: pytest.CaptureFixture[str]
):
    words = ["plan", GRPO, "--cluster", cluster, "--model", "qwen2.5-1.5b", "--proposals", "0"]
    words += ["--prompt-tokens", "200", "generator.max_new_tokens=2000"]
    words += [*setting.split(), "--max-staleness", "0", "pipeline.groups_per_step=8"]
    code, out = run(capsys, *words)
    assert code == 1
    assert "\nany one of these would let it fit:\n" in out
    code, out = run(capsys, *words, "--json")
    plan = json.loads(out)
    assert code == 1 and plan["best"] is None
    assert suggested in plan["remedies"]
    for remedy in plan["remedies"]:
        more = remedy.split() if remedy.startswith("--cluster") else remedy.split(", ")
        assert run(capsys, *words, *more)[0] == 0, remedy


def test_a_shortage_of_main_memory_names_the_cluster_that_has_enough(refuse: Refuse):
    words = ["simulate", GRPO, "--model", "qwen2.5-0.5b", "--prompt-tokens", "20", "--steps", "2"]
    error = refuse(*words, "--cluster", "4xH100+4GB")
    assert "node 0: this placement needs " in error
    assert " GB of main memory; it has 4.0, " in error
    (sufficient,) = re.findall(r"; --cluster (4xH100\+\d+GB) has enough for it$", error)
    assert main([*words, "--cluster", sufficient]) == 0


def test_a_run_that_fits_nowhere_is_reported_with_the_arithmetic(
    capsys: pytest.CaptureFixture[str],
):
    words = [GRPO, *STEP, "--cluster", "1xV100", "--model", "llama-70b", "--prompt-tokens", "9"]
    code, out = run(capsys, "plan", *words, "--proposals", "0")
    assert code == 1
    assert "nothing fits" in out
    assert "GB" in out
    assert out.endswith("\nno row for 0, 1, 2, 4: no evaluated placement fits\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cluster", "8xH100", "--model", "critic=llama-7b"], "--model critic=llama-7b"),
        (
            ["--cluster", "8xH100", "--lengths", "lognormal:3"],
            "--lengths lognormal:3: write fixed:N or lognormal:MEDIAN:SIGMA",
        ),
        (["--cluster", "8xH100", "--lengths", "no/file"], "--lengths no/file: no such file"),
        (
            ["--cluster", "8xH100", "--lengths", "fixed:x"],
            "lengths are whole numbers of tokens, from 1",
        ),
        (
            ["--cluster", "8xH100", "--lengths", "fixed:999999"],
            "--lengths fixed:999999: 999999 tokens: must be at most generator.max_new_tokens=12",
        ),
        (
            ["--cluster", "8xH100", "--lengths", "fixed:5000", "generator.max_new_tokens=9999"],
            "pipeline.micro_batch_tokens=4096: must hold one rollout, 10019 tokens",
        ),
        (["--cluster", "8xH100", "--prompt-tokens", "1e12"], "tokens = prompt 1000000000000 +"),
        (["--cluster", "8xH100", "--constants", "no/file"], "constants no/file: no such file"),
        (["--cluster", "8xH100", "--prompt-tokens", "nan"], "--prompt-tokens nan: must be above"),
        (["--cluster", "8xH100", "--seed", "-1"], "--seed: -1: must be a whole number, at least 0"),
        (["--cluster", "8xH100", "trainer.world=2"], "trainer.world"),
        ([], "the following arguments are required: --cluster"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_bad_input_is_a_one_line_error(
    command: str, words: list[str], message: str, refuse: Refuse
):
    default_options = {"--model": "qwen2.5-1.5b", "--prompt-tokens": "20"}
    more = [
        word for key, value in default_options.items() if key not in words for word in (key, value)
    ]
    assert message in refuse(command, GRPO, *words, *more)


def test_a_plan_says_that_the_time_of_environments_is_left_out(
    capsys: pytest.CaptureFixture[str],
):
    words = ["simulate", GUESS, "--cluster", "2xH100", "--model", "qwen2.5-0.5b", "--steps", "4"]
    code, out = run(capsys, *words, "--prompt-tokens", "20", "pipeline.groups_per_step=16")
    assert code == 0
    assert "an episode counts as one completion, without the time of its environment" in out


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("plan", ["--max-staleness", "one"], "--max-staleness: one: must be numbers"),
        ("plan", ["--max-staleness", "9" * 5000], "must be numbers from 0 to 64"),
        ("plan", ["--proposals", "-1"], "--proposals: -1: must be"),
        ("plan", ["--filtered", "0.5"], "filter.kind=none"),
        ("plan", ["-o", "plan.json"], "-o plan.json: must end in .yaml"),
        ("plan", ["--model", "llama-7b"], "--model llama-7b: --model qwen2.5-1.5b names the same"),
        ("simulate", ["--steps", "10000000"], "must be a whole number from 1 to 10000"),
        ("simulate", ["generator.replicas=9"], "generator: needs devices 0-8; the cluster has 8"),
        (
            "simulate",
            ["algorithm.kl_coef=0.1", "reference={world_size: 4, sequence_parallel: 4}"],
            "reference.sequence_parallel=4: must divide the model's num_key_value_heads=2",
        ),
        (
            "simulate",
            ["trainer.world_size=3", "trainer.tensor_parallel=3", "trainer.backend=torch"],
            "trainer.tensor_parallel=3: must divide the model's num_key_value_heads=2",
        ),
        (
            "simulate",
            [
                *("--model", "reward=qwen3-8b"),
                "rewards=[{kind: model, path: judge, world_size: 5, tensor_parallel: 5}]",
            ],
            "rewards[0].tensor_parallel=5: must divide the model's num_attention_heads=32",
        ),
        ("simulate", ["pipeline.max_staleness=1000000000"], "must be from 0 to 64"),
        (
            "simulate",
            ["pipeline.depth=65", "pipeline.on_stale=drop"],
            "depth=65: must be at most 64 steps ahead",
        ),
    ],
)
def test_bad_options_of_a_command_are_refused(refuse, command, words, message):
    small = SMALL if command == "plan" else SMALL[:-2]
    assert message in refuse(command, *small, *words)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1e400, 3]", "must hold lengths, which are whole numbers of tokens, from 1"),
        ("1.0 2 x", "must hold lengths"),
        ("[1,", "must hold lengths"),
        ("3 3000", "3000 tokens: must be at most generator.max_new_tokens=2048"),
    ],
)
def test_a_malformed_lengths_file_is_a_one_line_error(refuse, tmp_path, content, message):
    path = tmp_path / "file.json"
    path.write_text(content)
    error = refuse("simulate", *SMALL[:-2], "--lengths", path)
    assert str(path) in error and message in error


HUGE = "pipeline.groups_per_step=10000000"


def test_a_simulation_of_hours_is_refused_before_it_starts(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch
):
    factors = "pipeline.groups_per_step=10000000, algorithm.group_size=8: about"
    rule = "h to simulate; the limit is 1 h"
    error = refuse("plan", *SMALL, HUGE)
    assert f" {factors} " in error and error.endswith(rule)
    error = refuse("simulate", *SMALL[:-2], HUGE, "--steps", "2")
    assert f" --steps 2, {factors} " in error and error.endswith(rule)
    # The size of a full simulation is only known after planning.
    monkeypatch.setattr("streamrl.cli.arguments.planner_args.HOUR_S", 0.1)
    monkeypatch.setattr("streamrl.cli.plan.run_quick_simulation", None)
    groups = "pipeline.groups_per_step=64"
    error = refuse("plan", *SMALL, groups, "--max-staleness", "0")
    assert "pipeline.groups_per_step=64, algorithm.group_size=8: about" in error


LONG = "x" * 300


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/proc/plan.yaml", ""),
        # An unfinished file has a longer temporary name.
        (f"{{tmp}}/{LONG[:245]}.yaml", "File name too long"),
        ("{tmp}/folder.yaml", "not a file"),
        ("{tmp}/none/plan.yaml", "No such file or directory"),
    ],
)
def test_an_unwritable_output_file_is_refused_before_reading(
    path: str, reason: str, tmp_path: Path, refuse: Refuse
):
    (tmp_path / "folder.yaml").mkdir()
    output_path = Path(path.format(tmp=tmp_path))
    error = refuse("plan", "nowhere.yaml", "--cluster", "8xH100", "-o", str(output_path))
    assert f"-o {output_path}: {reason}" in error
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder.yaml"]


@pytest.mark.parametrize("option", ["CONFIG", "--constants"])
def test_an_output_file_that_is_an_input_is_refused(option: str, tmp_path: Path, refuse: Refuse):
    (tmp_path / "config.yaml").touch()
    (tmp_path / "link.yaml").symlink_to("config.yaml")
    words = [tmp_path] if option == "CONFIG" else [GRPO, option, tmp_path / "config.yaml"]
    for path in (tmp_path / "config.yaml", tmp_path / "link.yaml"):
        error = refuse("plan", *words, "--cluster", "8xH100", "-o", path)
        assert f"-o {path}: is an input of this command; name another file" in error


def test_a_plan_on_unlike_nodes_cannot_be_written_as_config(tmp_path: Path, refuse: Refuse):
    words = [GRPO, *STEP, "--cluster", "2xH100,2xA100", *SIZES, "--proposals", "20"]
    words += ["--max-staleness", "0"]
    error = refuse("plan", *words, "-o", str(tmp_path / "plan.yaml"))
    assert "unlike nodes (devices, their number, network or memory), as in 2xH100,2xA100;" in error


PLAN = ["plan", *TINY, "--json"]
PUBLISH_EVERY_3 = "weights.publish_every=3"


def test_an_excluded_bound_is_absent_and_the_written_config_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = tmp_path / "plan.yaml"
    # The config's own bound is 1.
    words = ["--max-staleness", "0,1,2", PUBLISH_EVERY_3, "-o", str(plan)]
    result = json.loads(run(capsys, *PLAN, *words)[1])
    assert [point["max_staleness"] for point in result["front"]] == [2]
    assert [bound["max_staleness"] for bound in result["absent"]] == [0, 1]
    assert all(bound["why"].startswith(PUBLISH_EVERY_3) for bound in result["absent"])
    written = load_config(plan)
    assert (written.pipeline.max_staleness, written.weights.publish_every) == (2, 3)


def test_excluding_every_bound_is_an_error(refuse: Refuse):
    error = refuse(*PLAN, "--max-staleness", "0,1", PUBLISH_EVERY_3)
    assert PUBLISH_EVERY_3 in error and "pipeline.max_staleness=0" in error


def test_the_runs_current_sizes_do_not_prevent_colocation(capsys: pytest.CaptureFixture[str]):
    sizes = ["--max-staleness", "0", "generator.replicas=3", "trainer.world_size=2"]
    candidates = json.loads(run(capsys, *PLAN, *sizes)[1])["candidates"]
    assert "colocated" in {c["kind"] for c in candidates if "unfit" not in c}
