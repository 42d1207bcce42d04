"""Whole training runs of a benchmark, as metrics rows."""

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import ROOT, run_command
from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.cli.run_setup.training import train
from streamrl.config.run_config import RunConfig, load_config

RECIPE = ROOT / "configs" / "grpo_arithmetic.yaml"
QUIET = (
    "telemetry.console=none",
    "telemetry.wandb.mode=disabled",
    "checkpoint.at_end=false",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
)
"""Settings that turn off everything but training steps."""
MAKE_S = 900.0

Row = Mapping[str, Any]


def make_arithmetic() -> None:
    """Make the data and the base model of the arithmetic task, if missing."""
    script = ROOT / "examples" / "arithmetic" / "make.py"
    run_command([sys.executable, str(script)], "making the arithmetic task", timeout_s=MAKE_S)


def load_quiet(recipe: Path, settings: Sequence[str]) -> RunConfig:
    """Load a recipe with these settings and QUIET."""
    return load_config(recipe, [*QUIET, *settings])


def train_run(config: RunConfig, engines: RealEngineFactory, *, skip: int = 0) -> list[Row]:
    """Train, and return the metrics of each step after the first `skip`."""
    train(config, None, engines)
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][skip:]


def compute_medians(rows: Sequence[Row], names: Mapping[str, str]) -> dict[str, float]:
    """Return by result the median of its metric over the steps."""
    return {figure: statistics.median(row[name] for row in rows) for figure, name in names.items()}
