"""Training on completions in the data: real runs, killed and resumed; a run's own rollouts."""

import json
from pathlib import Path

import pytest
import torch

from streamrl.config.run_config import load_config
from streamrl.data.chat_template import load_tokenizer
from streamrl.engines.models.forward import compute_row_logits, load_reward_model
from streamrl.telemetry.rollout_log import list_recorded_steps, read_recorded_groups
from tests.e2e.launched import Launched, audit, rows, train
from tests.toy import write_toy

WORDS = ("algorithm={name: sft}", "pipeline.groups_per_step=16", "trainer.lr=3e-3")


def write_lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_targets(folder: Path) -> Path:
    pairs = [(i % 10, i // 10) for i in range(100)]
    targets = [{"prompt": f"{a}+{b}", "completion": f"{a + b}"} for a, b in pairs]
    return write_lines(folder / "targets.jsonl", targets)


@pytest.mark.slow
def test_a_killed_sft_run_trains_the_rows_of_an_undisturbed_one(tmp_path: Path):
    toy = write_toy(tmp_path)
    # Ahead of training, a step would take the rows that arrive first.
    words = [*WORDS, "run.steps=60", "checkpoint.every=20", "pipeline.max_staleness=0"]
    words.append(f"data.train={make_targets(toy)}")
    whole, whole_dir = train(toy, "whole", *words)
    whole.finish()
    killed, killed_dir = train(toy, "killed", *words)
    killed.until(lambda: len(rows(killed_dir)) >= 30)
    killed.kill()
    Launched(["train", "--resume", str(killed_dir)], toy).finish()

    assert list(audit(killed_dir).admitted) == list(audit(whole_dir).admitted)
    losses = [[row["loss/policy"] for row in rows(folder)] for folder in (killed_dir, whole_dir)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < 0.3 * losses[0][0]
    assert rows(whole_dir)[-1]["reward/mean"] is None
    assert load_config(whole_dir).dataflow.calls_by_role.keys() == {"policy"}


@pytest.mark.slow
def test_a_policy_learns_from_its_own_accepted_rollouts(tmp_path: Path):
    toy = write_toy(tmp_path)
    run, folder = train(toy, "sampled", "rewards=[{kind: length}]", "run.steps=4")
    run.finish()
    steps = [read_recorded_groups(folder, step) for step in list_recorded_steps(folder)]
    rollouts = [r for groups in steps for group in groups for r in group.rollouts]
    least = sorted(rollout.score for rollout in rollouts)[len(rollouts) // 2]
    accepted = sum(r.score >= least and r.finish_reason == "stop" for r in rollouts)
    assert 0 < accepted < len(rollouts)
    words = [*WORDS, "run.steps=2", f"data.train={{path: {folder}, min_score: {least}}}"]
    tuning, tuned_dir = train(toy, "tuned", *words)
    tuning.finish()
    assert f"{accepted} prompts; 32 groups" in tuning.output
    assert rows(tuned_dir)[-1]["loss/policy"] > 0


@pytest.mark.slow
def test_a_reward_model_learns_which_of_two_answers_is_preferred(tmp_path: Path):
    toy = write_toy(tmp_path)
    # The lower digit is preferred, whatever the question is.
    records = [
        {"prompt": f"{i % 10}+{i // 10}", "chosen": str(i % 5), "rejected": str(5 + i % 4)}
        for i in range(100)
    ]
    path = write_lines(toy / "pairs.jsonl", records)
    words = ["algorithm={name: reward_model}", "pipeline.groups_per_step=16", "trainer.lr=3e-3"]
    run, folder = train(toy, "judge", *words, "run.steps=40", f"data.train={path}")
    run.finish()
    assert rows(folder)[0]["loss/policy"] == pytest.approx(0.6931, abs=1e-3)  # log 2: all equal
    assert rows(folder)[-1]["policy/pair_accuracy"] > 0.9

    model_dir = max((folder / "checkpoints").iterdir()) / "model"
    model, tokenizer = (
        load_reward_model(str(model_dir), dtype=torch.float32),
        load_tokenizer(str(model_dir)),
    )
    scores = []
    for key in ("chosen", "rejected"):
        # A closed conversation, by the toy's template.
        texts = [f"{record['prompt']}{record[key]}=" for record in records]
        ids = torch.tensor(tokenizer(texts)["input_ids"])
        with torch.no_grad():
            scores.append(compute_row_logits(model, ids, torch.ones_like(ids, dtype=torch.bool)))
    assert (scores[0] > scores[1]).double().mean() > 0.9
