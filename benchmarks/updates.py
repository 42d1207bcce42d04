"""Cost of weight updates for long rollouts: `python -m benchmarks.updates` prints one JSON object.

The demo with a model that never ends a text, so that every completion has --tokens tokens and spans
many trainer steps: every version arrives in the middle of rollouts. By mode (weights.kv),
medians over steps of the tokens per second sampled by a generator and trained, each
also relative to the best mode; pause_s is the pause of sampling per version, interrupted the number
of rollouts in progress.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import ROOT, BenchmarkParser, at_least, report_progress, run_benchmark
from benchmarks.runs import RECIPE, compute_medians, load_quiet, make_arithmetic, train_run
from streamrl.actors.engine_factory import RealEngineFactory
from streamrl.weights.config import KV_CACHE_MODES

MODES = {mode: [f"weights.kv={mode}"] for mode in KV_CACHE_MODES}
WARM_UP_STEPS = 3
NEVER_WRITTEN = ("<bos>", 1)
"""A token that the model never samples, and its id."""


def make_parser() -> BenchmarkParser:
    """Declare the modes and the length of a run."""
    parser = BenchmarkParser("updates", __doc__)
    parser.add_argument("--steps", type=at_least(1), default=12, help="steps of each run")
    parser.add_argument("--tokens", type=at_least(1), default=192, help="tokens of a completion")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.set_quick(steps=2, tokens=32, modes=["keep"])
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run every mode and print the results."""
    run_benchmark(make_parser(), measure, argv)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    make_arithmetic()
    with tempfile.TemporaryDirectory() as folder:
        model = write_endless_model(Path(folder) / "model")
        results = {
            name: measure_run(name, model, Path(folder), arguments) for name in arguments.modes
        }
    for key in ("sampled_per_s", "trained_per_s"):
        best = max(figures[key] for figures in results.values())
        for figures in results.values():
            figures[f"{key}_over_best"] = figures[key] / best
    return results


def write_endless_model(folder: Path) -> Path:
    """Return the demo's model with another end-of-text token."""
    shutil.copytree(ROOT / "examples" / "arithmetic" / "build" / "base_model", folder)
    token, token_id = NEVER_WRITTEN
    for name, changed in (
        ("config.json", {"eos_token_id": token_id}),
        ("generation_config.json", {"eos_token_id": token_id}),
        ("tokenizer_config.json", {"eos_token": token}),
    ):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, **changed}))
    return folder


def measure_run(
    mode: str, model: Path, folder: Path, arguments: argparse.Namespace
) -> dict[str, float]:
    """Return medians over the steps of a run, without the first ones."""
    report_progress(f"{mode}: {arguments.steps} steps")
    settings = [
        f"run.dir={folder}",
        "run.name=updates",
        "run.overwrite=true",
        f"run.steps={arguments.steps + WARM_UP_STEPS}",
        f"model.path={model}",
        f"generator.max_new_tokens={arguments.tokens}",
        "generator.max_concurrent_rollouts=64",
        "pipeline.groups_per_step=4",
        *MODES[mode],
    ]
    rows = train_run(load_quiet(RECIPE, settings), RealEngineFactory(), skip=WARM_UP_STEPS)
    names = {
        "sampled_per_s": "rollout/tokens_per_s",
        "trained_per_s": "throughput/tokens_per_s",
        "pause_s": "weights/pause_s",
        "interrupted": "weights/interrupted",
        "step_s": "time/step_s",
        "staleness_mean": "staleness/mean",
        "idle_train": "idle/train",
    }
    return compute_medians(rows, names)


if __name__ == "__main__":
    main()
