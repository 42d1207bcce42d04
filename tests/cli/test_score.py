"""`streamrl score`: existing completions get the scores that a run would give."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import psutil
import pytest

from streamrl.cli.main import main
from streamrl.cli.score import combine_verdicts
from streamrl.messages import (
    Experience,
    GroupLease,
    Prompt,
    rollouts_to_columns,
)
from streamrl.rewards.group_filter import accept_group
from streamrl.rewards.interface.config import RewardConfig
from streamrl.rewards.registry import build_rewards
from streamrl.rewards.reward_scorer import RewardScorer
from streamrl.telemetry.config import RolloutConfig
from tests.rollouts import make_rollout

ROOT = Path(__file__).resolve().parents[2]
ROWS = (
    {"prompt": "2+3=", "ground_truth": "5", "data_source": "sums"},
    {"prompt": "2*3=", "reward_model": {"ground_truth": "6"}, "data_source": "products"},
)
COMPLETIONS = ((1, "6"), (0, "5"), (1, "5"), (0, "5.0"))


def write(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def score(tmp_path, capsys):
    """Run the command on ROWS; return exit code, JSON lines and stderr."""

    def run(*words, completions=COMPLETIONS, name="outs.jsonl"):
        records = [{"index": index, "completion": text} for index, text in completions]
        files = write(tmp_path / "rows.jsonl", ROWS), write(tmp_path / name, records)
        code = main(["score", str(files[0]), "--completions", str(files[1]), *map(str, words)])
        out, error = capsys.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], error

    return run


@pytest.fixture
def reward_file(tmp_path):
    def make(source):
        path = tmp_path / "my_reward.py"
        path.write_text(textwrap.dedent(source))
        return path

    return make


class Characters:
    """Tokenizer whose token n is the character with code n."""

    def decode(self, ids, **_):
        return "".join(map(chr, ids))

    def batch_decode(self, rows, **_):
        return [self.decode(ids) for ids in rows]


def experience(row, completions):
    rollouts = [make_rollout([0], list(map(ord, text))) for text in completions]
    prompt = Prompt("0:0:0", np.zeros(1, np.int32), ground_truth=row)
    lease = GroupLease(token=1, uid=prompt.uid, stage="any", attempt=1, expires_at=9.0)
    return Experience(lease, 0, prompt=prompt, columns=rollouts_to_columns(rollouts))


async def test_scores_equal_the_scorer_of_a_run(score):
    rewards = [
        RewardConfig("exact", weight=0.25, gate=True),
        RewardConfig("regex", "dot", options={"pattern": r"\."}),
        RewardConfig("numeric"),
    ]
    scorer = RewardScorer(build_rewards(rewards), Characters(), accept_group, RolloutConfig())
    texts = ["5", "5.0", "6", "five"]
    (columns,) = await scorer.score([experience("5", texts)])
    assert isinstance(columns, Mapping)
    (group,) = scorer.drain_recorded()
    words = ("{kind: exact, weight: 0.25, gate: true}", r"{kind: regex, pattern: '\.', name: dot}")
    reward_args = [word for kind in (*words, "numeric") for word in ("--reward", kind)]
    code, lines, _ = await asyncio.to_thread(
        score, *reward_args, completions=[(0, t) for t in texts]
    )
    assert code == 0
    assert [line["score"] for line in lines] == columns["scores"].tolist() == [1.25, 0, 0, 0]
    for line, rollout in zip(lines, group.rollouts, strict=True):
        assert line["score"] == rollout.score
        assert line["components"] == rollout.components
        assert line["verdicts"] == rollout.verdicts


def test_output_lines_keep_file_order_and_an_index_is_a_group(score, reward_file):
    path = reward_file("""
        print("printed on import")
        def position(completions, ground_truth):
            print("printed on call")
            return [10 * len(completions) + i for i in range(len(completions))]
    """)
    code, lines, error = score("--reward", f"{path}:position", "--jsonl")
    assert (code, error.replace("printed on import\n", "")) == (0, "")
    assert [(line["index"], line["components"]["position"]) for line in lines] == [
        (1, 20.0),
        (0, 20.0),
        (1, 21.0),
        (0, 21.0),
    ]
    assert lines[0].keys() == {*("index", "score", "components", "verdict", "verdicts", "seconds")}


def test_a_failed_group_has_no_score_but_other_groups_do(score, reward_file):
    path = reward_file("""
        import time
        def f(solution_str, ground_truth):
            if solution_str == "hang": time.sleep(600)
            return None if solution_str == "nothing" else {"score": 0.5, "acc": True}
    """)
    reward = f"{{kind: function, path: {path}, name: f, attempts: 1}}"
    completions = [(0, "5"), (1, "hang"), (0, "6")]
    code, lines, error = score("--reward", reward, "scorer.timeout_s=2", completions=completions)
    assert code == 1
    assert [line["score"] for line in lines] == [0.5, None, 0.5]
    timed_out = lines[1]
    assert timed_out["verdict"] == "infra_error" and timed_out["cause"] == "reward_timeout"
    assert re.fullmatch(
        r"reward f, .*rows.jsonl line 2 \(uid 0:1:0\): no result in 2 s", timed_out["error"]
    )
    assert "not scored             reward_timeout 1; first: reward f, " in error
    assert "scorer/killed/timeout  1 time" in error
    code, lines, _ = score("--reward", reward, completions=[(0, "5"), (0, "nothing")])
    assert code == 1
    assert [line["cause"] for line in lines] == ["reward_error"] * 2, "a group fails as a whole"
    assert "returned None for completion 1" in lines[0]["error"]


def test_a_recipe_or_run_provides_rewards_and_settings(score, tmp_path):
    recipe = tmp_path / "config.yaml"
    recipe.write_text(
        "model: {path: nowhere}\ndata: {train: nowhere.jsonl}\n"
        "rewards: [{kind: exact, weight: 10}, {kind: numeric}]\n"
    )
    for config in (recipe, tmp_path):
        code, lines, _ = score("--config", config)
        assert code == 0
        assert [line["score"] for line in lines] == [11.0, 11.0, 0.0, 1.0]
    code, lines, _ = score("--config", recipe, "--reward", "numeric")
    assert [line["components"] for line in lines][-1] == {"numeric": 1.0}
    code, lines, _ = score("--config", recipe, "rewards[1].weight=3")
    assert [line["score"] for line in lines] == [13.0, 13.0, 0.0, 3.0]


def test_costs_of_a_recipe_are_on_every_line_and_in_the_summary(score, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {path: .}\ndata: {train: .}\nalgorithm: {name: safe_rlhf}\n"
        "rewards: [{kind: exact}]\n"
        "costs: [{kind: length, name: long, unit: characters, least: 2}]\n"
    )
    code, lines, summary = score("--config", recipe)
    assert code == 0
    assert [line["score"] for line in lines] == [1.0, 1.0, 0.0, 0.0]
    assert [line["cost"] for line in lines] == [line["costs"]["long"] for line in lines]
    assert len({line["cost"] for line in lines}) == 2
    assert re.search(r"cost +mean .*\ncost/long +mean ", summary)


def test_the_summary_counts_by_outcome_component_and_source(score):
    words = ("--reward", "exact", "--reward", "{kind: numeric, weight: 0.5}")
    _, _, error = score(*words, name="outs.txt")  # JSONL, whatever its extension
    title, *rows = error.splitlines()
    assert re.fullmatch(r"4 completions in \d+\.\d s: pass 2, wrong 2", title)
    summary = {name: text.strip() for name, text in (row.split("  ", 1) for row in rows)}
    assert summary["score"] == "mean 0.8750"
    assert summary["reward/exact"] == "mean 0.5000: pass 2, wrong 2"
    assert summary["reward/numeric"] == "mean 0.7500: pass 3, wrong 1"
    assert summary["source sums"] == "mean 1.0000: pass 1, wrong 1"
    assert summary["source products"] == "mean 0.7500: pass 1, wrong 1"
    assert "p50" in summary["seconds"]


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        ("pass pass wrong", "pass"),
        ("pass wrong pass", "wrong"),
        ("wrong pass pass", "wrong"),
        ("wrong timeout memory", "timeout"),
        ("pass pass memory", "memory"),
        ("not_judged pass wrong", "pass"),
        ("not_judged wrong pass", "wrong"),
    ],
)
def test_the_verdict_depends_on_weighted_components(verdicts, verdict):
    configs = [RewardConfig("a"), RewardConfig("b", weight=0, gate=True), RewardConfig("c", "", 0)]
    assert combine_verdicts(dict(zip("abc", verdicts.split(), strict=True)), configs) == verdict


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("\n\n", "{}: contains no rows"),
        ('{"index": 0, "completion": "5"}\n{"index": ', "{} line 2: not JSON: Expecting value"),
        ('\n"5"', '{} line 2: "5": must be '),
        (
            '{"index": "0", "completion": ""}',
            '{} line 1: {{"index": "0", "completion": ""}}: must be',
        ),
        ('{"index": 0, "completion": null}', '{} line 1: {{"index": 0, "completion": null}}: must'),
        ('{"index": 2, "completion": ""}', "{} line 1: index=2: "),
    ],
)
def test_a_bad_completion_line_is_named_by_number(tmp_path, refuse, lines, words):
    path, rows = tmp_path / "outs.jsonl", write(tmp_path / "rows.jsonl", ROWS)
    path.write_text(lines)
    error = refuse("score", rows, "--completions", path, "--reward", "exact")
    assert error.startswith("streamrl: --completions " + words.format(path))


def test_a_reward_file_imports_neighbors_and_its_prints_go_to_stderr(reward_file, tmp_path):
    (tmp_path / "beside.py").write_text("import os\nos.write(1, b'noise')\nvalue = 0.5\n")
    # A file in the working directory must not shadow a library of the workers.
    (tmp_path / "psutil.py").write_text("raise ImportError\n")
    path = reward_file("import beside\ndef f(prompt, completion): return beside.value\n")
    rows = write(tmp_path / "rows.jsonl", ROWS)
    outs = write(tmp_path / "outs.jsonl", [{"index": 0, "completion": "5"}])
    command = [sys.executable, "-P", "-m", "streamrl.cli", "score", rows, "--completions", outs]
    process = subprocess.run(
        [*map(str, command), "--jsonl", "--reward", f"{path}:f"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    (line,) = process.stdout.splitlines()
    assert json.loads(line)["score"] == 0.5
    assert "noise" in process.stderr


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "score: give --reward (see `streamrl config --rewards`) or --config"),
        (["--reward", "no.py"], "--reward=no.py: write it as file.py:function"),
        (["--reward", "no.py:f"], "rewards[0].path="),
        (["--reward", "exact", "--reward", "exact"], "rewards.name=exact: given 2 times"),
        (["--reward", "exact", "scorer.timeout_s"], "'scorer.timeout_s': write an override"),
    ],
)
def test_bad_settings_are_a_one_line_error(refuse, tmp_path, words, line):
    rows = write(tmp_path / "rows.jsonl", ROWS)
    outs = write(tmp_path / "outs.jsonl", [{"index": 0, "completion": "5"}])
    error = refuse("score", rows, "--completions", outs, *words)
    assert error.startswith(f"streamrl: {line}")


@pytest.mark.slow
def test_ctrl_c_prints_finished_lines_and_leaves_no_process(tmp_path, reward_file):
    path = reward_file("""
        import os, subprocess, time
        def f(prompt, completion):
            if completion == "hang":
                child = subprocess.Popen(["setsid", "sleep", "600"])
                with open(__file__ + ".part", "w") as file: file.write(str(child.pid))
                os.rename(__file__ + ".part", __file__ + ".pid")
                time.sleep(600)
            return 1.0
    """)
    rows = write(tmp_path / "rows.jsonl", ROWS)
    outs = write(
        tmp_path / "outs.jsonl",
        [{"index": 0, "completion": "5"}, {"index": 1, "completion": "hang"}],
    )
    # A shell that runs the tests in the background makes all child processes ignore Ctrl-C.
    interruptible = ["env", "--default-signal=INT", sys.executable]
    command = [*interruptible, "-m", "streamrl.cli", "score", rows, "--completions", outs]
    process = subprocess.Popen(
        [*map(str, command), "--reward", f"{path}:f"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pid_file, deadline = Path(f"{path}.pid"), time.monotonic() + 60
    while not pid_file.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    descendants = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "streamrl: interrupted\n"
    assert [json.loads(line)["score"] for line in out.splitlines()] == [1.0]
    assert int(pid_file.read_text()) in [child.pid for child in descendants]
    assert not [child for child in descendants if child.is_running()]
