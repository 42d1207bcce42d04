"""`streamrl graph`: a config's model calls as text and Mermaid, from the config alone."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.cli.main import main
from streamrl.config.run_config import load_config
from streamrl.dataflow import POLICY, CallKind, Dataflow, ModelCall
from streamrl.telemetry.drawing.graph_text import DataflowGraph, render_mermaid

ROOT = Path(__file__).parents[2]
PPO = str(ROOT / "configs" / "ppo_arithmetic.yaml")
GRPO = str(ROOT / "configs" / "grpo_arithmetic.yaml")

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


def read_output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["graph", *words]) == 0
    return capsys.readouterr().out


def test_text_lists_stages_in_flow_order_and_edges_with_columns(capsys):
    assert read_output(capsys, GRPO) == read_output(capsys, GRPO, "--text") == GRPO_TEXT


def test_overrides_apply_at_any_position(capsys):
    text = read_output(
        capsys, GRPO, "--steps", "2", "algorithm.kl_coef=0.1", "pipeline.max_staleness=0"
    )
    assert text.startswith("grpo: 4 stages, versions at most 0 behind\n")
    assert re.search(r"^  reference\[2\] -> train\[2\] +ref_logprobs$", text, re.MULTILINE)
    assert re.search(r"^  train\[1\] -> generate\[2\] +version of policy$", text, re.MULTILINE)
    assert re.search(r"^  train\[1\] -> train\[2\] +one step after the other$", text, re.MULTILINE)
    assert "version of policy, 1 step later" in read_output(
        capsys, GRPO, "pipeline.max_staleness=0"
    )


def test_stages_behind_the_group_filter_are_in_the_graph(capsys):
    unfiltered = read_output(capsys, PPO)
    assert "reward -> reference" not in unfiltered and "reward -> value" not in unfiltered
    text = read_output(capsys, PPO, "filter.kind=equal_rewards", "algorithm.group_size=4")
    for stage in ("reference", "value"):
        assert re.search(rf"^  reward -> {stage} +scores$", text, re.MULTILINE)


def test_depth_limits_how_far_generation_runs_ahead(capsys):
    text = read_output(capsys, GRPO, "pipeline.max_staleness=4", "pipeline.depth=2")
    assert "versions at most 2 behind" in text
    assert "train -> generate   version of policy, 3 steps later" in text


def test_settings_outside_the_graph_become_notes(capsys):
    words = ["weights.publish_every=2", "algorithm.kl_coef=0.1", "reference.every=5"]
    notes = [
        line for line in read_output(capsys, GRPO, *words).splitlines() if line.startswith("note")
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
    assert read_output(capsys, GRPO).endswith(
        "\nnote: extra produces answers, which no stage requires\n"
    )


def test_a_run_directory_works_like_its_config(capsys, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(Path(GRPO).read_text())
    assert read_output(capsys, str(tmp_path)) == GRPO_TEXT


def test_neither_model_nor_data_nor_runtime_is_loaded(tmp_path: Path):
    config = tmp_path / "own.yaml"
    config.write_text("{model: {path: nowhere}, data: {train: no.jsonl}, rewards: [{kind: exact}]}")
    code = (
        "import sys; from streamrl.cli.main import main; code = main(sys.argv[1:])\n"
        "names = ('ray', 'vllm', 'deepspeed', 'transformers')\n"
        "print(code, [name for name in names if name in sys.modules])"
    )
    words = [sys.executable, "-c", code, "graph", str(config)]
    process = subprocess.run(words, capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "0 []"


GRPO_MERMAID = """\
---
title: "grpo: 3 stages, versions at most 1 behind"
---
flowchart LR
  n0["generate<br/>generator"]:::generate
  n1["reward<br/>reward"]:::score
  n2["train<br/>policy"]:::train
  n0 -->|"{sampled}"| n1
  n0 -->|"{sampled}"| n2
  n1 -->|"scores"| n2
  n2 -.->|"version of policy"| n0
  linkStyle 0,1,2 stroke:#475569
  linkStyle 3 stroke:#7c3aed
  classDef generate fill:#dbeafe,stroke:#1d4ed8,color:#0f172a
  classDef score fill:#dcfce7,stroke:#15803d,color:#0f172a
  classDef train fill:#ffedd5,stroke:#c2410c,color:#0f172a
""".replace("{sampled}", SAMPLED.replace(", ", "<br/>"))


def test_mermaid_has_every_stage_and_edge(capsys):
    assert read_output(capsys, GRPO, "--mermaid") == GRPO_MERMAID


def test_mermaid_of_several_steps_has_a_subgraph_per_step(capsys):
    text = read_output(capsys, GRPO, "--mermaid", "--steps", "3")
    assert [line for line in text.splitlines() if line.startswith("  subgraph")] == [
        f'  subgraph s{i}["step {i + 1}"]' for i in range(3)
    ]
    assert text.count("\n  end\n") == 3
    assert '  n0["generate[1]<br/>generator"]:::generate\n' in text
    assert {line for line in text.splitlines() if "-.->" in line} == {
        "  n2 -.-> n5",
        "  n5 -.-> n8",
        '  n2 -.->|"version of policy"| n6',
    }


def test_mermaid_escapes_every_label():
    flow = Dataflow([ModelCall('a "b" #1 <c>', POLICY, CallKind.TRAIN, (), ())])
    text = render_mermaid(DataflowGraph.from_dataflow(flow, name="own", steps=1, max_staleness=0))
    assert 'n0["a #quot;b#quot; #35;1 #lt;c><br/>policy"]' in text


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["a" * 300], f"config {'a' * 300}: File name too long"),
        (["nowhere.yaml"], "config nowhere.yaml: No such file or directory"),
        ([GRPO, "trainer.lrr=1"], f"{GRPO}: unknown key trainer.lrr=1; the nearest key is "),
        ([GRPO, "nonsense"], "'nonsense': write an override as key=value"),
        ([GRPO, "--steps", "0"], "--steps 0: must be from 1 to 100"),
        ([GRPO, "--steps", "101"], "--steps 101: must be from 1 to 100"),
    ],
)
def test_bad_input_is_a_one_line_error(capsys, tmp_path: Path, words: list[str], line: str):
    assert main(["graph", *(word.replace("{tmp}", str(tmp_path)) for word in words)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"streamrl: {line}".replace("{tmp}", str(tmp_path)))
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert not list(tmp_path.iterdir())
