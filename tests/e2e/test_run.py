"""Outputs of the demo: metrics, a wandb file, a trace, a checkpoint, rollouts, a summary."""

import json

import pandas as pd
import pytest

from streamrl.telemetry.metric_names import METRICS, find_metric
from streamrl.telemetry.wandb_sink import TABLE_EVERY
from tests.e2e.launched import events
from tests.e2e.shared_runs import BUILD, Ended
from tests.telemetry.wandb_file import read_wandb_file

pytestmark = pytest.mark.xdist_group("demo")

STEPS, GROUPS = 80, 32


def test_every_step_logs_every_name_of_the_contract(demo: Ended):
    metrics = demo.rows
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    fixed = {m.name for m in METRICS if not (m.is_pattern or m.has_episodes)}
    stages = {"generate", "reward", "train"}
    for row in metrics:
        assert fixed <= row.keys(), fixed - row.keys()
        assert {f"queue/depth/{s}" for s in stages} | {f"idle/{s}" for s in stages} <= row.keys()
        for name in row.keys() - {"step", "time"}:
            find_metric(name)


def test_rewards_staleness_versions_and_ledger_are_consistent_in_every_step(demo: Ended):
    metrics = demo.rows
    for row in metrics:
        assert 0 <= row["reward/mean"] <= 1
        assert row["reward/mean"] == pytest.approx(row["reward/exact"])
        assert sum(row["staleness/histogram"]["counts"]) > 0
        assert row["weights/version"] == row["step"]
        assert row["policy/ratio_mean"] == pytest.approx(1.0, abs=0.2)
        assert 0 < row["policy/ess"] <= 1.0 + 1e-6
        assert all(0 <= row[name] <= 1 for name in row if name.startswith("idle/"))
        assert row["ledger/trained"] == GROUPS * row["step"]
        ended = row["ledger/trained"] + row["ledger/filtered"] + row["ledger/dropped"]
        assert row["ledger/admitted"] == ended + row["ledger/in_flight"]
    assert metrics[0]["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-3), "on-policy at first"
    assert metrics[-1]["ledger/in_flight"] == 0
    assert metrics[-1]["ledger/admitted"] == GROUPS * STEPS


def test_the_offline_wandb_run_holds_what_the_run_has_and_tables_of_rollouts(demo: Ended):
    (file,) = demo.run_dir.glob("wandb/**/*.wandb")
    history = [row for row in read_wandb_file(file).rows if "reward/mean" in row]
    for row, logged in zip(demo.rows, history, strict=True):
        present = {name for name, value in row.items() if value is not None} - {"step", "time"}
        tables = {"rollouts"} if row["step"] % TABLE_EVERY == 0 else set()
        assert {name for name in logged if not name.startswith("_")} == present | tables
        assert not present & {"loss/value", "policy/kl_ref"}, "the demo has neither"
        assert logged["reward/mean"] == pytest.approx(row["reward/mean"])
        assert logged["staleness/histogram"]["_type"] == "histogram"


def test_the_evaluation_before_and_after_is_reported(demo: Ended):
    (base,) = events(demo.run_dir, "base_evaluation")
    assert 0 <= base["eval/pass_at_1"] <= 1
    last = demo.rows[-1]
    assert last["eval/interval/pass_at_1_low"] <= last["eval/pass_at_1"]
    parts = [last["eval/file/eval/mean_at_k"], last["eval/file/again/mean_at_k"]]
    assert last["eval/mean_at_k"] == pytest.approx(sum(parts) / 2)
    assert "pass_at_1" in demo.output


def test_the_step_after_a_checkpoint_reports_the_wait(demo: Ended):
    waited = [row for row in demo.rows if row["time/checkpoint_s"] is not None]
    assert [row["step"] for row in waited] == [41]
    assert 0 < waited[0]["time/checkpoint_s"] <= waited[0]["time/step_s"]


def test_the_trace_shows_stages_that_overlap(demo: Ended):
    trace = json.loads((demo.run_dir / "trace.json").read_text())
    spans = trace["traceEvents"] if isinstance(trace, dict) else trace
    names = {span["name"] for span in spans}
    assert {"generate", "reward", "train", "update", "publish", "pull"} <= names


def test_the_checkpoint_is_a_trained_model_that_transformers_loads(demo: Ended):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_dir = demo.run_dir / "checkpoints" / f"step_{STEPS:06d}" / "model"
    trained = AutoModelForCausalLM.from_pretrained(model_dir)
    base = AutoModelForCausalLM.from_pretrained(BUILD / "base_model")
    assert AutoTokenizer.from_pretrained(model_dir).chat_template
    before, after = base.state_dict(), trained.state_dict()
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved, "nothing was trained"
    assert all(torch.isfinite(tensor).all() for tensor in after.values())


def test_every_group_of_every_step_is_recorded(demo: Ended):
    frame = pd.read_parquet(demo.run_dir / "rollouts")
    assert frame.groupby("step")["uid"].nunique().tolist() == [GROUPS] * STEPS
    assert frame["uid"].nunique() == GROUPS * STEPS
    assert (frame["tokens"] >= 1).all() and frame["completion"].str.len().max() > 1
    for step, row in enumerate(demo.rows, start=1):
        part = frame[frame["step"] == step]
        assert part["score"].mean() == pytest.approx(row["reward/mean"], abs=1e-6)
        assert part["version_max"].max() <= step - 1
        assert part["advantage"].mean() == pytest.approx(0.0, abs=1e-3)
        right, wrong = part[part["score"] == 1], part[part["score"] == 0]
        assert (right["advantage"] >= 0).all() and (wrong["advantage"] <= 0).all()


def test_the_run_ends_with_a_summary(demo: Ended):
    total = GROUPS * STEPS
    line = f"admitted {total} = trained {total} + filtered 0 + dropped 0 + in flight 0"
    assert line in demo.output
    assert str(demo.run_dir) in demo.output.replace("\n", "")
