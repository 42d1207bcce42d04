"""A short run on the real engines, on policy: vLLM, Ray, DeepSpeed, wandb."""

import json
from pathlib import Path

import pytest

from streamrl.telemetry.contract import METRICS, metric_for
from tests.e2e.launched import Launched, events, rows
from tests.telemetry.wandb_file import read_wandb_file
from tests.toy import write_toy

pytestmark = pytest.mark.slow

ON_POLICY = ["run.steps=4", "pipeline.max_staleness=0", "pipeline.micro_batch_tokens=64"]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def finished(toy: Path) -> tuple[Path, str]:
    """A run of four steps, and what it printed."""
    run = Launched(
        [
            "train",
            str(toy / "recipe.yaml"),
            f"run.dir={toy}/runs",
            "run.name=first",
            *ON_POLICY,
            "checkpoint.every=2",
            "telemetry.wandb.mode=offline",
            f"data.eval=[{toy}/rows.jsonl, {{path: {toy}/rows.jsonl, name: again}}]",
        ],
        toy,
    )
    assert run.wait() == 0, run.output
    assert run.orphans() == []
    return toy / "runs" / "first", run.output


def test_every_step_logs_every_name_of_the_contract(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    found = rows(run_dir)
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    fixed = {m.name for m in METRICS if not m.is_pattern}
    stages = {"generate", "reward", "train"}
    for row in found:
        assert fixed <= row.keys(), fixed - row.keys()
        assert {f"queue/depth/{s}" for s in stages} | {f"idle/{s}" for s in stages} <= row.keys()
        for name in row.keys() - {"step", "time"}:
            metric_for(name)


def test_the_numbers_of_a_run_make_sense(finished: tuple[Path, str]) -> None:
    found = rows(finished[0])
    for row in found:
        assert 0 <= row["reward/mean"] <= 1
        assert row["reward/mean"] == pytest.approx(row["reward/exact"])
        assert row["staleness/max"] == 0
        assert sum(row["staleness/histogram"]["counts"]) > 0
        assert row["weights/version"] == row["step"]
        assert row["policy/ratio_mean"] == pytest.approx(1.0, abs=0.2)
        assert 0 < row["policy/ess"] <= 1.0 + 1e-6
        assert all(0 <= row[name] <= 1 for name in row if name.startswith("idle/"))
        assert row["ledger/trained"] == 4 * row["step"]
        ended = row["ledger/trained"] + row["ledger/filtered"] + row["ledger/dropped"]
        assert row["ledger/admitted"] == ended + row["ledger/in_flight"]
    assert found[0]["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-3), "on-policy at first"
    assert found[-1]["ledger/in_flight"] == 0
    assert found[-1]["ledger/admitted"] == 16


def test_the_offline_wandb_run_holds_the_same_keys(finished: tuple[Path, str]) -> None:
    run_dir, _ = finished
    (file,) = run_dir.glob("wandb/**/*.wandb")
    history = [row for row in read_wandb_file(file).rows if "reward/mean" in row]
    for mine, theirs in zip(rows(run_dir), history, strict=True):
        assert mine.keys() - {"step", "time"} <= theirs.keys()
        assert theirs["reward/mean"] == pytest.approx(mine["reward/mean"])
        assert theirs["staleness/histogram"]["_type"] == "histogram"


def test_the_evaluation_before_and_after_is_reported(finished: tuple[Path, str]) -> None:
    run_dir, output = finished
    (base,) = events(run_dir, "base_evaluation")
    assert 0 <= base["eval/pass_at_1"] <= 1
    last = rows(run_dir)[-1]
    assert last["eval/interval/pass_at_1_low"] <= last["eval/pass_at_1"]
    parts = [last["eval/file/rows/mean_at_k"], last["eval/file/again/mean_at_k"]]
    assert last["eval/mean_at_k"] == pytest.approx(sum(parts) / 2)
    assert "pass_at_1" in output


def test_the_trace_shows_stages_that_overlap(finished: tuple[Path, str]) -> None:
    trace = json.loads((finished[0] / "trace.json").read_text())
    spans = trace["traceEvents"] if isinstance(trace, dict) else trace
    names = {span["name"] for span in spans}
    assert {"generate", "reward", "train", "update", "publish", "pull"} <= names


def test_the_checkpoint_loads_with_transformers_and_continues_to_be_what_was_trained(
    finished: tuple[Path, str], toy: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_dir = finished[0] / "checkpoints" / "step_000004" / "model"
    trained = AutoModelForCausalLM.from_pretrained(model_dir)
    base = AutoModelForCausalLM.from_pretrained(toy / "model")
    assert AutoTokenizer.from_pretrained(model_dir).chat_template
    before, after = base.state_dict(), trained.state_dict()
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved, "nothing was trained"
    assert all(torch.isfinite(tensor).all() for tensor in after.values())


def test_a_few_rollouts_can_be_read(finished: tuple[Path, str]) -> None:
    files = sorted((finished[0] / "rollouts").glob("step_*.jsonl"))
    sample = json.loads(files[0].read_text().splitlines()[0])
    assert sample["prompt"][0]["role"] == "user"
    assert len(sample["rollouts"]) == 4
    assert {"completion", "score"} <= sample["rollouts"][0].keys()


def test_the_run_ends_with_a_summary_of_what_it_did(finished: tuple[Path, str]) -> None:
    run_dir, output = finished
    assert "16 admitted = 16 trained + 0 filtered + 0 dropped + 0 in flight" in output
    assert str(run_dir) in output.replace("\n", "")
