"""`streamrl graph`: a config's model calls as text, DOT and SVG, from the config alone."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from streamrl.cli.main import main
from streamrl.config.run_config import load_config
from streamrl.dataflow import POLICY, CallKind, Dataflow, ModelCall
from streamrl.drawing.dataflow_graph import KIND_FILLS, DataflowGraph
from streamrl.drawing.graph_text import render_dot
from streamrl.drawing.svg import CHARACTER_EM

ROOT = Path(__file__).parents[2]
PPO = str(ROOT / "configs" / "ppo_arithmetic.yaml")
GRPO = str(ROOT / "configs" / "grpo_arithmetic.yaml")
SVG = "{http://www.w3.org/2000/svg}"

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


def test_text_lists_stages_in_flow_order_and_edges_with_columns(capsys) -> None:
    assert read_output(capsys, GRPO) == read_output(capsys, GRPO, "--text") == GRPO_TEXT


def test_overrides_apply_at_any_position(capsys) -> None:
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


def test_stages_behind_the_group_filter_are_in_the_graph(capsys) -> None:
    alone = read_output(capsys, PPO)
    assert "reward -> reference" not in alone and "reward -> value" not in alone
    text = read_output(capsys, PPO, "filter.kind=equal_rewards", "algorithm.group_size=4")
    for stage in ("reference", "value"):
        assert re.search(rf"^  reward -> {stage} +scores$", text, re.MULTILINE)


def test_depth_limits_how_far_generation_runs_ahead(capsys) -> None:
    text = read_output(capsys, GRPO, "pipeline.max_staleness=4", "pipeline.depth=2")
    assert "versions at most 2 behind" in text
    assert "train -> generate   version of policy, 3 steps later" in text


def test_settings_outside_the_graph_become_notes(capsys) -> None:
    words = ["weights.publish_every=2", "algorithm.kl_coef=0.1", "reference.every=5"]
    notes = [
        line for line in read_output(capsys, GRPO, *words).splitlines() if line.startswith("note")
    ]
    assert notes == [
        "note: weights.publish_every=2: publishes only one in 2 versions",
        "note: reference.every=5: the reference moves only at one in 5 versions",
    ]


def test_an_unused_column_becomes_a_note(capsys, monkeypatch) -> None:
    extra = ModelCall("extra", "extra", CallKind.SCORE, (), ("answers",))
    flow = load_config(Path(GRPO)).dataflow
    wider = property(lambda config: Dataflow([*flow.calls, extra]))
    monkeypatch.setattr("streamrl.config.run_config.RunConfig.dataflow", wider)
    assert read_output(capsys, GRPO).endswith(
        "\nnote: extra produces answers, which no stage requires\n"
    )


def test_a_run_directory_works_like_its_config(capsys, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(Path(GRPO).read_text())
    assert read_output(capsys, str(tmp_path)) == GRPO_TEXT


def test_neither_model_nor_data_nor_runtime_is_loaded(tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    config.write_text("{model: {path: nowhere}, data: {train: no.jsonl}, rewards: [{kind: exact}]}")
    code = (
        "import sys; from streamrl.cli.main import main; code = main(sys.argv[1:])\n"
        "names = ('ray', 'vllm', 'deepspeed', 'transformers')\n"
        "print(code, [name for name in names if name in sys.modules])"
    )
    words = [sys.executable, "-c", code, "graph", str(config), "--svg", str(tmp_path / "a.svg")]
    process = subprocess.run(words, capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "0 []"


NAME = r'"((?:[^"\\]|\\.)*)"'


def parse_dot(source: str) -> tuple[dict[str, str], list[tuple[str, str, dict[str, str]]]]:
    """Parse node labels and edges of a DOT file in which every name is quoted."""
    nodes: dict[str, str] = {}
    edges: list[tuple[str, str, dict[str, str]]] = []
    for line in source.splitlines():
        facts = dict(re.findall(rf"(\w+)={NAME}", line))
        if edge := re.match(rf" *{NAME} -> {NAME} \[", line):
            edges.append((edge[1], edge[2], facts))
        elif node := re.match(rf" *{NAME} \[", line):
            nodes[node[1]] = facts["label"]
    return nodes, edges


def test_dot_has_every_stage_and_edge(capsys) -> None:
    nodes, edges = parse_dot(read_output(capsys, PPO, "--dot"))
    assert nodes["train_critic"] == r"train_critic\ncritic"
    assert len(nodes) == 6
    assert len(edges) == 11 + 2
    assert ("reference", "train") in [(a, b) for a, b, _ in edges]
    back = {(a, b): facts for a, b, facts in edges if facts["style"] == "dashed"}
    assert set(back) == {("train", "generate"), ("train_critic", "value")}
    assert {facts["constraint"] for facts in back.values()} == {"false"}
    labels = {(a, b): facts["label"] for a, b, facts in edges}
    assert labels["generate", "value"] == r"token_ids\nloss_mask\nlengths"


def test_dot_of_several_steps_has_a_cluster_per_step(capsys) -> None:
    source = read_output(capsys, GRPO, "--dot", "--steps", "3")
    nodes, edges = parse_dot(source)
    assert source.count('subgraph "cluster_') == 3
    assert set(nodes) == {f"{s}[{i}]" for s in ("generate", "reward", "train") for i in (1, 2, 3)}
    dashed_edges = {(a, b, facts["style"]) for a, b, facts in edges if facts["style"] != "solid"}
    assert dashed_edges == {
        ("train[1]", "train[2]", "dotted"),
        ("train[2]", "train[3]", "dotted"),
        ("train[1]", "generate[3]", "dashed"),
    }


def test_dot_quotes_every_stage_name() -> None:
    odd = 'a "b" \\ -> c; {'
    flow = Dataflow([ModelCall(odd, POLICY, CallKind.TRAIN, (), ())])
    source = render_dot(DataflowGraph.from_dataflow(flow, name="own", steps=1, max_staleness=0))
    nodes, _ = parse_dot(source)
    assert [name.replace('\\"', '"').replace("\\\\", "\\") for name in nodes] == [odd]


def test_svg_boxes_have_the_color_of_their_kind(capsys, tmp_path: Path) -> None:
    path = tmp_path / "ppo.svg"
    assert read_output(capsys, PPO, "--svg", str(path)) == (
        f"{path}: ppo: 6 stages, versions at most 1 behind\n"
    )
    assert [entry.name for entry in tmp_path.iterdir()] == ["ppo.svg"]
    root = ET.fromstring(path.read_text())
    assert root.tag == f"{SVG}svg"
    colors = {}
    for group in root.findall(f"{SVG}g"):
        if (title := group.find(f"{SVG}title")) is not None:
            colors[str(title.text)] = group.findall(f"{SVG}rect")[0].get("fill")
    assert colors == {
        f"{call.stage}: {call.kind.value}, role {call.role}": KIND_FILLS[call.kind]
        for call in load_config(Path(PPO)).dataflow.calls
    }
    dashed = [p for p in root.findall(f"{SVG}path") if p.get("stroke-dasharray") == "6 4"]
    assert len(dashed) == 2
    words = " ".join(str(text.text) for text in root.iter(f"{SVG}text"))
    assert words.count("ref_logprobs") == 2
    assert "version of critic" in words


def test_writing_to_a_symlink_replaces_its_target(capsys, tmp_path: Path) -> None:
    link, drawing = tmp_path / "link.svg", tmp_path / "drawing.svg"
    link.symlink_to(drawing)
    drawing.write_text("before")
    read_output(capsys, GRPO, "--svg", str(link))
    assert link.is_symlink()
    assert drawing.read_text().startswith("<svg")


def test_svg_on_stdout_is_deterministic(capsys) -> None:
    first = read_output(capsys, PPO, "--svg", "-", "--steps", "3")
    assert first == read_output(capsys, PPO, "--svg", "-", "--steps", "3")
    assert len(ET.fromstring(first).findall(f"{SVG}g/{SVG}title")) == 18


@pytest.mark.parametrize("recipe", ["grpo_arithmetic", "remax_arithmetic", "safe_rlhf_toy"])
def test_svg_texts_neither_overlap_nor_leave_the_canvas(capsys, recipe: str) -> None:
    config = str(ROOT / "configs" / f"{recipe}.yaml")
    for words in ([], ["--steps", "3"], ["--steps", "3", "pipeline.max_staleness=0"]):
        root = ET.fromstring(read_output(capsys, config, "--svg", "-", *words))
        width, height = (float(root.attrib[name]) for name in ("width", "height"))
        texts = [_extent(text) for text in root.iter(f"{SVG}text")]
        for i, (left, top, right, bottom) in enumerate(texts):
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
            for other in texts[:i]:
                apart = right <= other[0] or other[2] <= left
                assert apart or bottom <= other[1] or other[3] <= top


def _extent(text: ET.Element) -> tuple[float, float, float, float]:
    x, y, size = (float(text.attrib[name]) for name in ("x", "y", "font-size"))
    width = len(str(text.text)) * size * CHARACTER_EM
    left = x - width / 2 if text.get("text-anchor") == "middle" else x
    return left, y - 0.8 * size, left + width, y + 0.2 * size


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["a" * 300], f"config {'a' * 300}: File name too long"),
        (["nowhere.yaml"], "config nowhere.yaml: No such file or directory"),
        ([GRPO, "trainer.lrr=1"], f"{GRPO}: unknown key trainer.lrr=1; the nearest key is "),
        ([GRPO, "nonsense"], "'nonsense': write an override as key=value"),
        ([GRPO, "--steps", "0"], "--steps 0: must be from 1 to 100"),
        ([GRPO, "--steps", "101"], "--steps 101: must be from 1 to 100"),
        ([GRPO, "--svg", "{tmp}/none/a.svg"], "--svg {tmp}/none/a.svg: No such file or directory"),
        ([GRPO, "--svg", "{tmp}"], "--svg {tmp}: not a file"),
        ([GRPO, "--svg", "/dev/null"], "--svg /dev/null: not a file"),
        (
            [GRPO, "--svg", "{tmp}/" + "a" * 300],
            "--svg {tmp}/" + "a" * 300 + ": File name too long",
        ),
    ],
)
def test_bad_input_is_a_one_line_error(capsys, tmp_path: Path, words: list[str], line: str) -> None:
    assert main(["graph", *(word.replace("{tmp}", str(tmp_path)) for word in words)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"streamrl: {line}".replace("{tmp}", str(tmp_path)))
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert not list(tmp_path.iterdir())
