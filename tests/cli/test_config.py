"""`streamrl config`: config keys, reward kinds, algorithms, and a config's model calls."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from streamrl.algorithms import ALGORITHMS
from streamrl.cli.config import list_config_keys
from streamrl.cli.main import main
from streamrl.config.run_config import load_config
from streamrl.dataflow import CallKind, Dataflow, ModelCall
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.registry import REWARD_KINDS

ROOT = Path(__file__).parents[2]
PPO = str(ROOT / "configs" / "ppo_arithmetic.yaml")
GRPO = str(ROOT / "configs" / "grpo_arithmetic.yaml")


def read_output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["config", *words]) == 0
    return capsys.readouterr().out


def test_every_config_key_has_a_meaning_and_they_stay_few():
    keys = list(list_config_keys())
    assert [key.name for key in keys if not key.meaning] == []
    assert len(keys) <= 190


def test_a_named_key_or_section_is_printed(capsys: pytest.CaptureFixture[str]):
    lr = "trainer.lr\n  type     float\n  default  1.0e-06\n  meaning  "
    assert read_output(capsys, "trainer.lr").startswith(lr)
    text = read_output(capsys, "rewards")
    assert all(name.startswith("rewards[].") for name in re.findall(r"^\S+", text, re.MULTILINE))
    assert "\n  default  1.0e-05\n" in read_output(capsys, "critic.trainer.lr")
    assert "\ncritic.trainer.zero_stage\n" in read_output(capsys, "critic.trainer")
    assert read_output(capsys, "costs[1].weight").startswith("costs[].weight\n")
    named = read_output(capsys, "environment.named.calc.path")
    assert named.startswith("environment.named.NAME.path\n  type     text\n")


def test_every_kind_is_printed_with_its_options(capsys):
    text = read_output(capsys, "--rewards")
    for name, kind in REWARD_KINDS.items():
        assert f"{name}\n  what it is  {kind.summary}\n" in text
    text = read_output(capsys, "--rewards", "regex")
    assert re.findall(r"^\S+", text, re.MULTILINE)[0] == "regex"
    meaning = "regular expression, searched anywhere in the completion"
    assert f"  default  required\n  meaning  {meaning}\n  of       regex\n" in text


@pytest.mark.parametrize("kind", [*REWARD_KINDS.values(), RewardConfig])
def test_every_option_has_a_meaning_and_its_effective_default(kind):
    settings = kind if kind is RewardConfig else kind.options_type
    options = list(list_config_keys(settings))
    assert [option.name for option in options if not option.meaning] == []
    if all(option.default != "required" for option in options):
        defaults = {option.name: yaml.safe_load(option.default) for option in options}
        assert settings(**defaults) == settings()


def test_markdown_cells_are_escaped(capsys):
    for line in read_output(capsys, "--rewards", "--markdown").splitlines():
        assert line == "" or line.count("|") - line.count("\\|") in (4, 6)
        words = re.sub(r"(`+).*?\1", "", line).replace("\\<", "")
        assert "<" not in words, "an unescaped < begins an HTML tag"


def test_a_full_disk_behind_stdout_is_a_one_line_error():
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [sys.executable, "-m", "streamrl.cli", "config"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert process.returncode == 1
    assert process.stderr == "streamrl: standard output: no space left\n"


def test_every_algorithm_is_printed_with_its_spec(capsys):
    text = read_output(capsys, "--algorithms")
    for row in ALGORITHMS.values():
        assert f"\n  paper             {row.paper}" in text
        assert row.advantages.__name__ in text and row.token_loss.__name__ in text
    assert "defaults          clip_low=0.2 clip_high=0.2 dual_clip=null" in text
    text = read_output(capsys, "--algorithms", "gpg")
    assert text.startswith("gpg\n  columns           scores\n")
    assert "\n  scope             step\n" in text
    assert text.count("arXiv") == 1


SAMPLED = "token_ids, loss_mask, generator_logprobs, policy_version, lengths, finish_reason"
GRPO_TEXT = f"""\
grpo: 3 stages, versions at most 1 behind

generate    generate, role generator
  needs     prompts only
  produces  {SAMPLED}
  follows   policy
reward      score, role reward
  needs     {SAMPLED}
  produces  scores
train       train, role policy
  needs     {SAMPLED}, scores

edges
  generate -> reward  {SAMPLED}
  generate -> train   {SAMPLED}
  reward -> train     scores
  train -> generate   version of policy, 2 steps later
"""


def read_graph(capsys: pytest.CaptureFixture[str], config: str, *words: str) -> str:
    return read_output(capsys, "--graph", config, *words)


def test_text_lists_stages_in_flow_order_and_edges_with_columns(capsys):
    assert read_graph(capsys, GRPO) == GRPO_TEXT


@pytest.mark.parametrize(
    ("words", "behind", "steps"),
    [
        (["algorithm.kl_coef=0.1", "pipeline.max_staleness=0"], 0, "1 step"),
        (["algorithm.kl_coef=0.1", "pipeline.max_staleness=4", "pipeline.depth=2"], 2, "3 steps"),
    ],
)
def test_overrides_change_stages_and_how_far_generation_runs_ahead(capsys, words, behind, steps):
    text = read_graph(capsys, GRPO, *words)
    assert text.startswith(f"grpo: 4 stages, versions at most {behind} behind\n")
    assert re.search(r"^  reference -> train +ref_logprobs$", text, re.MULTILINE)
    assert re.search(rf"^  train -> generate +version of policy, {steps} later$", text, re.M)


@pytest.mark.parametrize(
    ("words", "role"),
    [([], "critic (the ranks that train it)"), (["critic.replicas=1"], "value")],
)
def test_the_graph_names_the_ranks_that_compute_values(capsys, words, role):
    assert f"\nvalue         score, role {role}\n" in read_graph(capsys, PPO, *words)


def test_stages_behind_the_group_filter_are_in_the_graph(capsys):
    unfiltered = read_graph(capsys, PPO)
    assert "reward -> reference" not in unfiltered and "reward -> value" not in unfiltered
    text = read_graph(capsys, PPO, "filter.kind=equal_rewards", "algorithm.group_size=4")
    for stage in ("reference", "value"):
        assert re.search(rf"^  reward -> {stage} +scores$", text, re.MULTILINE)


def test_settings_outside_the_graph_become_notes(capsys):
    words = ["weights.publish_every=2", "algorithm.kl_coef=0.1", "reference.every=5"]
    notes = [
        line for line in read_graph(capsys, GRPO, *words).splitlines() if line.startswith("note")
    ]
    assert notes == [
        "note: weights.publish_every=2: publishes only one in 2 versions",
        "note: reference.every=5: the reference moves only at one in 5 versions",
    ]


def test_an_unused_column_becomes_a_note(capsys, monkeypatch):
    extra = ModelCall("extra", "extra", CallKind.SCORE, (), ("answers",))
    flow = load_config(Path(GRPO)).dataflow
    dataflow_with_extra = property(lambda config: Dataflow([*flow.calls, extra]))
    monkeypatch.setattr("streamrl.config.run_config.RunConfig.dataflow", dataflow_with_extra)
    assert read_graph(capsys, GRPO).endswith(
        "\nnote: extra produces answers, which no stage requires\n"
    )


def test_a_run_directory_works_like_its_config(capsys, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(Path(GRPO).read_text())
    assert read_graph(capsys, str(tmp_path)) == GRPO_TEXT


def test_neither_model_nor_data_nor_runtime_is_loaded(tmp_path: Path):
    config = tmp_path / "own.yaml"
    config.write_text("{model: {path: nowhere}, data: {train: no.jsonl}, rewards: [{kind: exact}]}")
    code = (
        "import sys; from streamrl.cli.main import main; code = main(sys.argv[1:])\n"
        "names = ('ray', 'vllm', 'deepspeed', 'transformers')\n"
        "print(code, [name for name in names if name in sys.modules])"
    )
    words = [sys.executable, "-c", code, "config", "--graph", str(config)]
    process = subprocess.run(words, capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "0 []"
