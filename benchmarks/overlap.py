"""How well the stages overlap: `python -m benchmarks.overlap` prints one JSON object.

real: the demo's pipeline with max_staleness 0 and 1, against the same pipeline run stage after
stage (placement.mode=sequential), same work, same cores. sleeps: 8 generators, 4 scorers and
2 trainers that only sleep, so that cores are no limit. empty: engines that do nothing, where a
step is what the pipeline itself costs, in seconds and in calls of an idle Ray actor.
overlap_efficiency is the busy time of the busiest stage over the step time: 1 means that the
slowest stage never waits.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from benchmarks.timed_engines import TimedEngines
from streamrl.actors.cluster import cluster, nothing
from streamrl.actors.engine_factory import EngineFactory
from streamrl.actors.real_engines import RealEngines
from streamrl.cli.train import train
from streamrl.config import load_config
from streamrl.placement import PlacementConfig

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "configs" / "grpo_arithmetic.yaml"
WARM_UP_STEPS = 4
QUIET = [
    "telemetry.console=none",
    "telemetry.wandb.mode=disabled",
    "checkpoint.at_end=false",
    "evaluation.at_start=false",
    "evaluation.at_end=false",
]
KINDS = ("generate", "score", "train")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts asked for and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="steps of each run")
    parser.add_argument("--parts", nargs="+", default=["real", "sleeps", "empty"])
    arguments = parser.parse_args(argv)
    subprocess.run(
        [sys.executable, str(ROOT / "examples" / "arithmetic" / "make.py")],
        check=True,
        stdout=sys.stderr,
    )
    parts = {"real": measure_real, "sleeps": measure_sleeps, "empty": measure_empty}
    # Standard output is the JSON object alone, whatever the cluster has to say meanwhile.
    with contextlib.redirect_stdout(sys.stderr):
        found = {name: parts[name](arguments.steps) for name in arguments.parts}
    print(json.dumps(found, indent=1))


def measure_real(steps: int) -> dict[str, Any]:
    """vLLM and DeepSpeed: the three modes, and speed-ups over the sequential one."""
    modes = {
        "sequential": ["placement.mode=sequential", "pipeline.max_staleness=0"],
        "max_staleness_0": ["pipeline.max_staleness=0"],
        "max_staleness_1": ["pipeline.max_staleness=1"],
    }
    found = {name: measure(RealEngines(), steps, mode) for name, mode in modes.items()}
    baseline = found["sequential"]["step_s"]
    for figures in found.values():
        figures["speed_up"] = baseline / figures["step_s"]
    return found


def measure_sleeps(steps: int) -> dict[str, Any]:
    """A generator-bound stream on 14 workers."""
    engines = TimedEngines(generate_s=0.3, score_s=0.1, train_s=0.006)
    workers = [
        "generator.replicas=8",
        "generator.max_concurrent_rollouts=8",
        "scorer.replicas=4",
        "scorer.max_groups=1",
        "trainer.world_size=2",
        "pipeline.groups_per_step=32",
        "algorithm.group_size=8",
        "pipeline.micro_batch_tokens=512",
    ]
    return {
        f"max_staleness_{bound}": measure(
            engines, steps, [*workers, f"pipeline.max_staleness={bound}"]
        )
        for bound in (0, 1)
    }


def measure_empty(steps: int) -> dict[str, Any]:
    """The pipeline's own cost, also as a multiple of what one message costs on this machine."""
    call_s = measure_call()
    found = {
        f"max_staleness_{bound}": measure(
            TimedEngines(), 4 * steps, [f"pipeline.max_staleness={bound}"]
        )
        for bound in (0, 1)
    }
    for figures in found.values():
        figures["step_per_call"] = figures["step_s"] / call_s
    return {"call_s": call_s, **found}


def measure_call(count: int = 500) -> float:
    """Median seconds of a call to an idle Ray actor and back, one after the other."""
    with cluster(PlacementConfig(), nothing):
        actor = ray.remote(Echo).remote()
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            ray.get(actor.echo.remote())
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class Echo:
    """An actor as those of the run are: asyncio, one process."""

    async def echo(self) -> None:
        """Do nothing."""


def measure(engines: EngineFactory, steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Medians over the steps of one run, without its first ones."""
    with tempfile.TemporaryDirectory() as folder:
        run = [f"run.dir={folder}", "run.name=overlap", f"run.steps={steps + WARM_UP_STEPS}"]
        config = load_config(RECIPE, [*QUIET, *run, *overrides])
        train(config, None, engines)
        lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][WARM_UP_STEPS:]
    seconds = [row["time/step_s"] for row in rows]
    total = sum(seconds)
    busy = {kind: sum(row[f"time/{kind}_s"] for row in rows) for kind in KINDS}
    return {
        "steps": len(rows),
        "step_s": statistics.median(seconds),
        "step_s_mean": total / len(rows),
        "busy_s": {kind: seconds / len(rows) for kind, seconds in busy.items()},
        "overlap_efficiency": max(busy.values()) / total,
        "tokens_per_s": statistics.median(row["throughput/tokens_per_s"] for row in rows),
    }


if __name__ == "__main__":
    main()
