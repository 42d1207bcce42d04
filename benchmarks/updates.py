"""What updates cost long rollouts: `python -m benchmarks.updates` prints one JSON object.

The demo with a model that knows no end, so that every completion has --tokens tokens, many times
the length of a step of the trainer: every version comes in the middle of rollouts. By what becomes
of them (weights.on_update, weights.kv): medians over steps of the tokens a generator samples per
second and of those trained per second, each also over the best of the run; pause_s is how long
sampling stood still for a version, interrupted the rollouts it came in the middle of.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.overlap import QUIET, RECIPE, ROOT
from streamrl.actors.real_engines import RealEngines
from streamrl.cli.train import train
from streamrl.config import load_config

MODES = {
    "interrupt, recompute": ["weights.on_update=interrupt", "weights.kv=recompute"],
    "interrupt, keep": ["weights.on_update=interrupt", "weights.kv=keep"],
    "drain": ["weights.on_update=drain"],
}
WARM_UP_STEPS = 3
NEVER_WRITTEN = ("<bos>", 1)
"""A token that the model has learned to write nowhere, and its id."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run every mode and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="steps of each run")
    parser.add_argument("--tokens", type=int, default=192, help="tokens of a completion")
    arguments = parser.parse_args(argv)
    subprocess.run(
        [sys.executable, str(ROOT / "examples" / "arithmetic" / "make.py")],
        check=True,
        stdout=sys.stderr,
    )
    # Standard output is the JSON object alone, whatever the cluster has to say meanwhile.
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        model = endless(Path(folder) / "model")
        found = {
            name: measure(mode, model, Path(folder), arguments) for name, mode in MODES.items()
        }
    for key in ("sampled_per_s", "trained_per_s"):
        best = max(figures[key] for figures in found.values())
        for figures in found.values():
            figures[f"{key}_over_best"] = figures[key] / best
    print(json.dumps(found, indent=1))


def endless(folder: Path) -> Path:
    """The demo's model with another token for the end of a text."""
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


def measure(
    mode: Sequence[str], model: Path, folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Medians over the steps of one run, without its first ones."""
    settings = [
        f"run.dir={folder}",
        "run.name=updates",
        "run.overwrite=true",
        f"run.steps={arguments.steps + WARM_UP_STEPS}",
        f"model.path={model}",
        f"generator.max_new_tokens={arguments.tokens}",
        "generator.max_concurrent_rollouts=64",
        "pipeline.groups_per_step=4",
    ]
    config = load_config(RECIPE, [*QUIET, *settings, *mode])
    train(config, None, RealEngines())
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][WARM_UP_STEPS:]
    names = {
        "sampled_per_s": "rollout/tokens_per_s",
        "trained_per_s": "throughput/tokens_per_s",
        "pause_s": "weights/pause_s",
        "interrupted": "weights/interrupted",
        "step_s": "time/step_s",
        "staleness_mean": "staleness/mean",
        "idle_train": "idle/train",
    }
    return {key: statistics.median(row[name] for row in rows) for key, name in names.items()}


if __name__ == "__main__":
    main()
