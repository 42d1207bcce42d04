"""Train a small model with `streamrl train`, on rows that give completions."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.toy_models.rows import Row

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class TrainingRecipe:
    """Steps and learning rate of the training of a model, and the bar that it must reach."""

    num_steps: int
    """Optimizer steps; 0 leaves the model untrained."""
    slip_rate: float = 0.0
    """Rate of slips (deliberate mistakes) in the last demonstrations; the task defines a slip."""
    rows_per_step: int = 64
    """Demonstrations per step."""
    optimizer: str = "muon"
    """As of `trainer.optimizer`. Muon needs fewer steps; RL moves a model of AdamW faster."""
    lr: float = 3e-3
    """Peak learning rate. It rises in a tenth of the steps, then falls to 0 on a line."""
    hidden_size: int = 128
    """Width of the model."""
    num_measured: int = 256
    """Rows per split on which the final model is measured."""
    bar: Mapping[str, float] = field(default_factory=dict)
    """Lowest values that a usable model may have, by name of the measured statistic."""


def train_on_rows(
    start: Path,
    rows: list[Row],
    out: Path,
    recipe: TrainingRecipe,
    *,
    seed: int,
    algorithm: str = "sft",
) -> None:
    """Train the model `start` on the rows, once and in their order, and write it to `out`.

    Raises SystemExit if the run fails.
    """
    if not recipe.num_steps:
        shutil.copytree(start, out, dirs_exist_ok=True)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config: dict[str, Any] = {
            "model": {"path": str(start.resolve())},
            "data": {"train": str(folder / "rows.jsonl"), "shuffle": False},
            "algorithm": {"name": algorithm},
            "pipeline": {"groups_per_step": recipe.rows_per_step, "micro_batch_tokens": 8192},
            "trainer": {
                "backend": "torch",
                "zero_stage": 0,
                "optimizer": recipe.optimizer,
                "lr": recipe.lr,
                "lr_schedule": "linear",
                "warmup_steps": max(recipe.num_steps // 10, 1),
                "betas": [0.9, 0.98],
            },
            "telemetry": {
                "console": "none",
                "rollouts": {"every": 0},
                "wandb": {"mode": "disabled"},
            },
            "run": {"name": "run", "dir": scratch, "steps": recipe.num_steps, "seed": seed},
        }
        (folder / "config.yaml").write_text(json.dumps(config))
        print(f"streamrl train: {recipe.num_steps} steps of {algorithm}", flush=True)
        words = [sys.executable, "-m", "streamrl.cli", "train", str(folder / "config.yaml")]
        if code := subprocess.run(words, cwd=ROOT, check=False).returncode:
            raise SystemExit(f"streamrl train ended with exit code {code}")
        (trained,) = folder.glob("run/checkpoints/step_*/model")
        shutil.copytree(trained, out, dirs_exist_ok=True)
